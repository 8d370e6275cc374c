"""Counts steps as this node's workers report them: which are new, which were lost and are done again.

The *position* is the newest step that the state in the workers' memory contains. It goes up with each step that is
done, and down when a generation begins at an older checkpoint; what lies between was lost. The *highest* step is the
highest position that the job has ever had, on any node as far as this one knows; only steps beyond it are new.

Reports are hints: throttled, so that one stands for all steps since the one before, and lost without a word. Workers of
one node report the same steps; who comes second says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counted:
    """What one report adds. `mean_s`: seconds per step since the report before, if that is of this generation."""

    new: int = 0
    lost: int = 0
    mean_s: float | None = None


class StepCount:
    """See the module's docstring. Instants are seconds, monotonic."""

    def __init__(self) -> None:
        self.highest = 0
        self.stepped = False
        """A worker of this generation has reported a step."""
        self._position: int | None = None
        self._resumed = False
        self._reported: tuple[int, float] | None = None

    @property
    def catching_up(self) -> bool:
        """The step after the one that was reported last has been done before."""
        return self._position is not None and self._position < self.highest

    def begin(self, highest: int) -> None:
        """Another generation starts; `highest` is the highest step that any node had reported before."""
        self.highest = max(self.highest, highest)
        self.stepped = self._resumed = False
        self._reported = None

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
        """A worker reported at `at` that it has finished this step."""
        lost = self.resumed(max(0, step - 1)).lost
        self.stepped = True
        mean_s = None
        if self._reported is not None and step > self._reported[0]:
            mean_s = (at - self._reported[1]) / (step - self._reported[0])
        if self._reported is None or step > self._reported[0]:
            self._reported = (step, at)
        return Counted(self._reach(step), lost, mean_s)

    def saved(self, step: int) -> Counted:
        """A checkpoint of this step was committed: it is done, whether or not its report was held back."""
        return Counted(self._reach(step) if self.stepped else 0)

    def _reach(self, step: int) -> int:
        self._position = max(step, self._position or 0)
        new = max(0, step - self.highest)
        self.highest += new
        return new
