"""Loads for DCP: the newest version that is whole in the memory of the living nodes, else the newest on disk."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...codec import Count
from ..checkpointing.loading.offered_copies import copies_in, offers_of_standbys
from ..checkpointing.loading.open_copies import CopiesUnusable, MemoryReader
from ..checkpointing.loading.selection import (
    CopyName,
    CopyPlace,
    Offer,
    Places,
    Source,
    choose_source,
    unusable,
    without,
)
from ..checkpointing.loading.state_loader import Reasons, choose_together
from ..checkpointing.sharded.meeting import RankHome
from ..errors import BadCheckpoint, CheckpointError, CheckpointMismatch, NoUsableCheckpoint
from ..ranks.group import Group, current_group, raise_together
from ..state.sharding.pieces import Box, numel
from ..state.sharding.reading import OpenCopy, Reader
from ..state.sharding.table import Table
from ..storage.disk.checkpoint_files import CheckpointFiles
from ..storage.disk.manifests import Manifest
from ..storage.disk.shard_files import DiskCopy
from ..storage.disk.sharded_save import index_of
from ..storage.memory.copy_header import FoundCopy
from ..storage.replication.copy_rule import Version
from ..wire.environment import WorkerEnv
from ..wire.messages import MAX_REASON_CHARS, Reason
from .rank_storage import RankStorage, WorldRank, are_the_world, storage_of
from .writer import refuse_id

logger = logging.getLogger(__name__)

READ_BYTES = 256 << 20
"""Of tensors that are read before they are copied to their places."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What is loaded, and the tables of its copies, by rank. `places`: where these lie in memory."""

    what: Manifest | Source
    tables: dict[int, Table]
    places: tuple[CopyPlace, ...] = ()

    @property
    def step(self) -> int:
        return self.what.step if isinstance(self.what, Manifest) else self.what.what.step

    @property
    def run(self) -> str:
        return (self.what if isinstance(self.what, Manifest) else self.what.what).run

    @property
    def version(self) -> Version | None:
        """Of copies in memory."""
        return None if isinstance(self.what, Manifest) else self.what.version

    @property
    def name(self) -> str:
        """No other has it."""
        if isinstance(self.what, Manifest):
            return self.what.file
        generation, step = self.what.version
        return f"step {step} of generation {generation} in memory"


@dataclass(frozen=True, slots=True)
class _Choice:
    """By one rank, with its plan."""

    name: str
    rank: WorldRank


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Copies that one rank cannot read: the ranks whose they are, and why."""

    ranks: tuple[Count, ...] = ()
    reasons: tuple[Reason, ...] = ()


class ElasticStorageReader(StorageReader):
    """For `dcp.load`: the newest good checkpoint, or that of `step`. A `Checkpointer`'s are read, too.

    Under an agent all ranks look together, when the first of `step` and `dcp.load` is asked for: what the memory of all
    nodes has comes before what is on disk, unless that is newer. Ranks of several need their process group by then.
    With `memory=False` each rank looks by itself, at the disk only: for `no_dist`, without a process group or with one
    of some of the ranks, and to ask for `step` on one rank alone.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, step: int | None = None, memory: bool = True
    ) -> None:
        self._directory = os.path.abspath(directory)
        self._wanted = step
        self._memory = memory
        self._found: _Found | None = None
        self._was_loaded = False
        self._failure: CheckpointError | None = None

    @property
    def step(self) -> int | None:
        """Of the checkpoint that was loaded, or that would be; None: there is none.

        Raises NoUsableCheckpoint when there are some and none verifies, CheckpointMismatch when it is one file of an
        older version, CheckpointError when ranks of several have no process group yet, or the directory cannot be read.
        """
        if self._found is None:
            try:
                self._found = self._look()
            except OSError as error:
                raise CheckpointError(f"{self._directory} cannot be read: {error}") from error
        return self._found.step if self._found is not None else None

    @property
    def checkpoint_id(self) -> str:
        return self._directory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """What `step` has found is what is loaded; a second load looks again."""
        refuse_id(checkpoint_id)
        self._failure = None
        if self._was_loaded:
            self._found, self._was_loaded = None, False

    def read_metadata(self, *args: Any) -> Metadata:
        """An error waits for `set_up_storage_reader`: here DCP would keep only its text."""
        try:
            if self.step is None:
                raise NoUsableCheckpoint(
                    f"{self._directory} has no checkpoint: where step is None, do not load"
                )
        except CheckpointError as error:
            self._failure = error
        if self._found is None:
            return Metadata({})
        self._was_loaded = True
        metadata: Metadata = index_of(self._found.tables)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._found is not None
        return replace(
            plan, storage_data=_Choice(self._found.name, self._own().world_rank(self._found.version))
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        choices = [plan.storage_data for plan in plans]
        chosen = sorted({choice.name for choice in choices})
        if len(chosen) > 1:
            raise CheckpointError(
                f"the ranks found different checkpoints in {self._directory}: {', '.join(chosen)}. Let all nodes see "
                "the same directory, and load again when no save is under way"
            )
        ranks = [choice.rank for choice in choices]
        homes = tuple(one.home for one in ranks) if self._memory and are_the_world(ranks) else ()
        return [replace(plan, storage_data=homes) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self._found
        assert found is not None
        if isinstance(found.what, Manifest):
            self._read_from_disk(found.what, found.tables, plan, planner)
        else:
            self._read_from_memory(found, plan, planner)
        if self._wanted is not None:
            self._own().await_disk()  # what is being saved may be newer
        self._own().note_load(found.step, found.run)
        homes: tuple[RankHome, ...] = plan.storage_data
        if homes and WorkerEnv.of(os.environ).run:
            self._own().loaded(found.step, found.version, homes)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_from_memory(self, found: _Found, plan: LoadPlan, planner: LoadPlanner) -> None:
        try:
            with contextlib.ExitStack() as stack:
                memory = _memory(WorkerEnv.of(os.environ), stack)
                copies = {
                    rank: memory.open_at(place, found.tables[rank], verify=False)
                    for rank, place in enumerate(found.places)
                }
                _read_plan(plan, planner, copies)
        except CopiesUnusable as error:
            raise CheckpointError(
                f"{found.name} cannot be read any more ({error.reason}): load again"
            ) from error

    def _read_from_disk(
        self, manifest: Manifest, tables: Mapping[int, Table], plan: LoadPlan, planner: LoadPlanner
    ) -> None:
        files = self._own().files
        with contextlib.ExitStack() as stack:
            open_rank = functools.cache(lambda rank: stack.enter_context(files.open_rank(manifest, rank)))
            try:
                copies = {rank: OpenCopy(table, _late(open_rank, rank)) for rank, table in tables.items()}
                _read_plan(plan, planner, copies)
            except BadCheckpoint as bad:
                if not files.has(manifest):
                    raise CheckpointError(
                        f"step {manifest.step} in {self._directory} was removed while it was loaded: run "
                        f"{manifest.run} saves there, and has newer ones. Load again; if that is not enough, let that "
                        "run retain more of them (keep)"
                    ) from bad
                older = next((step for step in files.steps() if step < manifest.step), None)
                reason = f"{bad.reason}. There is no older one"
                if older is not None:
                    reason = (
                        f"{bad.reason}. To go on from an older one: "
                        f"ElasticStorageReader({self._directory!r}, step={older})"
                    )
                raise BadCheckpoint(bad.step, bad.path, reason) from bad

    def _own(self) -> RankStorage:
        return storage_of(self._directory)

    # ---------------------------------------------------------------- what is there

    def _look(self) -> _Found | None:
        group = self._group()
        own = self._own()
        if group is None:
            return self._look_on_disk(own.files)
        return self._look_together(group, own)

    def _group(self) -> Group | None:
        """None: this rank looks by itself. The same on all ranks, or some would wait for the others for ever."""
        return current_group() if self._memory and WorkerEnv.of(os.environ).run else None

    def _look_together(self, group: Group, own: RankStorage) -> _Found | None:
        copies = self._copies_here(own.env)
        standbys = offers_of_standbys(own.env, self._directory, group)
        damaged: set[CopyName] = set()
        in_memory: _Found | None = None
        on_disk: _Found | None = None
        failure: CheckpointError | None = None

        def exchange(manifest: Manifest | None, _: Reasons) -> list[Offer]:
            of_ranks = group.exchange(self._offer(own, manifest, copies))
            return [without(self._wanted_of(offer), damaged) for offer in (*of_ranks, *standbys)]

        def look() -> tuple[Manifest | None, Reasons]:
            nonlocal on_disk, failure
            own.await_disk()
            try:
                on_disk = self._look_on_disk(own.files)
            except CheckpointError as error:
                failure = error
            except OSError as error:
                failure = CheckpointError(f"{self._directory} cannot be read: {error}")
            return (on_disk.what if on_disk is not None and isinstance(on_disk.what, Manifest) else None), ()

        def all_can_read(source: Source, offers: list[Offer]) -> bool:
            nonlocal in_memory
            places = tuple(_best_of(places, rank) for rank, places in enumerate(source.places))
            tables = _open_together(group, own.env, places, damaged, {offer.node for offer in standbys})
            if tables is not None:
                in_memory = _Found(source, tables, places)
            return tables is not None

        claimed = self._newest_manifest(own.files)
        source, offers = choose_together(claimed, exchange, choose_source, look, all_can_read)
        if in_memory is None:
            raise_together(group, failure)
            return on_disk
        if group.rank == 0:
            for one in unusable(offers, source):
                logger.warning("%s", one.reason)
        return in_memory

    def _newest_manifest(self, files: CheckpointFiles) -> Manifest | None:
        with contextlib.suppress(OSError):
            manifest = files.newest_manifest(self._is_unwanted)
            if manifest is not None and not self._is_unwanted(manifest):
                return manifest
        return None

    def _copies_here(self, env: WorkerEnv) -> tuple[FoundCopy, ...]:
        """On this node. Its first rank names them."""
        return (
            copies_in(env.memory, self._directory, is_sharded=True)
            if env.memory and env.local_rank <= 0
            else ()
        )

    def _wanted_of(self, offer: Offer) -> Offer:
        wanted = (copy for copy in offer.copies if copy.header.step == self._wanted)
        return offer if self._wanted is None else replace(offer, copies=tuple(wanted))

    def _offer(self, own: RankStorage, manifest: Manifest | None, copies: tuple[FoundCopy, ...]) -> Offer:
        foreign = manifest is not None and not own.files.claim.is_ours(manifest)
        return Offer(manifest, (), copies, own.env.node, own.env.memory_address, own.files.run.id, foreign)

    def _is_unwanted(self, manifest: Manifest) -> bool:
        return self._wanted not in (None, manifest.step) or manifest.is_one_file

    def _look_on_disk(self, files: CheckpointFiles) -> _Found | None:
        reported = set[int]()
        while True:
            checkpoint, bad = files.find(self._is_unwanted, verify=False)
            for one in bad:
                if one.step not in reported:
                    reported.add(one.step)
                    logger.warning(
                        "checkpoint does not verify, trying an older one: step=%d reason=%s", one.step, one
                    )
            if checkpoint is None:
                if bad:
                    raise NoUsableCheckpoint(f"no checkpoint in {self._directory} verifies: {bad[0]}")
                return None
            checkpoint.stream.close()
            manifest = checkpoint.manifest
            if self._wanted not in (None, manifest.step):
                raise NoUsableCheckpoint(f"{self._directory} has no good checkpoint of step {self._wanted}")
            if manifest.is_one_file:
                raise CheckpointMismatch(
                    f"step {manifest.step} in {self._directory} is of an older version: load it with Checkpointer"
                )
            try:
                return _Found(
                    manifest, {rank: _table(files, manifest, rank) for rank in range(manifest.parts)}
                )
            except BadCheckpoint as damage:
                files.reject(manifest, damage)


def _open_together(
    group: Group,
    env: WorkerEnv,
    places: tuple[CopyPlace, ...],
    damaged: set[CopyName],
    standbys: Collection[str],
) -> dict[int, Table] | None:
    """The tables of these copies, by rank, when all can be read; None: some are `damaged`, on all ranks the same.

    Each worker verifies what its own slots have, and those of a worker with its number on other nodes. `standbys` have
    no workers: the ranks share their copies, and let the memory servers verify them.
    """
    tables: dict[int, Table] = {}
    problems: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        memory = _memory(env, stack)
        for rank, place in enumerate(places):
            try:
                tables[rank] = memory.open_at(place, verify=_is_verified_by(env, place)).table
                if place.node in standbys and rank % group.world_size == group.rank:
                    memory.verify_there(place)
            except CopiesUnusable as error:
                problems[rank] = error.reason[:MAX_REASON_CHARS]
    everywhere = group.exchange(_Unreadable(tuple(problems), tuple(problems.values())))
    for one in everywhere:
        for rank, reason in zip(one.ranks, one.reasons, strict=True):
            if group.rank == 0 and places[rank].name not in damaged:
                logger.warning(
                    "a copy in memory cannot be read, trying another: step=%d rank=%d reason=%s",
                    places[rank].header.step,
                    rank,
                    reason,
                )
            damaged.add(places[rank].name)
    return None if any(one.ranks for one in everywhere) else tables


def _memory(env: WorkerEnv, stack: contextlib.ExitStack) -> MemoryReader:
    return MemoryReader(env.memory, env.node, None, stack)


def _best_of(places: Places, rank: int) -> CopyPlace:
    """The same on all ranks: that old rank's own copy, and a replica only where its node is gone."""
    return min(places, key=lambda one: (not one.is_of(rank), bool(one.folder.origin)))


def _is_verified_by(env: WorkerEnv, place: CopyPlace) -> bool:
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return place.node == env.node and (place.folder.local_rank or 0) % workers == max(0, env.local_rank)


def _late(open_rank: Callable[[int], DiskCopy], rank: int) -> Callable[[int, memoryview], None]:
    """A file is opened when something is read of it."""
    return lambda offset, into: open_rank(rank).read(offset, into)


def _table(files: CheckpointFiles, manifest: Manifest, rank: int) -> Table:
    with files.open_rank(manifest, rank) as copy:
        return copy.table


# ---------------------------------------------------------------- what a plan reads


def _read_plan(plan: LoadPlan, planner: LoadPlanner, copies: Mapping[int, OpenCopy]) -> None:
    """Raises what the copies' `read` raises."""
    reader = Reader(copies, None)
    values = {
        value.key: (rank, value)
        for rank in sorted(copies, reverse=True)
        for value in copies[rank].table.values
    }
    tensors = []
    for item in plan.items:
        if item.type is LoadItemType.BYTE_IO:
            rank, value = values[item.storage_index.fqn]
            archive = bytearray(value.length)
            copies[rank].read(value.begin, memoryview(archive))
            planner.load_bytes(item, io.BytesIO(archive))
        else:
            tensors.append(item)
    for group in _groups(tensors):
        wanted = [(item, reader.want(item.storage_index.fqn, _box(item))) for item in group]
        reader.read()
        for item, one in wanted:
            place = planner.resolve_tensor(item).detach()
            place.copy_(one.tensor)
            planner.commit_tensor(item, place)


def _box(item: ReadItem) -> Box:
    begin = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(at + more for at, more in zip(begin, item.storage_offsets, strict=True))
    return Box(offsets, tuple(item.lengths))


def _groups(items: list[ReadItem]) -> Iterator[list[ReadItem]]:
    group: list[ReadItem] = []
    size = 0
    for item in items:
        group.append(item)
        size += numel(item.lengths) * 8  # no element is larger, but complex ones
        if size >= READ_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
