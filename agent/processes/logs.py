"""What workers print: kept in a file per rank and stream, and shown as one `[node/rank]` stream on the console.

A worker's stdout and stderr are pipes that the thread `worker-logs` reads. The bytes go, as they are, to
`<directory>/gen<generation>/rank<rank>/{stdout,stderr}.log`; whole lines, prefixed, go to the agent's own stdout and
stderr; the last lines stay in memory for the failure summary. Pipes, and not files that workers write themselves,
because a full or read-only disk must cost the files and nothing else: a worker never sees it.

Words: the *console* is the agent's own stdout and stderr. A line is *redrawn* when a lone carriage return ended it,
as progress bars do: on the console each state of the bar is a line, in memory the next one replaces it.

Invariant: workers never wait for more than a local disk. The console is written by a thread of its own,
`worker-console`: one that is slow slows the workers, as every terminal does; one that stands still (Ctrl-S, a stuck
pipe) costs them `_CONSOLE_PATIENCE_S` once, and then loses lines, which are counted and reported, until it moves
again. Memory is bounded per stream, whatever workers print.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import re
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

LINE_MAX = 64 * 1024
"""A longer line is cut into pieces of this size."""
TAIL_LINES = 40
_TAIL_LINE_MAX = 2048
_READ_MAX = 64 * 1024
_CONSOLE_MAX = 1024 * 1024
_CONSOLE_PATIENCE_S = 1.0

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
    path: Path | None
    console: int
    prefix: bytes
    name: str
    file: int = -1
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: Tail = field(default_factory=Tail)


class WorkerLogs:
    """Reads the pipes of all workers of this node. The methods are for one thread, the agent's main one.

    `out` and `err` need a file descriptor (`sys.stdout.buffer`): it is written past their Python buffer. Files
    of earlier generations are never deleted.
    """

    def __init__(
        self,
        directory: Path | None,
        node: str,
        out: BinaryIO,
        err: BinaryIO,
        count: Callable[[str, int, int], None] = lambda name, lines, size: None,
    ) -> None:
        """`count(name, lines, size)` hears of what was read from a stream, in the reading thread."""
        self._directory = directory
        self._count = count
        self._node = node
        self._consoles = (out.fileno(), err.fileno())
        self._console = _Console(node)
        self._streams: dict[tuple[int, int], tuple[_Stream, _Stream]] = {}
        self._actions: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = False
        self._complained = -1  # the generation whose first disk trouble was reported
        self._thread = threading.Thread(target=self._serve, name="worker-logs", daemon=True)

    def start(self) -> None:
        self._console.start()
        self._thread.start()

    def attach(self, generation: int, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Reads these pipes from now on. They belong to this object, which closes them."""
        assert (generation, rank) not in self._streams, "a rank starts once in a generation"
        prefix = f"[{self._node}/{rank}] ".encode()
        out, err = self._consoles
        stdout = _Stream(generation, stdout_fd, self._path(generation, rank, "stdout"), out, prefix, "stdout")
        stderr = _Stream(generation, stderr_fd, self._path(generation, rank, "stderr"), err, prefix, "stderr")
        self._streams[generation, rank] = (stdout, stderr)
        self._post(partial(self._open, stdout))
        self._post(partial(self._open, stderr))

    def tail(self, generation: int, rank: int) -> tuple[str, ...]:
        """The last lines of stderr, or of stdout when stderr has none. Complete once `drain` said so."""
        stdout, stderr = self._streams[generation, rank]
        return stderr.tail.lines() or stdout.tail.lines()

    def log_file(self, generation: int, rank: int) -> Path | None:
        """Where the worker's stderr was written, if it was."""
        path = self._path(generation, rank, "stderr")
        return path if path is not None and path.exists() else None

    def folder(self, generation: int, name: str) -> Path | None:
        """For what others write beside the logs of a generation; None when there are no files, or no room for it."""
        if self._directory is None:
            return None
        folder = self._directory.absolute() / f"gen{generation}" / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("no folder %s: %s", folder, error)
            return None
        return folder

    def drain(self, generation: int, rank: int, timeout_s: float) -> bool:
        """Waits until everything that a dead worker wrote has been read. False: not within `timeout_s`.

        Does not wait for end-of-file: a grandchild that outlives the worker holds the pipes open.
        """
        stdout, stderr = self._streams[generation, rank]
        self._post(partial(self._drain, stdout))
        return self._post(partial(self._drain, stderr)).wait(timeout_s)

    def detach_generation(self, generation: int) -> None:
        """Reads what is left, then closes the generation's pipes and files; its tails are forgotten at once."""
        ended = [key for key in self._streams if key[0] == generation]
        for key in ended:
            for stream in self._streams.pop(key):
                self._post(partial(self._finish, stream))

    def close(self, timeout_s: float = 2.0) -> None:
        """Detaches and shows everything; a stuck disk, and then a stuck console, get `timeout_s` each. Once."""
        for generation in {generation for generation, _ in self._streams}:
            self.detach_generation(generation)
        self._post(self._stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wake)
        self._console.close(timeout_s)

    def _path(self, generation: int, rank: int, name: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"gen{generation}" / f"rank{rank}" / f"{name}.log"

    def _post(self, action: Callable[[], None]) -> threading.Event:
        """Has the reading thread do `action`, after all that was posted before it."""
        done = threading.Event()
        self._actions.put((action, done))
        os.eventfd_write(self._wake, 1)
        return done

    # Everything below runs in the reading thread.

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._act()
                else:
                    self._read(key.data)

    def _act(self) -> None:
        os.eventfd_read(self._wake)
        while not self._actions.empty():
            action, done = self._actions.get()
            action()
            done.set()

    def _stop(self) -> None:
        self._stopping = True

    def _open(self, stream: _Stream) -> None:
        os.set_blocking(stream.pipe, False)
        if stream.path is not None:
            try:
                stream.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                stream.file = os.open(stream.path, flags, 0o640)
            except OSError as error:
                self._complain(stream, error)
        self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def _read(self, stream: _Stream) -> int:
        """Takes one read's worth and says how many bytes that was: 0 when there is nothing, or never more."""
        if stream.pipe < 0:  # closed by an action of the same turn
            return 0
        try:
            data = os.read(stream.pipe, _READ_MAX)
        except BlockingIOError:
            return 0
        if not data:
            self._close(stream)
            return 0
        self._count(stream.name, 0, len(data))
        self._save(stream, data)
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
            self._selector.unregister(stream.pipe)
            os.close(stream.pipe)
            stream.pipe = -1
        self._abandon_file(stream)

    def _save(self, stream: _Stream, data: bytes) -> None:
        if stream.file < 0:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(stream.file, rest) :]
        except OSError as error:
            self._complain(stream, error)
            self._abandon_file(stream)

    def _abandon_file(self, stream: _Stream) -> None:
        if stream.file >= 0:
            with contextlib.suppress(OSError):  # what a network disk has to say at close was said at write
                os.close(stream.file)
            stream.file = -1

    def _complain(self, stream: _Stream, error: OSError) -> None:
        """One warning for a generation: a full disk is one fact, not one for each rank and stream."""
        if self._complained == stream.generation:
            return
        self._complained = stream.generation
        _log.warning(
            "worker log %s is not written: %s; this generation's lines go to the console only where that "
            "happens: make room or set another --log-dir",
            stream.path,
            error.strerror,
        )

    def _show(self, stream: _Stream, lines: list[Line]) -> None:
        if lines:
            self._count(stream.name, len(lines), 0)
            stream.tail.add(lines)
            self._console.write(stream.console, b"".join(stream.prefix + text + b"\n" for text, _ in lines))


class _Console:
    """Whole lines for the agent's stdout and stderr, written in order by a thread that may stand still."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._size = 0  # bytes waiting or being written
        self._stuck = False
        self._lost = 0  # lines
        self._closing = False
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._serve, name="worker-console", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, fd: int, lines: bytes) -> None:
        with self._changed:
            if not self._stuck:
                self._stuck = not self._changed.wait_for(self._has_room, _CONSOLE_PATIENCE_S)
            if self._stuck:
                self._lost += lines.count(b"\n")
            else:
                self._put(fd, lines)

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _has_room(self) -> bool:
        return self._size < _CONSOLE_MAX

    def _put(self, fd: int, lines: bytes) -> None:
        self._waiting.append((fd, lines))
        self._size += len(lines)
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                fd, lines = self._waiting.popleft()
            self._write_all(fd, lines)
            with self._changed:
                self._size -= len(lines)
                self._stuck = False
                self._changed.notify_all()
                if self._lost:
                    self._put(
                        fd,
                        f"[{self._node}] the console stood still: {self._lost} lines missing here\n".encode(),
                    )
                    self._lost = 0

    def _write_all(self, fd: int, lines: bytes) -> None:
        if fd in self._gone:
            return
        rest = memoryview(lines)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # somebody made a shared terminal non-blocking
                waiting = select.poll()
                waiting.register(fd, select.POLLOUT)
                waiting.poll()
            except OSError as error:
                self._gone.add(fd)
                _log.warning(
                    "workers' output is no longer shown on file descriptor %d: %s; training goes on",
                    fd,
                    error.strerror,
                )
                return
