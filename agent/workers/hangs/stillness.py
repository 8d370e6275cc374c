"""Whether one worker is active, as seen from outside: by processor time, bytes, output, and waits that end.

The kernel counts no bytes of sockets for a process. But a main thread that waits for them wakes when some have come.

A worker that hangs is not quite still: threads of libraries wake now and then, a data loader asks every few seconds
whether its children live. So a worker counts as active only from a share of what it uses when it works; until that is
known, from the smallest use that the kernel shows, if that is more than two ticks now and then. What an inquiry itself
makes it do, which asks for its stacks by a signal, does not count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from .signs import WAKES_PER_S, Signs

ACTIVE_SHARE = 0.01
"""Of one processor's time, from which on a worker is active, whatever it uses otherwise."""
OF_USUAL = 0.1
"""Or so much of what it has mostly used while it was active."""
WAITING_SHARE = 0.0075
"""Libraries that wait use less. Of a worker that uses little more when it works, half of that counts."""
USUAL_LOOKS = 32
WORKING_SHARE = 0.05
"""From which on a worker that waits itself has threads or children at work."""
BYTES_PER_S = 16384.0
"""Read and written; less is what libraries write of themselves."""
NOW_AND_THEN = 0.004
"""A smaller share of one processor, over three looks, is what threads of libraries use that only wait."""
AT_ONCE = 0.0125
"""In one look it is more than that: they may use two ticks of the kernel's clock in two seconds."""
WARM_LOOKS = 10
"""A worker that was active at so many looks has begun its work."""


@dataclass(slots=True)
class Stillness:
    """Of one worker. Instants are monotonic."""

    active_at: float
    """When it was last seen to do anything."""
    worked_at: float = 0.0
    """When it was last seen to do more than a worker does that only waits, whatever it has used before."""
    active_looks: int = 0
    _signs: Signs | None = None
    _looked_at: float = 0.0
    _lately: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    _shares: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_LOOKS))

    def look(self, at: float, signs: Signs, *, asked: bool = False) -> float:
        """Returns the pause that this look has ended, 0 if none. `asked`: its stacks were asked for since the last."""
        before, self._signs = self._signs, signs
        took_s, self._looked_at = at - self._looked_at, at
        if before is None or took_s <= 0:
            self.active_at = self.worked_at = max(self.active_at, at)
            return 0.0
        if asked:
            return 0.0
        share = (signs.processor_s - before.processor_s) / took_s
        self._lately.append(share)
        lately = sum(self._lately) / len(self._lately)
        threshold = self._threshold()
        uses = share > threshold and (share > AT_ONCE or lately > max(NOW_AND_THEN, threshold))
        moves = (
            share < 0  # a child has ended for which its parent did not wait
            or abs(signs.moved_bytes - before.moved_bytes) > BYTES_PER_S * took_s
            or signs.wakes - before.wakes > WAKES_PER_S * took_s
            or signs.output_bytes != before.output_bytes
        )
        if moves or signs.stirs or share > WORKING_SHARE:
            self.worked_at = at
        if not (moves or uses):
            return 0.0
        pause_s = self._looked_at - took_s - self.active_at
        self.active_at = at
        self.active_looks += 1
        self._shares.append(max(0.0, share))
        return pause_s

    def _threshold(self) -> float:
        if len(self._shares) < WARM_LOOKS:
            return 0.0
        usual = median(self._shares)
        return min(ACTIVE_SHARE, max(OF_USUAL * usual, min(usual / 2, WAITING_SHARE)))

    @property
    def warm(self) -> bool:
        return self.active_looks >= WARM_LOOKS
