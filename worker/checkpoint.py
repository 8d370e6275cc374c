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
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import journal, progress, rng, salvage
from .collectives import Group, current_group
from .errors import (
    BadCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    SaveFailed,
    StepNotGrowing,
    Unconfirmed,
)
from .files import CheckpointFiles
from .just_in_time import JustInTime, modules_in
from .layout import CannotLayOut
from .memory import memory_of
from .permit import Permit
from .restore import Loaded, Restore, because, raise_together
from .slots import NoRoom, SlotsBusy
from .states import Stateful, load_into, prove_loadable, state_of

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
        if memory_every is not None:
            progress.on_step(self._remember_quietly, every=memory_every, stage=progress.Stage.STATE)
        progress.keeper = self._keep

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
        progress.checkpoint_load(step, "ok" if owner is not None else "none", time.monotonic() - started_s)
        return step

    def save(self, step: int) -> bool:
        """Save the state after `step` finished steps; True when it is durable. Every rank must call it.

        No rank returns before rank 0 is done, and all return or raise the same. False means that the disk refused,
        or that nobody could confirm this generation, that a warning said so, and that training may go on with the
        older checkpoints intact.

        Raises Fenced when this generation is over, which its agent is about to tell in its own way; SaveFailed after
        `max_failed_saves` refusals in a row; StepNotGrowing when `step` is not beyond the newest saved one (the step
        that was just loaded may be saved again); NotPlainData when some part's state could not be loaded again;
        CheckpointError when ranks ask for different steps.
        """
        group = current_group()
        started_s = time.monotonic()
        step = operator.index(step)
        calls = group.gather(_CALL.pack(step) + rng.capture())
        steps = {rank: _CALL.unpack_from(call)[0] for rank, call in enumerate(calls)}
        if len(set(steps.values())) > 1:
            raise CheckpointError(
                f"ranks save different steps, by rank: {steps}; call save() in the same iteration"
            )

        error: CheckpointError | None = None
        size = 0
        try:
            size = self._save_here(step, [call[_CALL.size :] for call in calls], group)
        except CheckpointError as refusal:
            error = refusal
        except OSError as refusal:
            error = because(
                SaveFailed, f"step {step} not saved in {self._files.directory}: {refusal}", refusal
            )
        except Exception as failure:
            # The other ranks are waiting: they must hear of this before it ends this one.
            error = because(CheckpointError, f"step {step} not saved: {failure!r}", failure)
        if group.rank == 0:
            progress.checkpoint_save(step, "error" if error else "ok", time.monotonic() - started_s, size)
        try:
            raise_together(group, error)
        except SaveFailed as refusal:
            if not isinstance(refusal, Unconfirmed):
                self._failed_saves += 1
            if self._failed_saves >= self._max_failed_saves:
                raise
            logger.warning(
                "checkpoint not saved, training goes on: failed=%d limit=%d reason=%s",
                self._failed_saves,
                self._max_failed_saves,
                refusal,
            )
            return False
        self._failed_saves = 0
        self._floor = step
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
        """Every rank: let the state after `step` outlive this process. Returns when it does, on all of them."""
        remembered = self.remember(step)
        if self._memory is not None:
            self._memory.settle()
        if not all(current_group().gather(b"1" if remembered else b"")):
            self.save(step)

    def _copy(self, payload: dict[str, Any], *, room_for_random_state: int = 0, haste: bool = False) -> bool:
        """Copy a state to memory; False when that cannot be, which is said when it begins and when it ends."""
        assert self._memory is not None
        try:
            with self._copying:
                self._memory.put(payload, room_for_random_state=room_for_random_state, haste=haste)
        except (NoRoom, SlotsBusy, CannotLayOut) as refusal:
            if type(refusal).__name__ != self._without_memory:
                self._without_memory = type(refusal).__name__
                logger.warning("no copy in memory, only what is on disk survives: reason=%s", refusal)
            return False
        if self._without_memory:
            self._without_memory = ""
            logger.warning("copies in memory again: step=%d", payload["step"])
        return True

    def _save_here(self, step: int, random_states: Sequence[bytes], group: Group) -> int:
        """This rank's part of a save; returns the size of the checkpoint."""
        copies = self._memory is not None and self._memory.is_keeper
        if group.rank != 0 and not copies:
            return 0
        if group.rank == 0:
            self._check_grows(step)
        payload = {
            "step": step,
            "state": self._states(),
            "rng": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in random_states],
        }
        if copies:
            self._copy(payload)
        return self._commit(payload) if group.rank == 0 else 0

    def _check_grows(self, step: int) -> None:
        if self._floor is None:
            # save() without load(): the directory itself says how far the run has come.
            self._floor = max(self._files.steps(), default=-1)
        if step <= self._floor:
            raise StepNotGrowing(
                f"step {step} is not beyond step {self._floor}, the newest in {self._files.directory}: "
                "call load() first and continue from what it returns, or use another directory"
            )

    def _commit(self, payload: dict[str, Any]) -> int:
        """Make the checkpoint exist on disk; returns its size. Rank 0 only."""
        manifest = self._files.write(
            payload["step"],
            generation=int(os.environ.get("ELASTIC_AGENT_GENERATION", "0")),
            world_size=len(payload["rng"]),
            serialize=lambda sink: torch.save(payload, sink),
        )
        prove_loadable(os.path.join(self._files.directory, manifest.file), manifest.step)
        permit = Permit(os.environ.get("ELASTIC_AGENT_COMMITS", ""), manifest.generation)
        self._files.publish(manifest, permit.check)
        return manifest.size

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
