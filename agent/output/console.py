"""The agent's own stdout and stderr, its *console*: threads that do nothing else write there, so that only they wait.

The reader of a console may stop: Ctrl-S, a pager, a stalled srun, a full pipe. Nothing else must stop with it, so all
that the agent prints goes through a bounded queue. Lines of workers wait for room for `PATIENCE_S`, once; a line of the
agent's own log never waits, and has room of its own behind theirs. What finds no room is dropped and counted, and when
the console moves again a line there has how many are missing. So it is with a console that refuses, as on a full disk:
it is tried again.

`take` makes that true for the whole process: what Python prints goes through the queue, too, and file descriptors 1
and 2, to which C code writes, and which processes of the agent inherit, lead to where they led, but never block.

The form of a line of the agent's own log: text for people, or one JSON object for programs.

    {"time": "2026-03-01T12:00:00.125Z", "level": "warning", "logger": "elastic_agent.agent.main.loop",
     "message": "leaving the job", "node": "a", "generation": 3}

A text of several lines, such as a traceback, is one line of JSON. The lines of workers on the console are not changed.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from ..common.events import Backlog

QUEUE_MAX = 1024 * 1024
"""Bytes of workers' lines that may wait, for each of stdout and stderr."""
LOG_MAX = 256 * 1024
"""Bytes of the agent's own lines that may wait behind them."""
PATIENCE_S = 1.0
LAST_LINES_S = 2.0
"""How long the end of the agent waits for its last lines to be written."""
SEND_TIMEOUT_US = 10_000
"""For a console that is a socket: all that keeps those who inherit it from waiting."""

_log = logging.getLogger(__name__)


class Console:
    """See the module's docstring. All methods are for any thread."""

    def __init__(self, node: str, out: int, err: int) -> None:
        """`out` and `err` are file descriptors; lines for the same file stay in order."""
        self._out = _Lane(node, out)
        self._err = self._out if _same_file(out, err) else _Lane(node, err)
        self.stdout = _Printed(self, "stdout")
        self.stderr = _Printed(self, "stderr")

    def start(self) -> None:
        for lane in self._lanes:
            lane.start()

    def show(self, stream: str, lines: bytes) -> None:
        """Whole lines of workers, for stdout or stderr. May wait, see the module's docstring."""
        (self._out if stream == "stdout" else self._err).show(lines)

    def print(self, text: str, stream: str = "stderr") -> None:
        """One line of the agent's own, or several. Never waits."""
        (self._out if stream == "stdout" else self._err).print(text.encode(errors="backslashreplace") + b"\n")

    def count_lost(self, count: Callable[[int], None]) -> None:
        """From now on `count` gets the number of lines that were dropped."""
        for lane in self._lanes:
            lane.count_lost = count

    def close(self, timeout_s: float = LAST_LINES_S) -> None:
        """Everything is written, if the console takes it within that time."""
        deadline = time.monotonic() + timeout_s
        for printed in (self.stdout, self.stderr):
            printed.end_line()
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))

    @property
    def _lanes(self) -> tuple[_Lane, ...]:
        return (self._out,) if self._out is self._err else (self._out, self._err)


class ConsoleHandler(logging.Handler):
    """The agent's log."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record))
        except Exception:
            self.handleError(record)


def take(node: str) -> Console:
    """This process' stdout and stderr, from now until it ends."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    console = Console(node, os.dup(1), os.dup(2))
    console.start()
    for descriptor in (1, 2):
        _never_block(descriptor)
    sys.stdout, sys.stderr = console.stdout, console.stderr
    return console


class _Printed(io.TextIOBase):
    """What Python itself and libraries print. A line that is not complete waits for its end; a long one is cut."""

    def __init__(self, console: Console, stream: str) -> None:
        self._console = console
        self._stream = stream
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._console.print(whole, self._stream)
        if len(self._begun) >= LOG_MAX:
            self.end_line()
        return len(text)

    def end_line(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, ""
        if begun:
            self._console.print(begun, self._stream)

    def writable(self) -> bool:
        return True


def _same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


def _never_block(descriptor: int) -> None:
    """What is written there from now on arrives at once or not at all; where that cannot be, all stays as it was.

    A flag on the descriptor would be one on the terminal that others share; opened anew it is ours alone. Not so for
    a plain file, where two would write over each other's lines, and which stands still only if the disk does.
    """
    mode = os.fstat(descriptor).st_mode
    try:
        if stat.S_ISSOCK(mode):
            with socket.socket(fileno=os.dup(descriptor)) as console:
                timeout = struct.pack("ll", 0, SEND_TIMEOUT_US)
                console.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            again = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.dup2(again, descriptor)
            os.close(again)
    except OSError as error:
        _log.debug("file descriptor %d may make its writers wait: %s", descriptor, error)


class _Lane(Backlog[bytes]):
    """Whole lines for one file descriptor, written in order by a thread that may stand still."""

    def __init__(self, node: str, descriptor: int) -> None:
        super().__init__("console")
        self._node = node
        self._descriptor = descriptor
        self._lost = 0  # lines since the console stood still
        self._gone = False  # the last write has failed
        self.count_lost: Callable[[int], None] = lambda lines: None

    def show(self, lines: bytes) -> None:
        self.put(lines, len(lines), QUEUE_MAX, PATIENCE_S)

    def print(self, lines: bytes) -> None:
        self.put(lines, len(lines), QUEUE_MAX + LOG_MAX)

    def _refused(self, lines: bytes) -> None:
        lost = lines.count(b"\n")
        self._lost += lost
        self.count_lost(lost)

    def _moved(self) -> None:
        if self._lost and not self._gone:
            missing = f"[{self._node}] the console stood still: {self._lost} lines missing here\n".encode()
            self._lost = 0
            self.put(missing, len(missing), math.inf)

    def _do(self, lines: bytes) -> None:
        rest = memoryview(lines)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # another process made a shared terminal non-blocking
                    waiting = select.poll()
                    waiting.register(self._descriptor, select.POLLOUT)
                    waiting.poll()
            self._gone = False
        except OSError as error:
            if not self._gone:
                _log.warning(
                    "nothing is shown on file descriptor %d for now: %s; training goes on",
                    self._descriptor,
                    error.strerror,
                )
            self._gone = True
            with self._changed:
                self._refused(lines[-len(rest) :])


class TextLines(logging.Formatter):
    """The form for people: `2026-03-01 13:00:00.125+01:00 [a] leaving the job`."""

    def __init__(self, node: str) -> None:
        super().__init__(f"%(asctime)s [{node}] %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """With date and zone, so that the lines of nodes in several places, and of several days, can be compared."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")


class JsonLines(logging.Formatter):
    """`generation`: the newest generation of this node's workers; 0: there was none, and the key is left out."""

    def __init__(self, node: str, generation: Callable[[], int]) -> None:
        super().__init__()
        self._node = node
        self._generation = generation

    def format(self, record: logging.LogRecord) -> str:
        whole, milliseconds = divmod(round(record.created * 1000), 1000)
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "node": self._node,
        }
        if generation := self._generation():
            line["generation"] = generation
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
