"""What this process has of one checkpoint directory: the disk, and its own slots in the memory of its node.

    all ranks     save_request(step, ...)        how the last write ended, and what the slots hold
    coordinator   decide(requests, ...)          what all ranks do
    all ranks     write(save, decision, layout)  a copy in memory that the disk writer has, or a part on disk
    coordinator   commit(save)                   when all have done so

A save in memory that the disk writer could not bring to disk is named in the log; the next one ends only when it is on
disk, so that a disk that still refuses raises where the script can see it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..checkpointing.saving.slot_copies import SlotCopies
from ..checkpointing.sharded.meeting import RankHome
from ..checkpointing.sharded.shard_replicas import LOOK_S, REPLICA_PATIENCE_S, SLOT_PATIENCE_S, ShardReplicas
from ..errors import BadCheckpoint, CheckpointError, StepNotGrowing
from ..state.sharding.items import Form, Items
from ..state.sharding.layout import ShardLayout, ShardLayouts
from ..steps import progress
from ..storage.disk.async_save import DiskSaver
from ..storage.disk.checkpoint_files import CheckpointFiles
from ..storage.disk.commit import make_attempt, new_attempt, not_shared, sees_mark
from ..storage.disk.manifests import Manifest, manifest_of, manifest_steps
from ..storage.disk.parts import refusal_of
from ..storage.disk.sharded_save import ShardedSave
from ..storage.memory.slot_memory import CopyUnderWay, SlotMemory, header_of_shards, memory_of
from ..storage.memory.slots import HeldSlot, Slots
from ..storage.replication.copy_rule import Decision, Readiness, Version, may_copy, oldest_needed
from ..wire.environment import Run, WorkerEnv, this_run
from ..wire.files import open_directory

logger = logging.getLogger(__name__)

ENDING_S = 1.0
"""For the thread of a save that has failed, whose future the script may know already."""

HeldCopy = tuple[Slots, HeldSlot]


@dataclass(frozen=True, slots=True)
class WorldRank:
    """Where a rank is: its number and that of all ranks as the launcher counts them, and its node."""

    rank: int
    world_size: int
    home: RankHome


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """By one rank.

    `size` is what it would write, in bytes, before DCP leaves out what other ranks write. `readiness`: of its slots;
    None: it has no memory for copies. `knows_nodes`: it need not be told where the others are. `last_save_failed`: its
    newest copy did not reach the disk. `is_busy`: another thread of its process is at a save of the same directory.
    """

    step: int
    rank: WorldRank
    size: int
    readiness: Readiness | None
    knows_nodes: bool
    last_save_failed: bool
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """What all ranks do.

    `copies`: each rank copies into memory, into the slot without the version `protected`. `drop_older_than`: older
    replicas are of no more use, on no node; None: some may be. `homes` are those of all ranks, for the replicas; empty:
    all know them. `durable`: the save ends when it is on disk. `most_bytes`: what the ranks of one node write, of that
    node which writes most.
    """

    copies: bool = False
    protected: Version | None = None
    drop_older_than: Version | None = None
    homes: tuple[RankHome, ...] = ()
    durable: bool = False
    most_bytes: int = 0


def decide(requests: Sequence[SaveRequest], generation: int, protected: Version | None) -> SaveDecision:
    """`requests` are by rank, `protected` is as of `may_copy`. Raises CheckpointError for different steps, and for a
    save that overlaps with another one: what the slots hold would no longer be what the ranks have asked with.

    They copy only where all have memory, and all ranks of the world take part: a slot belongs to a rank of the world.
    """
    steps = {rank: one.step for rank, one in enumerate(requests)}
    if len(set(steps.values())) > 1:
        raise CheckpointError(
            f"ranks save different steps, by rank: {steps}; call dcp.save in the same iteration on all ranks"
        )
    if busy := [rank for rank, one in enumerate(requests) if one.is_busy]:
        raise CheckpointError(
            f"step {requests[0].step} is not saved: ranks {busy} are still at another save of that directory. Wait for "
            "the future of the last dcp.async_save before the next one"
        )
    decision = SaveDecision(
        durable=any(one.last_save_failed for one in requests),
        most_bytes=max(sum(sizes) for sizes in _by_node(requests).values()),
    )
    everyone = [one.readiness for one in requests if one.readiness is not None]
    if len(everyone) < len(requests) or not are_the_world([one.rank for one in requests]):
        return decision
    verdict = may_copy(everyone, (generation, requests[0].step), protected, must=True)
    return replace(
        decision,
        copies=verdict.decision in (Decision.COPY, Decision.HAVE),
        protected=verdict.protected,
        drop_older_than=oldest_needed(everyone, generation),
        homes=() if all(one.knows_nodes for one in requests) else tuple(one.rank.home for one in requests),
    )


def are_the_world(ranks: Sequence[WorldRank]) -> bool:
    """Whether these, by rank of DCP's process group, are all ranks of the world, in its order."""
    return all((one.rank, one.world_size) == (rank, len(ranks)) for rank, one in enumerate(ranks))


def _by_node(requests: Sequence[SaveRequest]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in requests:
        found.setdefault(one.rank.home.node, []).append(one.size)
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """Of one directory. `number` counts those of this process: two loads of one step are two pasts. `run` made what was
    loaded.

    `newer` are the checkpoints that lay there beyond `step`, and were given up for it.
    """

    number: int
    step: int
    run: str
    newer: tuple[Manifest, ...]


class RankStorage:
    """For several threads: `dcp.async_save` has its own."""

    def __init__(self, path: str, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.files = CheckpointFiles(path, keep=1, run=run, lend=progress.lend)
        self.env = env = WorkerEnv.of(os.environ)
        self.protected: Version | None = None
        """No rank overwrites it, see `may_copy`."""
        self._layouts = ShardLayouts()
        self._form: Form | None = None
        """Of the newest save."""
        self._memory = memory_of(os.environ, path, is_sharded=True)
        self._replicas = ShardReplicas(path, env, self._memory) if self._memory is not None else None
        self._copies = SlotCopies(self._memory)
        self._saver = DiskSaver(self.files, env)
        self._clock = clock
        self._lock = threading.RLock()
        self._resumed_from = 0
        self._copied: set[int] = set()
        """The steps that this process has copied."""
        self.newest_load: Load | None = None
        """Of this process."""
        self._load: Load | None = None
        """That the newest save goes on from."""
        self._copied_before_load = -1
        """The newest step that this process had copied by then."""
        self._saving: threading.Thread | None = None
        """It is at a save, until its part is done."""
        self._beginning = threading.Lock()
        self._attempts: set[str] = set()
        """Those of this process, as the coordinator."""
        self._is_shared = False
        """This rank has seen here what the coordinator had made."""
        self._knows_nodes = False
        self._warned = False

    def world_rank(self, loaded: Version | None = None) -> WorldRank:
        """As the launcher says; without one there is a single process. `loaded`: the version from which it goes on."""
        rank, env, memory = int(os.environ.get("RANK", "0")), self.env, self._memory
        kept = memory.digest_of(loaded) if memory is not None and loaded is not None else ""
        # DCP lets one rank write what several have: no rank's part can stand for another's.
        home = RankHome(env.node, env.memory_address, f"{rank:016}", kept)
        return WorldRank(rank, int(os.environ.get("WORLD_SIZE", "1")), home)

    # ---------------------------------------------------------------- saving

    def await_disk(self) -> bool:
        """Wait for the end of the newest write; False when the disk has refused it."""
        with self._lock:
            outcome = self._saver.finish()
        refusal = refusal_of(outcome) if outcome is not None else None
        if outcome is None or refusal is None:
            return True
        logger.warning("a save is not on disk: step=%d reason=%s", outcome.step, refusal)
        return False

    def save_request(self, step: int, size: int, load: Load | None) -> SaveRequest:
        """`load` is the newest one of this directory, maybe by another process, which has left the save to this one."""
        world_rank = self.world_rank()
        if not self._begin_save():
            return SaveRequest(step, world_rank, size, None, self._knows_nodes, False, is_busy=True)
        with self._lock:
            last_save_failed = not self.await_disk()
            if load != self._load:
                self._load, self._copied_before_load = load, max(self._copied, default=-1)
            return SaveRequest(
                step, world_rank, size, self._await_slots(step), self._knows_nodes, last_save_failed
            )

    def _begin_save(self) -> bool:
        """False: another thread is at a save of this directory."""
        own = threading.current_thread()
        with self._beginning:
            other = self._saving
            if other is not None and other is not own:
                other.join(ENDING_S)
                if other.is_alive():
                    return False
            self._saving = own
        return True

    def end_save(self) -> None:
        """This thread is not at a save any more. DCP does not tell when another rank has failed: then the thread of
        `dcp.async_save` ends, and any other one makes a new writer."""
        if self._saving is threading.current_thread():
            self._saving = None

    def _await_slots(self, step: int) -> Readiness | None:
        """What the slots hold, after a wait that has an end for replicas and readers of these; None: no memory."""
        if self._replicas is None or self._memory is None or self._is_used_by_checkpointer(self._memory):
            return None
        if self._load is not None and self._load.step < step <= self._copied_before_load:
            # Other nodes may have replicas of that version, of another state: no copy must be taken for one of it.
            self._abandon_from(step, self._memory, self._replicas)
            return None
        since = self._clock()
        while True:
            readiness = self._replicas.readiness(None)
            waited_s = self._clock() - since
            verdict = may_copy(
                [readiness], (self.env.generation, step), self.protected, must=waited_s > REPLICA_PATIENCE_S
            )
            if verdict.decision is not Decision.WAIT or waited_s > SLOT_PATIENCE_S:
                return readiness
            time.sleep(LOOK_S)

    def _abandon_from(self, step: int, memory: SlotMemory, replicas: ShardReplicas) -> None:
        """Drop what this generation has copied from that step on, which an older state was loaded after."""
        before = self.env.generation, step - 1
        memory.abandon_newer(before)
        replicas.abandon_newer(before)
        if self.protected is not None and self.protected > before:
            self.protected = None

    def _is_used_by_checkpointer(self, memory: SlotMemory) -> bool:
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

    def new_attempt(self, step: int) -> tuple[str, bool]:
        """The coordinator's, and whether its directory is there: the write says why the disk refuses it.

        Raises StepNotGrowing when another process of this run has begun to save that step.
        """
        attempt = new_attempt(self.files, step, self.env.generation)
        self._attempts.add(attempt)
        try:
            others = make_attempt(self.files, attempt) - self._attempts
        except OSError:
            return attempt, False
        if others:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(self.files.directory, attempt))
            raise StepNotGrowing(
                f"another process of this run has saved, or is saving, step {step} in {self.files.directory}. Let all "
                "ranks that save there do so together: in one process group, without no_dist. Or give each group a "
                "directory of its own"
            )
        return attempt, True

    def claim(self, step: int, load: Load | None) -> None:
        """The directory becomes this run's, which goes on from what was loaded, before `step` is saved."""
        claim = self.files.claim
        if load is None:
            claim.uphold(step - 1)
            return
        claim.bad_steps.update(one.step for one in load.newer)
        claim.uphold(load.step, load.run)

    def lay_out(self, items_after: Callable[[Form | None], Items]) -> ShardLayout:
        """This rank's part. `items_after` gets the form of the save before, if there was one."""
        items = items_after(self._form)
        self._form = items.form
        return self._layouts.lay_out(items)

    def require_shared(self, attempt: str, rank: int) -> None:
        """At the first save, before anything is copied: raises DirectoryNotShared where that is not to be seen."""
        if not self._is_shared and not sees_mark(self.files.directory, attempt):
            raise not_shared(self.files.directory, rank, self.env.node)
        self._is_shared = True

    def write(self, save: ShardedSave, decision: SaveDecision, layout: ShardLayout) -> HeldCopy | None:
        """Copy this rank's part and let the disk writer have it, or write it now.

        The coordinator gets what it has copied, for `commit`. Raises OSError, CheckpointError.
        """
        with self._lock:
            if decision.homes and not self._knows_nodes:
                self._begin_replicas(decision.homes, (0, 0))
            if decision.copies:
                assert self._replicas is not None
                self.protected = decision.protected
                self._replicas.settled(decision.drop_older_than)
            held_copy = self._copy(save, decision, layout) if decision.copies else None
            if held_copy is None:
                save.write_now(self._saver, layout, self._resumed_from, common=save.rank == 0)
            elif save.rank:
                self._order(save, held_copy)
            else:
                return held_copy
        return None

    def commit(
        self, save: ShardedSave, held_copy: HeldCopy | None, *, keep: int, durable: bool
    ) -> int | None:
        """The coordinator, when all ranks have done their part: make a checkpoint of it.

        Its size; None: the disk writers are at it. Of good ones `keep` are retained. Raises OSError, CheckpointError.
        """
        self.files.keep = keep
        _verify_older(self.files, save.step)
        with self._lock:
            if held_copy is None:
                return save.commit_now(self._saver)
            self._order(save, held_copy)
            if not durable:
                return None
            outcome = self._saver.finish()
        assert outcome is not None, "it was ordered"
        refusal = refusal_of(outcome)
        if refusal is not None:
            raise refusal
        return outcome.size

    def _copy(self, save: ShardedSave, decision: SaveDecision, layout: ShardLayout) -> HeldCopy | None:
        """None, with a word in the log: there is no room, or no disk writer."""
        memory = self._memory
        assert memory is not None
        version = self.env.generation, save.step

        def begin() -> CopyUnderWay:
            protected = decision.protected
            header = header_of_shards(
                layout,
                memory.place,
                save.step,
                memory.resumed_from,
                common=memory.keeps_common,
                protected=protected,
            )
            copy = memory.begin_copy(layout, header, protected=protected)
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

    def _order(self, save: ShardedSave, held_copy: HeldCopy) -> None:
        self.await_disk()  # another save of this process, whose write has begun meanwhile
        self._saver.promise(save)
        self._saver.begin(*held_copy)

    # ---------------------------------------------------------------- what was loaded

    def loaded(self, step: int, version: Version | None, homes: tuple[RankHome, ...]) -> None:
        """All ranks have loaded `step`, in memory if there is a version: training goes on from there.

        After the first save of this process a load is no beginning any more.
        """
        memory = self._memory
        if memory is None or self._copied:
            return
        with self._lock:
            self._resumed_from = memory.resumed_from = step
            self.protected = version
            if version is not None:
                memory.abandon_newer(version)
            if homes:
                self._begin_replicas(homes, version or (0, 0))

    def note_load(self, step: int, run: str) -> None:
        """This process has loaded that step. What is newer was given up, and counts no more when it saves."""
        number = self.newest_load.number + 1 if self.newest_load is not None else 1
        self.newest_load = Load(number, step, run, self._newer_than(step))

    def _newer_than(self, step: int) -> tuple[Manifest, ...]:
        with contextlib.suppress(OSError), open_directory(self.files.directory) as there:
            newer = (one for one in manifest_steps(there) if one > step)
            return tuple(found for one in newer if (found := manifest_of(there, one)) is not None)
        return ()

    def _begin_replicas(self, homes: tuple[RankHome, ...], resumed: Version) -> None:
        self._knows_nodes = True
        if self._replicas is not None:
            self._replicas.began(homes, resumed)


def _verify_older(files: CheckpointFiles, step: int) -> None:
    """After a restart: find out which older checkpoints are good, so that no more than these are retained."""
    for older in files.steps():
        if len(files.good) >= files.keep - 1:
            return
        with open_directory(files.directory) as there:
            manifest = manifest_of(there, older)
        if (
            older < step
            and manifest is not None
            and not manifest.is_one_file
            and files.claim.is_ours(manifest)
        ):
            with contextlib.suppress(BadCheckpoint):
                files.open(older, verify=False).stream.close()


def storage_of(path: str, run: Run | None = None) -> RankStorage:
    """One for all writers and readers of a process. `run`: without an agent that of the coordinator is all ranks'."""
    own = this_run(os.environ)
    return _storage(path, own if run is None or run.id == own.id else run)


@functools.cache
def _storage(path: str, run: Run) -> RankStorage:
    return RankStorage(path, run)
