"""Saves the state of one Checkpointer, as one rank takes part in it: to its node's memory, and as rank 0 to the disk.

A checkpoint that the disk refuses does not end training, until `max_failed_saves` in a row were refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ...errors import CheckpointError, NotSaved, SaveFailed, StepNotGrowing, Superseded, Unconfirmed
from ...ranks.group import Group, because, current_group
from ...state import rng
from ...state.sharding.layout import ShardLayout
from ...state.sharding.table import Table
from ...state.state_dicts import Part
from ...steps import progress
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.commit import new_attempt
from ...storage.disk.sharded_save import ShardedSave, metadata_of
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import CopyUnderWay, SlotMemory, header_of_whole
from ...storage.memory.slots import CopyLost, NoRoom
from ...wire.messages import SaveResult
from ..saving.base_saver import BaseSaver, unless_refused
from ..saving.slot_copies import SlotCopies
from .contents import Boundary, Contents, Gathered

logger = logging.getLogger(__name__)


class Saver(BaseSaver):
    """See `Checkpointer` for what its methods promise."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: Contents,
        memory: SlotMemory | None,
        disk: DiskSaver,
        max_failed_saves: int,
    ) -> None:
        super().__init__(files, contents.given, SlotCopies(memory), disk, max_failed_saves)
        self._contents = contents
        self._index: tuple[bytes, bytes] | None = None
        """DCP's, of the copy with that table."""
        self._any_has_memory: bool | None = None
        """Some rank's node has memory for copies; None: the ranks have not asked each other yet."""

    def save(self, step: int, *, in_memory: bool = True) -> bool:
        """`in_memory`: the disk writer takes it from there, if this node has room for it."""
        group = current_group()
        gathered = self._contents.gather(step, group)
        if self.has_saved(step):
            return True
        try:
            if not unless_refused(lambda: self._save(step, gathered, group, in_memory=in_memory)):
                return False
        except Superseded:
            return False
        self.saved(step)
        return True

    def remember(self, step: int, *, alone: bool = False) -> bool:
        """`alone`: some rank will not call it for this step, and the copy counts without that rank's random state."""
        if self._contents.of_each_rank:
            assert not alone, "one rank does not have what the others have for themselves"
            return self._remember_together(step)
        memory = self._memory
        if memory is None:
            if self._contents.is_compared:  # the node of rank 0 waits for this rank
                self._contents.same_on_all_ranks(step, wait=False)
            return False
        if not self._contents.same_on_all_ranks(step, wait=not alone):
            return False
        if not self._note(memory, step):
            return False
        if memory.keeps_common:
            ranks = memory.place.world_size
            return self._copy(
                memory, step, lambda: self._contents.lay_out(step, ranks, None), has_holes=True, partial=alone
            )
        self._copies.log_copied(step)
        return True

    def _note(self, memory: SlotMemory, step: int) -> bool:
        """Write down this rank's random state after `step`; False when there is no room for it, which the log has."""
        try:
            memory.note(step, rng.capture())
        except NoRoom as refusal:
            self._copies.log_no_copy(refusal)
            return False
        return True

    def _copy(
        self,
        memory: SlotMemory,
        step: int,
        lay_out: Callable[[], ShardLayout],
        *,
        has_holes: bool = False,
        partial: bool = False,
    ) -> bool:
        """Copy the state to memory, for this node; False when that cannot be, see `SlotCopies.copy`.

        `has_holes`: the random state of each rank comes later. `partial`: see `Header`. Raises as `lay_out`.
        """

        def begin() -> CopyUnderWay:
            layout, ranks = lay_out(), memory.place.world_size
            holes = self._contents.random_state_places(layout, ranks) if has_holes else ()
            header = header_of_whole(layout, memory.place, step, memory.resumed_from)
            return memory.begin_copy(layout, replace(header, rng_holes=holes, partial=partial))

        return self._copies.copy(begin, step)

    def _remember_together(self, step: int) -> bool:
        """All ranks at once: only together they have what each has for itself."""
        group, memory = current_group(), self._memory
        if self._any_has_memory is None:
            self._any_has_memory = any(group.gather(b"memory" if memory is not None else b""))
        if not self._any_has_memory:
            return False
        gathered = self._contents.gather(step, group)
        if memory is None:
            return False
        if memory.keeps_common:
            return self._copy(memory, step, lambda: self._contents.lay_out(step, group.world_size, gathered))
        self._copies.log_copied(step)
        return True

    def write_loaded(self, header: Header) -> None:
        """Rank 0: what is only in memory is durable soon, also if the generation that saved it ended in the middle."""
        memory = self._memory
        if memory is None or not self._disk.has_writer:
            return
        try:
            on_disk = self._files.newest_manifest()
            if (on_disk is None or on_disk.step != header.step) and memory.is_whole(header.version):
                save = self._save_of_copy(memory, header.version)
                copy = memory.lend(header.version)
                self._disk.promise(save)
                self._disk.begin(*copy)
        except (OSError, ValueError) as error:
            logger.warning("the loaded state is not brought to disk: step=%d reason=%s", header.step, error)

    def _save(self, step: int, gathered: Gathered, group: Group, *, in_memory: bool) -> None:
        """This rank's part of a save. Rank 0 reports its end to the agent; of a background write the writer does."""
        started_s, self._copies.blocked_s = time.monotonic(), 0.0
        result: SaveResult = "error"
        size: int | None = 0
        try:
            size = self._copy_and_commit(step, gathered, group, in_memory=in_memory)
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

    def _copy_and_commit(self, step: int, gathered: Gathered, group: Group, *, in_memory: bool) -> int | None:
        """The size of the checkpoint that is on disk now; None if that is up to others."""
        memory = self._memory
        copies = in_memory and memory is not None and memory.keeps_common
        writes = group.rank == 0
        if not (copies or writes):
            return None
        if writes:
            self._files.claim.uphold(self.check_grows(step))
            try:
                # The next may take its place on the disk and in memory only when this one's end is known.
                self.finish_last_write()
            except (NotSaved, Unconfirmed):
                pass  # the log has it; this one may fare better
        layout = self._contents.lay_out(step, group.world_size, gathered)
        copied = copies and memory is not None and self._copy(memory, step, lambda: layout)
        if not writes:
            return None
        save = self._save_of(step, group.world_size, layout.size, layout.packed_table)
        if copied and self._disk.has_writer:
            self._write_behind(step, save)
            return None
        return self._commit(save, layout)

    def _save_of(self, step: int, world_size: int, size: int, table: bytes) -> ShardedSave:
        """To disk, of a copy of that size with that table. Raises Invalid."""
        if self._index is None or self._index[0] != table:
            self._index = table, metadata_of({0: Table.from_bytes(table)})
        attempt = new_attempt(self._files, step, self._disk.env.generation)
        return ShardedSave(step, attempt, 0, world_size, size, metadata=self._index[1], is_whole=True)

    def _save_of_copy(self, memory: SlotMemory, version: tuple[int, int]) -> ShardedSave:
        """Raises OSError, ValueError."""
        with memory.hold(version) as held:
            offset, length = held.header.table
            table = os.pread(held.stream.fileno(), length, offset)
        return self._save_of(held.header.step, held.header.world_size, held.header.size, table)

    def _write_behind(self, step: int, save: ShardedSave) -> None:
        """Rank 0: let the disk writer have the newest copy while training goes on."""
        memory = self._memory
        assert memory is not None
        self._disk.promise(save)
        try:
            self._copies.hand_on(lambda: memory.lend((memory.place.generation, step)), self._disk.begin)
        except CopyLost:
            pass  # `settle` says so
        except (OSError, ValueError) as error:
            self._disk.refuse(step, error, save)

    def _commit(self, save: ShardedSave, layout: ShardLayout) -> int:
        """Rank 0: make the checkpoint exist on disk while all wait."""
        size, step = 0, save.step
        refusal: CheckpointError | None = None
        try:
            save.write_now(self._disk, layout, 0, common=True)
            size = save.commit_now(self._disk)
        except CheckpointError as error:
            refusal = error
        except OSError as error:
            refusal = because(SaveFailed, f"step {step} not saved in {self._files.directory}: {error}", error)
        self.count(refusal)
        return size

    # ---------------------------------------------------------------- planned changes

    @property
    def saves_alone(self) -> bool:
        contents = self._contents
        return self._memory is not None and not contents.of_rank_0 and not contents.of_each_rank

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        """Every rank: let the state after `step` outlive this process, which is about to end. False: it does not.

        No rank waits for the disk: `order_write` orders the write, and a generation that goes on from the copy orders
        that again. Only where some node has no room for a copy must the checkpoint be durable first.
        """
        if self.is_beyond(step):
            return True
        group = current_group()
        gathered = self._contents.gather(step, group)
        self._contents.share_buffers(group)
        memory = self._memory
        copied = memory is not None
        if memory is not None and memory.keeps_common:
            copied = self._copy(
                memory, step, lambda: self._contents.lay_out(step, group.world_size, gathered)
            )
            copied = self._copies.settled() and copied
        floor = self.floor
        if all(group.gather(b"copied" if copied else b"")):
            self._disk.is_leaving = True
        elif (floor is None or step > floor) and not (self.save(step, in_memory=copied) and self.wait()):
            if group.rank == 0:
                logger.error(
                    "step %d is NOT on disk in %s: its save was refused", step, self._files.directory
                )
            return False
        return True

    def order_write(self, step: int) -> None:
        """Every rank, after `save_last_step`: rank 0 orders the write of a copy that was made on every node."""
        memory = self._memory
        if memory is None or memory.place.rank or not (self._disk.is_leaving and self._disk.has_writer):
            return
        try:
            version = memory.place.generation, step
            self._disk.leave_to_writer(self._save_of_copy(memory, version), *memory.lend(version))
        except (OSError, ValueError) as error:
            logger.warning("the last state is in memory only: step=%d reason=%s", step, error)

    def save_last_step_alone(self, step: int) -> bool:
        """The same in this node's memory, when other ranks will not call it."""
        if self.is_beyond(step):
            return True
        if self._lacks_rows(step):
            return False
        kept = self.remember(step, alone=True)
        return self._copies.settled() and kept

    def leave(self) -> None:
        super().leave()
        self._contents.comparison.cancel_publish()

    def _lacks_rows(self, step: int) -> bool:
        own = sorted(self._contents.of_each_rank)
        if own:
            logger.warning("step %d is not kept: %s are each rank's own", step, own)
        return bool(own)

    # ---------------------------------------------------------------- failures: see `just_in_time`

    @property
    def parts(self) -> Mapping[str, Part]:
        """Of which `save_just_in_time` gets the boundary."""
        return self._contents.shared

    @property
    def folder(self) -> str:
        """In memory. Raises OSError where there is none."""
        if self._memory is None:
            raise OSError(f"no memory for {self._files.directory}")
        return self._memory.folder

    def prove(self, step: int) -> None:
        """Find out, if that is not known, whether all ranks have the same state. Raises NotReplicated."""
        self._contents.same_on_all_ranks(step, wait=True)

    def save_just_in_time(self, step: int, boundary: Boundary) -> bool:
        """Copy the states of all parts, of a failed generation, to memory, in a thread of the guard's."""
        if self.is_beyond(step):
            return True
        memory = self._memory
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
        if self._lacks_rows(step):
            return False
        # On a GPU in a stream of its own: the usual one waits for a collective that never ends.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch left it without annotations
        beside = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        ranks = memory.place.world_size
        with beside:
            copied = self._copy(
                memory,
                step,
                lambda: self._contents.lay_out(step, ranks, None, boundary),
                has_holes=True,
                partial=True,
            )
        return self._copies.settled() and copied
