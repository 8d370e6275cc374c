"""Takes the shards of all ranks at one step: into memory, and to disk.

All ranks come to the same decisions: each brings what it has (`meeting`), and pure functions of what all have brought
say what every rank does (`copy_rule`). A version exists only if all ranks have copied it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...errors import CheckpointError, DirectoryNotShared, NotSaved, SaveFailed, Unconfirmed
from ...ranks.group import Group, current_group
from ...ranks.refusals import because, raise_together, together
from ...state.sharding.layout import ShardLayout
from ...state.sharding.reading import metadata_of
from ...state.sharding.table import Table
from ...steps import progress
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.shard_files import data_name
from ...storage.disk.sharded.commit import new_attempt
from ...storage.disk.sharded.own_rows import own_rows
from ...storage.disk.sharded.shard_saver import ShardedSave, ShardSaver
from ...storage.disk.sharded.shared_directory import not_shared, remove_mark, sees_mark, write_mark
from ...storage.memory.checksums import undisturbed
from ...storage.memory.copy_header import Header, RankShards
from ...storage.memory.shard_memory import ShardMemory
from ...storage.replication.copy_rule import Decision, Line, Readiness, Verdict, has, may_copy, oldest_needed
from ...wire.environment import WorkerEnv
from ..saving.save_outcomes import SaveOutcomes, unless_refused
from ..saving.slot_copies import SlotCopies
from .contents import ShardContents
from .meeting import Brought, Met, meet
from .shard_replicas import ShardReplicas

logger = logging.getLogger(__name__)

REPLICA_PATIENCE_S = 1.0
"""For which a save waits until the copy before has its replicas: after that it overwrites this one."""
SLOT_PATIENCE_S = 10.0
"""For which it waits until nothing reads the slot that it needs: after that all ranks write while training waits."""
LAST_REPLICA_S = 2.0
LAST_REPLICA_BYTES_PER_S = 200e6
"""For which, both together, the last step of a planned change waits for its replicas: after that it goes to disk."""
_LOOK_S = 0.01


class ShardSaving(SaveOutcomes):
    """See `Checkpointer` for what its methods promise. All of them are collectives."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: ShardContents,
        memory: ShardMemory | None,
        replicas: ShardReplicas | None,
        copies: SlotCopies,
        disk: ShardSaver,
        env: WorkerEnv,
        max_failed_saves: int,
        *,
        keeps_common: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keeps_common`: this rank's copies also have what is the same on all ranks."""
        super().__init__(files, copies, disk, max_failed_saves)
        self._files = files
        self._contents = contents
        self._memory = memory
        self._replicas = replicas
        self._copies = copies
        self._disk: ShardSaver = disk
        self._env = env
        self._keeps_common = keeps_common
        self._clock = clock
        self._line = Line(env.generation, None)
        self._resumed_from = 0
        self._compared = False
        """All ranks had the same, of what they should have, after training changed it."""
        self._is_shared: bool | None = None
        """All nodes see one directory; None: they have not looked yet."""
        self._why_not_shared = ""
        self._tables = _Tables()
        self._last: ShardedSave | None = None
        """What `order_write` has written."""

    def began(self, step: int, loaded: tuple[int, int] | None) -> None:
        """All ranks have loaded the state of `step`; `loaded` is its version if it came out of memory."""
        # The step just loaded may be saved again.
        self.floor = step - 1
        self._line = Line(self._env.generation, loaded)
        self._resumed_from, self._compared = step, False
        if self._memory is not None:
            self._memory.resumed_from = step

    # ---------------------------------------------------------------- in memory

    @undisturbed()
    def remember(self, step: int) -> bool:
        group = current_group()
        layout, met = self._meet(step, group, compare=not self._compared)
        if not met.all_have_memory:
            return False
        verdict = self._judge(met)
        if verdict.decision is Decision.HAVE:
            return True
        # No word of it: where replicas take longer than some steps, not every step can be remembered.
        return verdict.copies and self._copy(layout, step, met, verdict)

    def _meet(self, step: int, group: Group, *, compare: bool) -> tuple[ShardLayout, Met]:
        layout, refusal = self._contents.lay_out(step, group, common=self._keeps_common)
        common = self._contents.digest() if compare else None
        met = meet(group, self._brought(step, layout, common))
        if met.some_refused or layout is None:
            raise_together(group, refusal)
            raise CheckpointError("some rank's state cannot be taken")
        if compare:
            self._contents.compare(group, [one.common for one in met.all], step)
            self._compared = step > self._resumed_from
        return layout, met

    def _brought(self, step: int, layout: ShardLayout | None, common: bytes | None = None) -> Brought:
        self._disk.take_note()  # what is being written holds a slot
        brought = Brought(
            step,
            layout.digest if layout is not None else "",
            layout.size if layout is not None else 0,
            has_writer=self._disk.has_writer,
            readiness=self._readiness(step),
        )
        return brought if common is None else replace(brought, common=common)

    def _readiness(self, step: int) -> Readiness | None:
        return self._replicas.readiness(step, self._copies.filling) if self._replicas is not None else None

    def _judge(self, met: Met) -> Verdict:
        """The same on all ranks. Raises CheckpointError, on all of them."""
        assert self._replicas is not None
        verdict = may_copy(met.readiness, self._line, must=met.patience_over)
        if verdict.decision is Decision.REFUSE:
            raise CheckpointError(verdict.reason)
        self._line = self._line.after(verdict)
        self._replicas.settled(oldest_needed(met.readiness, self._env.generation))
        return verdict

    def _copy(self, layout: ShardLayout, step: int, met: Met, verdict: Verdict) -> bool:
        memory = self._memory
        assert memory is not None
        rank = memory.place.rank
        if has(met.readiness[rank].slots, (self._env.generation, step)):
            return True
        twins = met.twins_of(rank)
        return self._copies.copy(
            lambda: memory.begin_copy(layout, step, keep=verdict.keep, twins=twins), step
        )

    def _copy_surely(self, layout: ShardLayout, step: int, met: Met, group: Group) -> bool:
        """Whether all ranks have this step in memory, after a wait for replicas and readers that has an end."""
        if not met.all_have_memory:
            return False
        verdict = self._await_turn(layout, step, met, group)
        copied = verdict.decision is Decision.HAVE

        def copy() -> None:
            nonlocal copied
            copied = copied or (verdict.copies and self._copy(layout, step, met, verdict))

        together(group, copy, f"step {step} is not copied")
        return all(group.gather(b"copied" if copied else b""))

    def _await_turn(self, layout: ShardLayout, step: int, met: Met, group: Group) -> Verdict:
        since = self._clock()
        while True:
            verdict = self._judge(met)
            if verdict.decision is not Decision.WAIT or met.gives_up:
                return verdict
            time.sleep(_LOOK_S)
            waited_s = self._clock() - since
            met = meet(
                group,
                replace(
                    self._brought(step, layout),
                    patience_over=waited_s > REPLICA_PATIENCE_S,
                    gives_up=waited_s > SLOT_PATIENCE_S,
                ),
            )

    # ---------------------------------------------------------------- on disk

    def save(self, step: int) -> bool:
        group = current_group()
        started_s = time.monotonic()
        if not unless_refused(lambda: self._prepare(step, group)):
            return False
        layout, met = self._meet(step, group, compare=True)
        try:
            self._require_shared_directory(group)
        except (NotSaved, Unconfirmed):
            return False
        copied = self._copy_surely(layout, step, met, group)
        if copied and met.all_have_writers:
            save = self._plan(step, met, group, layout.packed_table, twins=True)
            saved = unless_refused(lambda: self._order(save))
        else:
            save = self._plan(step, met, group, layout.packed_table, twins=False)
            saved = self._write_now(save, layout, group, started_s)
        if saved:
            self.floor = step
        return saved

    def wait(self) -> bool:
        return unless_refused(self.make_durable)

    def write_loaded(self, step: int, version: tuple[int, int]) -> None:
        """Let what was loaded from memory be durable soon, unless it is on disk or is not in all ranks' own slots."""
        group, memory = current_group(), self._memory
        table, digest, size = b"", "", 0
        if memory is not None and self._disk.has_writer:
            try:
                with memory.hold(version) as held:
                    shards = held.header.shards
                    of_this_world = held.header.world_size == group.world_size
                    if shards is not None and shards.rank == group.rank and of_this_world:
                        table = os.pread(held.stream.fileno(), shards.table[1], shards.table[0])
                        digest, size = shards.digest, held.header.size
            except (OSError, ValueError) as error:
                logger.warning("the loaded state is not brought to disk: step=%d reason=%s", step, error)
        on_disk = group.rank == 0 and self._is_on_disk(step)
        met = meet(group, Brought(step, "" if on_disk else digest, size, has_writer=bool(table)))
        if met.some_refused:
            return
        try:
            self._require_shared_directory(group)
            save = self._plan(step, met, group, table, twins=True)
        except CheckpointError as refusal:
            logger.warning("the loaded state is not brought to disk: step=%d reason=%s", step, refusal)
            return
        self._disk.expect(save)
        assert memory is not None
        try:
            self._disk.begin(*memory.lend(version))
        except (OSError, ValueError) as error:
            logger.warning("the loaded state is not brought to disk: step=%d reason=%s", step, error)
            self._disk.refuse(error)

    def _is_on_disk(self, step: int) -> bool:
        try:
            newest = self._files.newest_manifest()
        except OSError:
            return False
        return newest is not None and newest.step == step

    def _prepare(self, step: int, group: Group) -> None:
        if group.rank == 0:
            self._files.claim.uphold(self.check_grows(step))
        try:
            # The next may take its place on the disk and in memory only when this one's end is known.
            self.finish_last_write()
        except (NotSaved, Unconfirmed):
            pass  # the log has it; this one may fare better

    def _require_shared_directory(self, group: Group) -> None:
        """Raises DirectoryNotShared on all ranks."""
        if self._is_shared is None:
            self._is_shared = group.world_size == 1 or self._all_see_one_directory(group)
        if not self._is_shared:
            raise DirectoryNotShared(self._why_not_shared)

    def _may_write(self, group: Group) -> bool:
        try:
            self._require_shared_directory(group)
        except (DirectoryNotShared, NotSaved, Unconfirmed) as refusal:
            if group.rank == 0:
                logger.warning("the last state is in memory only: reason=%s", refusal)
            return False
        return True

    def _all_see_one_directory(self, group: Group) -> bool:
        directory = self._files.directory
        token = ""

        def mark() -> None:
            nonlocal token
            if group.rank == 0:
                try:
                    token = write_mark(directory, self._files.run)
                except OSError as error:
                    self.count(because(SaveFailed, f"nothing can be written to {directory}: {error}", error))

        together(group, mark, f"nothing can be written to {directory}")
        token = group.gather(token.encode())[0].decode()
        seen = group.gather(b"" if sees_mark(directory, token) else self._env.node.encode() or b"?")
        if group.rank == 0:
            remove_mark(directory, token)
        blind = next((rank for rank, node in enumerate(seen) if node), None)
        if blind is not None:
            self._why_not_shared = str(not_shared(directory, blind, seen[blind].decode()))
        return blind is None

    def _plan(self, step: int, met: Met, group: Group, table: bytes, *, twins: bool) -> ShardedSave:
        """`twins`: a rank whose shards another one writes, too, writes only what it has for itself."""
        attempt = new_attempt(self._files, step, self._env.generation) if group.rank == 0 else ""
        attempt = self._tables.exchange(group, attempt, table)
        first = [met.first_twin_of(rank) if twins else None for rank in range(group.world_size)]
        metadata = b""

        def index() -> None:
            nonlocal metadata
            if group.rank == 0:
                metadata = self._tables.metadata(first)

        together(group, index, f"step {step} is not saved")
        return ShardedSave(
            step,
            attempt,
            group.rank,
            group.world_size,
            _most_bytes_of_a_node(group, met, first),
            first[group.rank],
            metadata,
        )

    def _order(self, save: ShardedSave) -> None:
        memory = self._memory
        assert memory is not None
        self._disk.expect(save)
        self._disk.promise(save.step)
        version = memory.place.generation, save.step
        self._copies.hand_on(lambda: memory.lend(version), self._disk.begin)
        self._disk.take_note()  # where the writer could not be asked, this process writes now

    def _write_now(self, save: ShardedSave, layout: ShardLayout, group: Group, started_s: float) -> bool:
        """All ranks write their parts while all wait, and rank 0 commits."""
        size = 0

        def write() -> None:
            try:
                self._disk.write_now(save, self._header(save.step, layout, group), layout.pour)
            except CheckpointError as refusal:
                self.count(refusal)
            except OSError as error:
                reason = f"step {save.step} not saved in {self._files.directory}: {error}"
                self.count(because(SaveFailed, reason, error))

        def commit() -> None:
            nonlocal size
            if group.rank:
                return
            try:
                size = self._disk.commit_now(save)
            except CheckpointError as refusal:
                self.count(refusal)
            except OSError as error:
                reason = f"step {save.step} not saved in {self._files.directory}: {error}"
                self.count(because(SaveFailed, reason, error))

        saved = unless_refused(write) and unless_refused(commit)
        if saved:
            self.count(None)
            self._disk.wrote(save.step, durable=True)
        if group.rank == 0:
            took_s = time.monotonic() - started_s
            progress.checkpoint_save(save.step, "ok" if saved else "error", took_s, size, blocked_s=took_s)
        return saved

    def _header(self, step: int, layout: ShardLayout, group: Group) -> Header:
        return Header(
            step,
            self._env.generation,
            self._resumed_from,
            group.world_size,
            layout.size,
            run=self._files.run.id,
            shards=RankShards(group.rank, layout.table_place, layout.digest, self._keeps_common),
        )

    # ---------------------------------------------------------------- the last step of a planned change

    def save_last_step(self, step: int) -> bool:
        """Every rank: let the state after `step` outlive this process, which is about to end. False: it does not."""
        group = current_group()
        layout, met = self._meet(step, group, compare=True)
        copied = self._copy_surely(layout, step, met, group)
        kept = copied and self._copies.settled() and self._outlives_node(step, layout.size)
        if copied and all(group.gather(b"kept" if kept else b"")):
            self._disk.is_leaving = True
            if met.all_have_writers and self._may_write(group):
                self._last = self._plan(step, met, group, layout.packed_table, twins=True)
            return True
        if self.floor is not None and step <= self.floor:
            return True
        try:
            saved = self.save(step) and self.wait()
        except DirectoryNotShared as refusal:
            if group.rank == 0:
                logger.error(
                    "step %d is in memory only, and what a node that leaves now has of it is lost: %s",
                    step,
                    refusal,
                )
            return copied
        if not saved and group.rank == 0:
            logger.error("step %d is NOT on disk in %s: its save was refused", step, self._files.directory)
        return saved

    def _outlives_node(self, step: int, size: int) -> bool:
        """Whether other nodes have this rank's shards, for its own may be about to leave; after a wait for that."""
        assert self._replicas is not None
        deadline = self._clock() + LAST_REPLICA_S + size / LAST_REPLICA_BYTES_PER_S
        while (found := self._replicas.outlives_node((self._env.generation, step))) is None:
            if self._clock() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return found

    def order_write(self, step: int) -> None:
        """After that: let the disk writers have what is only in memory."""
        save, self._last = self._last, None
        memory = self._memory
        if save is None or memory is None:
            return
        self._disk.expect(save)
        try:
            self._disk.hand_over(*memory.lend((memory.place.generation, step)))
        except (OSError, ValueError) as error:
            logger.warning("the last state is in memory only: step=%d reason=%s", step, error)
            self._disk.refuse(error)


class _Tables:
    """Those of all ranks' copies, at rank 0; each is sent only when it is another one than before."""

    def __init__(self) -> None:
        self._sent = b""
        self._packed: dict[int, bytes] = {}
        self._known: dict[int, tuple[bytes, Table]] = {}
        self._metadata: tuple[list[int | None], bytes] | None = None

    def exchange(self, group: Group, attempt: str, table: bytes) -> str:
        """Every rank calls it; returns the name of the attempt that rank 0 has given."""
        new = table if table != self._sent else b""
        self._sent = table
        rows = group.gather(attempt.encode() + b"\n" + new)
        for rank, row in enumerate(rows):
            name, _, packed = row.partition(b"\n")
            if rank == 0:
                attempt = name.decode()
            if packed and group.rank == 0:
                self._packed[rank] = packed
                self._metadata = None
        return attempt

    def metadata(self, first_twins: list[int | None]) -> bytes:
        """Rank 0: DCP's index of all files. Raises Invalid for a table that cannot be read."""
        if self._metadata is None or self._metadata[0] != first_twins:
            for rank, packed in self._packed.items():
                if self._known.get(rank, (b"",))[0] != packed:
                    self._known[rank] = packed, Table.from_bytes(packed)
            tables = {
                rank: table if first_twins[rank] is None else own_rows(table, rank).table
                for rank, (_, table) in self._known.items()
            }
            self._metadata = first_twins, metadata_of(tables, {rank: data_name(rank) for rank in tables})
        return self._metadata[1]


def _most_bytes_of_a_node(group: Group, met: Met, first_twins: Sequence[int | None]) -> int:
    """No rank knows which ranks share a node, but all nodes of a world have about as many."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    sizes = [one.size if first is None else 0 for one, first in zip(met.all, first_twins, strict=True)]
    return max(sum(sizes[begin : begin + local]) for begin in range(0, group.world_size, local))
