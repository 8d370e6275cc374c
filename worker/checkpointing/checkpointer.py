"""Checkpoints that all ranks take and load together.

`Checkpointer` keeps four promises. All ranks of a world continue from the same step, also when only one node has
the files. A step that `save` reported as saved survives a power cut (see `checkpoint_files`). A process that stood
still while others took its place changes none of their checkpoints (see `commit_permission`). A run that was killed
and restarted with the same world size ends with the very bits of a run that was not.

There are two kinds of state. What is the same on every rank, as in data-parallel training, rank 0 saves for all, and
whatever is not the same is refused (`replicated`). Of what is sharded over ranks each one saves its own shards
(`sharded`). Kept per rank are in both the random state, and the parts that are declared to be each rank's own (see
`rank_parts`). Nothing loaded is ever code: files are opened with `weights_only=True`, and a state that could not be
opened so is refused when it is saved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

from ..errors import CheckpointError
from ..ranks.group import current_group
from ..state.kinds import is_sharded
from ..state.rank_parts import Reshard, rules_of
from ..state.sharding.parts import refuse_names
from ..state.state_dicts import Stateful
from ..steps import progress
from ..storage.disk.checkpoint_files import CheckpointFiles
from ..storage.disk.manifests import step_number
from ..wire.environment import this_run
from .agreement import Agreement
from .replicated.replicated_state import ReplicatedState
from .sharded.sharded_state import ShardedState

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads the named parts of `state` in `directory`, on all ranks together.

        checkpoints = Checkpointer("runs/x", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        start = checkpoints.load()                # 0 in a new directory
        for step in range(start, total_steps):
            train_one()
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1)        # `step + 1` steps are done

    Args:
        state: by name, objects with `state_dict` and `load_state_dict` (a DDP model is unwrapped), or plain dicts,
            which are updated in place. Everything in them must be tensors and plain Python data. Parts are loaded in
            the order given here, those with FullyShardedDataParallel first.
        from_rank_0: names of parts whose tensors may differ between ranks, because rank 0's are meant for all. Whatever
            else differs is refused at the first save.
        per_rank: names of parts that each rank has for itself, such as the error feedback of PowerSGD: all are
            saved, and each rank loads its own. A world of another size is refused, unless a part's name comes with a
            rule (see `Reshard`): `per_rank={"hook": lambda states, rank, world_size: states.get(rank, {})}`.
        keep: how many good checkpoints to retain, at least 1; with 1 a bit flip on disk loses everything.
        max_failed_saves: a full or read-only disk does not end training: `save` warns and returns False, until this
            many saves in a row have failed. 1 means raise at the first. Saves that fail because the rendezvous store is
            away do not count: how long that may last is for the agent to judge.
        memory_every: copy the state to this node's memory at every so many steps of `worker.step`; a
            restart then begins at the newest copy, and costs at most so many steps. None: only when it is saved.
        read_only: for an evaluation beside the training that saves here, or for a teacher in another training: `load`
            takes nothing over and is no beginning of this training, `save` is an error. `state` may be some of the
            saved parts.

    Keep the object for as long as the training runs: one that the script has dropped, or closed, takes no part in it
    any more. In one process a directory has one Checkpointer at a time that is not read_only. This one is closed:

        with Checkpointer("runs/x", state) as checkpoints:
            ...

    The directory may be shared by all nodes or local to each where only rank 0 writes to it; a sharded state, which
    all ranks write, needs one that all nodes see. It belongs to one run, the one that loaded last (see
    `ownership`). `load` gives the tensors of a replicated state to the parts' `load_state_dict` on the CPU:
    modules and optimizers copy them to where theirs are, and optimizers keep the tensors that belong on the CPU there.
    The tensors of a sharded module are written where they are.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Stateful | dict[str, Any]],
        *,
        from_rank_0: Collection[str] = (),
        per_rank: Collection[str] | Mapping[str, Reshard | None] = (),
        keep: int = 2,
        max_failed_saves: int = 10,
        memory_every: int | None = None,
        read_only: bool = False,
        of_rank_0: Collection[str] | None = None,
        of_each_rank: Collection[str] | Mapping[str, Reshard | None] | None = None,
    ) -> None:
        if of_rank_0 is not None:
            _warn_of_old_name("of_rank_0", "from_rank_0", is_given=bool(from_rank_0))
            from_rank_0 = of_rank_0
        if of_each_rank is not None:
            _warn_of_old_name("of_each_rank", "per_rank", is_given=bool(per_rank))
            per_rank = of_each_rank
        for name, part in state.items():
            if not isinstance(name, str) or not (isinstance(part, dict) or _has_state(part)):
                raise TypeError(
                    f"part {name!r} of the state is of the type {type(part).__name__}: expected, by a name, a dict, or "
                    "an object with state_dict() and load_state_dict(). Put a tensor into a dict"
                )
        if max_failed_saves < 1:
            raise ValueError(f"max_failed_saves is {max_failed_saves}, expected at least 1")
        refuse_names(state)
        rules = rules_of(per_rank, state, from_rank_0)
        self._read_only = read_only
        self._thread = threading.get_ident()
        """It has made this, or loaded last."""
        self._files = CheckpointFiles(directory, keep=keep, run=this_run(os.environ), lend=progress.lend)
        shards = is_sharded(state)
        self._agreement = Agreement(
            self._files.directory, is_sharded=shards, copies_alone=not shards and not rules
        )
        self._state = (ShardedState if shards else ReplicatedState)(
            self._files, state, from_rank_0, rules, max_failed_saves=max_failed_saves, read_only=read_only
        )
        self._durable: bool | None = None
        """What `close` has returned."""
        self._end_copies: Callable[[], object] | None = None
        self._has_saved = False
        self._follows_durable = False
        """An earlier Checkpointer of this process has left a durable checkpoint in the directory."""
        if not read_only:
            self._follows_durable = progress.checkpointers.claim(self._files.directory, self)
            if memory_every is not None:
                # What is registered must not keep what the script has dropped alive.
                copy = _forwarding(weakref.ref(self))
                end = progress.on_step(copy, every=memory_every, stage=progress.Stage.STATE)
                self._end_copies = weakref.finalize(self, end)
        self._end = weakref.finalize(self, self._state.end)
        self._end.atexit = False  # what it does at the end of the process is registered there

    def load(self) -> int:
        """Load the newest checkpoint that any rank has whole; returns the number of steps it holds.

        Returns 0, and changes nothing, when no rank has any checkpoint. Every rank must call it, and every rank
        returns the same. A checkpoint that does not verify is named in a warning and the next older one tried.
        After failures right after a load the agent may name that state: then an older one is loaded, with a warning.
        With another world size than at the time of saving the random states are left as they are, with a warning.
        From here on this Checkpointer takes part in training: planned changes keep its state at their last step.

        Raises Sharded when the state is spread over ranks in a way that is not carried; what `wait` raises, of a save
        that was under way;
        NoUsableCheckpoint when checkpoints exist and none verifies (delete them to start again from step 0);
        CheckpointMismatch when the checkpoint does not fit `state` (some of it may have been changed by then);
        OtherWorldSize when it holds each rank's own state of another number of ranks, without a rule;
        OtherRun when another run has the directory or has left something newer there; CheckpointError when it broke on
        its way from the rank that has it.
        """
        self._check_open()
        self._thread = threading.get_ident()
        self._agreement.meet()
        if self._follows_durable:
            self._leave_removed_aside()
        return self._state.load()

    def save(self, step: int) -> bool:
        """Save the state after `step` finished steps. Every rank must call it, and all return or raise the same.

        Where this node has room in memory, the agent's disk writer makes the state durable while training goes on. Then
        save waits for the other ranks, for the save before this one to be on disk, and for the copy; True says that
        the state is in memory. `wait`, or the next save, says what became of it. Where the disk
        writer does not answer, a thread of this process writes instead. Elsewhere (no agent, no room) rank 0, or each
        rank its shards, writes while all wait, and True says that the state is durable.

        False means that the disk refused this save or the one before, that the store could not confirm this generation,
        or, where nothing was loaded, that the directory has a step as new; a warning says so, and training may go on
        with the older checkpoints intact.

        Raises NotReplicated when the ranks do not have the same state where they should; DirectoryNotShared when not
        all nodes see the directory to which they write shards; Fenced when this generation is over, and its
        agent is about to stop this process; SaveFailed after `max_failed_saves` refusals in a row; StepNotGrowing
        when `step` is not beyond the newest saved one (the step that was just loaded may be saved again); NotPlainData
        when some part's state could not be loaded again; OtherRun when another run has taken the directory over, or has
        saved there beyond this step; CheckpointError when ranks ask for different steps, and at once on a thread that
        is neither the main thread nor the one that made this Checkpointer, or loaded it last.
        """
        if self._read_only:
            raise CheckpointError(
                f"this Checkpointer only reads {self._files.directory}: it was made read_only"
            )
        self._check_open()
        number = step_number(step)
        self._refuse_other_thread()
        with progress.saving():
            self._agreement.meet()
            saved = self._state.save(number)
        if saved:
            self._has_saved = True
            self._state.goes_on()
        return saved

    def wait(self) -> bool:
        """Return when the newest save is durable; False when it was refused. Every rank must call it.

        Raises what `save` raises. At the end of the script it waits by itself: rank 0, or, of shards, each rank.
        """
        self._refuse_other_thread()
        durable = self._state.wait()
        self._state.waited()
        if durable and self._has_saved:
            progress.checkpointers.saved(self._files.directory)
        return durable

    def save_to_memory(self, step: int) -> bool:
        """Copy the state after `step` finished steps to this node's memory; False when there is no room for it.

        Only this process's part of it: no rank waits for another, but a copy counts once every rank has called it
        for that step. Only the first one waits until all have come there and shown that they have the same state; False
        if they have not. What is remembered outlives this process, and is lost with the agent.

        With parts that are per_rank, and where the state is sharded, all ranks must call it for the same step, and
        wait for each other: a copy is of all. Of shards it is False, too, while the copy before has not reached its
        partners: see docs/worker.md.

        Raises NotReplicated when the ranks do not have the same state; NotPlainData when some part's state could not
        be loaded again; CheckpointError when the state is sharded on some ranks only.
        """
        self._check_open()
        number = step_number(step)
        self._agreement.before_copy()
        if self._state.remember(number):
            return True
        self._agreement.after_no_copy()
        return False

    def remember(self, step: int) -> bool:
        """The old name of `save_to_memory`, for one release."""
        _warn_of_old_name("remember()", "save_to_memory()")
        return self.save_to_memory(step)

    def just_in_time(self) -> contextlib.AbstractContextManager[None]:
        """Put this round the training loop: when another rank dies, no finished step is lost.

            with checkpoints.just_in_time():
                for step in range(checkpoints.load(), total_steps):
                    ...

        The survivors then save the state of the last `step()` to memory before they leave; how, and what it asks of
        the loop: see `just_in_time`. One guards all Checkpointers that were loaded. Without an agent, or without room
        in its memory, this does nothing.

        Raises CheckpointError where parts are per_rank, and where the state is sharded: survivors do not have what
        the other rank had for itself.
        """
        self._check_open()
        return self._state.just_in_time()

    def _refuse_other_thread(self) -> None:
        """Before any collective: beside the training, ranks would come to their collectives in different orders."""
        thread = threading.current_thread()
        if thread.ident != self._thread and thread is not threading.main_thread():
            raise CheckpointError(
                f"{self._files.directory}: save() and wait() cannot run on the thread {thread.name}: all ranks meet "
                "there, and in the training loop too. Call them in the loop, on the thread that called load(). Under "
                "an agent the disk is written behind the training anyway"
            )

    def _leave_removed_aside(self) -> None:
        """Every rank: where the script has removed the durable checkpoints, their copies in memory do not count either.

        Only an earlier Checkpointer of this very process tells: after a restart the files may be lost with a node."""
        self._follows_durable = False
        is_here = True
        with contextlib.suppress(OSError):
            is_here = bool(self._files.steps())
        was_removed = not any(current_group().gather(b"here" if is_here else b""))
        if was_removed and self._state.forget():
            logger.warning(
                "%s was removed since it was saved there: the copies of it in memory are left aside. close() a "
                "Checkpointer before its directory is used for another training",
                self._files.directory,
            )

    def close(self) -> bool:
        """The training is over: wait as `wait` does, and take no part any more. Every rank must call it.

        What is on disk then needs no copy in memory: this node gives back that memory, also of newer steps that were
        only there, and a later load begins from the last save.

        Returns what `wait` returns, also when it is called again, and raises what `wait` raises.
        """
        if self._durable is None:
            self._refuse_other_thread()
            self._durable = False
            try:
                self._durable = self.wait()
            finally:
                self._leave()
                self._end()
            # The generation after a planned change goes on from memory, also where the script closes on its way out.
            if self._durable and progress.awaited_between_steps() is None:
                self._state.forget()
        return self._durable

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._durable is None:
            # Other ranks may never come here. A write that is under way goes on.
            self._durable = False
            self._leave()

    def _leave(self) -> None:
        """Take no part in training from here on."""
        if self._end_copies is not None:
            self._end_copies()
        self._state.leave()
        progress.checkpointers.release(self._files.directory, self)

    def _check_open(self) -> None:
        if self._durable is not None:
            raise CheckpointError(f"this Checkpointer of {self._files.directory} was closed: make a new one")


def _warn_of_old_name(old: str, new: str, *, is_given: bool = False) -> None:
    """`is_given`: by the new name, too. Raises ValueError then."""
    if is_given:
        raise ValueError(f"{old} is the old name of {new}: give one of the two")
    warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=3)


def _has_state(part: object) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _forwarding(checkpointer: weakref.ref[Checkpointer]) -> Callable[[int], None]:
    def copy(step: int) -> None:
        alive = checkpointer()
        if alive is not None and not alive._state.is_over:
            alive.save_to_memory(step)

    return copy
