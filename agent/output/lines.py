"""Lines out of a stream of bytes, and what a terminal would show of those that a progress bar redraws.

A line is *redrawn* when a lone carriage return ended it, as progress bars do: on a terminal the next one takes its
place. So it is with a bar below others, which is drawn behind newlines and ends by going up again.
"""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from typing import NamedTuple

LINE_MAX = 64 * 1024
"""A longer line is cut into pieces of this size."""
TAIL_LINES = 40
_TAIL_LINE_MAX = 2048
REDRAW_S = 5.0
"""A line that is redrawn is shown as often at most, for each stream: eight ranks with a bar are fewer than two lines a
second."""

_NEWLINES = (b"\n", b"\r\n")
_UP = b"\x1b[A"
# A carriage return that ends what was read waits for the next byte: it may be half of "\r\n". Newlines behind a way up
# only lead to where the next bar is drawn.
_LINE_END = re.compile(rb"(?:\x1b\[A)+\n+|\r?\n|\r(?=[^\n])")
_LONGEST_BEGUN_END = len(_UP)


class Line(NamedTuple):
    text: bytes
    redrawn: bool = False


class LineSplitter:
    """Cuts a stream of bytes into lines of at most `LINE_MAX` bytes, and holds no more than one such line."""

    def __init__(self) -> None:
        self._rest = b""
        self._redraws = False
        """The last line was redrawn."""
        self._moves = False
        """Newlines were the last that was read, and if more come they belong to them."""

    @property
    def drawn(self) -> bytes:
        """What there is of a line that is drawn anew; empty when there is none, or it is not known to be one."""
        drawn = self._rest.removesuffix(b"\r")
        return _without_ups(drawn) if self._redraws or len(drawn) < len(self._rest) else b""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        if self._moves:
            data = data.lstrip(b"\n")
        searched = max(0, len(self._rest) - _LONGEST_BEGUN_END)
        data = self._rest + data
        lines: list[Line] = []
        start = 0
        ending = b""
        for end in _LINE_END.finditer(data, searched):
            text, ending = data[start : end.start()], end.group()
            start = end.end()
            redrawn = ending not in _NEWLINES
            if redrawn:
                text = _without_ups(text)
            if text or not redrawn:  # progress bars also begin with a carriage return: no line of its own
                lines += _cut(text, redrawn)
        if ending:
            self._redraws = ending not in _NEWLINES
            self._moves = ending.startswith(_UP)
        self._moves = self._moves and start == len(data)
        begun = data[start:].removesuffix(b"\r")
        *whole, last = _cut(begun, False)
        self._rest = last.text + data[start + len(begun) :]
        return lines + whole

    def flush(self) -> list[Line]:
        """The line that was begun, if any: nothing comes to complete it."""
        wiped = self.drawn.isspace()
        rest, self._rest, self._redraws = _without_ups(self._rest.rstrip(b"\r")), b"", False
        return [Line(rest)] if rest and not wiped else []


def _without_ups(text: bytes) -> bytes:
    while text.endswith(_UP):
        text = text[: -len(_UP)]
    return text


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
                state = self._lines.pop() if self._redrawn else b""
                self._lines.append(line.text[:_TAIL_LINE_MAX] or state)
                self._redrawn = line.redrawn

    def lines(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(line.decode(errors="backslashreplace") for line in self._lines)


class Redrawn:
    """What to show of one stream: each line when it ends, and of one that is redrawn the newest state now and then.

    A state that another one has replaced is not shown, as it is not seen on a terminal. Blanks wipe a state out.
    """

    def __init__(self) -> None:
        self._state = b""
        self._shown = b""
        """The last state that was shown, until a line ends."""
        self._shown_at = -math.inf

    def show(self, lines: list[Line], drawn: bytes, now: float) -> list[bytes]:
        """The texts to show; `drawn` is what there is of a line that is drawn anew behind these."""
        texts: list[bytes] = []
        for line in lines:
            if line.redrawn:
                self._state = line.text
                continue
            text = line.text or (
                self._state if self._state.strip() else b""
            )  # an end alone leaves the state standing
            if not text or text != self._shown:
                texts.append(text)
            self._state = self._shown = b""
        self._state = drawn or self._state
        if self._waits and now >= self._shown_at + REDRAW_S:
            texts.append(self._state)
            self._shown, self._shown_at = self._state, now
        return texts

    def end(self) -> list[bytes]:
        """Nothing comes any more: the state that waits, if any, is the last one."""
        texts = [self._state] if self._waits else []
        self._state = self._shown = b""
        return texts

    @property
    def due_at(self) -> float | None:
        """When a state that waits is to be shown."""
        return self._shown_at + REDRAW_S if self._waits else None

    @property
    def _waits(self) -> bool:
        return self._state != self._shown and bool(self._state.strip())
