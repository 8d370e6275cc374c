"""Saves the state of one Checkpointer, as one rank takes part in it: to its node's memory, and as rank 0 to the disk.

A checkpoint that the disk refuses does not end training, until `max_failed_saves` in a row were refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import CheckpointError, NotSaved, SaveFailed, StepNotGrowing, Superseded, Unconfirmed
from ...ranks.group import Group, because, current_group
from ...state import rng
from ...state.archive_layout import LayoutCache
from ...state.state_dicts import Part, is_plain, prove_loadable, with_numbers
from ...steps import progress
from ...storage.disk.async_save import DiskSaver, WholeSave
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import CopyUnderWay, SlotMemory
from ...storage.memory.slots import CopyLost, NoRoom
from ...wire.messages import SaveResult
from ..saving.base_saver import BaseSaver, unless_refused
from ..saving.slot_copies import SlotCopies
from .contents import Contents, Gathered

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
        copies = Copies(memory)
        super().__init__(files, contents.parts, copies, disk, max_failed_saves)
        self._contents = contents
        self._copies: Copies = copies
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
        random_state = rng.capture()
        if not self._copies.note(step, random_state):
            return False
        if self._copies.for_node:
            payload = {"step": step, "state": self._contents.states()}
            return self._copies.make(payload, like=random_state, partial=alone)
        self._copies.log_copied(step)
        return True

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
        if self._copies.for_node:
            return self._copies.make(self._contents.payload(step, gathered))
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
                copy = memory.lend(header.version)
                self._disk.promise(WholeSave(header.step))
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
        copies, writes = in_memory and self._copies.for_node, group.rank == 0
        if not (copies or writes):
            return None
        if writes:
            self._files.claim.uphold(self.check_grows(step))
            try:
                # The next may take its place on the disk and in memory only when this one's end is known.
                self.finish_last_write()
            except (NotSaved, Unconfirmed):
                pass  # the log has it; this one may fare better
        payload = self._contents.payload(step, gathered)
        copied = copies and self._copies.make(payload)
        if not writes:
            return None
        if copied and self._disk.has_writer:
            self._write_behind(step)
            return None
        return self._commit(payload)

    def _write_behind(self, step: int) -> None:
        """Rank 0: let the disk writer have the newest copy while training goes on."""
        memory, save = self._memory, WholeSave(step)
        assert memory is not None
        self._disk.promise(save)
        try:
            self._copies.hand_on(lambda: memory.lend((memory.place.generation, step)), self._disk.begin)
        except CopyLost:
            pass  # `settle` says so
        except (OSError, ValueError) as error:
            self._disk.refuse(step, error, save)

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
        copied = self._memory is not None
        if self._copies.for_node:
            copied = self._copies.make(self._contents.payload(step, gathered))
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
            self._disk.leave_to_writer(WholeSave(step), *memory.lend((memory.place.generation, step)))
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
        """Whose states `save_just_in_time` gets."""
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

    def save_just_in_time(self, step: int, states: dict[str, Any]) -> bool:
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
        random_state = rng.capture()
        with beside:
            copied = self._copies.make({"step": step, "state": states}, like=random_state, partial=True)
        return self._copies.settled() and copied


# ---------------------------------------------------------------- copies
#
# Makes one Checkpointer's copies of a state that is the same on all ranks.


class Copies(SlotCopies):
    """Of a state that is the same on all ranks. `memory` is this node's, if it has any for copies."""

    def __init__(self, memory: SlotMemory | None) -> None:
        super().__init__(memory)
        self._layouts = LayoutCache()
        self._was_proven = False

    @property
    def for_node(self) -> bool:
        """Whether this rank makes them for its node."""
        return self.memory is not None and self.memory.keeps_common

    def note(self, step: int, random_state: bytes) -> bool:
        """Write down this rank's random state after `step`; False when there is no room for it, which the log has."""
        assert self.memory is not None
        try:
            self.memory.note(step, random_state)
        except NoRoom as refusal:
            self.log_no_copy(refusal)
            return False
        return True

    def make(
        self,
        payload: dict[str, Any],
        *,
        like: bytes = b"",
        partial: bool = False,
    ) -> bool:
        """Copy a state to memory; False when that cannot be, see `copy`.

        `like`: leave room for a random state such as this one for each rank, where the state has none. `partial`: see
        `Header`. Raises what `prove_loadable` raises, and the states' own pickling.
        """
        return self.copy(lambda: self._begin(payload, _room_for(like), partial), payload["step"])

    def _begin(self, payload: dict[str, Any], room: int, partial: bool) -> CopyUnderWay:
        memory = self.memory
        assert memory is not None
        place, step = memory.place, payload["step"]
        rows = torch.zeros(place.world_size, room, dtype=torch.uint8)
        if room:
            payload = {**payload, "rng": rows}
        was_plain = is_plain(payload)
        if not was_plain:
            payload = with_numbers(payload)
        layout = self._layouts.lay_out(payload)
        begin = layout.offset_of(rows) if rows.numel() else 0
        holes = tuple((begin + rank * room, room) for rank in range(place.world_size)) if room else ()
        header = Header(
            step,
            place.generation,
            memory.resumed_from,
            place.world_size,
            layout.size,
            holes,
            partial,
            run=place.run,
        )

        def prove(path: str) -> None:
            if not (self._was_proven and was_plain):
                prove_loadable(path, step, payload["state"])
                self._was_proven = True

        return memory.begin_copy(layout, header, check=prove)


def _room_for(random_state: bytes) -> int:
    """Another rank's may be longer: it may have more devices, or be the only one that uses numpy."""
    return (len(random_state) * 5 // 4 + 4096) // 8 * 8 if random_state else 0
