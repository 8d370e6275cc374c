"""What a Checkpointer of either kind of state does beside copying and writing it.

It takes part in training: each one that was loaded, or has a guard, is registered with `progress`, for planned changes
(`steps/drain`) and for the guard (`just_in_time`). And it says what becomes of saves: training goes on after one that
the disk has refused, but not after too many in a row.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from ...errors import CheckpointError, NotSaved, SaveFailed, StepNotGrowing, Superseded, Unconfirmed
from ...ranks.group import current_group, together
from ...state.state_dicts import Part, unwrapped
from ...steps import progress
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.parts import refusal_of
from ...storage.memory.slots import CopyLost
from ...wire.shared_progress import clock_ns
from .slot_copies import SlotCopies

logger = logging.getLogger(__name__)


class BaseSaver(ABC):
    """Of one Checkpointer, on one rank: a `drain.DrainSaver`."""

    def __init__(
        self,
        files: CheckpointFiles,
        parts: Mapping[str, Part],
        copies: SlotCopies,
        disk: DiskSaver,
        max_failed_saves: int,
    ) -> None:
        self.directory = files.directory
        self.floor: int | None = None
        """Steps up to this one are not saved again; None, on all ranks alike, until the first load or save."""
        self._objects = [part if isinstance(part, dict) else unwrapped(part) for part in parts.values()]
        self._loaded_step: int | None = None
        self._waited_at: int | None = None
        """The instant of the newest step when the script waited, as it does where a training is over."""
        self._files = files
        self._copies = copies
        self._memory = copies.memory
        self._disk = disk
        self._max_failed_saves = max_failed_saves
        self._failed_saves = 0
        self._saved: int | None = None
        """The step that was saved last."""

    # ---------------------------------------------------------------- its part in training

    def loaded(self, step: int) -> None:
        """From here on this one's state is kept at the last step of a planned change."""
        if progress.checkpointers.all():
            # Ranks collect garbage at different times, and must ask the same Checkpointers at each step.
            gc.collect()
        for former in all_savers():
            was_waited_for = former._waited_at == progress.newest_step_at()
            if former is not self and (was_waited_for or former._shares_part_with(self)):
                former.leave()
                logger.warning(
                    "the Checkpointer of %s %s, so another training begins with that of %s: the first keeps no step of "
                    "it, unless it is loaded or saved again. close() it where its training is over",
                    former.directory,
                    "was waited for" if was_waited_for else "has a part of the one that is loaded now",
                    self.directory,
                )
        for other in progress.loaded_since_newest_step():
            if isinstance(other, BaseSaver) and other is not self and other._loaded_step not in (None, step):
                logger.warning(
                    "training goes on from two steps: put what belongs together into one Checkpointer, and close() "
                    "one whose training is over: step=%d directory=%s other_step=%d other_directory=%s",
                    step,
                    self.directory,
                    other._loaded_step,
                    other.directory,
                )
        self._loaded_step, self._waited_at = step, None
        self.register()

    def _shares_part_with(self, other: BaseSaver) -> bool:
        return any(mine is one for mine in self._objects for one in other._objects)

    def waited(self) -> None:
        """All that was saved is on disk."""
        self._waited_at = progress.newest_step_at()

    def goes_on(self) -> None:
        """What was saved is of the training that goes on."""
        self._waited_at = None
        if self.is_over:
            self.register()

    def register(self) -> None:
        progress.checkpointers.add(self.directory, self)

    def leave(self) -> None:
        """Take no part any more."""
        progress.checkpointers.remove(self)

    def end(self) -> None:
        """The script has closed or dropped the Checkpointer: nothing of it is left here. Waits for no other rank."""
        if self in progress.checkpointers.all():
            self._warn_where_training_goes_on()
        self.leave()
        self.end_writes()
        if self._memory is not None:
            self._memory.close()

    def forget(self) -> bool:
        """Every rank: no load goes on from what is in memory. Whether this rank had any copy there."""
        return self._memory is not None and self._memory.forget()

    def _warn_where_training_goes_on(self) -> None:
        since_ns = clock_ns()
        next_steps = {
            newest + 1 for newest in (self._loaded_step, progress.newest_step()) if newest is not None
        }

        def warn(step: int) -> None:
            end()
            if step in next_steps and not progress.checkpointers.all(since_ns):
                logger.warning(
                    "step %d is not kept in %s: the script has dropped its Checkpointer. Keep the object for as long "
                    "as the training runs, and close() it after that",
                    step,
                    self.directory,
                )

        end = progress.on_step(warn)

    @property
    def is_over(self) -> bool:
        """It was loaded, and another training has begun since."""
        return self._loaded_step is not None and self not in progress.checkpointers.all()

    def is_beyond(self, step: int) -> bool:
        """These are the steps of another training, begun in this process after this one was done."""
        return self.floor is not None and step < self.floor

    # ---------------------------------------------------------------- planned changes: see `drain.DrainSaver`

    @property
    @abstractmethod
    def saves_alone(self) -> bool: ...

    @abstractmethod
    def save_last_step(self, step: int, *, leaves: bool) -> bool: ...

    @abstractmethod
    def order_write(self, step: int) -> None: ...

    @abstractmethod
    def save_last_step_alone(self, step: int) -> bool: ...

    def give_up(self, step: int) -> None:
        if self._memory is not None:
            self._memory.drop((self._memory.place.generation, step))

    def versions(self, step: int) -> frozenset[tuple[int, int]] | None:
        if self.is_beyond(step):
            return None
        return self._memory.versions() if self._memory is not None else frozenset()

    def go_back(self, step: int, version: tuple[int, int]) -> None:
        if self._memory is not None and not self.is_beyond(step):
            self._memory.abandon_newer(version)

    # ---------------------------------------------------------------- what becomes of saves

    def saved(self, step: int) -> None:
        """It is in memory, or on disk."""
        self.floor = self._saved = step

    def has_saved(self, step: int) -> bool:
        """Every rank: whether nothing was saved or loaded since this step was, and it is on disk by now. Where the disk
        has refused it, it may be saved again."""
        if not step == self._saved == self.floor:
            return False
        if self.wait():
            return True
        self.floor = step - 1
        return False

    def wait(self) -> bool:
        """See `Checkpointer`."""
        return unless_refused(self.make_durable)

    def finish_last_write(self) -> None:
        """Wait for the end of a write in the background, and raise if it was refused. There may be none."""
        outcome = self._disk.finish(self._settle())
        if outcome is not None:
            self.count(refusal_of(outcome))

    def _settle(self) -> str:
        """Why the copy that is to be written never came; empty where it did, or there is none."""
        try:
            self._copies.settle()
        except CopyLost as error:
            return str(error)
        return ""

    def end_writes(self) -> None:
        """No save follows: what was saved last is on disk before, or the log says that it is not."""
        self._disk.end(self._settle())

    def make_durable(self) -> None:
        """Wait for the newest save, and raise while it is not on disk, also when that was raised before."""
        self.finish_last_write()
        if not self._disk.is_durable:
            raise NotSaved("the newest save was refused, as a warning before this says")

    def count(self, refusal: CheckpointError | None) -> None:
        """Let training go on after a refused save, but not after too many. Raises what `Checkpointer.save` raises."""
        if refusal is None:
            self._failed_saves = 0
            return
        if not isinstance(refusal, SaveFailed):
            raise refusal
        self._failed_saves += not isinstance(refusal, Unconfirmed)
        if self._failed_saves >= self._max_failed_saves:
            raise SaveFailed(
                f"{refusal} ({self._failed_saves} saves in a row were refused: max_failed_saves)"
            ) from refusal
        logger.warning(
            "checkpoint not saved, training goes on: failed=%d limit=%d reason=%s",
            self._failed_saves,
            self._max_failed_saves,
            refusal,
        )
        raise refusal if isinstance(refusal, Unconfirmed) else NotSaved(str(refusal)) from refusal

    def check_grows(self, step: int) -> int:
        """The step at which the directory is claimed: of this run no newer one is on disk.

        Raises StepNotGrowing. It is Superseded where a script that never loads, such as an archive of the best models,
        comes to steps that an earlier generation has saved: they are left out until it is beyond them.
        """
        floor = self.floor
        if floor is None:
            # save() without load(): the directory itself says how far the run has come.
            floor = max(self._files.steps(), default=-1)
        if step <= floor and step != self._saved:
            newest = self._files.newest_manifest() if self.floor is None else None
            if newest is not None and newest.run == self._files.run.id:
                text = (
                    f"step {step} is not saved: {self._files.directory} has step {floor} of an earlier generation; "
                    "saves go on beyond it"
                )
                logger.warning("%s", text)
                raise Superseded(text)
            raise StepNotGrowing(
                f"step {step} is not beyond step {floor}, the newest in {self._files.directory}: save() wants steps "
                "that grow. Give another training another directory"
            )
        return floor + 1  # of a step that was loaded, and may be saved again


def unless_refused(part: Callable[[], None]) -> bool:
    """All ranks do this; False: the disk has refused it, or the agent's answer is missing, and not too often yet."""
    try:
        together(current_group(), part, "not saved")
    except (NotSaved, Unconfirmed):
        return False
    return True


def all_savers() -> tuple[BaseSaver, ...]:
    """Those that take part now."""
    return tuple(one for one in progress.checkpointers.all() if isinstance(one, BaseSaver))
