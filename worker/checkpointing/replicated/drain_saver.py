"""A Checkpointer of a state that is the same on every rank, as it takes part in training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...ranks.group import current_group
from ...state import rng
from ...state.state_dicts import Part
from ...storage.disk.async_save import DiskSaver, WholeSave
from ..saving.drain_saver import BaseDrainSaver
from .contents import Contents
from .saver import Copies, Occasion, Saver, ToDisk

logger = logging.getLogger(__name__)


class ReplicatedDrainSaver(BaseDrainSaver):
    """One that can be guarded, too: see `just_in_time`."""

    def __init__(
        self,
        directory: str,
        contents: Contents,
        copies: Copies,
        disk: DiskSaver,
        saver: Saver,
    ) -> None:
        super().__init__(directory, contents.parts, copies.memory, saver)
        self._contents = contents
        self._copies = copies
        self._disk = disk
        self._saver = saver

    def loaded(self, step: int) -> None:
        super().loaded(step)
        if self._contents.is_compared:
            self._contents.comparison.publish_at_next_step(current_group())

    def leave(self) -> None:
        super().leave()
        self._contents.comparison.cancel_publish()

    # ---------------------------------------------------------------- planned changes

    @property
    def saves_alone(self) -> bool:
        return (
            self._copies.memory is not None
            and not self._contents.of_rank_0
            and not self._contents.of_each_rank
        )

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        """Every rank: let the state after `step` outlive this process, which is about to end. False: it does not.

        No rank waits for the disk: `order_write` orders the write, and a generation that goes on from the copy orders
        that again. Only where some node has no room for a copy must the checkpoint be durable first.
        """
        if self.is_beyond(step):
            return True
        group = current_group()
        brought = self._contents.gather(step, group)
        self._contents.share_buffers(group)
        plan = self._copies.plan(Occasion.LAST_STEP, group.rank)
        copied = self._copies.memory is not None
        if plan.copies:
            copied = self._copies.make(self._contents.payload(step, brought), plan)
            copied = self._copies.settled() and copied
        floor = self._saver.floor
        if all(group.gather(b"copied" if copied else b"")):
            self._disk.is_leaving = True
        elif (floor is None or step > floor) and not self._saver.save_and_wait(step):
            if group.rank == 0:
                logger.error("step %d is NOT on disk in %s: its save was refused", step, self.directory)
            return False
        return True

    def order_write(self, step: int) -> None:
        """Every rank, after `save_last_step`: rank 0 orders the write of a copy that was made on every node."""
        memory = self._copies.memory
        if memory is None or not self._disk.is_leaving:
            return
        if self._copies.plan(Occasion.LAST_STEP, memory.place.rank).disk is not ToDisk.AFTERWARDS:
            return
        try:
            self._disk.leave_to_writer(WholeSave(step), *memory.lend((memory.place.generation, step)))
        except (OSError, ValueError) as error:
            logger.warning("the last state is in memory only: step=%d reason=%s", step, error)

    def save_last_step_alone(self, step: int) -> bool:
        """The same in this node's memory, when other ranks will not call it."""
        if self.is_beyond(step):
            return True
        if self._contents.of_each_rank:
            logger.warning(
                "step %d is not kept: %s are each rank's own", step, sorted(self._contents.of_each_rank)
            )
            return False
        kept = self._saver.remember(step, alone=True)
        return self._copies.settled() and kept

    # ---------------------------------------------------------------- failures

    @property
    def parts(self) -> Mapping[str, Part]:
        """Whose states `save_just_in_time` gets."""
        return self._contents.shared

    @property
    def folder(self) -> str:
        """In memory. Raises OSError where there is none."""
        if self._copies.memory is None:
            raise OSError(f"no memory for {self.directory}")
        return self._copies.memory.folder

    def prove(self, step: int) -> None:
        """Find out, if that is not known, whether all ranks have the same state. Raises NotReplicated."""
        self._contents.same_on_all_ranks(step, wait=True)

    def save_just_in_time(self, step: int, states: dict[str, Any]) -> bool:
        """Copy the states of all parts, of a failed generation, to memory, in a thread of the guard's."""
        if self.is_beyond(step):
            return True
        memory = self._copies.memory
        if memory is None or not self._contents.comparison.proven:
            logger.warning(
                "step %d is not kept: not all ranks have shown that they have the same state", step
            )
            return False
        if self._contents.of_rank_0 and memory.place.rank != 0:
            logger.warning(
                "step %d is not kept: rank %d does not have %s of rank 0",
                step,
                memory.place.rank,
                sorted(self._contents.of_rank_0),
            )
            return False
        if self._copies.settled() and memory.mark_partial(step):
            return True
        if self._contents.of_each_rank:
            logger.warning(
                "step %d is not kept: %s are each rank's own", step, sorted(self._contents.of_each_rank)
            )
            return False
        # On a GPU in a stream of its own: the usual one waits for a collective that never ends.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch left it without annotations
        beside = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        plan = self._copies.plan(Occasion.FAILURE, memory.place.rank)
        random_state = rng.capture()
        with beside:
            copied = self._copies.make({"step": step, "state": states}, plan, like=random_state)
        return self._copies.settled() and copied
