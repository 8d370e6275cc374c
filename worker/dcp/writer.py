"""Saves what DCP plans: into memory and from there to disk, or to disk while all ranks wait."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pickle import dumps
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..errors import CheckpointMismatch, NotPlainData, SaveFailed, StepNotGrowing
from ..state.sharding.items import Form, Items, Row
from ..state.sharding.pieces import numel, without_plain_values
from ..state.sharding.table import Table
from ..steps import progress
from ..storage.disk.manifests import Manifest, step_number
from ..storage.disk.shard_files import data_name
from ..storage.disk.sharded_save import ShardedSave
from ..wire.environment import Run
from ..wire.messages import SaveResult
from .rank_storage import HeldCopy, RankStorage, SaveDecision, SaveRequest, decide, storage_of


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one rank writes, and how; the coordinator gives it to all ranks with their plans."""

    step: int
    attempt: str
    is_there: bool
    """The coordinator has made the directory of the attempt."""
    run: Run
    rank: int
    world_size: int
    decision: SaveDecision

    @property
    def save(self) -> ShardedSave:
        return ShardedSave(self.step, self.attempt, self.rank, self.world_size, self.decision.most_bytes)


class ElasticStorageWriter(StorageWriter):
    """For one `dcp.save` or `dcp.async_save` of the state after `step`; `keep` good checkpoints are retained.

    Where all nodes have room in memory, the save ends when all ranks have copied what they write, and the agents' disk
    writers make it durable while training goes on. The next save waits for that; if the disk has refused it, a warning
    says so, and that save ends only when it is on disk, or raises. With `durable` each does. At the end of the script
    the process waits for the newest save. Elsewhere (no agent, no room, a process group of some of the ranks) all ranks
    write while all wait.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, step: int, keep: int = 2, durable: bool = False
    ) -> None:
        self._step = step_number(step)
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to retain")
        self._directory = os.path.abspath(directory)
        self._keep = keep
        self._durable = durable
        self._load = self._own().newest_load
        """A process of DCP's own that saves has not loaded anything: it gets this object."""
        self._target: _Target | None = None
        self._held_copy: HeldCopy | None = None
        """The coordinator's copy, which the disk writer has not been given yet."""
        self._started_s = 0.0
        self._own().end_save()

    @property
    def checkpoint_id(self) -> str:
        return self._directory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        refuse_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("ElasticStorageWriter needs use_collectives=True: the ranks make one checkpoint")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._started_s = time.monotonic()
        return replace(plan, storage_data=self._own().save_request(self._step, _size_of(plan), self._load))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        own = self._own()
        requests = [plan.storage_data for plan in plans if isinstance(plan.storage_data, SaveRequest)]
        # A planner may have left out what came with the plans: then nothing is known of the others' memory.
        decision = (
            decide(requests, own.env.generation, own.protected)
            if len(requests) == len(plans)
            else SaveDecision()
        )
        decision = replace(decision, durable=decision.durable or self._durable)
        with self._as_save_failed():
            self._check_grows(own)
        own.claim(self._step, self._load)
        attempt, is_there = own.new_attempt(self._step)
        of_all = _Target(self._step, attempt, is_there, own.files.run, 0, len(plans), decision)
        return [replace(plan, storage_data=replace(of_all, rank=rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with contextlib.ExitStack() as at_the_end:
            at_the_end.callback(self._own().end_save)
            written = self._write(plan, planner)
            if self._target is not None and self._target.rank == 0:
                at_the_end.pop_all()  # `finish` follows
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target = plan.storage_data
        if not isinstance(target, _Target) or target.step != self._step:
            raise ValueError(
                f"the plan is not of step {self._step}: make the planner without enable_plan_caching"
            )
        self._target = target
        storage = storage_of(self._directory, target.run)
        if target.is_there:
            storage.require_shared(target.attempt, target.rank)
        layout = storage.lay_out(lambda before: _items_of(plan, planner, target.rank, before))
        with self._as_save_failed():
            self._held_copy = storage.write(target.save, target.decision, layout)
        written: Future[list[WriteResult]] = Future()
        written.set_result(_results_of(plan, layout.table, data_name(target.rank)))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        target = self._target
        assert target is not None, "write_data comes first"
        metadata.storage_data = {one.index: one.storage_data for several in results for one in several}
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        own = self._own()
        held_copy, self._held_copy = self._held_copy, None
        size, saved = None, False
        try:
            with self._as_save_failed():
                save = replace(target.save, metadata=dumps(metadata))
                size = own.commit(save, held_copy, keep=self._keep, durable=target.decision.durable)
            saved = True
        finally:
            own.end_save()
            if held_copy is None:  # the agent reports what its disk writer does
                took_s = time.monotonic() - self._started_s
                result: SaveResult = "ok" if saved else "error"
                where = own.files.directory
                progress.checkpoint_save(self._step, result, took_s, size or 0, directory=where)

    def _own(self) -> RankStorage:
        return storage_of(self._directory)

    def _check_grows(self, own: RankStorage) -> None:
        """The step that was loaded may be saved again, unless this generation has saved it."""
        files, load = own.files, self._load

        def is_past(one: Manifest) -> bool:
            if one.run != files.run.id:
                return True
            return load is not None and (one.generation < own.env.generation or one in load.newer)

        newest = files.newest_manifest(is_past)
        saved = newest.step if newest is not None and not is_past(newest) else -1
        loaded = load.step if load is not None else -1
        if self._step <= saved or self._step < loaded:
            raise StepNotGrowing(
                f"step {self._step} is not beyond step {max(saved, loaded)}, the newest that this run has saved in "
                f"{self._directory}, or has loaded there: give each ElasticStorageWriter the number of steps that its "
                "state holds, and let one process group save there"
            )

    @contextlib.contextmanager
    def _as_save_failed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SaveFailed(f"step {self._step} not saved in {self._directory}: {error}") from error


def refuse_id(checkpoint_id: object) -> None:
    if checkpoint_id is not None:
        raise ValueError(
            f"leave checkpoint_id out: it is {checkpoint_id!r}, and ElasticStorageWriter(directory, step=) and "
            "ElasticStorageReader(directory) say themselves where a checkpoint lies, and of which step it is"
        )


# ---------------------------------------------------------------- what a plan writes


def _size_of(plan: SavePlan) -> int:
    """Of its tensors, in bytes."""
    return sum(
        numel(tuple(item.tensor_data.chunk.sizes)) * item.tensor_data.properties.dtype.itemsize
        for item in plan.items
        if item.tensor_data is not None
    )


def _items_of(plan: SavePlan, planner: SavePlanner, rank: int, before: Form | None) -> Items:
    """`before` is the form of the last save: the same object, where nothing but contents has changed."""
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
        if kind := without_plain_values(data):
            raise NotPlainData(
                f"{key!r} is {kind}, which ElasticStorageWriter does not carry: save a plain tensor"
            )
        shape, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        row = Row(path, key, data.dtype, shape, tuple(chunk.offsets), tuple(chunk.sizes), False, len(tensors))
        if tuple(data.shape) != row.sizes:
            raise CheckpointMismatch(
                f"the plan gives {key!r} the sizes {row.sizes}, it has {tuple(data.shape)}"
            )
        rows.append(row)
        tensors.append(data.detach())
    form = before if before is not None and before.rows == tuple(rows) else Form(rows, len(tensors))
    # DCP lets one rank write what several have: no rank's copy can stand for another's.
    return Items(form, tensors, values, True, rank)


def _results_of(plan: SavePlan, table: Table, file: str) -> list[WriteResult]:
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
