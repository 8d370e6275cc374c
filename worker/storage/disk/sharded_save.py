"""A rank's way to a durable checkpoint: every rank that has a part writes it, and rank 0 commits.

Of a sharded state each rank has a part. One that is the same on all ranks is rank 0's part alone.

In the background each rank orders its own slot of the disk writer of its node, rank 0 also the commit, with DCP's index
as an open file: so both outlive the ranks that gave the orders. Where the writer cannot be asked, dies, or is too late,
a rank does what its writer should have done: it writes its part, rank 0 commits. A rank whose part cannot be written
says so in the directory of the attempt, and the others need not wait for it.

While all wait, each rank calls `write_now`; all gather whether it went well, and rank 0 calls `commit_now`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pickle import dumps
from typing import Any

import torch

from ...errors import CheckpointError
from ...state.sharding.layout import ShardLayout
from ...state.sharding.leaves import Path
from ...state.sharding.reading import dtype_of
from ...state.sharding.table import Table
from ...wire.messages import CommitOrder, ShardOrder, Tier
from ..memory.slot_memory import RankPlace, header_of_shards, header_of_whole
from ..memory.slots import HeldSlot, Slots
from .async_save import LEAST_S, SLOWEST_BYTES_PER_S, DiskSaver, Save, Task
from .commit import commit
from .parts import Part, refuse_part, write_held, write_part
from .shard_files import data_name


@dataclass(frozen=True, slots=True)
class ShardedSave(Save):
    """One save, as one rank takes part in it; rank 0 has named the attempt (`new_attempt`) to all.

    `most_bytes` is what the ranks of one node write, of that node which writes most. `twin_of`: a lower rank that has
    the same shards, and no twin itself. `metadata` are the bytes of DCP's index: of rank 0. `is_whole`: rank 0's part
    is the only one, and has all.
    """

    step: int
    attempt: str
    rank: int
    world_size: int
    most_bytes: int
    twin_of: int | None = None
    metadata: bytes = b""
    is_whole: bool = False

    @property
    def tier(self) -> Tier:
        return "local" if self.is_whole else "part"

    @property
    def within_s(self) -> float:
        """For which parts are waited for."""
        return max(LEAST_S, self.most_bytes / SLOWEST_BYTES_PER_S)

    def tasks(self, disk: DiskSaver, slots: Slots, held: HeldSlot) -> Sequence[Task]:
        assert self.step == held.header.step, "the copy is of another step"

        def write() -> int:
            try:
                return write_held(disk.files, self._part(disk), slots, held, disk.permission())
            except (CheckpointError, OSError, ValueError) as error:
                self.refuse(disk, error)
                raise

        part = Task(self._order(disk, slots, held), write, self.within_s, "part")
        if self.rank:
            return (part,)
        # The writer gives up by itself first, and says what was missing.
        within_s, order = self.within_s + LEAST_S, self._commit_order(disk)
        return part, Task(order, lambda: self._commit(disk), within_s, content=self.metadata)

    def refuse(self, disk: DiskSaver, error: Exception) -> None:
        refuse_part(disk.files, self.attempt, self.rank, error)

    # ---------------------------------------------------------------- while all wait

    def write_now(self, disk: DiskSaver, layout: ShardLayout, resumed_from: int, *, common: bool) -> int:
        """Write this rank's part: what `layout` says, with what is `common` or without; its size.

        Raises OSError, CheckpointError.
        """
        env, files = disk.env, disk.files
        place = RankPlace(env.node, env.generation, self.rank, env.local_rank, self.world_size, files.run.id)
        if self.is_whole:
            header = header_of_whole(layout, place, self.step, resumed_from)
        else:
            header = header_of_shards(layout, place, self.step, resumed_from, common=common)
        assert self.twin_of is None, "what is poured are the shards, too"
        disk.wrote(self.step, durable=False)
        may_change = disk.permission()
        if self.is_whole:
            with files.prepared(self.step, env.generation, may_change):
                pass  # what was left here may have filled the disk
        try:
            return write_part(files, self._part(disk), header, layout.pour, may_change).size
        except (CheckpointError, OSError, ValueError) as error:
            if not self.is_whole:
                self.refuse(disk, error)
            raise

    def commit_now(self, disk: DiskSaver) -> int:
        """Rank 0, when all have written: make a checkpoint of it; the size of all parts. Raises as `write_now`."""
        size = self._commit(disk)
        disk.wrote(self.step, durable=True)
        return size

    # ---------------------------------------------------------------- orders

    def _part(self, disk: DiskSaver) -> Part:
        return Part(self.attempt, disk.env.generation, self.twin_of)

    def _order(self, disk: DiskSaver, slots: Slots, held: HeldSlot) -> ShardOrder:
        return ShardOrder(
            slots.memory,
            disk.files.directory,
            os.path.basename(slots.folder),
            held.name,
            held.header.step,
            held.header.generation,
            disk.env.generation,
            disk.files.run.id,
            self.attempt,
            self.rank,
            self.twin_of,
        )

    def _commit_order(self, disk: DiskSaver) -> CommitOrder:
        files = disk.files
        return CommitOrder(
            files.directory,
            self.step,
            disk.env.generation,
            files.run.id,
            self.attempt,
            self.world_size,
            1 if self.is_whole else self.world_size,
            files.keep,
            tuple(sorted(files.good)),
            self.within_s,
            tuple(sorted(files.claim.bad_steps)),
        )

    def _commit(self, disk: DiskSaver) -> int:
        return commit(disk.files, self._commit_order(disk), self.metadata, disk.permission()).size


# ---------------------------------------------------------------- DCP's index


def metadata_of(tables: Mapping[int, Table]) -> bytes:
    """What `torch.distributed.checkpoint.FileSystemWriter` writes into `.metadata`."""
    return dumps(index_of(tables))


def index_of(tables: Mapping[int, Table]) -> Any:
    """DCP's `Metadata` of these copies, by rank.

    A piece, or a value, that several ranks hold is named once, in the file of the lowest.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    paths: dict[str, Path] = {}
    for rank in sorted(tables):
        file = data_name(rank)
        for row in tables[rank].shards:
            offsets, sizes = torch.Size(row.offsets), torch.Size(row.sizes)
            entry = entries.get(row.key)
            if entry is None:
                entry = TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(row)), torch.Size(row.shape), []
                )
                entries[row.key] = entry
            if not sizes.numel() and entry.size.numel():
                continue  # this rank has nothing of it
            index = MetadataIndex(row.key, offsets, len(entry.chunks))
            if index not in stored:
                entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
                stored[index] = filesystem._StorageInfo(file, row.begin, row.length)
        for value in tables[rank].values:
            if value.key not in entries:
                entries[value.key] = BytesStorageMetadata()
                stored[MetadataIndex(value.key)] = filesystem._StorageInfo(file, value.begin, value.length)
        for key, path in tables[rank].paths.items():
            paths.setdefault(key, path)
    metadata = Metadata(entries, paths, stored, StorageMeta())
    if "version" in {one.name for one in fields(Metadata)}:
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return metadata
