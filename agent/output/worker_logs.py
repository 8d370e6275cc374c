"""What workers print: kept in a file per rank and stream, and shown as one `[node/rank]` stream on the console.

A worker's stdout and stderr are pipes that the thread `worker-logs` reads. The bytes go, as they are, to
`gen<generation>/rank<rank>/{stdout,stderr}.log` in the folder of the run (`log_folders`, `log_files`); whole lines,
prefixed, go to the agent's own stdout and stderr; the last lines stay in memory for the failure summary. Pipes, and not
files that workers write themselves, because a full, read-only or dead disk must cost the files and nothing else: a
worker never sees it.

Words: the *console* is the agent's own stdout and stderr (`console`). A line is *redrawn* when a lone carriage return
ended it, as progress bars do: on the console each state of the bar is a line, in memory the next one replaces it.

Invariants: neither the reading thread nor the main one writes to a disk or the console. A console or a disk that is
slow slows the workers, as every terminal does; one that stands still costs them a second, once. Memory is bounded,
whatever workers print.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...rendezvous.threads import Thread
from ..common.io_thread import IoThread
from .console import Console
from .log_files import LogFile, LogFiles
from .log_folders import RunFolder, run_folder

LINE_MAX = 64 * 1024
"""A longer line is cut into pieces of this size."""
TAIL_LINES = 40
_TAIL_LINE_MAX = 2048
_READ_MAX = 64 * 1024

# A carriage return that ends what was read waits for the next byte: it may be half of "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")

_log = logging.getLogger(__name__)


class Line(NamedTuple):
    text: bytes
    redrawn: bool = False


class LineSplitter:
    """Cuts a stream of bytes into lines of at most `LINE_MAX` bytes, and holds no more than one such line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        searched = max(0, len(self._rest) - 1)
        data = self._rest + data
        lines: list[Line] = []
        start = 0
        for end in _LINE_END.finditer(data, searched):
            text, redrawn = data[start : end.start()], end.group() == b"\r"
            start = end.end()
            if text or not redrawn:  # progress bars also begin with a carriage return: no line of its own
                lines += _cut(text, redrawn)
        begun = data[start:].removesuffix(b"\r")
        *whole, last = _cut(begun, False)
        self._rest = last.text + data[start + len(begun) :]
        return lines + whole

    def flush(self) -> list[Line]:
        """The line that was begun, if any: nothing comes to complete it."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [Line(rest)] if rest else []


def _cut(text: bytes, redrawn: bool) -> list[Line]:
    last = max(0, len(text) - 1) // LINE_MAX * LINE_MAX
    pieces = [Line(text[at : at + LINE_MAX]) for at in range(0, last, LINE_MAX)]
    return [*pieces, Line(text[last:], redrawn)]


class Tail:
    """The last `TAIL_LINES` lines as a terminal would show them. Filled by one thread, read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._redrawn = False

    def add(self, lines: list[Line]) -> None:
        with self._lock:
            for line in lines:
                if self._redrawn:
                    self._lines.pop()
                self._lines.append(line.text[:_TAIL_LINE_MAX])
                self._redrawn = line.redrawn

    def lines(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(line.decode(errors="backslashreplace") for line in self._lines)


@dataclass(slots=True, eq=False)
class _Stream:
    """One pipe of one worker. Only the reading thread touches it, `tail` excepted."""

    generation: int
    pipe: int  # -1 once it is closed
    file: LogFile | None
    prefix: bytes
    name: str
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: Tail = field(default_factory=Tail)


class WorkerLogs:
    """Reads the pipes of all workers of this node. The methods are for one thread, the agent's main one."""

    def __init__(
        self,
        directory: Path | None,
        node: str,
        console: Console,
        count: Callable[[str, int, int], None] = lambda name, lines, size: None,
        count_lost: Callable[[int], None] = lambda size: None,
    ) -> None:
        """In the reading thread `count(name, lines, size)` is given what was read from a stream, and `count_lost` how
        many bytes are missing in a file because its disk stood still."""
        self._directory = directory
        self._run: RunFolder | None = None
        self._tidying: Thread | None = None
        self._count = count
        self._node = node
        self._console = console
        self._files = LogFiles(count_lost)
        self._streams: dict[tuple[int, int], tuple[_Stream, _Stream]] = {}
        self._io = IoThread("worker-logs")
        """Of its own, because it waits for the console and for the files."""
        self._left_out: bytes | None = None

    def start(self) -> None:
        if self._directory is not None:
            self._files.start()
        self._io.start()

    def begin(self, job: str, run: str, generation: int) -> None:
        """Output goes to the folder of this run from now on; old folders are deleted while workers print."""
        if self._directory is None:
            return
        folder = run_folder(self._directory, job, run)
        if self._run is None or self._run.path != folder:
            if self._run is not None:
                self._run.release()
            self._run = RunFolder(folder)
        if self._tidying is None or not self._tidying.is_alive():
            tidy = partial(_tidy, self._run, generation)
            self._tidying = Thread(tidy, "log-folders")
            self._tidying.start()

    def leave_out(self, words: bytes) -> None:
        """From now on lines that end so are in the files only: they would only mislead."""
        self._left_out = words

    def attach(self, generation: int, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Reads these pipes from now on. They belong to this object, which closes them."""
        assert (generation, rank) not in self._streams, "a rank starts once in a generation"
        prefix = f"[{self._node}/{rank}] ".encode()
        stdout = _Stream(generation, stdout_fd, self._file(generation, rank, "stdout"), prefix, "stdout")
        stderr = _Stream(generation, stderr_fd, self._file(generation, rank, "stderr"), prefix, "stderr")
        self._streams[generation, rank] = (stdout, stderr)
        for stream in (stdout, stderr):
            os.set_blocking(stream.pipe, False)
            self._io.watch(stream.pipe, partial(self._read, stream))

    def tail(self, generation: int, rank: int) -> tuple[str, ...]:
        """The last lines of stderr, or of stdout when stderr has none. Complete once `drain` is done."""
        stdout, stderr = self._streams[generation, rank]
        return stderr.tail.lines() or stdout.tail.lines()

    def log_file(self, generation: int, rank: int) -> Path | None:
        """Where the stderr of a worker that is attached is written, if it is."""
        _, stderr = self._streams.get((generation, rank), (None, None))
        file = stderr.file if stderr is not None else None
        return file.path if file is not None and file.written else None

    def folder(self, generation: int, name: str) -> Path | None:
        """For what others write beside the logs of a generation, made soon; None when there are no files."""
        if self._run is None:
            return None
        folder = self._run.path.absolute() / f"gen{generation}" / name
        self._files.do(partial(_make_folder, folder))
        return folder

    def drain(self, generation: int, rank: int, then: Callable[[], None]) -> None:
        """Calls `then`, in another thread, once all that a dead worker wrote has been read and is in its files.

        Never waits: a disk that stands still delays `then`. Does not depend on end-of-file: a grandchild that outlives
        the worker holds the pipes open.
        """
        for stream in self._streams[generation, rank]:
            self._io.post(partial(self._drain, stream))
        self._io.post(partial(self._files.do, then) if self._directory is not None else then)

    def detach_generation(self, generation: int) -> None:
        """Reads what is left, then closes the generation's pipes and files; its tails are forgotten at once."""
        ended = [key for key in self._streams if key[0] == generation]
        for key in ended:
            for stream in self._streams.pop(key):
                self._io.post(partial(self._finish, stream))

    def close(self, timeout_s: float = 2.0) -> None:
        """Detaches everything; a stuck disk gets `timeout_s`, and no more. Once."""
        deadline = time.monotonic() + timeout_s
        for generation in {generation for generation, _ in self._streams}:
            self.detach_generation(generation)
        self._io.close(timeout_s)
        self._files.close()
        if not self._files.join(max(0.0, deadline - time.monotonic())):
            _log.warning("the last lines of the workers may be missing in their files: the disk stands still")

    def _file(self, generation: int, rank: int, name: str) -> LogFile | None:
        if self._run is None:
            return None
        path = self._run.path / f"gen{generation}" / f"rank{rank}" / f"{name}.log"
        return self._files.open(generation, path)

    # Everything below runs in the reading thread.

    def _read(self, stream: _Stream) -> int:
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
        self._count(stream.name, 0, len(data))
        if stream.file is not None:
            self._files.save(stream.file, data)
        self._show(stream, stream.splitter.feed(data))
        return len(data)

    def _drain(self, stream: _Stream) -> None:
        """Reads what was in the pipe on entry. A pipe holds no more than its size, so this ends in any case."""
        if stream.pipe < 0:
            return
        left = fcntl.fcntl(stream.pipe, fcntl.F_GETPIPE_SZ)
        while left > 0 and (size := self._read(stream)):
            left -= size
        self._show(stream, stream.splitter.flush())

    def _finish(self, stream: _Stream) -> None:
        self._drain(stream)
        self._close(stream)

    def _close(self, stream: _Stream) -> None:
        self._show(stream, stream.splitter.flush())
        if stream.pipe >= 0:
            self._io.forget(stream.pipe)
            os.close(stream.pipe)
            stream.pipe = -1
            if stream.file is not None:
                self._files.finish(stream.file)

    def _show(self, stream: _Stream, lines: list[Line]) -> None:
        if lines:
            self._count(stream.name, len(lines), 0)
        if self._left_out is not None:
            lines = [line for line in lines if not line.text.endswith(self._left_out)]
        if lines:
            stream.tail.add(lines)
            self._console.show(stream.name, b"".join(stream.prefix + text + b"\n" for text, _ in lines))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("no folder %s: %s", folder, error)


def _tidy(run: RunFolder, generation: int) -> None:
    """A disk that fails here fails the worker logs, too, where it is logged."""
    with contextlib.suppress(OSError):
        run.hold()
        run.prune(generation)
