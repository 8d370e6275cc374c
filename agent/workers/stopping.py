"""How workers end: in a planned change, as their return codes say, and with their last step kept.

`DrainState` is a planned change as this node's workers go through it: which end, which have, and which need no wait.
A worker that has done its last step ends by itself, and is no failure then. It is one if it crashes on the way to its
last step. Between the two are workers that wait in a step for ranks that have ended already (`rendezvous.node.drain`):
their collective may break, or never return. So before a crash counts in a drain, and when a worker takes long, the
store is asked where all were to end.

`JustInTimeState` chooses which worker keeps the last finished step of a failed generation, and for how long the others
are left alone. Workers that *guard* (`worker/checkpointing/replicated/just_in_time.py`) are asked to hold, if they can
after the newest step that any worker of this node has finished. When all have answered, or half of the time is over,
one whose boundary is the newest is asked to keep its state, and another one when it fails or dies over it. Then, or
when the time is over, all are let go, and the generation is stopped as if none guarded.

No I/O: what happens is reported, and what is to be done or sent is returned. Owned by the main thread; instants are
seconds on the monotonic clock.
"""

from __future__ import annotations

import enum
import logging
import math
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ...rendezvous.node.drain import stranded
from ...rendezvous.records import StopAt
from ...rendezvous.text import counted
from ...worker.steps.drain import DRAINED
from ...worker.wire.messages import Broken, FromGuard, Go, Guarding, Held, Hold, Keep, ToGuard
from ...worker.wire.shared_progress import Reading

log = logging.getLogger(__name__)

HANG_SIGNAL = signal.SIGABRT
"""Ends a worker that hangs: PYTHONFAULTHANDLER makes it print the stacks of its threads first."""

STRANDED_S = 2.0
"""A worker that has neither finished a step nor asked for so long, after the last one, waits for others or is busy."""

LOOK_AGAIN_S = 1.0


LEAVING = (DRAINED, 0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""How a worker ends after its last step in a planned change: as `Drained` does, or as a script does that has kept its
state by itself."""

AS_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL, DRAINED)
"""How a worker ends that was asked to: by the signal, by a handler or shell in its place, when its grace is over, or
because a planned change was under way."""


class Exit(enum.Enum):
    ENDED = enum.auto()
    """With success."""
    DRAINED = enum.auto()
    """After the last step of a planned change."""
    UNDETERMINED = enum.auto()
    """It crashed in a planned change: a failure, unless it waited in a step for ranks that had ended already."""
    AS_ASKED = enum.auto()
    """Because its generation is stopped."""
    HUNG = enum.auto()
    """By the signal that the agent sends to workers that do not move."""
    FAILED = enum.auto()


@dataclass(slots=True)
class DrainState:
    """Of one generation."""

    generation: int
    since: float | None = None
    """When the change was first announced to this node."""
    stopping: bool = False
    """All workers of the world know of it, and are about to end."""
    finished: set[int] = field(default_factory=set)
    """Local ranks that have done their last step, as their agent has answered."""
    kept: set[int] = field(default_factory=set)
    """Those of them that have kept the state after it."""
    drained: set[int] = field(default_factory=set)
    """Local ranks that the next generation can do without: they have ended after their last step, or wait for others
    that have."""
    undetermined: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Local ranks that have crashed, with return code and instant: it is not known yet whether that matters."""
    stop: StopAt | None = None
    _look_at: float | None = None

    @property
    def under_way(self) -> bool:
        return self.since is not None

    def begin(self, now: float, *, stopping: bool) -> bool:
        """The change is announced, or all know of it. True for the first time."""
        first, self.since = self.since is None, self.since if self.since is not None else now
        if stopping and not self.stopping:
            self.stopping, self._look_at = True, now + STRANDED_S
        return first

    def exited(
        self, local_rank: int, returncode: int, at: float, *, stopping: bool = False, hung: bool = False
    ) -> Exit:
        """What this end means. `stopping`: the generation is asked to end; `hung`: because it did not move. What is
        UNDETERMINED waits for a look."""
        finished = local_rank in self.finished
        if stopping:
            if hung and returncode == -HANG_SIGNAL:
                return Exit.HUNG
            if returncode in AS_ASKED:
                return Exit.AS_ASKED
        elif local_rank in self.kept or (finished and returncode in LEAVING):
            self.drained.add(local_rank)
            return Exit.DRAINED
        if returncode == 0:
            return Exit.ENDED
        if stopping or finished or not self.under_way:
            return Exit.FAILED
        self.undetermined[local_rank] = returncode, at
        return Exit.UNDETERMINED

    def looked(self, stop: StopAt | None, read: Mapping[int, Reading]) -> dict[int, tuple[int, float]]:
        """Where all were to end is known now, or cannot be. Returns those whose crash was a failure."""
        self.stop = stop if stop is not None and stop.generation == self.generation else None
        judged, self.undetermined = self.undetermined, {}
        fine = {rank for rank in judged if stranded(_step(read, rank), self.stop, self.generation)}
        self.drained |= fine
        return {rank: crash for rank, crash in judged.items() if rank not in fine}

    def wants_look(self, now: float, running: Collection[int]) -> bool:
        """True once each time: the store is to be asked where all were to end."""
        waits = self.stopping and any(rank not in self.finished for rank in running)
        if not waits or self._look_at is None or now < self._look_at:
            return False
        self._look_at = now + LOOK_AGAIN_S
        return True

    def look_at(self) -> float | None:
        return self._look_at if self.stopping else None

    def blocked(
        self, now: float, running: Collection[int], read: Mapping[int, Reading], asking: Collection[int]
    ) -> bool:
        """Whether all workers that are left here wait for others that have ended."""
        return bool(running) and all(
            rank not in self.finished and rank not in asking and self._waits(now, read.get(rank))
            for rank in running
        )

    def _waits(self, now: float, reading: Reading | None) -> bool:
        if reading is None or reading.stepped_at is None:
            return False
        return now >= reading.stepped_at + STRANDED_S and stranded(reading.step, self.stop, self.generation)

    def complete(self, returncodes: Mapping[int, int]) -> bool:
        """All these workers have ended, and not all of them because the training is over."""
        ended = self.kept | self.drained
        return bool(ended) and all(rank in ended or code == 0 for rank, code in returncodes.items())

    def keeps_all(self, returncodes: Mapping[int, int]) -> bool:
        """This node has the state after the last step."""
        return all(rank in self.kept for rank in returncodes)


def _step(read: Mapping[int, Reading], local_rank: int) -> int | None:
    reading = read.get(local_rank)
    return reading.step if reading is not None else None


Orders = list[tuple[int, ToGuard]]
"""By local rank."""


class JustInTimeState:
    """One generation's. Until `begin` it only learns who guards."""

    def __init__(self, generation: int, grace_s: float, finished: Callable[[], int | None]) -> None:
        """`finished()`: the newest step that a worker of this node has finished, dead or alive."""
        self.generation = generation
        self._grace_s = grace_s
        self._finished = finished
        self._guards: set[int] = set()
        self._held: dict[int, int | None] = {}
        """After which step those stand that have answered; None: it cannot be kept, or that was tried."""
        self._until = math.inf
        self._keeping: int | None = None
        self.over = False

    @property
    def under_way(self) -> bool:
        """The workers must not be signalled now."""
        return self._until < math.inf and not self.over

    def wake_at(self) -> float | None:
        if not self.under_way:
            return None
        return self._until if self._keeping is not None else self._choose_at

    @property
    def _choose_at(self) -> float:
        return self._until - self._grace_s / 2

    def begin(self, now: float, within_s: float = math.inf) -> Orders:
        """The generation has failed, or is stopped before its workers could come to a common last step: then there are
        `within_s` for all. Does nothing when that is known."""
        if self.under_way or self.over:
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
            self._guards.add(local_rank)
            return [(local_rank, Go())] if self.over else []
        if local_rank not in self._guards:
            return []
        if isinstance(message, Broken):
            return [(local_rank, Go())] if self.over else self.begin(now)
        if isinstance(message, Held):
            self._held.setdefault(local_rank, message.step)  # it is asked to keep its state once
        elif local_rank == self._keeping:
            self._keeping = None
            if message.step is not None:
                log.info("generation %d: step %d is in memory", self.generation, message.step)
                return self._end()
        return self.turn(now)

    def gone(self, local_rank: int, now: float) -> Orders:
        """That worker has ended, or guards no more."""
        self._guards.discard(local_rank)
        self._held.pop(local_rank, None)
        if local_rank == self._keeping:
            self._keeping = None
        return self.turn(now)

    def turn(self, now: float) -> Orders:
        """What is due."""
        if not self.under_way:
            return []
        if now >= self._until:
            log.warning(
                "generation %d: its last step was not kept within %g s", self.generation, self._grace_s
            )
            return self._end()
        if self._keeping is not None or (self._guards > self._held.keys() and now < self._choose_at):
            return []
        able = [(step, -local_rank) for local_rank, step in self._held.items() if step is not None]
        if not able:
            log.info("generation %d: no worker of this node could save its last step", self.generation)
            return self._end()
        self._keeping = -max(able)[1]
        self._held[self._keeping] = None
        return [(self._keeping, Keep())]

    def _end(self) -> Orders:
        self.over = True
        return [(local_rank, Go()) for local_rank in sorted(self._guards)]
