"""DCP's plans, as items of a copy, and as reads of copies."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import CheckpointMismatch, NotPlainData
from ..state.sharding.items import Form, Items, Row
from ..state.sharding.pieces import Box, numel, without_plain_values
from ..state.sharding.reading import OpenCopy, Reader
from ..state.sharding.table import Table

READ_BYTES = 256 << 20
"""Of tensors that are read before they are copied to their places."""


# ---------------------------------------------------------------- what a plan writes


def size_of(plan: SavePlan) -> int:
    """Of its tensors, in bytes."""
    return sum(
        numel(tuple(item.tensor_data.chunk.sizes)) * item.tensor_data.properties.dtype.itemsize
        for item in plan.items
        if item.tensor_data is not None
    )


def items_of(plan: SavePlan, planner: SavePlanner, rank: int, before: Form | None) -> Items:
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


def results_of(plan: SavePlan, table: Table, file: str) -> list[WriteResult]:
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


def read_plan(plan: LoadPlan, planner: LoadPlanner, copies: Mapping[int, OpenCopy]) -> None:
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
