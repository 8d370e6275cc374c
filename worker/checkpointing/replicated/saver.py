"""Saves the state of one Checkpointer, as one rank takes part in it: to its node's memory, and as rank 0 to the disk.

A checkpoint that the disk refuses does not end training, until `max_failed_saves` in a row were refused.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, NotSaved, SaveFailed, StepNotGrowing, Superseded, Unconfirmed
from ...ranks.group import Group, because, current_group
from ...state import rng
from ...state.state_dicts import prove_loadable, with_numbers
from ...steps import progress
from ...storage.disk.async_save import DiskSaver, WholeSave
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.memory.copy_header import Header
from ...storage.memory.node_memory import NodeMemory
from ...storage.memory.slots import NoRoom
from ...wire.messages import SaveResult
from ..saving.save_outcomes import SaveOutcomes, unless_refused
from ..saving.slot_copies import SlotCopies
from .contents import Contents, Gathered

logger = logging.getLogger(__name__)


class Saver(SaveOutcomes):
    """See `Checkpointer` for what its methods promise."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: Contents,
        copies: Copies,
        disk: DiskSaver,
        max_failed_saves: int,
    ) -> None:
        super().__init__(files, copies, disk, max_failed_saves)
        self._files = files
        self._contents = contents
        self._copies: Copies = copies
        self._disk: DiskSaver = disk
        self._any_has_memory: bool | None = None
        """Some rank's node has memory for copies; None: the ranks have not asked each other yet."""

    def save(self, step: int) -> bool:
        group = current_group()
        gathered = self._contents.gather(step, group)
        if self.has_saved(step):
            return True
        try:
            if not unless_refused(lambda: self._save(step, gathered, group)):
                return False
        except Superseded:
            return False
        self.saved(step)
        return True

    def save_and_wait(self, step: int) -> bool:
        return self.save(step) and self.wait()

    def remember(self, step: int, *, alone: bool = False) -> bool:
        """`alone`: some rank will not call it for this step, and the copy counts without that rank's random state."""
        if self._contents.of_each_rank:
            assert not alone, "one rank does not have what the others have for themselves"
            return self._remember_together(step)
        memory = self._copies.memory
        if memory is None:
            if self._contents.is_compared:  # the node of rank 0 waits for this rank
                self._contents.same_on_all_ranks(step, wait=False)
            return False
        if not self._contents.same_on_all_ranks(step, wait=not alone):
            return False
        random_state = rng.capture()
        if not self._copies.note(step, random_state):
            return False
        plan = self._copies.plan(Occasion.LAST_STEP_ALONE if alone else Occasion.REMEMBER, memory.place.rank)
        if plan.copies:
            payload = {"step": step, "state": self._contents.states()}
            return self._copies.make(payload, plan, like=random_state)
        self._copies.log_copied(step)
        return True

    def _remember_together(self, step: int) -> bool:
        """All ranks at once: only together they have what each has for itself."""
        group, memory = current_group(), self._copies.memory
        if self._any_has_memory is None:
            self._any_has_memory = any(group.gather(b"memory" if memory is not None else b""))
        if not self._any_has_memory:
            return False
        gathered = self._contents.gather(step, group)
        if memory is None:
            return False
        plan = self._copies.plan(Occasion.REMEMBER, memory.place.rank)
        if plan.copies:
            return self._copies.make(self._contents.payload(step, gathered), plan)
        self._copies.log_copied(step)
        return True

    def write_loaded(self, header: Header) -> None:
        """Rank 0: what is only in memory is durable soon, also if the generation that saved it ended in the middle."""
        memory = self._copies.memory
        if memory is None or not self._disk.has_writer:
            return
        try:
            on_disk = self._files.newest_manifest()
            if (on_disk is None or on_disk.step != header.step) and memory.is_whole(header.version):
                copy = memory.lend(header.version)
                self._disk.promise(WholeSave(header.step))
                self._disk.begin(*copy)
        except (OSError, ValueError) as error:
            logger.warning("the loaded state is not brought to disk: step=%d reason=%s", header.step, error)

    def _save(self, step: int, gathered: Gathered, group: Group) -> None:
        """This rank's part of a save. Rank 0 reports its end to the agent; of a background write the writer does."""
        started_s, self._copies.blocked_s = time.monotonic(), 0.0
        result: SaveResult = "error"
        size: int | None = 0
        try:
            size = self._copy_and_commit(step, gathered, group)
            result = "ok"
        except StepNotGrowing:
            size = None  # the script's error: no disk has refused anything
            raise
        finally:
            blocked_s = time.monotonic() - started_s
            if group.rank == 0 and size is not None:
                progress.checkpoint_save(
                    step,
                    result,
                    blocked_s,
                    size,
                    blocked_s=blocked_s - self._copies.blocked_s,
                    directory=self._files.directory,
                )

    def _copy_and_commit(self, step: int, gathered: Gathered, group: Group) -> int | None:
        """The size of the checkpoint that is on disk now; None if that is up to others."""
        plan = self._copies.plan(Occasion.SAVE, group.rank)
        if plan.does_nothing:
            return None
        if group.rank == 0:
            self._files.claim.uphold(self.check_grows(step))
            try:
                # The next may take its place on the disk and in memory only when this one's end is known.
                self.finish_last_write()
            except (NotSaved, Unconfirmed):
                pass  # the log has it; this one may fare better
        payload = self._contents.payload(step, gathered)
        if plan.disk is ToDisk.BEHIND:
            self._disk.promise(WholeSave(step))
        copied = plan.copies and self._copies.make(payload, plan)
        way = plan.way_to_disk(copied=copied)
        return self._commit(payload) if way is ToDisk.NOW else None

    def _commit(self, payload: dict[str, Any]) -> int:
        """Rank 0: make the checkpoint exist on disk while all wait."""
        step, size = payload["step"], 0
        states = payload["state"]
        payload = {**payload, "state": with_numbers(states)}
        refusal: CheckpointError | None = None
        try:
            size = WholeSave(step).commit_now(
                self._disk,
                len(payload["rng"]),
                lambda sink: torch.save(payload, sink),
                lambda manifest: prove_loadable(
                    os.path.join(self._files.directory, manifest.file), step, states
                ),
            )
        except CheckpointError as error:
            refusal = error
        except OSError as error:
            refusal = because(SaveFailed, f"step {step} not saved in {self._files.directory}: {error}", error)
        self.count(refusal)
        return size


# ---------------------------------------------------------------- which way a state takes
#
# Which way a state takes when a Checkpointer keeps it: to memory, to disk, or to both. Pure; no torch here.


class Occasion(enum.Enum):
    SAVE = enum.auto()
    """The script saves, on all ranks together."""
    REMEMBER = enum.auto()
    """The script, or `memory_every`, asks for a copy in memory."""
    LAST_STEP = enum.auto()
    """A planned change ends all ranks after this step."""
    LAST_STEP_ALONE = enum.auto()
    """A planned change ends this rank, and some others may never come here."""
    FAILURE = enum.auto()
    """A rank has failed, and this one saves the last finished step just in time."""


class ToDisk(enum.Enum):
    NEVER = enum.auto()
    NOW = enum.auto()
    """By this process, while all ranks wait."""
    BEHIND = enum.auto()
    """By the disk writer, from the copy in memory, while training goes on."""
    AFTERWARDS = enum.auto()
    """By the disk writer, from the copy in memory, once all Checkpointers have kept this step."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank does with its state."""

    copies: bool
    """It copies the state to the memory of its node."""
    disk: ToDisk
    without_copy: ToDisk
    """In place of `disk` where there is no room for the copy."""
    partial: bool
    """The copy counts without the random states of ranks that do not take part."""

    @property
    def does_nothing(self) -> bool:
        return not self.copies and self.disk is ToDisk.NEVER

    def way_to_disk(self, *, copied: bool) -> ToDisk:
        return self.disk if copied else self.without_copy


def plan_save(
    occasion: Occasion, *, rank: int, has_memory: bool, copies_for_node: bool, has_writer: bool
) -> SavePlan:
    """`has_memory`: this node keeps copies; `copies_for_node`: this rank makes them for its node; `has_writer`: the
    agent has a process that writes a copy to disk."""
    copies = has_memory and (copies_for_node or occasion is Occasion.FAILURE)
    partial = occasion in (Occasion.LAST_STEP_ALONE, Occasion.FAILURE)
    if rank != 0 or occasion not in (Occasion.SAVE, Occasion.LAST_STEP):
        return SavePlan(copies, ToDisk.NEVER, ToDisk.NEVER, partial)
    if not copies:
        return SavePlan(copies, ToDisk.NOW, ToDisk.NOW, partial)
    if occasion is Occasion.SAVE:
        return SavePlan(copies, ToDisk.BEHIND if has_writer else ToDisk.NOW, ToDisk.NOW, partial)
    return SavePlan(copies, ToDisk.AFTERWARDS if has_writer else ToDisk.NEVER, ToDisk.NOW, partial)


# ---------------------------------------------------------------- copies
#
# Makes one Checkpointer's copies of a state that is the same on all ranks.


class Copies(SlotCopies):
    """Of a state that is the same on all ranks. `memory` is this node's, if it has any for copies."""

    def __init__(self, memory: NodeMemory | None, disk: DiskSaver) -> None:
        super().__init__(memory)
        self.memory = memory
        self._disk = disk

    def plan(self, occasion: Occasion, rank: int) -> SavePlan:
        return plan_save(
            occasion,
            rank=rank,
            has_memory=self.memory is not None,
            copies_for_node=self.memory is not None and self.memory.copies_for_node,
            has_writer=self._disk.has_writer,
        )

    def note(self, step: int, random_state: bytes) -> bool:
        """Write down this rank's random state after `step`; False when there is no room for it, which the log has."""
        assert self.memory is not None
        try:
            self.memory.note(step, random_state)
        except NoRoom as refusal:
            self.log_no_copy(refusal)
            return False
        return True

    def make(self, payload: dict[str, Any], plan: SavePlan, *, like: bytes = b"") -> bool:
        """Copy a state to memory; False when that cannot be, see `copy`.

        like: leave room for a random state such as this one for each rank. Raises what `begin_copy` does of a state.
        """
        memory = self.memory
        assert memory is not None
        return self.copy(
            lambda: memory.begin_copy(payload, room_for_random_state=_room_for(like), partial=plan.partial),
            payload["step"],
            self._disk.begin if plan.disk is ToDisk.BEHIND else None,
        )


def _room_for(random_state: bytes) -> int:
    """Another rank's may be longer. What stays empty is below what torch allows behind the end of an archive."""
    return min(len(random_state) + len(random_state) // 4, 60_000) // 8 * 8
