"""Takes the shards of all ranks at one step: into memory, and to disk.

All ranks come to the same decisions: each brings what it has (`meeting`), and pure functions of what all have brought
say what every rank does (`copy_rule`). A version exists only if all ranks have copied it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable

from ...errors import CheckpointError, DirectoryNotShared, NotSaved, SaveFailed, Superseded, Unconfirmed
from ...ranks.group import Group, all_did, because, current_group, raise_together, tried
from ...state import rng
from ...state.sharding.layout import ShardLayout
from ...steps import progress
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.commit import new_token
from ...storage.disk.sharded_save import ShardedSave
from ...storage.memory.slot_memory import SlotMemory, header_of_shards
from ...storage.memory.slots import NoRoom
from ...storage.replication.copy_rule import (
    CopyVerdict,
    Decision,
    Readiness,
    Version,
    has,
    may_copy,
    oldest_needed,
)
from ...wire.environment import WorkerEnv
from ...wire.messages import SaveResult
from ..saving.base_saver import BaseSaver, unless_refused
from ..saving.slot_copies import SlotCopies
from .contents import ShardContents
from .loaded_write import LoadedWrite
from .meeting import Brought, Met, meet
from .shard_replicas import LOOK_S, REPLICA_PATIENCE_S, SLOT_PATIENCE_S, ShardReplicas
from .sharded_saves import DirectoryCheck, ShardedSaves

logger = logging.getLogger(__name__)

LONG_WAIT_S = 10.0
"""After that a warning says that copies in memory wait, for replicas or for the disk."""
LAST_REPLICA_S = 2.0
LAST_REPLICA_BYTES_PER_S = 200e6
"""For which, both together, ranks of a node that leaves wait for the replicas of their last step: after that all ranks
save it to disk. A node that stays keeps its copy in memory."""


class ShardSaving(BaseSaver):
    """See `Checkpointer` for what its methods promise. All of them are collectives."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: ShardContents,
        memory: SlotMemory | None,
        replicas: ShardReplicas | None,
        disk: DiskSaver,
        env: WorkerEnv,
        max_failed_saves: int,
        *,
        keeps_common: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keeps_common`: this rank's copies also have what is the same on all ranks."""
        super().__init__(files, contents.given, SlotCopies(memory), disk, max_failed_saves)
        self._contents = contents
        self._replicas = replicas
        self._env = env
        self._keeps_common = keeps_common
        self._clock = clock
        self._protected: Version | None = None
        """No rank overwrites it, see `may_copy`."""
        self._resumed_from = 0
        self._compared = False
        """All ranks had the same, of what they should have, after training changed it."""
        self._directory = DirectoryCheck(files, env.node, self.count)
        self._saves = ShardedSaves(files, env.generation)
        self._waits_since: float | None = None
        """On the clock; inf: it was said."""
        self._loaded = LoadedWrite(files, contents, memory, disk, self._saves, self._directory, env)
        self._last: tuple[Met, Group] | None = None
        """Those of the step that `order_write` lets be written."""

    def require_one_name(self) -> None:
        """See `DirectoryCheck`."""
        self._directory.require_one_name(current_group())

    def began(self, step: int, loaded: tuple[int, int] | None) -> None:
        """All ranks have loaded the state of `step`; `loaded` is its version if it came out of memory."""
        # The step just loaded may be saved again.
        self.floor = step - 1
        self._protected = loaded
        self._resumed_from, self._compared = step, False
        self._contents.comparison.began(step)
        self._loaded.began(step)
        if self._memory is not None:
            self._memory.resumed_from = step

    # ---------------------------------------------------------------- in memory

    @property
    def waits(self) -> bool:
        """The newest copy was not made, and that of a later step may be: on all ranks the same."""
        return self._waits_since is not None

    def remember(self, step: int) -> bool:
        group = current_group()
        layout, met = self._meet(step, group, compare=not self._compared)
        if not met.all_have_memory:
            self._waits_since = None
            return False
        verdict = self._judge(step, met)
        self._note_wait(step, verdict, group)
        if verdict.copies or verdict.decision is Decision.HAVE:
            self._loaded.copied(step)
        copied = verdict.copies and self._copy(layout, step, met, verdict)
        return copied or verdict.decision is Decision.HAVE

    def _note_wait(self, step: int, verdict: CopyVerdict, group: Group) -> None:
        """Where replicas take longer than some steps, not every step can be remembered. A long wait is said, once."""
        if verdict.decision is not Decision.WAIT:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since = self._clock()
        if self._clock() - self._waits_since >= LONG_WAIT_S and group.rank == 0:
            self._waits_since = math.inf
            logger.warning(
                "no copies in memory for %g s, a failure now costs the steps since: step=%d newest=%d reason=%s",
                LONG_WAIT_S,
                step,
                self._protected[1] if self._protected is not None else 0,
                verdict.reason,
            )

    def _meet(
        self,
        step: int,
        group: Group,
        *,
        compare: bool,
        saves: bool = False,
        refusal: CheckpointError | None = None,
    ) -> tuple[ShardLayout, Met]:
        """What this rank would copy, and what all have brought. `saves`: to disk, if no rank has a `refusal`.

        Raises on all ranks what any of them has against it.
        """
        laid_out = self._contents.lay_out(step, group, common=self._keeps_common, compare=compare)
        layout = laid_out.layout
        brought = self._brought(step, layout, laid_out.common)
        if saves:
            brought = brought._replace(
                token=new_token(),
                has_new_table=layout is not None and self._saves.is_new(layout.packed_table),
                cannot_save=refusal is not None,
            )
        self._note(step)
        met = meet(group, brought)
        if met.some_cannot_save:
            raise_together(group, refusal)
        if met.some_refused or layout is None:
            raise_together(group, laid_out.refusal)
            raise CheckpointError("some rank's state cannot be taken")
        if compare:
            self._contents.comparison.compare(group, [one.common for one in met.all], step)
            self._compared = step > self._resumed_from
        if met.some_have_new_tables:
            self._saves.exchange(layout.packed_table, group)
        return layout, met

    def _note(self, step: int) -> None:
        """Before the first copy of a generation, write this rank's random state down.

        If this process is killed in that copy, the version is loaded where another rank has the same shards. Later
        versions give way to the one before, see `choose_source`.
        """
        is_first = self._protected is None or self._protected[0] != self._env.generation
        if self._memory is not None and is_first:
            with contextlib.suppress(NoRoom):
                self._memory.note(step, rng.capture())

    def _brought(self, step: int, layout: ShardLayout | None, common: bytes | None = None) -> Brought:
        brought = Brought(
            step,
            layout.digest if layout is not None else "",
            layout.size if layout is not None else 0,
            has_writer=self._disk.has_writer,
            readiness=self._readiness(),
        )
        return brought if common is None else brought._replace(common=common)

    def _readiness(self) -> Readiness | None:
        return self._replicas.readiness(self._copies.filling) if self._replicas is not None else None

    def _judge(self, step: int, met: Met) -> CopyVerdict:
        """The same on all ranks."""
        assert self._replicas is not None
        version = self._env.generation, step
        verdict = may_copy(met.readiness, version, self._protected, must=met.patience_over)
        self._protected = verdict.protected
        self._replicas.settled(oldest_needed(met.readiness, self._env.generation))
        return verdict

    def _copy(self, layout: ShardLayout, step: int, met: Met, verdict: CopyVerdict) -> bool:
        memory = self._memory
        assert memory is not None
        rank = memory.place.rank
        if has(met.readiness[rank].slots, (self._env.generation, step)):
            return True
        protected = verdict.protected
        header = header_of_shards(
            layout,
            memory.place,
            step,
            self._resumed_from,
            common=memory.keeps_common,
            twins=met.twins_of(rank),
            protected=protected,
        )
        return self._copies.copy(lambda: memory.begin_copy(layout, header, protected=protected), step)

    def _copy_surely(self, layout: ShardLayout, step: int, met: Met, group: Group) -> bool:
        """Whether all ranks have this step in memory, after a wait for replicas and readers that has an end."""
        if not met.all_have_memory:
            return False
        verdict = self._await_turn(layout, step, met, group)
        if verdict.decision is Decision.WAIT and group.rank == 0:
            logger.warning("training waits while all ranks write: step=%d reason=%s", step, verdict.reason)
        if not verdict.copies:
            return verdict.decision is Decision.HAVE
        return all_did(group, lambda: self._copy(layout, step, met, verdict), f"step {step} is not copied")

    def _await_turn(self, layout: ShardLayout, step: int, met: Met, group: Group) -> CopyVerdict:
        since = self._clock()
        while True:
            verdict = self._judge(step, met)
            if verdict.decision is not Decision.WAIT or met.gives_up:
                return verdict
            time.sleep(LOOK_S)
            waited_s = self._clock() - since
            met = meet(
                group,
                self._brought(step, layout)._replace(
                    patience_over=waited_s > REPLICA_PATIENCE_S,
                    gives_up=waited_s > SLOT_PATIENCE_S,
                ),
            )

    # ---------------------------------------------------------------- on disk

    def save(self, step: int) -> bool:
        return self._save(step, in_memory=True)

    def _save(self, step: int, *, in_memory: bool) -> bool:
        """`in_memory`: the disk writers take it from there, if all ranks can copy it."""
        group = current_group()
        started_s = time.monotonic()
        try:
            refusal = tried(lambda: self._prepare(step, group), "not saved")[1]
            layout, met = self._meet(step, group, compare=True, saves=True, refusal=refusal)
            if self.has_saved(step):
                return True
            self._directory.require(group)
        except (NotSaved, Unconfirmed):
            self._report(step, "error", started_s, 0, group)
            return False
        except SaveFailed:
            self._report(step, "error", started_s, 0, group)
            raise
        except Superseded:
            return False
        writers = met.all_have_writers
        if in_memory and self._copy_surely(layout, step, met, group) and writers:
            self._order(step, met, group)
        elif not self._write_now(step, met, layout, group, started_s):
            return False
        self.saved(step)
        self._loaded.superseded()
        return True

    def write_loaded(self, version: Version) -> None:
        """See `LoadedWrite.order`."""
        self._loaded.order(version)

    def wait(self) -> bool:
        if not self._loaded.ensure(lambda loaded: self._save(loaded, in_memory=False)):
            return False
        return super().wait()

    def end_writes(self) -> None:
        super().end_writes()
        self._loaded.end()

    def _prepare(self, step: int, group: Group) -> None:
        if group.rank == 0:
            self._files.claim.uphold(self.check_grows(step))
        try:
            # The next may take its place on the disk and in memory only when this one's end is known.
            self.finish_last_write()
        except (NotSaved, Unconfirmed):
            pass  # the log has it; this one may fare better

    def _may_write(self, group: Group) -> bool:
        try:
            self._directory.require(group)
        except (DirectoryNotShared, NotSaved, Unconfirmed) as refusal:
            if group.rank == 0:
                logger.warning("the last state is in memory only: reason=%s", refusal)
            return False
        return True

    def _order(self, step: int, met: Met, group: Group) -> None:
        """Let the disk have the step, which all ranks have in memory, or will have when a GPU is done."""
        memory = self._memory
        assert memory is not None
        version = memory.place.generation, step

        def hand(save: ShardedSave) -> None:
            self._disk.promise(save)
            self._copies.hand_on(lambda: memory.lend(version), self._disk.begin)

        self._saves.order(self._disk, step, met, group, hand)

    def _write_now(self, step: int, met: Met, layout: ShardLayout, group: Group, started_s: float) -> bool:
        """All ranks write their parts while all wait, and rank 0 commits."""
        save: ShardedSave | None = None
        size = 0

        def write() -> None:
            nonlocal save
            save = self._saves.make(step, met, group, twins=False)
            save.write_now(self._disk, layout, self._resumed_from, common=self._keeps_common)

        def commit() -> None:
            nonlocal size
            if group.rank == 0 and save is not None:
                size = save.commit_now(self._disk)

        saved = False
        try:
            saved = unless_refused(self._counted(step, write)) and unless_refused(self._counted(step, commit))
            if saved:
                self.count(None)
                self._disk.wrote(step, durable=True)
        finally:
            self._report(step, "ok" if saved else "error", started_s, size, group)
        return saved

    def _report(self, step: int, result: SaveResult, started_s: float, size: int, group: Group) -> None:
        """Tell the agent of a save that this process has made, or tried to make."""
        if group.rank == 0:
            took_s = time.monotonic() - started_s
            where = self._files.directory
            progress.checkpoint_save(step, result, took_s, size, blocked_s=took_s, directory=where)

    def _counted(self, step: int, part: Callable[[], None]) -> Callable[[], None]:
        """The same, which raises what `count` makes of a refusal."""

        def counted() -> None:
            try:
                part()
            except CheckpointError as refusal:
                self.count(refusal)
            except OSError as error:
                reason = f"step {step} not saved in {self._files.directory}: {error}"
                self.count(because(SaveFailed, reason, error))

        return counted

    # ---------------------------------------------------------------- the last step of a planned change

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        """Every rank: let the state after `step` outlive this process, which is about to end, and this node where that
        `leaves`. False: it does not.

        What a node has that stays needs no other copy for that: the next generation gives it one. A node that is asked
        to leave later hands over what it has.
        """
        if self.is_beyond(step):
            return True
        group = current_group()
        layout, met = self._meet(step, group, compare=True, saves=True)
        copied = self._copy_surely(layout, step, met, group)

        def keep() -> bool:
            return self._copies.settled() and (not leaves or self._outlives_node(step, layout.size))

        if copied and all_did(group, keep, f"step {step} is not kept"):
            self._disk.is_leaving = True
            if met.all_have_writers and self._may_write(group):
                self._last = met, group
            return True
        if self.floor is not None and step <= self.floor:
            return True
        try:
            # What was not copied, after the wait for that, is not waited for again.
            saved = self._save(step, in_memory=copied) and self.wait()
            reason = "its save was refused"
        except DirectoryNotShared as refusal:
            saved, reason = False, str(refusal)
        if saved or group.rank != 0:
            return saved or copied
        if copied:
            logger.warning(
                "step %d is in memory only: nodes that leave now hand over what they have of it, or say what is lost: "
                "%s",
                step,
                reason,
            )
        else:
            logger.error("step %d is NOT on disk in %s: %s", step, self._files.directory, reason)
        return copied

    saves_alone = False
    """What a rank that dies had of the state, no other rank has."""

    def save_last_step_alone(self, step: int) -> bool:
        if self.is_beyond(step):
            return True
        logger.warning("step %d is not kept: its shards are on all ranks, and some do not come here", step)
        return False

    def go_back(self, step: int, version: Version) -> None:
        super().go_back(step, version)
        if self._replicas is not None and not self.is_beyond(step):
            self._replicas.abandon_newer(version)

    def _outlives_node(self, step: int, size: int) -> bool:
        """See `ShardReplicas.outlives_node`; after a wait for the replicas it is False."""
        assert self._replicas is not None
        deadline = self._clock() + LAST_REPLICA_S + size / LAST_REPLICA_BYTES_PER_S
        while (found := self._replicas.outlives_node((self._env.generation, step))) is None:
            if self._clock() >= deadline:
                return False
            time.sleep(LOOK_S)
        return found

    def order_write(self, step: int) -> None:
        """After that: let the disk writers have what is only in memory."""
        last, self._last = self._last, None
        memory = self._memory
        if last is None or memory is None:
            return
        version = memory.place.generation, step

        def hand(save: ShardedSave) -> None:
            self._disk.leave_to_writer(save, *memory.lend(version))

        self._saves.order(self._disk, step, *last, hand)
