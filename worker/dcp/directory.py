"""What this process has of one checkpoint directory: the disk, and its own slots in the memory of its node.

    all ranks     bring(step, ...)            how the last write ended, and what the slots hold
    coordinator   agree(brought, line)        see `agreement`
    all ranks     take(save, agreed, layout)  a copy in memory that the disk writer has, or a part on disk
    coordinator   commit(save)                when all have done so

A save in memory that the disk writer could not bring to disk is named in the log; the next one ends only when it is on
disk, so that a disk that still refuses raises where the script can see it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ..checkpointing.saving.slot_copies import SlotCopies
from ..checkpointing.sharded.meeting import RankHome
from ..checkpointing.sharded.shard_replicas import LOOK_S, REPLICA_PATIENCE_S, SLOT_PATIENCE_S, ShardReplicas
from ..state.sharding.items import Form
from ..state.sharding.layout import ShardLayout, ShardLayouts
from ..steps import progress
from ..storage.disk.background_write import refusal_of
from ..storage.disk.checkpoint_files import CheckpointFiles
from ..storage.disk.sharded.shard_saver import ShardedSave, ShardSaver
from ..storage.memory.copy_header import Header, RankShards
from ..storage.memory.shard_memory import ShardMemory, shard_memory_of
from ..storage.memory.slot_memory import CopyUnderWay
from ..storage.memory.slots import HeldSlot, Slots
from ..storage.replication.copy_rule import Decision, Readiness, Version, may_copy
from ..wire.environment import WorkerEnv
from ..wire.run import Run, this_run
from .agreement import Agreed, Brought, WorldRank

logger = logging.getLogger(__name__)

Lent = tuple[Slots, HeldSlot]


class DirectoryOfRank:
    """For several threads: `dcp.async_save` has its own."""

    def __init__(self, path: str, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.files = CheckpointFiles(path, keep=1, run=run, lend=progress.lend)
        self.env = env = WorkerEnv.of(os.environ)
        self.keep: Version | None = None
        """No rank overwrites it, see `may_copy`."""
        self.layouts = ShardLayouts()
        self.form: Form | None = None
        """Of the newest save."""
        self._memory = shard_memory_of(os.environ, path)
        self._replicas = ShardReplicas(path, env, self._memory) if self._memory is not None else None
        self._copies = SlotCopies(self._memory)
        self._saver = ShardSaver(self.files, env)
        self._clock = clock
        self._lock = threading.RLock()
        self._resumed_from = 0
        self._copied: set[int] = set()
        """The steps that this process has copied."""
        self._knows_others = False
        self._warned = False

    def world_rank(self, loaded: Version | None = None) -> WorldRank:
        """As the launcher says; without one there is a single process. `loaded`: the version from which it goes on."""
        rank, env, memory = int(os.environ.get("RANK", "0")), self.env, self._memory
        kept = memory.digest_of(loaded) if memory is not None and loaded is not None else ""
        # DCP lets one rank write what several have: no rank's part can stand for another's.
        home = RankHome(env.node, env.memory_address, env.failure_domain, f"{rank:016}", kept)
        return WorldRank(rank, int(os.environ.get("WORLD_SIZE", "1")), home)

    # ---------------------------------------------------------------- saving

    def settle(self) -> bool:
        """Wait for the end of the newest write; False when the disk has refused it."""
        with self._lock:
            outcome = self._saver.finish()
        refusal = refusal_of(outcome) if outcome is not None else None
        if outcome is None or refusal is None:
            return True
        logger.warning("a save is not on disk: step=%d reason=%s", outcome.step, refusal)
        return False

    def bring(self, step: int, size: int) -> Brought:
        with self._lock:
            was_refused = not self.settle()
            return Brought(
                step, self.world_rank(), size, self._await_turn(step), self._knows_others, was_refused
            )

    def _await_turn(self, step: int) -> Readiness | None:
        """What the slots hold, after a wait that has an end for replicas and readers of these; None: no memory."""
        if self._replicas is None or self._memory is None or self._is_taken(self._memory):
            return None
        since = self._clock()
        while True:
            readiness = self._replicas.readiness(None)
            waited_s = self._clock() - since
            verdict = may_copy(
                [readiness], (self.env.generation, step), self.keep, must=waited_s > REPLICA_PATIENCE_S
            )
            if verdict.decision is not Decision.WAIT or waited_s > SLOT_PATIENCE_S:
                return readiness
            time.sleep(LOOK_S)

    def _is_taken(self, memory: ShardMemory) -> bool:
        """A Checkpointer keeps its own copies in these slots."""
        others = [
            header.step
            for header in memory.headers().values()
            if header.generation == self.env.generation and header.step not in self._copied
        ]
        if others and not self._warned:
            self._warned = True
            logger.warning(
                "dcp.save writes to disk only: a Checkpointer keeps its copies of %s in memory, and there is room for "
                "one of both. Give them directories of their own",
                self.files.directory,
            )
        return bool(others)

    def take(self, save: ShardedSave, agreed: Agreed, layout: ShardLayout) -> Lent | None:
        """Copy this rank's part and let the disk writer have it, or write it now.

        The coordinator gets what it has copied, for `commit`. Raises OSError, CheckpointError.
        """
        with self._lock:
            if agreed.homes and not self._knows_others:
                self._begin_replicas(agreed.homes, (0, 0))
            if agreed.copies:
                assert self._replicas is not None
                self.keep = agreed.keep
                self._replicas.settled(agreed.settled)
            lent = self._copy(save, agreed, layout) if agreed.copies else None
            if lent is None:
                self._saver.write_now(save, self._header(save, layout), layout.pour)
            elif save.rank:
                self._order(save, lent)
            else:
                return lent
        return None

    def commit(self, save: ShardedSave, lent: Lent | None, *, durable: bool) -> int | None:
        """The coordinator, when all ranks have done their part: make a checkpoint of it.

        Its size; None: the disk writers are at it. Raises OSError, CheckpointError.
        """
        with self._lock:
            if lent is None:
                return self._saver.commit_now(save)
            self._order(save, lent)
            if not durable:
                return None
            outcome = self._saver.finish()
        assert outcome is not None, "it was ordered"
        refusal = refusal_of(outcome)
        if refusal is not None:
            raise refusal
        return outcome.size

    def _copy(self, save: ShardedSave, agreed: Agreed, layout: ShardLayout) -> Lent | None:
        """None, with a word in the log: there is no room, or no disk writer."""
        memory = self._memory
        assert memory is not None
        version = self.env.generation, save.step

        def begin() -> CopyUnderWay:
            copy = memory.begin_copy(layout, save.step, keep=agreed.keep, twins=())
            try:
                for event in copy.events:  # DCP's tensors may be its own, and end with the save
                    event.synchronize()
            except BaseException:
                copy.opened.close()
                raise
            return replace(copy, events=())

        if version not in memory.versions():
            self._copied.add(save.step)
            if not self._copies.copy(begin, save.step):
                return None
        if not self._saver.has_writer:
            return None
        try:
            return memory.lend(version)
        except (OSError, ValueError) as error:
            logger.warning("the copy in memory is gone: step=%d reason=%s", save.step, error)
            return None

    def _order(self, save: ShardedSave, lent: Lent) -> None:
        self.settle()  # another save of this process, whose write has begun meanwhile
        self._saver.expect(save)
        self._saver.promise(save.step)
        self._saver.begin(*lent)
        self._saver.take_note()  # where the writer could not be asked, this process writes now

    def _header(self, save: ShardedSave, layout: ShardLayout) -> Header:
        return Header(
            save.step,
            self.env.generation,
            self._resumed_from,
            save.world_size,
            layout.size,
            run=self.files.run.id,
            shards=RankShards(save.rank, layout.table_place, layout.digest, save.rank == 0),
        )

    # ---------------------------------------------------------------- what was loaded

    def began(self, step: int, version: Version | None, homes: tuple[RankHome, ...]) -> None:
        """All ranks have loaded `step`, in memory if there is a version: training goes on from there.

        After the first save of this process a load is no beginning any more.
        """
        memory = self._memory
        if memory is None or self._copied:
            return
        with self._lock:
            self._resumed_from = memory.resumed_from = step
            self.keep = version
            if version is not None:
                memory.abandon_newer(version)
            if homes:
                self._begin_replicas(homes, version or (0, 0))

    def _begin_replicas(self, homes: tuple[RankHome, ...], resumed: Version) -> None:
        self._knows_others = True
        if self._replicas is not None:
            self._replicas.began(homes, resumed)


def directory_of_rank(path: str, run: Run | None = None) -> DirectoryOfRank:
    """One for all writers and readers of a process. `run`: without an agent that of the coordinator is all ranks'."""
    own = this_run(os.environ)
    return _directory(path, own if run is None or run.id == own.id else run)


@functools.cache
def _directory(path: str, run: Run) -> DirectoryOfRank:
    return DirectoryOfRank(path, run)
