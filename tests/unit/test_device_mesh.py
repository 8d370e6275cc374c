"""Which sizes a mesh has in a world, and which worlds fit no mesh; four ranks build one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_agent.worker import MeshMismatch, mesh
from elastic_agent.worker.ranks.process_group import _device_type, sizes_of
from elastic_agent.worker.wire.environment import PROCESS_GROUP_TIMEOUT

WORLD = 4


@pytest.mark.parametrize(
    ("asked", "ranks", "sizes"),
    [
        ({"dp": "auto"}, 6, [6]),
        ({"dp": "auto", "shard": 4}, 8, [2, 4]),
        ({"dp": "auto", "shard": 4}, 4, [1, 4]),
        ({"dp": 2, "shard": "auto"}, 6, [2, 3]),
        ({"shard": "auto", "tp": 2}, 8, [4, 2]),
        ({"dp": "auto", "shard": 2, "tp": 2}, 12, [3, 2, 2]),
        ({"dp": 2, "tp": 2}, 4, [2, 2]),
    ],
)
def test_the_free_dimension_has_what_the_others_leave(asked: Any, ranks: int, sizes: list[int]) -> None:
    assert sizes_of(asked, ranks, 1) == dict(zip(asked, sizes, strict=True))


@pytest.mark.parametrize(
    ("asked", "ranks", "per_node", "text"),
    [
        (
            {"dp": "auto", "shard": 4},
            6,
            2,
            "a mesh of shard 4 fits 4, 8, 12, ... ranks, and the world has 6; start the agents with"
            " --nodes-multiple-of 2, if all nodes have 2 workers",
        ),
        ({"dp": "auto", "shard": 4}, 3, 1, "--nodes-multiple-of 4, if all nodes have 1 workers"),
        ({"dp": "auto", "shard": 2, "tp": 3}, 8, 4, "of shard 2 x tp 3 fits 6, 12, 18, ... ranks"),
        ({"dp": "auto", "shard": 2, "tp": 3}, 8, 4, "--nodes-multiple-of 3, if all nodes have 4 workers"),
        (
            {"dp": "auto", "shard": 4},
            6,
            4,
            "start the agents with 4 workers on every node (--nproc-per-node)",
        ),
        (
            {"dp": 2, "tp": 2},
            8,
            2,
            "of dp 2 x tp 2 fits 4 ranks, and the world has 8; start the agents with --min-nodes 2 --max-nodes 2",
        ),
        ({"tp": 3}, 4, 2, "start the agents with another --nproc-per-node"),
    ],
)
def test_a_world_that_does_not_fit_names_what_would(asked: Any, ranks: int, per_node: int, text: str) -> None:
    with pytest.raises(MeshMismatch) as refusal:
        sizes_of(asked, ranks, per_node)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    "asked",
    [{}, {"dp": "auto", "tp": "auto"}, {"dp": 0}, {"dp": True}, {"tp": "all"}, {"dp": "auto", "tp": 1.5}],
)
def test_other_sizes_are_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match='one may be "auto"'):
        sizes_of(asked, 4, 1)


@pytest.mark.parametrize(
    ("accelerator", "backends", "device"),
    [
        (None, "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda", "cuda:nccl", "cuda"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),
        ("xpu", "xpu:xccl", "xpu"),
    ],
)
def test_the_mesh_is_of_the_device_that_the_group_is_for(
    accelerator: str | None, backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = torch.device(accelerator) if accelerator is not None else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert _device_type() == device


def build(rank: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    os.environ[PROCESS_GROUP_TIMEOUT] = "45"
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD)
    found = mesh(shard=2, tp=1)
    assert found.mesh_dim_names == ("dp", "shard", "tp")
    assert found.mesh.tolist() == [[[0], [1]], [[2], [3]]]
    assert dist.get_process_group_ranks(found["shard"].get_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    for group in found.get_all_groups():
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=45)
    assert mesh(None, "auto").mesh.tolist() == [0, 1, 2, 3]
    with pytest.raises(MeshMismatch, match="--nodes-multiple-of 3"):
        mesh(tp=3)
    dist.barrier()
    dist.destroy_process_group()


def test_four_ranks_build_one(tmp_path: Path) -> None:
    mp.spawn(build, (str(tmp_path),), WORLD)
