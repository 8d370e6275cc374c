"""A planned change as this node's workers go through it: which end, which have, and which need no wait.

Without I/O: the `Supervisor` reports what happens, and does what is asked for. A worker that has done its last step
ends by itself, and is no failure then. It is one if it crashes on the way to its last step. Between the two are workers
that wait in a step for ranks that have ended already (`rendezvous.node.drain`): their collective may break, or never
return. So before a crash counts in a drain, and when a worker takes long, the store is asked where all were to end.

Instants are seconds on the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ....rendezvous.node.drain import stranded
from ....rendezvous.records import StopAt
from ....worker.wire.shared_progress import Reading
from .exits import Exit, classify_exit

STRANDED_S = 2.0
"""A worker that has neither finished a step nor asked for so long, after the last one, waits for others or is busy."""

LOOK_AGAIN_S = 1.0


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
    ended: set[int] = field(default_factory=set)
    """Those of them that have ended by themselves."""
    excused: set[int] = field(default_factory=set)
    """Local ranks that the next generation can do without."""
    doubtful: dict[int, tuple[int, float]] = field(default_factory=dict)
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
        """`stopping` and `hung`: see `classify_exit`. What is DOUBTFUL waits for a look."""
        kind = classify_exit(
            returncode,
            stopping=stopping,
            hung=hung,
            draining=self.under_way,
            finished=local_rank in self.finished,
            kept=local_rank in self.kept,
        )
        if kind is Exit.DRAINED:
            self.ended.add(local_rank)
        elif kind is Exit.DOUBTFUL:
            self.doubtful[local_rank] = returncode, at
        return kind

    def looked(self, stop: StopAt | None, read: Mapping[int, Reading]) -> dict[int, tuple[int, float]]:
        """Where all were to end is known now, or cannot be. Returns those whose crash was a failure."""
        self.stop = stop if stop is not None and stop.generation == self.generation else None
        judged, self.doubtful = self.doubtful, {}
        fine = {rank for rank in judged if stranded(_step(read, rank), self.stop, self.generation)}
        self.excused |= fine
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

    def left_behind(
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
        ended = self.kept | self.ended | self.excused
        return bool(ended) and all(rank in ended or code == 0 for rank, code in returncodes.items())

    def keeps_all(self, returncodes: Mapping[int, int]) -> bool:
        """This node has the state after the last step."""
        return all(rank in self.kept for rank in returncodes)


def _step(read: Mapping[int, Reading], local_rank: int) -> int | None:
    reading = read.get(local_rank)
    return reading.step if reading is not None else None
