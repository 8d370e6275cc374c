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
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ERASES = re.compile(rb"\x1b\[[0-9]*[JK]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_PROGRESS = re.compile(r"\d\s*%|\d\s*/\s*\d")


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


def replaces(new: bytes, old: bytes) -> bool:
    """Whether nothing is lost when only `new` is shown, which a carriage return put in the place of `old`.

    So it is when `new` has all words of `old`, where numbers, single letters and the characters of bars are no words;
    when both show progress, as a percentage or like 3/10, and begin with the same word; or when blanks
    wipe out progress.

    >>> replaces(b"Epoch 1:  20%|##   | loss=0.3", b"Epoch 1:  10%|#    |")
    True
    >>> replaces(b"1%", b"ERROR: device 3 has fallen off the bus")
    False
    """
    before, after = _plain(old), _plain(new)
    lost, kept = _WORD.findall(before), _WORD.findall(after)
    if not before.strip():
        return True
    if not lost:
        return bool(re.search(r"\d", before)) or not re.search(r"\w", before)
    if not after.strip():
        return bool(_PROGRESS.search(before))
    both = _PROGRESS.search(before) and _PROGRESS.search(after)
    return set(lost) <= set(kept) or bool(both and kept[:1] == lost[:1])


def _plain(text: bytes) -> str:
    return _ESCAPE.sub(b"", text).decode(errors="replace")


def _draws(text: bytes) -> bool:
    """Not only escape sequences that leave what is seen as it is, like one for the cursor."""
    return bool(_ESCAPE.sub(b"", text) or _ERASES.search(text))


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
                text = line.text[:_TAIL_LINE_MAX]
                if self._redrawn:
                    if not _draws(text):
                        self._redrawn = line.redrawn
                        continue
                    if replaces(text, self._lines[-1]):
                        self._lines.pop()
                self._lines.append(text)
                self._redrawn = line.redrawn

    def lines(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(line.decode(errors="backslashreplace") for line in self._lines)


class Redrawn:
    """What to show of one stream: each line when it ends, and of one that is redrawn the newest state now and then.

    A state that is a mere earlier one of the same bar is not shown, see `replaces`; every other one is.
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
                texts += self._replace(line.text)
                continue
            if self._state:
                texts += self._replace(line.text) + self.end()  # an end alone leaves the state standing
            else:
                texts.append(line.text)
        if drawn and drawn != self._state:
            texts += self._replace(drawn)
        if self._waits and now >= self._shown_at + REDRAW_S:
            texts.append(self._state)
            self._shown, self._shown_at = self._state, now
        return texts

    def _replace(self, state: bytes) -> list[bytes]:
        """The state before, if it would be lost."""
        if not _draws(state):
            return []
        before, self._state = self._state, state
        return [before] if before != self._shown and not replaces(state, before) else []

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
        return self._state != self._shown and bool(_plain(self._state).strip())
