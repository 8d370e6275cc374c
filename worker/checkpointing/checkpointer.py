"""Checkpoints that all ranks take and load together, written by rank 0.

`Checkpointer` keeps four promises. All ranks of a world continue from the same step, also when only one node has
the files. A step that `save` reported as saved survives a power cut (how: see `files`). A process that stood still
while others took its place changes none of their checkpoints (how: see `permit`). A run that was killed and restarted
with the same world size ends with the very bits of a run that was not.

It is for state that is the same on every rank, as in data-parallel training: rank 0's model, optimizer, scheduler
and sampler position are what is saved, and whatever is not the same is refused (see `replicas`). Only the random state
is kept per rank. Nothing loaded is ever code: files are opened with `weights_only=True`, and a state that could not be
opened so is refused when it is saved.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..disk.async_save import AsyncSaver
from ..disk.background_write import refusal_of
from ..disk.checkpoint_files import CheckpointFiles
from ..errors import BadCheckpoint, CheckpointError, NotSaved, SaveFailed, StepNotGrowing, Unconfirmed
from ..loading.checkpoint_selection import BadState, Owner
from ..loading.restore import Restore
from ..loading.resume import apply
from ..memory.copy_header import Header
from ..memory.node_memory import memory_of
from ..memory.slots import CopyLost
from ..ranks.group import Group, current_group
from ..ranks.refusals import because, together
from ..ranks.replicas import refuse_sharded
from ..state import rng
from ..state.state_dicts import Stateful, prove_loadable
from ..steps import progress
from ..wire.environment import WorkerEnv
from ..wire.messages import SaveResult, Tier
from ..wire.run import this_run
from .contents import Contents
from .copies import Copies
from .just_in_time import JustInTime
from .planned_saves import TakingPart, all_taking_part
from .save_plan import Occasion, ToDisk

logger = logging.getLogger(__name__)


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
    of_rank_0: names of parts whose tensors may differ between ranks, because rank 0's are meant for all. Whatever else
        differs is refused at the first save.
    keep: how many good checkpoints to retain, at least 1; with 1 a bit flip on disk loses everything.
    max_failed_saves: a full or read-only disk does not end training: `save` warns and returns False, until this
        many saves in a row have failed. 1 means raise at the first. Saves that fail because the rendezvous store is
        away do not count: how long that may last is for the agent to judge.

    memory_every: copy the state to this node's memory at every so many steps that the script tells `worker.step`; a
        restart then begins at the newest copy, and costs at most so many steps. None: only when it is saved.

    read_only: for an evaluation beside the training that saves here, or for a teacher in another training: `load` takes
        nothing over and is no beginning of this training, `save` is an error.

    The directory may be shared by all nodes or local to each; only rank 0 writes to it. It belongs to one run, the one
    that loaded last (see `ownership`). After `load`, tensors reach the parts' `load_state_dict` on the CPU: modules and
    optimizers copy them to where theirs are, and optimizers keep the tensors that belong on the CPU there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Stateful | dict[str, Any]],
        *,
        of_rank_0: Collection[str] = (),
        keep: int = 2,
        max_failed_saves: int = 10,
        memory_every: int | None = None,
        read_only: bool = False,
    ) -> None:
        if max_failed_saves < 1:
            raise ValueError(f"max_failed_saves is {max_failed_saves}, expected at least 1")
        self._files = CheckpointFiles(directory, keep=keep, run=this_run(os.environ), lend=progress.lend)
        self._read_only = read_only
        env = WorkerEnv.of(os.environ)
        self._speaks_for_node = env.local_rank == 0 and not read_only
        self._contents = Contents(state, of_rank_0)
        self._max_failed_saves = max_failed_saves
        self._failed_saves = 0
        # Steps up to this one are not saved again; None until load() or save() has found out.
        self._floor: int | None = None
        self._memory = memory_of(os.environ, self._files.directory) if not read_only else None
        # All ranks show that they have the same state, also those that do not have what is rank 0's: a copy of their
        # node would be another state.
        self._is_compared = self._memory is not None
        if of_rank_0 and self._memory is not None and not self._memory.place.is_on_node_of_rank_0:
            self._memory = None
        self._bad_state = BadState.of(os.environ) if not read_only else None
        self._account = progress if not read_only else progress.Silent()
        self._disk = AsyncSaver(self._files, env)
        self._copies = Copies(self._memory, self._disk)
        self._part = TakingPart(
            self._files.directory,
            self._contents,
            self._copies,
            self._disk,
            is_compared=self._is_compared,
            floor=lambda: self._floor,
            remember=lambda step: self.remember(step, haste=True),
            save=self._save_and_wait,
        )
        if memory_every is not None and not read_only:
            progress.on_step(self._remember_quietly, every=memory_every, stage=progress.Stage.STATE)

    def load(self) -> int:
        """Load the newest checkpoint that any rank has whole; returns the number of steps it holds.

        Returns 0, and changes nothing, when no rank has any checkpoint. Every rank must call it, and every rank
        returns the same. A checkpoint that does not verify is named in a warning and the next older one tried.
        After failures right after a load the agent may name that state: then an older one is loaded, with a warning.
        With another world size than at the time of saving the random states are left as they are, with a warning.
        From here on this Checkpointer takes part in training: planned changes keep its state at their last step.

        Raises NotReplicated when the state is sharded; what `wait` raises, of a save that was under way;
        NoUsableCheckpoint when checkpoints exist and none verifies (delete them to start again from step 0);
        CheckpointMismatch when the checkpoint does not fit `state` (some of it may have been changed by then);
        OtherRun when another run has the directory or has left something newer there; CheckpointError when it broke on
        its way from the rank that has it.
        """
        self._account.loading()
        group = current_group()
        started_s = time.monotonic()

        def bad(one: BadCheckpoint) -> None:
            logger.warning(
                "checkpoint does not verify, trying the next older one: step=%d reason=%s", one.step, one
            )
            self._account.checkpoint_load(one.step, "corrupt", time.monotonic() - started_s)

        step = 0
        restore = Restore(group, self._files, self._memory, bad, self._account.load_chosen, self._bad_state)
        try:
            together(group, self._prepare_to_load, "nothing loaded")
            self._on_rank_0(group, self._files.claim.await_former_run)
            with restore:
                owner = restore.choose()
                if owner is not None:
                    step = owner.what.step
                    self._say_if_set_back(owner)
                    restore.load(
                        lambda loaded: apply(
                            loaded, self._contents.parts, group, self._files.directory, self._memory
                        )
                    )
            kin = restore.kin()
            self._on_rank_0(group, lambda: self._files.claim.take(step, kin, elsewhere=restore.is_elsewhere))
        except CheckpointError:
            self._files.claim.release_lock()
            if not restore.unreadable:
                self._account.load_refused()
            self._account.checkpoint_load(step, "error", time.monotonic() - started_s)
            raise
        # The step just loaded may be saved again: where the files came from another node this is its second copy.
        self._floor = step - 1
        self._contents.replicas.began(step)
        if self._memory is not None:
            self._memory.resumed_from = step
        if not self._read_only:
            self._part.loaded(step)
        if group.rank and self._speaks_for_node:
            self._files.claim.share_lock()
        if group.rank == 0 and owner is not None and isinstance(owner.what, Header):
            self._write_what_was_loaded(owner.what)
        tier: Tier = "memory" if owner is not None and isinstance(owner.what, Header) else "local"
        self._account.checkpoint_load(
            step, "ok" if owner is not None else "none", time.monotonic() - started_s, tier
        )
        return step

    def _say_if_set_back(self, owner: Owner) -> None:
        bad = self._bad_state
        if bad is None:
            return
        if bad.covers(owner.what):
            logger.warning("there is no older state to go back to: step=%d bad=%d", owner.what.step, bad.step)
        else:
            logger.warning("going on from an older state: step=%d bad=%d", owner.what.step, bad.step)

    def save(self, step: int) -> bool:
        """Save the state after `step` finished steps. Every rank must call it, and all return or raise the same.

        Where this node has room in memory, training waits for the copy only, and the disk writer makes it durable while
        it goes on: True says that it is in memory. What became of it is told by `wait`, or by the next save, which
        waits for it. Elsewhere True says that it is durable.

        False means that the disk refused this save or the one before, or that nobody could confirm this generation,
        that a warning said so, and that training may go on with the older checkpoints intact.

        Raises NotReplicated when the ranks do not have the same state; Fenced when this generation is over, which its
        agent is about to tell in its own way; SaveFailed after `max_failed_saves` refusals in a row; StepNotGrowing
        when `step` is not beyond the newest saved one (the step that was just loaded may be saved again); NotPlainData
        when some part's state could not be loaded again; OtherRun when another run has taken the directory over, or has
        saved there beyond this step; CheckpointError when ranks ask for different steps.
        """
        if self._read_only:
            raise CheckpointError(
                f"this Checkpointer only reads {self._files.directory}: it was made read_only"
            )
        group = current_group()
        step = operator.index(step)
        random_states = self._contents.gather(step, group)
        try:
            together(group, lambda: self._save_and_tell(step, random_states, group), "not saved")
        except (NotSaved, Unconfirmed):
            return False
        self._floor = step
        return True

    def wait(self) -> bool:
        """Return when the newest save is durable; False when it was refused. Every rank must call it.

        Raises what `save` raises. At the end of the script rank 0 waits by itself.
        """
        try:
            together(current_group(), self._make_durable, "not saved")
        except (NotSaved, Unconfirmed):
            return False
        return True

    def remember(self, step: int, *, haste: bool = False) -> bool:
        """Copy the state after `step` finished steps to this node's memory; False when there is no room for it.

        Only this process's part of it: no rank waits for another, but a copy counts once every rank has called it
        for that step. Only the first one waits until all have come there and shown that they have the same state; False
        if they have not. What is remembered outlives this process, and is lost with the agent.

        haste: some rank has failed and will not call it: the copy counts without that rank's random state.

        Raises NotReplicated when the ranks do not have the same state; NotPlainData when some part's state could not
        be loaded again.
        """
        memory = self._memory
        step = operator.index(step)
        if memory is None:
            if self._is_compared:  # the node of rank 0 waits for this rank
                self._contents.same_on_all_ranks(step, wait=False)
            return False
        if not self._contents.same_on_all_ranks(step, wait=not haste):
            return False
        random_state = rng.capture()
        if not self._copies.note(step, random_state):
            return False
        self._disk.turn()
        occasion = Occasion.LAST_STEP_ALONE if haste else Occasion.REMEMBER
        plan = self._copies.plan(occasion, memory.place.rank)
        if plan.copies:
            payload = {"step": step, "state": self._contents.states()}
            return self._copies.make(payload, plan, like=random_state)
        self._copies.say_copied(step)
        return True

    def just_in_time(self) -> contextlib.AbstractContextManager[None]:
        """Put this round the training loop: when another rank dies, no finished step is lost.

            with checkpoints.just_in_time():
                for step in range(checkpoints.load(), total_steps):
                    ...

        The survivors then save the state of the last `step()` to memory before they leave; how, and what it asks of
        the loop: see `just_in_time`. One guards all Checkpointers that were loaded. Without an agent, or without room
        in its memory, this does nothing.
        """
        memory, address = self._memory, WorkerEnv.of(os.environ).socket
        if memory is None or not address:
            return contextlib.nullcontext()
        self._part.register()
        return JustInTime(memory.place, address, all_taking_part)

    # ---------------------------------------------------------------- parts of these

    def _remember_quietly(self, step: int) -> None:
        self.remember(step)

    def _save_and_wait(self, step: int) -> bool:
        return self.save(step) and self.wait()

    def _prepare_to_load(self) -> None:
        """No state is sharded, of the saves before no one is under way, and no agent holds locks of a past run."""
        refuse_sharded(self._contents.parts)
        if self._speaks_for_node:
            self._files.claim.release_former_locks()
        with contextlib.suppress(NotSaved, Unconfirmed):  # which was said
            self._hear_of_the_last_write()

    def _save_and_tell(self, step: int, random_states: Sequence[bytes], group: Group) -> None:
        """This rank's part of a save. The agent hears how it ended, of a write behind from the disk writer."""
        started_s, self._copies.blocked_s = time.monotonic(), 0.0
        result: SaveResult = "error"
        size: int | None = 0
        try:
            size = self._save_here(step, random_states, group)
            result = "ok"
        finally:
            blocked_s = time.monotonic() - started_s
            if group.rank == 0 and size is not None:
                progress.checkpoint_save(
                    step, result, blocked_s, size, blocked_s=blocked_s - self._copies.blocked_s
                )

    def _save_here(self, step: int, random_states: Sequence[bytes], group: Group) -> int | None:
        """The size of the checkpoint that is on disk now; None if that is up to others."""
        plan = self._copies.plan(Occasion.SAVE, group.rank)
        if plan.does_nothing:
            return None
        if group.rank == 0:
            self._files.claim.uphold(self._check_grows(step))
            try:
                # The next may take its place on the disk and in memory only when this one's end is known.
                self._hear_of_the_last_write()
            except (NotSaved, Unconfirmed):
                pass  # which was said; this one may fare better
        payload = self._contents.payload(step, random_states)
        if plan.disk is ToDisk.BEHIND:
            self._disk.promise(step)
        copied = plan.copies and self._copies.make(payload, plan)
        way = plan.way_to_disk(copied=copied)
        if way is ToDisk.BEHIND:
            self._disk.turn()  # if nobody could be asked, it is written now
        return self._commit(payload) if way is ToDisk.NOW else None

    def _hear_of_the_last_write(self) -> None:
        """Rank 0: wait for the end of a write behind, and raise if it was refused. There may have been none."""
        lost = ""
        try:
            self._copies.settle()
        except CopyLost as error:
            lost = str(error)
        outcome = self._disk.finish(lost)
        if outcome is not None:
            self._count(refusal_of(outcome))

    def _make_durable(self) -> None:
        """Rank 0: wait for the newest save, and raise while it is not on disk: also when that was told before."""
        self._hear_of_the_last_write()
        if not self._disk.is_durable:
            raise NotSaved("the newest save was refused")

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

    def _check_grows(self, step: int) -> int:
        """The newest step that this run has come to."""
        if self._floor is None:
            # save() without load(): the directory itself says how far the run has come.
            self._floor = max(self._files.steps(), default=-1)
        if step <= self._floor:
            raise StepNotGrowing(
                f"step {step} is not beyond step {self._floor}, the newest in {self._files.directory}: "
                "call load() first and continue from what it returns, or use another directory"
            )
        return self._floor + 1  # of a step that was loaded, and may be saved again

    def _write_what_was_loaded(self, wanted: Header) -> None:
        """Rank 0: what is only in memory is durable soon, also if the generation that saved it ended in the middle."""
        memory = self._memory
        if memory is None or not self._disk.writes_behind:
            return
        try:
            on_disk = self._files.newest_manifest()
            if (on_disk is None or on_disk.step != wanted.step) and memory.is_whole(wanted.version):
                self._disk.begin(*memory.lend(wanted.version))
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

    def _on_rank_0(self, group: Group, part: Callable[[], None]) -> None:
        """Let rank 0 do this, and raise on every rank what it raises."""
        does = group.rank == 0 and not self._read_only
        together(group, part if does else lambda: None, self._files.directory)
