"""Saves what DCP plans: into memory and from there to disk, or to disk while all ranks wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pickle import dumps
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..errors import BadCheckpoint, SaveFailed, StepNotGrowing
from ..steps import progress
from ..storage.disk.checkpoint_files import CheckpointFiles
from ..storage.disk.manifests import manifest_of
from ..storage.disk.shard_files import data_name
from ..storage.disk.sharded.commit import new_attempt
from ..storage.disk.sharded.shard_saver import ShardedSave
from ..wire.files import open_directory
from ..wire.run import Run
from .agreement import Agreed, Brought, agree
from .directory import DirectoryOfRank, Lent, directory_of_rank
from .plans import items_of, results_of, size_of


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one rank writes, and how; the coordinator gives it to all ranks with their plans."""

    step: int
    attempt: str
    run: Run
    rank: int
    world_size: int
    agreed: Agreed

    @property
    def save(self) -> ShardedSave:
        return ShardedSave(self.step, self.attempt, self.rank, self.world_size, self.agreed.most_bytes)


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
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to retain")
        self._directory = os.path.abspath(directory)
        self._step = step
        self._keep = keep
        self._durable = durable
        self._target: _Target | None = None
        self._lent: Lent | None = None
        """The coordinator's copy, which the disk writer has not been given yet."""
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
        refuse_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("ElasticStorageWriter needs use_collectives=True: the ranks make one checkpoint")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._started_s = time.monotonic()
        return replace(plan, storage_data=self._own().bring(self._step, size_of(plan)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        own = self._own()
        self._check_grows(own.files)
        own.files.claim.uphold(self._step - 1)
        attempt = new_attempt(own.files, self._step, own.env.generation)
        brought = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Brought)]
        # A planner may have left out what came with the plans: then nothing is known of the others' memory.
        agreed = agree(brought, own.env.generation, own.keep) if len(brought) == len(plans) else Agreed()
        agreed = replace(agreed, durable=agreed.durable or self._durable)
        return [
            replace(plan, storage_data=_Target(self._step, attempt, own.files.run, rank, len(plans), agreed))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target = plan.storage_data
        if not isinstance(target, _Target) or target.step != self._step:
            raise ValueError(
                f"the plan is not of step {self._step}: make the planner without enable_plan_caching"
            )
        self._target = target
        directory = directory_of_rank(self._directory, target.run)
        items = items_of(plan, planner, target.rank, directory.form)
        directory.form = items.form
        layout = directory.layouts.lay_out(items)
        with self._typed():
            self._lent = directory.take(target.save, target.agreed, layout)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results_of(plan, layout.table, data_name(target.rank)))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        target = self._target
        assert target is not None, "write_data comes first"
        metadata.storage_data = {one.index: one.storage_data for several in results for one in several}
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        own = self._own()
        own.files.keep = self._keep
        lent, self._lent = self._lent, None
        size, saved = None, False
        try:
            with self._typed():
                _look_back(own.files, self._step)
                save = replace(target.save, metadata=dumps(metadata))
                size = own.commit(save, lent, durable=target.agreed.durable)
            saved = True
        finally:
            if lent is None:  # the agent reports what its disk writer does
                took_s = time.monotonic() - self._started_s
                progress.checkpoint_save(self._step, "ok" if saved else "error", took_s, size or 0)

    def _own(self) -> DirectoryOfRank:
        return directory_of_rank(self._directory)

    def _check_grows(self, files: CheckpointFiles) -> None:
        newest = files.newest_manifest(lambda one: one.run != files.run.id)
        if newest is not None and newest.run == files.run.id and newest.step >= self._step:
            raise StepNotGrowing(
                f"step {self._step} is not beyond step {newest.step}, the newest that this run has saved in "
                f"{self._directory}: give each ElasticStorageWriter the number of steps that its state holds"
            )

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SaveFailed(f"step {self._step} not saved in {self._directory}: {error}") from error


def refuse_id(checkpoint_id: object) -> None:
    if checkpoint_id is not None:
        raise ValueError("leave checkpoint_id out: the writer and the reader have their directory")


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
