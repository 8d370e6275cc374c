"""The checkpoint directory of `Checkpointer`, for those who save and load with `torch.distributed.checkpoint` (DCP).

    dcp.save(state, storage_writer=ElasticStorageWriter("runs/x", step=120, keep=2))

    reader = ElasticStorageReader("runs/x")
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)

`dcp.async_save` takes the writer, too. Each save fills a directory of its own; its manifest appears last, behind the
fence, and older ones are pruned. What is read is verified, and no `.metadata` is unpickled. DCP raises its own
`CheckpointException`, on all ranks; its `failures` have the errors of `elastic_agent.worker.errors`, by rank.

States go to the disk only: the memory tier and its replicas need `Checkpointer`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pickle import dumps
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .errors import (
    BadCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    NoUsableCheckpoint,
    SaveFailed,
    StepNotGrowing,
)
from .state.sharding.items import Form, Items, Row
from .state.sharding.layout import ShardLayouts
from .state.sharding.pieces import Box, numel
from .state.sharding.reading import OpenCopy, Reader, index_of
from .state.sharding.table import Table
from .steps import progress
from .storage.disk.checkpoint_files import CheckpointFiles
from .storage.disk.manifests import Manifest, manifest_of
from .storage.disk.shard_files import DiskCopy, data_name
from .storage.disk.sharded.commit import new_attempt
from .storage.disk.sharded.shard_saver import ShardedSave, ShardSaver
from .storage.memory.copy_header import Header, RankShards
from .wire.environment import WorkerEnv
from .wire.files import open_directory
from .wire.run import Run, this_run

logger = logging.getLogger(__name__)

READ_BYTES = 256 << 20
"""Of tensors that are read before they are copied to their places."""


@functools.cache
def _files(directory: str, run: Run) -> CheckpointFiles:
    """One for all writers and readers of a process: it knows what is good and damaged, and holds the lock."""
    return CheckpointFiles(directory, keep=1, run=run, lend=progress.lend)


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one rank writes; the coordinator gives it to all ranks with their plans."""

    step: int
    attempt: str
    run: Run
    rank: int
    world_size: int


class ElasticStorageWriter(StorageWriter):
    """For one `dcp.save` or `dcp.async_save` of the state after `step`; `keep` good checkpoints are retained."""

    def __init__(self, directory: str | os.PathLike[str], *, step: int, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to retain")
        self._directory = os.path.abspath(directory)
        self._step = step
        self._keep = keep
        self._run = this_run(os.environ)
        self._attempt = ""
        self._target: _Target | None = None
        self._started_s = 0.0

    @property
    def checkpoint_id(self) -> str:
        return self._directory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        _refuse_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("ElasticStorageWriter needs use_collectives=True: the ranks make one checkpoint")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._started_s = time.monotonic()
        files = self._saver(self._run).files
        newest = files.newest_manifest(lambda one: one.run != self._run.id)
        if newest is not None and newest.run == self._run.id and newest.step >= self._step:
            raise StepNotGrowing(
                f"step {self._step} is not beyond step {newest.step}, the newest that this run has saved in "
                f"{self._directory}: give each ElasticStorageWriter the number of steps that its state holds"
            )
        files.claim.uphold(self._step - 1)
        self._attempt = new_attempt(files, self._step, WorkerEnv.of(os.environ).generation)
        return [
            replace(plan, storage_data=_Target(self._step, self._attempt, self._run, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target = plan.storage_data
        if not isinstance(target, _Target) or target.step != self._step:
            raise ValueError(
                f"the plan is not of step {self._step}: make the planner without enable_plan_caching"
            )
        self._target = target
        layout = ShardLayouts().lay_out(_items(plan, planner, target.rank))
        saver = self._saver(target.run)
        header = Header(
            target.step,
            saver.env.generation,
            0,
            target.world_size,
            layout.size,
            run=target.run.id,
            shards=RankShards(target.rank, layout.table_place, layout.digest, target.rank == 0),
        )
        with self._typed():
            saver.write_now(_save(target), header, layout.pour)
        written: Future[list[WriteResult]] = Future()
        written.set_result(_results(plan, layout.table, data_name(target.rank)))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._target is not None, "write_data comes first"
        metadata.storage_data = {one.index: one.storage_data for several in results for one in several}
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        saver = self._saver(self._run)
        saver.files.keep = self._keep
        size, saved = 0, False
        try:
            with self._typed():
                _look_back(saver.files, self._step)
                size = saver.commit_now(replace(_save(self._target), metadata=dumps(metadata)))
            saved = True
        finally:
            took_s = time.monotonic() - self._started_s
            progress.checkpoint_save(self._step, "ok" if saved else "error", took_s, size)

    def _saver(self, run: Run) -> ShardSaver:
        return ShardSaver(_files(self._directory, run), WorkerEnv.of(os.environ))

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SaveFailed(f"step {self._step} not saved in {self._directory}: {error}") from error


class ElasticStorageReader(StorageReader):
    """For `dcp.load`: the newest good checkpoint, or that of `step`. A sharded `Checkpointer`'s are read, too."""

    def __init__(self, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
        self._directory = os.path.abspath(directory)
        self._wanted = step
        self._found: _Found | None = None
        self._failure: CheckpointError | None = None

    @property
    def step(self) -> int | None:
        """Of the checkpoint that was loaded, or that would be; None: there is none.

        Raises NoUsableCheckpoint when there are some and none verifies, CheckpointMismatch when it is not of shards.
        """
        if self._found is None:
            self._found = self._look()
        return self._found.manifest.step if self._found is not None else None

    @property
    def checkpoint_id(self) -> str:
        return self._directory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        _refuse_id(checkpoint_id)
        self._found = self._failure = None

    def read_metadata(self, *args: Any) -> Metadata:
        """An error waits for `set_up_storage_reader`: here DCP would keep only its text."""
        try:
            if self.step is None:
                raise NoUsableCheckpoint(
                    f"{self._directory} has no checkpoint: where step is None, do not load"
                )
        except OSError as error:
            self._failure = CheckpointError(f"{self._directory} cannot be read: {error}")
        except CheckpointError as error:
            self._failure = error
        if self._found is None:
            return Metadata({})
        tables = self._found.tables
        metadata: Metadata = index_of(tables, {rank: data_name(rank) for rank in tables})
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._found is not None
        return replace(plan, storage_data=self._found.manifest.file)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise CheckpointError(
                f"the ranks found different checkpoints in {self._directory}: {', '.join(chosen)}. Let all nodes see "
                "the same directory, and load again when no save is under way"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._found is not None
        with contextlib.ExitStack() as stack:
            try:
                _read(plan, planner, self._found.tables, self._opener(self._found.manifest, stack))
            except BadCheckpoint as bad:
                reason = (
                    f"{bad.reason}. To go on from an older one: "
                    f"ElasticStorageReader({self._directory!r}, step=OLDER)"
                )
                raise BadCheckpoint(bad.step, bad.path, reason) from bad
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opener(self, manifest: Manifest, stack: contextlib.ExitStack) -> Callable[[int], DiskCopy]:
        files = self._files()
        return functools.cache(lambda rank: stack.enter_context(files.open_rank(manifest, rank)))

    def _files(self) -> CheckpointFiles:
        return _files(self._directory, this_run(os.environ))

    def _look(self) -> _Found | None:
        files, reported = self._files(), set[int]()
        while True:
            checkpoint, bad = files.find(
                lambda one: self._wanted not in (None, one.step) or not one.is_sharded
            )
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
            if not manifest.is_sharded:
                raise CheckpointMismatch(
                    f"step {manifest.step} in {self._directory} is not of shards: load it with Checkpointer"
                )
            try:
                return _Found(
                    manifest, {rank: _table(files, manifest, rank) for rank in range(manifest.world_size)}
                )
            except BadCheckpoint as damage:
                files.reject(manifest, damage)


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint, and the tables of its copies, by rank."""

    manifest: Manifest
    tables: dict[int, Table]


def _table(files: CheckpointFiles, manifest: Manifest, rank: int) -> Table:
    with files.open_rank(manifest, rank) as copy:
        return copy.table


def _refuse_id(checkpoint_id: object) -> None:
    if checkpoint_id is not None:
        raise ValueError("leave checkpoint_id out: the writer and the reader have their directory")


def _save(target: _Target) -> ShardedSave:
    return ShardedSave(target.step, target.attempt, target.rank, target.world_size, 0)


def _look_back(files: CheckpointFiles, step: int) -> None:
    """After a restart: find out which older checkpoints are good, so that no more than these are retained."""
    for older in files.steps():
        if len(files.good) >= files.keep - 1:
            return
        with open_directory(files.directory) as there:
            manifest = manifest_of(there, older)
        if older < step and manifest is not None and manifest.is_sharded and files.claim.is_ours(manifest):
            with contextlib.suppress(BadCheckpoint):
                files.open(older).stream.close()


# ---------------------------------------------------------------- what a plan writes


def _items(plan: SavePlan, planner: SavePlanner, rank: int) -> Items:
    paths = plan.planner_data or {}
    rows: list[Row] = []
    tensors: list[torch.Tensor] = []
    values: list[tuple[str, tuple[str | int, ...], bytes, bool]] = []
    for item in plan.items:
        key, data = item.index.fqn, planner.resolve_data(item)
        path = tuple(paths.get(key, (key,)))
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            values.append((key, path, data.getvalue(), True))
            continue
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        shape, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        row = Row(path, key, data.dtype, shape, tuple(chunk.offsets), tuple(chunk.sizes), False, len(tensors))
        if tuple(data.shape) != row.sizes:
            raise CheckpointMismatch(
                f"the plan gives {key!r} the sizes {row.sizes}, it has {tuple(data.shape)}"
            )
        rows.append(row)
        tensors.append(data.detach())
    return Items(Form(rows, len(tensors)), tensors, values, False, rank)


def _results(plan: SavePlan, table: Table, file: str) -> list[WriteResult]:
    places = {(row.key, row.offsets): (row.begin, row.length) for row in table.shards}
    values = {value.key: (value.begin, value.length) for value in table.values}
    found = []
    for item in plan.items:
        if item.tensor_data is None:
            begin, length = values[item.index.fqn]
        else:
            begin, length = places[item.index.fqn, tuple(item.tensor_data.chunk.offsets)]
        found.append(WriteResult(item.index, length, filesystem._StorageInfo(file, begin, length)))
    return found


# ---------------------------------------------------------------- what a plan reads


def _read(
    plan: LoadPlan, planner: LoadPlanner, tables: dict[int, Table], open_rank: Callable[[int], DiskCopy]
) -> None:
    def reading(rank: int) -> Callable[[int, memoryview], None]:
        return lambda offset, into: open_rank(rank).read(offset, into)

    reader = Reader({rank: OpenCopy(table, reading(rank)) for rank, table in tables.items()}, None)
    values = {
        value.key: (rank, value) for rank in sorted(tables, reverse=True) for value in tables[rank].values
    }
    tensors = []
    for item in plan.items:
        if item.type is LoadItemType.BYTE_IO:
            rank, value = values[item.storage_index.fqn]
            archive = bytearray(value.length)
            open_rank(rank).read(value.begin, archive)
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
