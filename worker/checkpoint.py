"""Checkpoints that all ranks take and load together, written by rank 0.

`Checkpointer` keeps four promises. All ranks of a world continue from the same step, also when only one node has
the files. A step that `save` reported as saved survives a power cut (how: see `files`). A process that stood still
while others took its place changes none of their checkpoints (how: see `permit`). A run that was killed and restarted
with the same world size ends with the very bits of a run that was not.

It is for state that is the same on every rank, as in data-parallel training: rank 0's model, optimizer, scheduler
and sampler position are what is saved. Only the random state is kept per rank. Nothing loaded is ever code: files
are opened with `weights_only=True`, and a state that could not be opened so is refused when it is saved.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import journal, progress, rng, salvage
from .collectives import Group, current_group
from .disk import Disk
from .errors import (
    BadCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    NotSaved,
    SaveFailed,
    StepNotGrowing,
    Unconfirmed,
)
from .files import CheckpointFiles
from .just_in_time import JustInTime, modules_in
from .layout import CannotLayOut
from .memory import memory_of
from .reports import SaveResult, Tier
from .restore import Loaded, Restore, because, raise_together
from .slots import Header, Held, NoRoom, Slots, SlotsBusy
from .states import Stateful, load_into, prove_loadable, state_of
from .writes import ADDRESS_VARIABLE

logger = logging.getLogger(__name__)

_CALL = struct.Struct("!q")  # what a rank brings to save(): the step, followed by the rank's random state


class Checkpointer:
    """Saves and loads the named parts of `state` in `directory`, on all ranks together.

        checkpoints = Checkpointer("runs/x", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        start = checkpoints.load()                # 0 in a new directory
        for step in range(start, total_steps):
            train_one()
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1)        # `step + 1` steps are done

    state: by name, objects with `state_dict` and `load_state_dict` (a DDP model is unwrapped), or plain dicts,
        which are updated in place. Everything in them must be tensors and plain Python data. Parts are loaded in
        the order given here.
    keep: how many good checkpoints to retain, at least 1; with 1 a bit flip on disk loses everything.
    max_failed_saves: a full or read-only disk does not end training: `save` warns and returns False, until this
        many saves in a row have failed. 1 means raise at the first. Saves that fail because the rendezvous store is
        away do not count: how long that may last is for the agent to judge.

    memory_every: copy the state to this node's memory at every so many steps that the script tells `worker.step`; a
        restart then begins at the newest copy, and costs at most so many steps. None: only when it is saved.

    The directory may be shared by all nodes or local to each; only rank 0 writes to it. After `load`, tensors
    reach the parts' `load_state_dict` on the CPU: modules and optimizers copy them to where theirs are, and
    optimizers keep the tensors that belong on the CPU there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Stateful | dict[str, Any]],
        *,
        keep: int = 2,
        max_failed_saves: int = 10,
        memory_every: int | None = None,
    ) -> None:
        if max_failed_saves < 1:
            raise ValueError(f"max_failed_saves is {max_failed_saves}, expected at least 1")
        self._files = CheckpointFiles(directory, keep=keep)
        self._state = dict(state)
        self._max_failed_saves = max_failed_saves
        self._failed_saves = 0
        # Steps up to this one are not saved again; None until load() or save() has found out.
        self._floor: int | None = None
        self._memory = memory_of(os.environ, self._files.directory)
        self._without_memory = ""
        self._copying = threading.Lock()
        self._copied_s = 0.0
        """For which training stood still in the newest copy to memory."""
        self._disk = Disk(
            self._files,
            int(os.environ.get("ELASTIC_AGENT_GENERATION", "0")),
            os.environ.get("ELASTIC_AGENT_COMMITS", ""),
            os.environ.get(ADDRESS_VARIABLE, ""),
        )
        if memory_every is not None:
            progress.on_step(self._remember_quietly, every=memory_every, stage=progress.Stage.STATE)
        progress.keeper = self._keep
        progress.lone_keeper = self._keep_alone if self._memory is not None else None

    def load(self) -> int:
        """Load the newest checkpoint that any rank has whole; returns the number of steps it holds.

        Returns 0, and changes nothing, when no rank has any checkpoint. Every rank must call it, and every rank
        returns the same. A checkpoint that does not verify is named in a warning and the next older one tried.
        With another world size than at the time of saving the random states are left as they are, with a warning.

        Raises NoUsableCheckpoint when checkpoints exist and none verifies (delete them to start again from step 0);
        CheckpointMismatch when the checkpoint does not fit `state` (some of it may have been changed by then);
        CheckpointError when it broke on its way from the rank that has it.
        """
        progress.loading()
        group = current_group()
        started_s = time.monotonic()

        def bad(one: BadCheckpoint) -> None:
            logger.warning(
                "checkpoint does not verify, trying the next older one: step=%d reason=%s", one.step, one
            )
            progress.checkpoint_load(one.step, "corrupt", time.monotonic() - started_s)

        step = 0
        try:
            with Restore(group, self._files, self._memory, bad) as restore:
                owner = restore.choose()
                if owner is not None:
                    step = owner.what.step
                    restore.load(lambda loaded: self._apply(loaded, group))
        except CheckpointError:
            progress.checkpoint_load(step, "error", time.monotonic() - started_s)
            raise
        # The step just loaded may be saved again: where the files came from another node this is its second copy.
        self._floor = step - 1
        if self._memory is not None:
            self._memory.base = step
        if group.rank == 0 and owner is not None and isinstance(owner.what, Header):
            self._write_what_was_loaded(owner.what)
        tier: Tier = "memory" if owner is not None and isinstance(owner.what, Header) else "local"
        progress.checkpoint_load(
            step, "ok" if owner is not None else "none", time.monotonic() - started_s, tier
        )
        return step

    def save(self, step: int) -> bool:
        """Save the state after `step` finished steps. Every rank must call it, and all return or raise the same.

        Where this node has room in memory, training waits for the copy only, and the disk writer makes it durable while
        it goes on: True says that it is in memory. What became of it is told by `wait`, or by the next save, which
        waits for it. Elsewhere True says that it is durable.

        False means that the disk refused this save or the one before, or that nobody could confirm this generation,
        that a warning said so, and that training may go on with the older checkpoints intact.

        Raises Fenced when this generation is over, which its agent is about to tell in its own way; SaveFailed after
        `max_failed_saves` refusals in a row; StepNotGrowing when `step` is not beyond the newest saved one (the step
        that was just loaded may be saved again); NotPlainData when some part's state could not be loaded again;
        CheckpointError when ranks ask for different steps.
        """
        group = current_group()
        step = operator.index(step)
        random_states = self._random_states(step, group)
        try:
            self._agree(group, lambda: self._save_and_tell(step, random_states, group))
        except (NotSaved, Unconfirmed):
            return False
        self._floor = step
        return True

    def wait(self) -> bool:
        """Return when the newest save is durable; False when it was refused. Every rank must call it.

        Raises what `save` raises. At the end of the script rank 0 waits by itself.
        """
        try:
            self._agree(current_group(), self._hear_of_the_last_write)
        except (NotSaved, Unconfirmed):
            return False
        return True

    def remember(self, step: int, *, haste: bool = False) -> bool:
        """Copy the state after `step` finished steps to this node's memory; False when there is no room for it.

        Only this process's part of it: no rank waits for another, but a copy counts once every rank has called it
        for that step. What is remembered outlives this process, and is lost with the agent.

        haste: some rank has failed and will not call it: the copy counts without that rank's random state.

        Raises NotPlainData when some part's state could not be loaded again.
        """
        memory = self._memory
        if memory is None:
            return False
        step = operator.index(step)
        random_state = rng.capture()
        memory.note(step, random_state)
        self._disk.turn()
        return not memory.is_keeper or self._copy(
            {"step": step, "state": self._states()},
            room_for_random_state=_room_for(random_state),
            haste=haste,
        )

    def just_in_time(self) -> contextlib.AbstractContextManager[None]:
        """Put this round the training loop: when another rank dies, no finished step is lost.

            with checkpoints.just_in_time():
                for step in range(checkpoints.load(), total_steps):
                    ...

        The survivors then save the state of the last `step()` to memory before they leave; how, and what it asks of
        the loop: see `just_in_time`. Without an agent, or without room in its memory, this does nothing.
        """
        memory, address = self._memory, os.environ.get(salvage.VARIABLE, "")
        if memory is None or not address:
            return contextlib.nullcontext()
        try:
            return JustInTime(self._state, memory.folder, memory.place, address, self._salvage)
        except OSError as error:
            logger.warning("no save just in time: reason=%s", error)
            return contextlib.nullcontext()

    def _salvage(self, step: int, states: dict[str, Any]) -> bool:
        """Copy the states of a failed generation to memory, in a thread of its own."""
        assert self._memory is not None
        room = _room_for(rng.capture())
        # On a GPU in a stream of its own: the usual one waits for a collective that never ends.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch left it without annotations
        beside = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        with beside:
            copied = self._copy({"step": step, "state": states}, room_for_random_state=room, haste=True)
        self._memory.settle()
        return copied

    def _remember_quietly(self, step: int) -> None:
        self.remember(step)

    def _keep(self, step: int) -> None:
        """Every rank: let the state after `step` outlive this process, which is about to end.

        Nobody waits for the disk: the writer has a copy to write, and whoever goes on from it orders that again. Only
        where some node has no room for a copy must the checkpoint be durable first.
        """
        group = current_group()
        random_states = self._random_states(step, group)
        memory = self._memory
        copied = memory is not None
        if memory is not None and memory.is_keeper:
            then = self._disk.leave if group.rank == 0 and self._disk.writes_behind else None
            copied = self._copy(self._payload(step, random_states), then=then)
            memory.settle()
        if all(group.gather(b"copied" if copied else b"")):
            self._disk.leaving = True
        elif self._floor is None or step > self._floor:
            self.save(step)
            self.wait()

    def _keep_alone(self, step: int) -> None:
        """The same in this node's memory, when other ranks will not call it."""
        self.remember(step, haste=True)
        if self._memory is not None:
            self._memory.settle()

    def _copy(
        self,
        payload: dict[str, Any],
        *,
        room_for_random_state: int = 0,
        haste: bool = False,
        then: Callable[[Slots, Held], None] | None = None,
    ) -> bool:
        """Copy a state to memory; False when that cannot be, which is said when it begins and when it ends."""
        assert self._memory is not None
        started_s = time.monotonic()
        size = 0
        try:
            with self._copying:
                size = self._memory.put(
                    payload, room_for_random_state=room_for_random_state, haste=haste, then=then
                )
        except (NoRoom, SlotsBusy, CannotLayOut) as refusal:
            if type(refusal).__name__ != self._without_memory:
                self._without_memory = type(refusal).__name__
                logger.warning("no copy in memory, only what is on disk survives: reason=%s", refusal)
            return False
        finally:
            self._copied_s = time.monotonic() - started_s
            result: SaveResult = "ok" if size else "error"
            progress.checkpoint_save(
                payload["step"], result, self._copied_s, size, tier="memory", blocked_s=self._copied_s
            )
        if self._without_memory:
            self._without_memory = ""
            logger.warning("copies in memory again: step=%d", payload["step"])
        return True

    def _save_and_tell(self, step: int, random_states: Sequence[bytes], group: Group) -> None:
        """This rank's part of a save. The agent hears how it ended, of a write behind from the disk writer."""
        started_s, self._copied_s = time.monotonic(), 0.0
        result: SaveResult = "error"
        size: int | None = 0
        try:
            size = self._save_here(step, random_states, group)
            result = "ok"
        finally:
            blocked_s = time.monotonic() - started_s
            if group.rank == 0 and size is not None:
                progress.checkpoint_save(step, result, blocked_s, size, blocked_s=blocked_s - self._copied_s)

    def _save_here(self, step: int, random_states: Sequence[bytes], group: Group) -> int | None:
        """The size of the checkpoint that is on disk now; None if that is up to others."""
        memory = self._memory if self._memory is not None and self._memory.is_keeper else None
        if group.rank != 0 and memory is None:
            return None
        if group.rank == 0:
            self._check_grows(step)
            try:
                # The next may take its place on the disk and in memory only when this one's end is known.
                self._hear_of_the_last_write()
            except (NotSaved, Unconfirmed):
                pass  # which was said; this one may fare better
        payload = self._payload(step, random_states)
        writes_behind = group.rank == 0 and self._disk.writes_behind
        copied = memory is not None and self._copy(payload, then=self._disk.begin if writes_behind else None)
        if copied and writes_behind:
            self._disk.turn()  # if nobody could be asked, it is written now
            return None
        return self._commit(payload) if group.rank == 0 else None

    def _hear_of_the_last_write(self) -> None:
        """Rank 0: wait for the end of a write behind, and raise if it was refused. There may have been none."""
        if self._memory is not None:
            self._memory.settle()
        outcome = self._disk.finish()
        if outcome is not None:
            self._count(outcome.refusal())

    def _count(self, refusal: CheckpointError | None) -> None:
        """Rank 0: let training go on after a refused save, but not after too many. Raises what `save` raises."""
        if refusal is None:
            self._failed_saves = 0
            return
        if not isinstance(refusal, SaveFailed):
            raise refusal
        self._failed_saves += not isinstance(refusal, Unconfirmed)
        if self._failed_saves >= self._max_failed_saves:
            raise SaveFailed(str(refusal)) from refusal
        logger.warning(
            "checkpoint not saved, training goes on: failed=%d limit=%d reason=%s",
            self._failed_saves,
            self._max_failed_saves,
            refusal,
        )
        raise refusal if isinstance(refusal, Unconfirmed) else NotSaved(str(refusal)) from refusal

    def _check_grows(self, step: int) -> None:
        if self._floor is None:
            # save() without load(): the directory itself says how far the run has come.
            self._floor = max(self._files.steps(), default=-1)
        if step <= self._floor:
            raise StepNotGrowing(
                f"step {step} is not beyond step {self._floor}, the newest in {self._files.directory}: "
                "call load() first and continue from what it returns, or use another directory"
            )

    def _write_what_was_loaded(self, wanted: Header) -> None:
        """Rank 0: what is only in memory is durable soon, also if the generation that saved it ended in the middle."""
        memory = self._memory
        if memory is None or not self._disk.writes_behind:
            return
        try:
            on_disk = self._files.newest_manifest()
            if (on_disk is None or on_disk.step != wanted.step) and memory.is_whole(wanted.age):
                self._disk.begin(*memory.lend(wanted.age))
        except (OSError, ValueError) as error:
            logger.warning("the loaded state is not brought to disk: step=%d reason=%s", wanted.step, error)

    def _commit(self, payload: dict[str, Any]) -> int:
        """Rank 0: make the checkpoint exist on disk while all wait."""
        step, size = payload["step"], 0
        refusal: CheckpointError | None = None
        try:
            size = self._disk.commit(
                step,
                len(payload["rng"]),
                lambda sink: torch.save(payload, sink),
                lambda manifest: prove_loadable(os.path.join(self._files.directory, manifest.file), step),
            )
        except CheckpointError as error:
            refusal = error
        except OSError as error:
            refusal = because(SaveFailed, f"step {step} not saved in {self._files.directory}: {error}", error)
        self._count(refusal)
        return size

    def _agree(self, group: Group, part: Callable[[], None]) -> None:
        """Do this rank's part, wait for the others, and raise on every rank when one has an error."""
        error: CheckpointError | None = None
        try:
            part()
        except CheckpointError as refusal:
            error = refusal
        except Exception as failure:
            # The other ranks are waiting: they must hear of this before it ends this one.
            error = because(CheckpointError, f"not saved: {failure!r}", failure)
        raise_together(group, error)

    def _random_states(self, step: int, group: Group) -> list[bytes]:
        """Of all ranks, by rank, which must have come to the same step."""
        calls = group.gather(_CALL.pack(step) + rng.capture())
        steps = {rank: _CALL.unpack_from(call)[0] for rank, call in enumerate(calls)}
        if len(set(steps.values())) > 1:
            raise CheckpointError(
                f"ranks save different steps, by rank: {steps}; call save() in the same iteration"
            )
        return [call[_CALL.size :] for call in calls]

    def _payload(self, step: int, random_states: Sequence[bytes]) -> dict[str, Any]:
        return {
            "step": step,
            "state": self._states(),
            "rng": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in random_states],
        }

    def _states(self) -> dict[str, Any]:
        return {name: state_of(part) for name, part in self._state.items()}

    def _apply(self, loaded: Loaded, group: Group) -> None:
        saved, step = loaded.payload["state"], loaded.payload["step"]
        if saved.keys() != self._state.keys():
            raise CheckpointMismatch(
                f"the checkpoint of step {step} in {self._files.directory} holds {sorted(saved)}, this script's state "
                f"is {sorted(self._state)}: give Checkpointer the same names, or use another directory"
            )
        for name, part in self._state.items():
            try:
                load_into(part, saved[name], mapped=loaded.mapped)
            except Exception as error:
                raise CheckpointMismatch(
                    f"{name!r} of step {step} in {self._files.directory} does not fit this script: {error}"
                ) from error
        if loaded.world_size != group.world_size:
            logger.warning(
                "random states not restored, the world size changed: step=%d saved=%d now=%d",
                step,
                loaded.world_size,
                group.world_size,
            )
        elif loaded.salvaged and self._restore_own(loaded, group):
            pass
        elif loaded.random_state is not None:
            rng.restore(loaded.random_state)
        else:
            logger.warning("random state not restored, nobody has kept it: step=%d rank=%d", step, group.rank)

    def _restore_own(self, loaded: Loaded, group: Group) -> bool:
        """What this rank alone knew when another one failed: its random state, and the buffers of its modules."""
        if self._memory is None:
            return False
        step = loaded.payload["step"]
        entry = journal.find(self._memory.folder, group.rank, group.world_size, loaded.generation, step)
        if entry is None:
            return False
        rng.restore_snapshot(entry.random_state)
        buffers = journal.Buffers(modules_in(self._state))
        if entry.buffers and len(entry.buffers) == buffers.size:
            buffers.restore(torch.frombuffer(bytearray(entry.buffers), dtype=torch.uint8))
        return True


def _room_for(random_state: bytes) -> int:
    """Another rank's may be longer. What stays empty is below what torch allows behind the end of an archive."""
    return min(len(random_state) + len(random_state) // 4, 60_000) // 8 * 8
