"""Counts the steps of this node's workers: which are new, which were lost and are done again.

The *position* is the newest step that the state in the workers' memory contains. It goes up with each step that is
done, and down when a generation begins at an older checkpoint; what lies between was lost. The *highest* step is the
highest position that the job has ever had, on any node as far as this one knows; only steps beyond it are new.

A reading shows only the newest of several steps; all since the reading before count as equally long. The workers of
one node do the same steps: a step counts once.
"""

from __future__ import annotations

from dataclasses import dataclass


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
