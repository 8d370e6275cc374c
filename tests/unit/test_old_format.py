"""Sharded checkpoints that the tree at 55e3c86c has written are read for one release."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker import Checkpointer
from elastic_agent.worker.dcp import ElasticStorageReader
from elastic_agent.worker.errors import BadCheckpoint
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.environment import Run

WORLD_SIZE = 4
"""Of the checkpoint with twins: ranks 2 and 3 have the shards of ranks 0 and 1."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("sharded_checkpoints_of_55e3c86c.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def load_and_go_on(rank: int, folder: str, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    model = nn.Linear(6, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    meta = {"done": 0}
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "meta": meta}
    checkpoints = Checkpointer(f"{folder}/fsdp2", parts, keep=1)
    assert checkpoints.load() == 1
    assert meta == {"done": 1}
    weight, bias = (parameter.full_tensor() for parameter in model.parameters())
    assert torch.equal(weight, torch.arange(24.0).reshape(4, 6) - 1)
    assert torch.equal(bias, torch.arange(4.0) - 1)
    for parameter in model.parameters():
        assert torch.equal(
            optimizer.state[parameter]["momentum_buffer"].full_tensor(), torch.ones(parameter.shape)
        )
    if world_size == 2:
        expected = torch.random.default_generator.get_state()
        torch.manual_seed(rank)
        assert torch.equal(torch.get_rng_state(), expected)
    assert checkpoints.save(2)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 1])
def test_a_job_goes_on_from_what_it_saved_before_the_update(old: Path, world_size: int) -> None:
    mp.spawn(load_and_go_on, (str(old), world_size), world_size)
    (manifest,) = (old / "fsdp2").glob("step-*.json")
    (attempt,) = (path for path in (old / "fsdp2").iterdir() if path.is_dir())
    assert int(manifest.stem.removeprefix("step-")) == 2
    assert "run-of-55e3c86c" not in attempt.name, "what was loaded is taken over, and deleted in time"


def test_what_twins_have_for_themselves_is_there(old: Path) -> None:
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(8, 6), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "ranks": {str(rank): {"rng": torch.zeros(11, dtype=torch.uint8)} for rank in range(WORLD_SIZE)},
        "meta": {"seen": 0},
    }
    reader = ElasticStorageReader(old / "twins" / "disk", memory=False)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["model"]["weight"], torch.arange(48.0).reshape(8, 6))
    assert state["meta"] == {"seen": 5}
    for rank in range(WORLD_SIZE):
        assert torch.equal(state["ranks"][str(rank)]["rng"], torch.full((11,), rank, dtype=torch.uint8))


def test_a_twin_names_the_rank_that_has_its_shards(old: Path) -> None:
    files = CheckpointFiles(old / "twins" / "disk", keep=1, run=Run("reader"))
    manifest = files.newest_manifest()
    assert manifest is not None
    twins = []
    for rank in range(WORLD_SIZE):
        with files.open_rank(manifest, rank) as copy:
            twins.append(copy.twin_of)
    assert twins == [None, None, 0, 1]


@pytest.mark.parametrize("name", ["files.json", "__1_0.json", "__1_0.distcp"])
def test_one_that_is_damaged_is_not_believed(old: Path, name: str) -> None:
    files = CheckpointFiles(old / "twins" / "disk", keep=1, run=Run("reader"))
    manifest = files.newest_manifest()
    assert manifest is not None
    path = old / "twins" / "disk" / manifest.file / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:])
    with pytest.raises(BadCheckpoint):  # noqa: PT012  # either finds it
        files.open(manifest.step).stream.close()
        with files.open_rank(manifest, 1) as copy:
            copy.read(0, bytearray(copy.footer.size))
