"""The index of a checkpoint's files, by which `torch.distributed.checkpoint` (DCP) finds what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pickle import dumps
from typing import Any

import torch

from ...state.sharding.leaves import Path
from ...state.sharding.reading import dtype_of
from ...state.sharding.table import Table
from .shard_files import data_name


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
