"""What workers print: kept in a file per rank and stream, and shown as one `[node/rank]` stream on the console.

A worker's stdout and stderr are pipes that the thread `worker-logs` reads. The bytes go, as they are, to
`gen<generation>/rank<rank>/{stdout,stderr}.log` in the folder of the run (`log_files`); whole lines,
prefixed, go to the agent's own stdout and stderr; the last lines stay in memory for the failure summary. An
`OutputRoute` says which of the first two a stream has; one whose file cannot be written is on the console in any
case.
Pipes, and not files that workers write themselves, because a full, read-only or dead disk must cost the files and
nothing else: a worker never sees it.

Words: the *console* is the agent's own stdout and stderr (`console`). A progress bar that has not ended is shown
there every few seconds.

Invariants: neither the reading thread nor the main one writes to a disk or the console. A console or a disk that is
slow slows the workers, as every terminal does; one that stands still costs them a second, once. Memory is bounded,
whatever workers print.

A progress bar draws its line anew behind a carriage return. Of such a line only what stands after the last one is
shown, and kept among a worker's last lines; the log file has every byte.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..common.events import IoThread
from .console import Console
from .log_files import PATIENCE_S, LogFile, LogFiles, run_folder

LINE_MAX = 64 * 1024
"""A longer line is cut into pieces of this size."""
TAIL_LINES = 40
_TAIL_LINE_MAX = 2048
REDRAW_S = 5.0
"""A bar that has not ended is shown as often at most, for each stream: eight ranks with a bar are fewer than two lines
a second."""


_BELOW = re.compile(rb"(?:\x1b\[A)+\n+")
"""A bar below another one is drawn on the next line, and goes up again: that is no end of a line."""


class LineSplitter:
    """Cuts a stream of bytes into lines of at most `LINE_MAX` bytes, and holds no more than one such line."""

    def __init__(self) -> None:
        self._rest = b""
        """Of the line that was begun; a carriage return in it: it was drawn anew."""

    @property
    def drawn(self) -> bytes:
        """The newest state of a bar whose line has not ended; empty when there is none, or it is blank."""
        newest = _newest(self._rest)
        return newest if b"\r" in self._rest and not newest.isspace() else b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *ended, begun = _BELOW.sub(b"\r", self._rest + data).split(b"\n")
        lines = [piece for text in ended for piece in _cut(_newest(text))]
        shown = begun.rstrip(b"\r")  # the last one may be half of "\r\n"
        at = max(0, shown.rfind(b"\r"))
        *whole, last = _cut(shown[at:])
        self._rest = last + b"\r" * begun.endswith(b"\r")
        return lines + whole

    def flush(self) -> list[bytes]:
        """The line that was begun, if any: nothing comes to complete it."""
        rest, self._rest = self._rest, b""
        newest = _newest(rest)
        return [newest] if newest and not (b"\r" in rest and newest.isspace()) else []


def _newest(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2].replace(b"\x1b[A", b"")


def _cut(text: bytes) -> list[bytes]:
    return [text[at : at + LINE_MAX] for at in range(0, len(text), LINE_MAX)] or [b""]


STREAMS = ("stdout", "stderr")
_READ_MAX = 64 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputRoute:
    """Where that goes which a worker prints on one stream, besides the memory."""

    prefix: str = ""
    """Of each line, but in the worker's own file."""
    file: bool = True
    """The worker's own file, where there are any."""
    console: bool = True
    copied: tuple[str, ...] = ()
    """Lines that hold one of these also go to a file of this node, for all of its workers."""


@dataclass(slots=True, eq=False)
class _WorkerStream:
    """One pipe of one worker. Only the reading thread touches it, `tail` excepted."""

    name: str
    pipe: int  # -1 once it is closed
    prefix: bytes
    console: bool
    file: LogFile | None
    copied: tuple[bytes, ...]
    copies: LogFile | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    bar_at: float = -math.inf
    """When a progress bar was shown last."""
    size: int = 0
    """Bytes read so far; for any thread."""


class WorkerLogs:
    """Reads the pipes of all workers of this node. The methods are for one thread, the agent's main one."""

    def __init__(
        self,
        directory: Path | None,
        node: str,
        console: Console,
        files: LogFiles,
        count_lost: Callable[[int], None] = lambda size: None,
        *,
        has_files: bool = True,
    ) -> None:
        """`count_lost` is given how many bytes are missing in a file. Without `has_files` what workers print is in
        none, and the folder of the run, if there is a `directory`, is for others."""
        self._directory = directory
        self._files = files
        self.has_files = has_files and directory is not None
        """The output of workers is written to files."""
        self._run: Path | None = None
        self._node = node
        self._console = console
        self._count_lost = count_lost
        self._streams: dict[tuple[int, int], tuple[_WorkerStream, ...]] = {}
        self._copies: dict[tuple[int, str], LogFile] = {}
        """By generation and stream: of all workers here."""
        self._io = IoThread("worker-logs")
        """Of its own, because it waits for the console and for the files."""
        self._left_out: bytes | None = None

    def start(self) -> None:
        self._io.start()

    def begin(self, job: str, run: str, generation: int) -> None:
        """Output goes to the folder of this run from now on; old folders are deleted while workers print."""
        if self._directory is not None:
            self._run = run_folder(self._directory.absolute(), job, run)
            self._files.begin(self._run, generation)

    def leave_out(self, words: bytes) -> None:
        """From now on lines that end so are in the files only: they would only mislead."""
        self._left_out = words

    def attach(self, generation: int, rank: int, pipes: Sequence[int], routes: Sequence[OutputRoute]) -> None:
        """Reads these pipes, of stdout and stderr, from now on. They belong to this object, which closes them."""
        assert (generation, rank) not in self._streams, "a rank starts once in a generation"
        streams = tuple(
            self._stream(generation, rank, name, pipe, route)
            for name, pipe, route in zip(STREAMS, pipes, routes, strict=True)
        )
        self._streams[generation, rank] = streams
        for stream in streams:
            os.set_blocking(stream.pipe, False)
            self._io.watch(stream.pipe, partial(self._read, stream))

    def tail(self, generation: int, rank: int) -> tuple[str, ...]:
        """The last lines of stderr, or of stdout when stderr has none. Complete once `drain` is done."""
        stdout, stderr = self._streams[generation, rank]
        last = tuple(stderr.tail) or tuple(stdout.tail)
        return tuple(line.decode(errors="backslashreplace") for line in last)

    def printed(self, generation: int, rank: int) -> int:
        """Bytes that this worker has printed; 0 if its output is not read."""
        return sum(stream.size for stream in self._streams.get((generation, rank), ()))

    def log_file(self, generation: int, rank: int) -> Path | None:
        """Where the stderr of a worker that is attached is written, or else its stdout, if it is."""
        streams = self._streams.get((generation, rank), ())
        files = [stream.file for stream in streams if stream.file is not None and stream.file.written]
        return files[-1].path if files else None

    def folder(self, generation: int, name: str) -> Path | None:
        """For what others write beside the logs of a generation, made soon; None when there are no files."""
        if self._run is None or not self.has_files:
            return None
        folder = self._run / f"gen{generation}" / name
        self._files.do(partial(_make_folder, folder))
        return folder

    def drain(self, generation: int, rank: int, then: Callable[[], None]) -> None:
        """Calls `then`, in another thread, once all that a dead worker wrote has been read and is in its files.

        Never waits: a disk that stands still delays `then`. Does not depend on end-of-file: a grandchild that outlives
        the worker holds the pipes open.
        """
        for stream in self._streams[generation, rank]:
            self._io.post(partial(self._drain, stream))
        self._io.post(partial(self._files.do, then))

    def detach_generation(self, generation: int) -> None:
        """Reads what is left, then closes the generation's pipes and files; its tails are forgotten at once."""
        ended = [key for key in self._streams if key[0] == generation]
        for key in ended:
            for stream in self._streams.pop(key):
                self._io.post(partial(self._finish, stream))
        for name in STREAMS:
            if (copies := self._copies.pop((generation, name), None)) is not None:
                self._io.post(partial(self._files.finish, copies))

    def close(self, timeout_s: float = 2.0) -> None:
        """Detaches everything, in a bounded time. Once."""
        for generation in {generation for generation, _ in self._streams}:
            self.detach_generation(generation)
        self._io.close(timeout_s)

    def _stream(self, generation: int, rank: int, name: str, pipe: int, route: OutputRoute) -> _WorkerStream:
        file = copies = None
        if route.file:
            file = self._file(generation, f"rank{rank}", f"{name}.log")
        if route.copied:
            key = generation, name
            copies = self._copies.get(key) or self._file(
                generation, f"node-{self._node}", f"filtered_{name}.log"
            )
            if copies is not None:
                self._copies[key] = copies
        needles = tuple(text.encode(errors="surrogateescape") for text in route.copied)
        prefix = route.prefix.encode(errors="surrogateescape")
        return _WorkerStream(name, pipe, prefix, route.console, file, needles, copies)

    def _file(self, generation: int, folder: str, name: str) -> LogFile | None:
        if self._run is None or not self.has_files:
            return None
        return self._files.open(LogFile(self._run / f"gen{generation}" / folder / name, self._count_lost))

    def _misleads(self, line: bytes) -> bool:
        return self._left_out is not None and line.endswith(self._left_out)

    def _print(self, name: str, prefix: bytes, texts: list[bytes]) -> None:
        if texts:
            self._console.show(name, b"".join(prefix + text + b"\n" for text in texts))

    # Everything below runs in the reading thread.

    def _read(self, stream: _WorkerStream) -> int:
        """Takes one read's worth and returns how many bytes that was: 0 when there is nothing, or never more."""
        if stream.pipe < 0:
            return 0
        try:
            data = os.read(stream.pipe, _READ_MAX)
        except BlockingIOError:
            return 0
        if not data:
            self._close(stream)
            return 0
        stream.size += len(data)
        if stream.file is not None:
            self._files.save(stream.file, data, PATIENCE_S)
        self._show(stream, stream.splitter.feed(data))
        return len(data)

    def _drain(self, stream: _WorkerStream) -> None:
        """Reads what was in the pipe on entry. A pipe holds no more than its size, so this ends in any case."""
        if stream.pipe < 0:
            return
        left = fcntl.fcntl(stream.pipe, fcntl.F_GETPIPE_SZ)
        while left > 0 and (size := self._read(stream)):
            left -= size
        self._show(stream, stream.splitter.flush())

    def _finish(self, stream: _WorkerStream) -> None:
        self._drain(stream)
        self._close(stream)

    def _close(self, stream: _WorkerStream) -> None:
        self._show(stream, stream.splitter.flush())
        if stream.pipe >= 0:
            self._io.forget(stream.pipe)
            os.close(stream.pipe)
            stream.pipe = -1
            if stream.file is not None:
                self._files.finish(stream.file)

    def _show(self, stream: _WorkerStream, ended: list[bytes]) -> None:
        ended = [line for line in ended if not self._misleads(line)]
        stream.tail.extend(line[:_TAIL_LINE_MAX] for line in ended)
        shown, drawn, now = list(ended), stream.splitter.drawn, time.monotonic()
        if drawn and now >= stream.bar_at + REDRAW_S:
            shown.append(drawn)
            stream.bar_at = now
        if stream.console or (stream.file is not None and stream.file.failed):
            self._print(stream.name, stream.prefix, shown)
        copied = [line for line in ended if any(needle in line for needle in stream.copied)]
        if copied and stream.copies is not None:
            lines = b"".join(stream.prefix + text + b"\n" for text in copied)
            self._files.save(stream.copies, lines, PATIENCE_S)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("no folder %s: %s", folder, error)
