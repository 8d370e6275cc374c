"""The rate of steps of this node's workers since the start of the agent, in bounded memory.

Time is cut into slices of equal width; a step that spans several slices counts in each by its share. When there are too
many slices, each two become one: the whole job is always there, in less detail the longer it lasts.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

FIRST_WIDTH_S = 2.0
MOST_SLICES = 240


@dataclass(frozen=True, slots=True)
class Rates:
    """Steps in each slice, the oldest first."""

    width_s: float
    left_s: float
    """The time until the last slice ends."""
    last_s: float | None
    """Age of the last step."""
    new: tuple[float, ...] = ()
    again: tuple[float, ...] = ()
    """Steps that an earlier generation had done already; not among `new`."""


class StepRate:
    """The main thread adds, any thread reads. Instants are monotonic."""

    def __init__(self, started_at: float, width_s: float = FIRST_WIDTH_S, most: int = MOST_SLICES) -> None:
        self._lock = threading.Lock()
        self._started_at = started_at
        self._width_s = width_s
        self._most = most
        self._new: list[float] = [0.0]
        self._again: list[float] = [0.0]
        self._last_at: float | None = None

    def add(self, since: float, until: float, new: int, again: int) -> None:
        """`new` steps were done between these instants, and `again` more that an earlier generation had done."""
        with self._lock:
            self._reach(until)
            self._last_at = until
            begin, end = max(0.0, since - self._started_at), until - self._started_at
            first, last = (min(len(self._new) - 1, max(0, int(at // self._width_s))) for at in (begin, end))
            for place in range(first, last + 1):
                share = 1.0
                if last > first and end > begin:
                    inside = min(end, (place + 1) * self._width_s) - max(begin, place * self._width_s)
                    share = max(0.0, inside) / (end - begin)
                self._new[place] += new * share
                self._again[place] += again * share

    def read(self, now: float) -> Rates:
        with self._lock:
            self._reach(now)
            left_s = self._started_at + len(self._new) * self._width_s - now
            return Rates(
                self._width_s,
                round(left_s, 3),
                round(max(0.0, now - self._last_at), 3) if self._last_at is not None else None,
                tuple(round(steps, 3) for steps in self._new),
                tuple(round(steps, 3) for steps in self._again),
            )

    def _reach(self, at: float) -> None:
        """Add slices until there is one for this instant."""
        while at - self._started_at >= self._most * self._width_s:
            self._new, self._again = _halved(self._new), _halved(self._again)
            self._width_s *= 2
        more = int((at - self._started_at) // self._width_s) + 1 - len(self._new)
        if more > 0:
            self._new += [0.0] * more
            self._again += [0.0] * more


def _halved(steps: list[float]) -> list[float]:
    return [sum(steps[place : place + 2]) for place in range(0, len(steps), 2)]
