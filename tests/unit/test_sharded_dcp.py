"""That `dcp.load` of torch reads what the ranks have written, twins' files included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elastic_agent.worker.state.sharding.items import Form, Items, Row
from elastic_agent.worker.state.sharding.layout import ShardLayouts
from elastic_agent.worker.state.sharding.leaves import Archives, key_of
from elastic_agent.worker.state.sharding.table import Table
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.commit import commit, new_attempt
from elastic_agent.worker.storage.disk.parts import Part, own_rows, write_held
from elastic_agent.worker.storage.disk.shard_files import data_name
from elastic_agent.worker.storage.disk.sharded_save import metadata_of
from elastic_agent.worker.storage.memory.copy_header import Header, RankShards
from elastic_agent.worker.wire.messages import CommitOrder
from tests.shards import RUN, in_slot, permitted

WHOLE = torch.arange(48, dtype=torch.float32).reshape(8, 6)
BIAS = torch.arange(3, dtype=torch.bfloat16)
WORLD_SIZE = 4
TWIN_OF = (None, None, 0, 1)
"""As in HSDP: two groups, each with the whole."""


def rng(rank: int) -> torch.Tensor:
    return torch.full((11,), rank, dtype=torch.uint8)


def items(rank: int) -> Items:
    half = rank % 2
    weight, own = ("model", "weight"), ("ranks", str(rank), "rng")
    rows = [
        Row(weight, key_of(weight), WHOLE.dtype, (8, 6), (4 * half, 0), (4, 6), False, 0),
        Row(own, key_of(own), torch.uint8, (11,), (0,), (11,), False, 1),
    ]
    tensors = [WHOLE[4 * half : 4 * half + 4], rng(rank)]
    values = []
    if rank == 0:
        bias, seen = ("model", "bias"), ("meta", "seen")
        rows.append(Row(bias, key_of(bias), BIAS.dtype, (3,), (0,), (3,), True, 2))
        tensors.append(BIAS)
        values.append((key_of(seen), seen, Archives().of(seen, 5, 10), True))
    return Items(Form(rows, len(tensors)), tensors, values, False, rank)


def test_dcp_reads_a_checkpoint_of_ours(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "disk", keep=1, run=RUN)
    attempt = new_attempt(files, 10, 1)
    tables: dict[int, Table] = {}
    for rank, twin_of in enumerate(TWIN_OF):
        layout = ShardLayouts().lay_out(items(rank))
        raw = bytearray(layout.size)
        layout.copy_to(memoryview(raw), torch.frombuffer(raw, dtype=torch.uint8))
        shards, place = RankShards(rank, layout.digest, rank == 0), layout.table_place
        header = Header(10, 1, 0, WORLD_SIZE, layout.size, run=RUN.id, shards=shards, table=place)
        slots = in_slot(tmp_path, str(tmp_path), rank, bytes(raw), header)
        with slots.hold("a") as held:
            write_held(files, Part(attempt, 1, twin_of), slots, held, permitted)
        tables[rank] = layout.table if twin_of is None else own_rows(layout.table, rank)[0]
    index = metadata_of(tables)
    manifest = commit(
        files, CommitOrder("", 10, 1, RUN.id, attempt, WORLD_SIZE, WORLD_SIZE, 1, (), 0.0), index, permitted
    )

    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(8, 6), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "ranks": {str(rank): {"rng": torch.zeros(11, dtype=torch.uint8)} for rank in range(WORLD_SIZE)},
        "meta": {"seen": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "disk" / manifest.file, no_dist=True)
    assert torch.equal(state["model"]["weight"], WHOLE)
    assert torch.equal(state["model"]["bias"], BIAS)
    assert all(torch.equal(state["ranks"][str(rank)]["rng"], rng(rank)) for rank in range(WORLD_SIZE))
    assert state["meta"] == {"seen": 5}
    size = (tmp_path / "disk" / manifest.file / data_name(2)).stat().st_size
    assert size < (tmp_path / "disk" / manifest.file / data_name(1)).stat().st_size

    dcp_to_torch_save(tmp_path / "disk" / manifest.file, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(one["model"]["weight"], WHOLE)
    assert one["meta"] == {"seen": 5}
