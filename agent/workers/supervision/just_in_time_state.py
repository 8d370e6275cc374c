"""Which worker keeps the last finished step of a failed generation, and for how long the others are left alone.

Workers that *guard* (`worker/checkpointing/replicated/just_in_time.py`) are asked to hold, if they can after the
newest step that any worker of this node has finished. When all have answered, or half of the time is over, one whose
boundary is the newest is asked to keep its state, and another one when it fails or dies over it. Then, or when the time
is over, all are let go, and the generation is stopped as if none guarded.

No I/O: the messages to send are returned. Owned by the main thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from ....rendezvous.text import counted
from ....worker.wire.messages import Broken, FromGuard, Go, Guarding, Held, Hold, Keep, Kept, ToGuard

log = logging.getLogger(__name__)

Orders = list[tuple[int, ToGuard]]
"""By local rank."""


@dataclass(slots=True)
class _Guard:
    answered: bool = False
    step: int | None = None
    tried: bool = False


class JustInTimeState:
    """One generation's. Until `begin` it only learns who guards."""

    def __init__(self, generation: int, grace_s: float, finished: Callable[[], int | None]) -> None:
        """`finished()`: the newest step that a worker of this node has finished, dead or alive."""
        self.generation = generation
        self._grace_s = grace_s
        self._finished = finished
        self._guards: dict[int, _Guard] = {}
        self._until: float | None = None
        self._keeping: int | None = None
        self.over = False

    @property
    def under_way(self) -> bool:
        """The workers must not be signalled now."""
        return self._until is not None and not self.over

    def wake_at(self) -> float | None:
        if not self.under_way or self._until is None:
            return None
        return self._until if self._keeping is not None else self._choose_at(self._until)

    def begin(self, now: float, within_s: float = math.inf) -> Orders:
        """The generation has failed, or is stopped before its workers could come to a common last step: then there are
        `within_s` for all. Does nothing when that is known."""
        if self._until is not None or self.over:
            return []
        self._grace_s = min(self._grace_s, within_s)
        if not self._guards or self._grace_s == 0:
            return self._end()
        self._until = now + self._grace_s
        log.info(
            "generation %d: %s may hold its last step", self.generation, counted(len(self._guards), "worker")
        )
        hold = Hold(self._grace_s / 2, self._finished())
        return [(local_rank, hold) for local_rank in sorted(self._guards)]

    def received(self, local_rank: int, message: FromGuard, now: float) -> Orders:
        if isinstance(message, Guarding):
            self._guards[local_rank] = _Guard()
            return [(local_rank, Go())] if self.over else []
        guard = self._guards.get(local_rank)
        if guard is None:
            return []
        if isinstance(message, Broken):
            return [(local_rank, Go())] if self.over else self.begin(now)
        if isinstance(message, Held):
            guard.answered, guard.step = True, message.step
        elif isinstance(message, Kept) and local_rank == self._keeping:
            self._keeping = None
            if message.step is not None:
                log.info("generation %d: step %d is in memory", self.generation, message.step)
                return self._end()
        return self.turn(now)

    def gone(self, local_rank: int, now: float) -> Orders:
        """That worker has ended, or guards no more."""
        self._guards.pop(local_rank, None)
        if local_rank == self._keeping:
            self._keeping = None
        return self.turn(now)

    def turn(self, now: float) -> Orders:
        """What is due."""
        if not self.under_way or self._until is None:
            return []
        if now >= self._until:
            log.warning(
                "generation %d: its last step was not kept within %g s", self.generation, self._grace_s
            )
            return self._end()
        waiting = not all(guard.answered for guard in self._guards.values())
        if self._keeping is not None or (waiting and now < self._choose_at(self._until)):
            return []
        able = [
            (guard.step, -local_rank)
            for local_rank, guard in self._guards.items()
            if guard.step is not None and not guard.tried
        ]
        if not able:
            log.info("generation %d: no worker of this node could save its last step", self.generation)
            return self._end()
        self._keeping = -max(able)[1]
        self._guards[self._keeping].tried = True
        return [(self._keeping, Keep(self._until - now))]

    def _choose_at(self, until: float) -> float:
        return until - self._grace_s / 2

    def _end(self) -> Orders:
        self.over = True
        return [(local_rank, Go()) for local_rank in sorted(self._guards)]
