"""What becomes of saves to disk: training goes on after one that was refused, but not after too many in a row."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...errors import CheckpointError, NotSaved, SaveFailed, StepNotGrowing, Superseded, Unconfirmed
from ...ranks.group import current_group, together
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.parts import refusal_of
from ...storage.memory.slots import CopyLost
from .slot_copies import SlotCopies

logger = logging.getLogger(__name__)


class SaveOutcomes:
    """Of one Checkpointer, on a rank that writes."""

    def __init__(
        self, files: CheckpointFiles, copies: SlotCopies, disk: DiskSaver, max_failed_saves: int
    ) -> None:
        self.floor: int | None = None
        """Steps up to this one are not saved again; None, on all ranks alike, until the first load or save."""
        self._files = files
        self._copies = copies
        self._disk = disk
        self._max_failed_saves = max_failed_saves
        self._failed_saves = 0
        self._saved: int | None = None
        """The step that was saved last."""

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

    def end(self) -> None:
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
