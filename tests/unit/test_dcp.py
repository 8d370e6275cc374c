"""DCP's save and load into a checkpoint directory: by two ranks, read by two, by one, and by DCP alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker.dcp import ElasticStorageReader, ElasticStorageWriter
from elastic_agent.worker.errors import BadCheckpoint, NoUsableCheckpoint, StepNotGrowing


def state(seed: int, *, sharded: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    if sharded:
        fully_shard(net, mesh=DeviceMesh("cpu", list(range(2))))
    return {"model": get_model_state_dict(net), "counts": {"seen": seed, "of": torch.arange(3) + seed}}


def whole(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in found["model"].items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = whole(one), whole(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert one["counts"]["seen"] == other["counts"]["seen"]
    assert torch.equal(one["counts"]["of"], other["counts"]["of"])


def load(
    directory: str, seed: int = 99, *, sharded: bool = True, step: int | None = None
) -> tuple[Any, int | None]:
    reader, found = ElasticStorageReader(directory, step=step), state(seed, sharded=sharded)
    dcp.load(found, storage_reader=reader)
    return found, reader.step


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def attempts(folder: str) -> list[Path]:
    return sorted(one for one in Path(folder).glob("step-*") if one.is_dir())


def failure(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return next(iter(caught.value.failures.values()))[0]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    runs = f"{folder}/runs"
    assert ElasticStorageReader(runs).step is None
    dist.barrier()
    dcp.save(state(1), storage_writer=ElasticStorageWriter(runs, step=10))
    found, step = load(runs)
    assert step == 10
    same(found, state(1))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(1), storage_writer=ElasticStorageWriter(runs, step=10))
    assert isinstance(failure(caught), StepNotGrowing)

    second = state(2)
    pending = dcp.async_save(second, storage_writer=ElasticStorageWriter(runs, step=20))
    for tensor in second["model"].values():
        tensor.zero_()  # what training does meanwhile is not saved
    pending.result()  # type: ignore[union-attr]
    found, step = load(runs)
    assert step == 20
    same(found, state(2))

    dcp.save(state(3), storage_writer=ElasticStorageWriter(runs, step=30))
    dist.barrier()
    assert [one.name[:17] for one in attempts(runs)] == ["step-000000000020", "step-000000000030"]
    plain = state(9)
    dcp.load(plain, storage_reader=dcp.FileSystemReader(attempts(runs)[-1]))
    same(plain, state(3))
    if rank == 0:
        flip(attempts(runs)[-1] / "__1_0.distcp", 300)
    dist.barrier()
    found, step = load(runs)
    assert step == 20, "all ranks fall back alike"
    same(found, state(2))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_what_two_ranks_have_saved_two_ranks_one_and_dcp_load(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), 2)
    runs = str(tmp_path / "runs")
    found, step = load(runs, sharded=False)
    assert step == 20
    same(found, state(2, sharded=False))
    flip(attempts(runs)[0] / "__0_0.distcp", 300)
    with pytest.raises(CheckpointException) as caught:
        load(runs, sharded=False)
    assert isinstance(failure(caught), NoUsableCheckpoint)


@pytest.mark.filterwarnings("ignore")
def test_one_process_keeps_one(tmp_path: Path) -> None:
    runs = str(tmp_path)
    for step in (1, 2):
        dcp.save(state(step, sharded=False), storage_writer=ElasticStorageWriter(runs, step=step, keep=1))
    assert len(attempts(runs)) == 1
    reader, found = ElasticStorageReader(runs), state(99, sharded=False)
    assert reader.step == 2
    reader.reset()
    found, _ = load(runs, sharded=False)
    same(found, state(2, sharded=False))


@pytest.mark.filterwarnings("ignore")
def test_damage_that_a_read_finds_names_the_step_to_everyone(tmp_path: Path) -> None:
    runs = str(tmp_path)
    large = {"weight": torch.randn(12 << 20), "seen": 1}
    dcp.save(large, storage_writer=ElasticStorageWriter(runs, step=1))
    flip(attempts(runs)[0] / "__0_0.distcp", 300)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"weight": torch.zeros(12 << 20), "seen": 0}, storage_reader=ElasticStorageReader(runs))
    bad = failure(caught)
    assert isinstance(bad, BadCheckpoint)
    again = pickle.loads(pickle.dumps(bad))
    assert (again.step, str(again)) == (1, str(bad))
    assert "step=OLDER" in str(bad)
