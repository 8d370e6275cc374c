"""Lines out of a stream of bytes, and the newest state of a progress bar.

A progress bar draws its line anew behind a carriage return. Of such a line only what stands after the last one is
shown, and kept among a worker's last lines; the log file has every byte.
"""

from __future__ import annotations

import threading
from collections import deque

LINE_MAX = 64 * 1024
"""A longer line is cut into pieces of this size."""
TAIL_LINES = 40
_TAIL_LINE_MAX = 2048
REDRAW_S = 5.0
"""A bar that has not ended is shown as often at most, for each stream: eight ranks with a bar are fewer than two lines
a second."""


class LineSplitter:
    """Cuts a stream of bytes into lines of at most `LINE_MAX` bytes, and holds no more than one such line."""

    def __init__(self) -> None:
        self._rest = b""
        self._redraws = False
        """The line that was begun has been drawn anew."""

    @property
    def drawn(self) -> bytes:
        """The newest state of a bar whose line has not ended; empty when there is none, or it is blank."""
        drawn = self._rest.removesuffix(b"\r")
        return drawn if (self._redraws or len(drawn) < len(self._rest)) and not drawn.isspace() else b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *ended, begun = (self._rest + data).split(b"\n")
        redraws = self._redraws and not ended
        lines = [piece for text in ended for piece in _cut(_newest(text.rstrip(b"\r")))]
        # A carriage return at the end of what was read may be half of "\r\n".
        newest = _newest(begun.rstrip(b"\r"))
        self._redraws = redraws or len(newest) < len(begun.rstrip(b"\r"))
        *whole, last = _cut(newest)
        self._rest = last + b"\r" * begun.endswith(b"\r")
        return lines + whole

    def flush(self) -> list[bytes]:
        """The line that was begun, if any: nothing comes to complete it."""
        wiped = self._redraws and self._rest.isspace()
        rest, self._rest, self._redraws = self._rest.removesuffix(b"\r"), b"", False
        return [rest] if rest and not wiped else []


def _newest(text: bytes) -> bytes:
    return text.rpartition(b"\r")[2]


def _cut(text: bytes) -> list[bytes]:
    return [text[at : at + LINE_MAX] for at in range(0, len(text), LINE_MAX)] or [b""]


class Tail:
    """The last `TAIL_LINES` lines. Filled by one thread, read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def add(self, lines: list[bytes]) -> None:
        with self._lock:
            self._lines.extend(line[:_TAIL_LINE_MAX] for line in lines)

    def lines(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(line.decode(errors="backslashreplace") for line in self._lines)
