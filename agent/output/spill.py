"""What the file of a redirected stream does not take: shown on the console, line by line.

A stream that is not on the console is in its file alone, so that a file which is full, gone or has no room in the queue
(`log_files`) would lose lines for good. The thread that finds out brings the bytes here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .lines import Line, LineSplitter, Redrawn


class Spill:
    """Of one file. All methods are for any thread, and may wait for the console."""

    def __init__(self, show: Callable[[list[bytes]], None], leave_out: Callable[[Line], bool]) -> None:
        self._show_texts = show
        self._leave_out = leave_out
        self._lock = threading.Lock()
        self._splitter = LineSplitter()
        self._redrawn = Redrawn()
        self._next = 0

    def take(self, at: int, data: bytes) -> None:
        """These bytes are not in the file; `at` is their place in the stream. A line whose rest went elsewhere ends."""
        with self._lock:
            lines = self._splitter.flush() if at != self._next else []
            self._next = at + len(data)
            self._show(lines + self._splitter.feed(data))

    def end_line(self) -> None:
        """What comes next in the stream is in the file, or there is no more."""
        with self._lock:
            self._show(self._splitter.flush())
            self._show_texts(self._redrawn.end())

    def _show(self, lines: list[Line]) -> None:
        lines = [line for line in lines if not self._leave_out(line)]
        self._show_texts(self._redrawn.show(lines, self._splitter.drawn, time.monotonic()))
