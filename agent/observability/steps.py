"""The progress, steps and rate of this node's workers together, from the shared progress of each.

A generation's scripts have begun when the last one has, and the same goes for loading. A step is done when the first
worker has finished it; one that is still loading then is not waited for.

Steps are counted: which are new, which were lost and are done again.

The *position* is the newest step that the state in the workers' memory contains. It goes up with each step that is
done, and down when a generation begins at an older checkpoint; what lies between was lost. The *highest* step is the
highest position that the job has ever had, on any node as far as this one knows; only steps beyond it are new.

A reading shows only the newest of several steps; all since the reading before count as equally long. The workers of
one node do the same steps: a step counts once.

The rate since the start of the agent is kept in bounded memory, as totals at some instants. When there are too many,
every second one goes: the whole job is always there, in less detail the longer it lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from ...worker.wire.shared_progress import Reading


class Step(NamedTuple):
    number: int
    at: float


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Instants are seconds, monotonic. None: not yet."""

    began_at: float | None = None
    """The script of each worker had begun."""
    load_at: float | None = None
    """Each had asked for its checkpoint."""
    loaded: Step | None = None
    """Each had loaded this step's checkpoint; step 0 is that there was none."""
    first: Step | None = None
    """The first that any worker finished."""
    newest: Step | None = None


def node_progress(readings: Collection[Reading]) -> NodeProgress:
    firsts = [
        Step(reading.first_step, reading.first_at)
        for reading in readings
        if reading.first_step is not None and reading.first_at is not None
    ]
    steps = [
        Step(reading.step, reading.stepped_at)
        for reading in readings
        if reading.step is not None and reading.stepped_at is not None
    ]
    first = min(firsts, key=lambda step: step.at, default=None)

    def all_at(instant: Callable[[Reading], float | None]) -> float | None:
        known = [at for reading in readings if (at := instant(reading)) is not None]
        if not known or (first is None and len(known) < len(readings)):
            return None
        return max(known) if first is None else min(max(known), first.at)

    loaded_at = all_at(lambda reading: reading.loaded_at)
    loaded_step = max((each.loaded_step for each in readings if each.loaded_step is not None), default=0)
    return NodeProgress(
        began_at=all_at(lambda reading: reading.script_at),
        load_at=all_at(lambda reading: reading.load_at),
        loaded=Step(loaded_step, loaded_at) if loaded_at is not None else None,
        first=first,
        newest=max(steps, key=lambda step: (step.number, -step.at), default=None),
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """What one reading adds."""

    new: int = 0
    lost: int = 0
    timed: int = 0
    """Steps of which it is known how long they took."""
    mean_s: float = 0.0
    """Seconds that each of these took."""
    caught_up_at: float | None = None
    """The instant, before that of the reading, when the highest step had been done again."""


class StepCount:
    """The position and the highest step of this node. Instants are seconds, monotonic."""

    def __init__(self) -> None:
        self.highest = 0
        self.stepped = False
        """A worker of this generation has finished a step."""
        self._position: int | None = None
        self._resumed = False
        self._seen: tuple[int, float] | None = None

    @property
    def catching_up(self) -> bool:
        """The step after the newest one has been done before."""
        return self._position is not None and self._position < self.highest

    def begin(self, highest: int) -> None:
        """Another generation starts; `highest` is the highest step that any node had done before."""
        self.highest = max(self.highest, highest)
        self.stepped = self._resumed = False
        self._seen = None

    def resumed(self, step: int) -> Counted:
        """The generation goes on from here: it has loaded the checkpoint of this step."""
        if self._resumed:
            return Counted()
        self._resumed = True
        lost = max(0, self._position - step) if self._position is not None else 0
        self._position = step
        self.highest = max(self.highest, step)
        return Counted(lost=lost)

    def done(self, step: int, at: float) -> Counted:
        """A worker finished this step at `at`. The first step of a generation must be among the calls."""
        lost = self.resumed(max(0, step - 1)).lost
        self.stepped = True
        seen, highest = self._seen, self.highest
        if seen is not None and step <= seen[0]:
            return Counted(lost=lost)
        self._seen = (step, at)
        new = self._reach(step)
        if seen is None:
            return Counted(new, lost)
        timed = step - seen[0]
        mean_s = max(0.0, at - seen[1]) / timed
        caught_up_at = seen[1] + (highest - seen[0]) * mean_s if seen[0] < highest < step else None
        return Counted(new, lost, timed, mean_s, caught_up_at)

    def saved(self, step: int) -> Counted:
        """A checkpoint of this step was committed: the step is done, also where no reading has shown it yet."""
        return Counted(self._reach(step) if self.stepped else 0)

    def _reach(self, step: int) -> int:
        self._position = max(step, self._position or 0)
        new = max(0, step - self.highest)
        self.highest += new
        return new


class StepRate:
    """The main thread adds, any thread reads. Instants are monotonic. Totals are new steps, and steps that an earlier
    generation had done already."""

    def __init__(self, every_s: float = 2.0, most: int = 240) -> None:
        self._lock = threading.Lock()
        self._every_s = every_s
        self._most = most
        self._kept: list[tuple[float, int, int]] = []
        self._newest: tuple[float, int, int] | None = None

    def add(self, since: float, until: float, new: int, again: int) -> None:
        """`new` steps were done between these instants, and `again` more that an earlier generation had done."""
        with self._lock:
            _, all_new, all_again = self._newest or (since, 0, 0)
            self._keep((since, all_new, all_again))
            self._newest = (until, all_new + new, all_again + again)
            self._keep(self._newest)

    def _keep(self, totals: tuple[float, int, int]) -> None:
        if not self._kept or totals[0] - self._kept[-1][0] >= self._every_s:
            self._kept.append(totals)
        if len(self._kept) > self._most:
            self._kept, self._every_s = self._kept[::2], 2 * self._every_s

    def read(self, now: float) -> list[tuple[float, int, int]]:
        """Seconds ago, and the totals then, the oldest first; the last one is of the newest step."""
        with self._lock:
            totals = [*self._kept, *([self._newest] if self._newest is not None else [])]
        return [(round(max(0.0, now - at), 3), new, again) for at, new, again in totals]
