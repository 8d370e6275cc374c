"""The workers of one generation that live on after others have ended with success: are they at work, or stuck?

A job is over only when all of its workers have ended. One that is stuck after its script's last line, in the end of
the interpreter or of a library, would keep all nodes for ever. One that writes the final model is at work. So what
counts is the time since the last sign of life: a step, a checkpoint, the end of a rank.

A worker that reports steps is at work while it reports steps or checkpoints. One that reports none can only be watched
from outside: it is at work while its processes use the processor. So a script without the worker library may do what it
likes on rank 0 after the others have ended, and a library that sleeps for ever at the end of it is found all the same.

Owned by the main thread. Instants are seconds on the monotonic clock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ....rendezvous.text import shortened
from ..processes.proc import all_stats

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Between two looks at the processor time of workers that report no steps."""

AT_WORK = 0.01
"""The share of one processor's time, between two looks, from which on such a worker is at work."""

FIRST_WARNING_S = 10.0
"""The ranks of a job end within seconds of each other; more is worth a line in the log."""

SECOND_WARNING_S = 60.0
"""From then on, twice as long each time."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class ExitWatch:
    """`limit_s` None: nothing is ever due."""

    limit_s: float | None
    _alive_at: float | None = None
    """None: no rank has ended."""
    _next_warning_s: float = FIRST_WARNING_S

    def ended(self, at: float) -> None:
        """A rank has ended with success."""
        self._alive_at = at if self._alive_at is None else max(self._alive_at, at)

    def alive(self, at: float) -> None:
        """One of those that live on is at work."""
        if self._alive_at is not None:
            self._alive_at = max(self._alive_at, at)

    @property
    def watching(self) -> bool:
        return self._alive_at is not None

    def silence_s(self, now: float) -> float:
        return max(0.0, now - self._alive_at) if self._alive_at is not None else 0.0

    def due(self, now: float) -> bool:
        """The silence is a hang."""
        return self.watching and self.limit_s is not None and self.limit_s <= self.silence_s(now)

    def warning_due(self, now: float) -> bool:
        """A line in the log is due; True once each time."""
        if not self.watching or self.silence_s(now) < self._next_warning_s:
            return False
        self._next_warning_s = max(SECOND_WARNING_S, 2 * self._next_warning_s)
        return True


class LateExits:
    """Of one generation, on this node."""

    def __init__(
        self, limit_s: float | None, processor_time: Callable[[Collection[int]], float] | None = None
    ) -> None:
        """`processor_time` of all processes in these sessions, in seconds."""
        self.watch = ExitWatch(limit_s)
        self._processor_time = processor_time or session_processor_time
        self._ended: list[int] = []
        self._elsewhere = False
        self._looked: tuple[float, float] | None = None
        """When, and the processor time used until then."""

    def ended(self, rank: int, at: float) -> None:
        """A rank of this node has ended with success."""
        self._ended.append(rank)
        self.watch.ended(at)

    def others_ended(self, now: float) -> None:
        """Ranks of other nodes have ended with success."""
        if not self._elsewhere:
            self._elsewhere = True
            self.watch.ended(now)

    def turn(self, now: float, running: Collection[int], mute: Collection[int]) -> str:
        """Log which ranks live on, when it is due. `running` are ranks; `mute` the sessions of those that have reported
        no step. Returns why this is a hang; empty if it is not."""
        if not self.watch.watching or not running:
            return ""
        if mute:
            self._look(now, mute)
        due = self.watch.due(now)
        if not due and not self.watch.warning_due(now):
            return ""
        silence_s, still = self.watch.silence_s(now), "lives" if len(running) == 1 else "live"
        state = (
            f"{self._ended_ranks()} with success; {_ranks(running)} still {still}, "
            f"without a step or checkpoint for {silence_s:.0f} s"
        )
        limit = self.watch.limit_s
        if due:
            return f"hang after the end of other ranks: {state} (--exit-timeout)"
        bound = (
            f"a hang after {limit:g} s (--exit-timeout)"
            if limit is not None
            else "waiting without a limit (--exit-timeout)"
        )
        log.warning("%s: %s", state, bound)
        return ""

    def _look(self, now: float, mute: Collection[int]) -> None:
        if self._looked is not None and now < self._looked[0] + LOOK_EVERY_S:
            return
        used_s = self._processor_time(mute)
        if self._looked is not None and used_s - self._looked[1] >= AT_WORK * (now - self._looked[0]):
            self.watch.alive(now)
        self._looked = now, used_s

    def _ended_ranks(self) -> str:
        if not self._ended:
            return "ranks of other nodes have ended"
        ended = _ranks(self._ended)
        if self._elsewhere:
            return f"{ended} and ranks of other nodes have ended"
        return f"{ended} {'has' if len(self._ended) == 1 else 'have'} ended"


def session_processor_time(sessions: Collection[int]) -> float:
    """Seconds, of all processes in these sessions and of their children that have ended."""
    return sum(stat.ticks for stat in all_stats().values() if stat.session in sessions) / _TICKS_PER_S


def _ranks(ranks: Iterable[int]) -> str:
    names = sorted(ranks)
    shown = shortened(map(str, names))
    return f"rank {shown}" if len(names) == 1 else f"ranks {shown}"
