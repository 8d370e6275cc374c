"""A replicated state and a sharded one have one format on disk: a script with either goes on from both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic_agent.worker import Checkpointer, CheckpointError, CheckpointMismatch, NotPlainData
from elastic_agent.worker.checkpointing.loading.node_sharing import SharedBytes
from elastic_agent.worker.checkpointing.loading.selection import Source
from elastic_agent.worker.checkpointing.loading.whole_copies import WholeCopies
from elastic_agent.worker.checkpointing.replicated.replicated_state import ReplicatedState
from tests.shards import state_on_disk

WORLD = 2


class Training:
    """A model with tied weights, and Adam with a scheduler."""

    def __init__(self, directory: str, *, is_sharded: bool) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
        )
        self.model[2].weight = self.model[0].weight
        if is_sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.meta = {"done": 0}
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "meta": self.meta,
        }
        self.checkpoints = Checkpointer(directory, state)
        assert isinstance(self.checkpoints._state, ReplicatedState) is not is_sharded

    def train(self) -> None:
        self.model(torch.arange(24.0).reshape(4, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.meta["done"] += 1

    def whole(self) -> dict[str, Any]:
        found = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        for name, weight in self.model.named_parameters():
            found |= {f"{name}.{key}": one for key, one in self.optimizer.state[weight].items()}
        whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in found.items()}
        return {key: one.detach().clone() for key, one in whole.items()}


def go_on(rank: int, folder: str, saved: bool, loads: bool) -> None:
    """`saved`, and `loads`: whether it is a sharded state."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    first = Training(f"{folder}/disk", is_sharded=saved)
    for _ in range(2):
        first.train()
    assert first.checkpoints.save(2)
    torch.manual_seed(rank)
    assert first.checkpoints.save(3)
    drawn, expected, rate = torch.rand(2), first.whole(), first.optimizer.param_groups[0]["lr"]
    first.checkpoints.close()

    again = Training(f"{folder}/disk", is_sharded=loads)
    assert again.checkpoints.load() == 3
    assert torch.equal(torch.rand(2), drawn), "each rank has its random state"
    assert again.meta == {"done": 2}
    assert again.optimizer.param_groups[0]["lr"] == rate
    found = again.whole()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], one) for key, one in expected.items())
    again.train()
    assert again.checkpoints.save(4)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("saved", "loads"), [(False, True), (True, False)], ids=["to shards", "from shards"])
def test_a_script_goes_on_from_what_the_other_kind_has_saved(
    tmp_path: Path, saved: bool, loads: bool
) -> None:
    mp.spawn(go_on, (str(tmp_path), saved, loads), WORLD)
    assert state_on_disk(tmp_path / "disk", 4)["meta"]["done"] == 3


class Counting(torch.optim.SGD):
    """It has a number beside states and groups."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({key: one for key, one in state_dict.items() if key != "calls"})


@pytest.mark.usefixtures("own_processes")
def test_all_that_an_optimizer_keeps_comes_back(tmp_path: Path) -> None:
    def made() -> tuple[nn.Linear, Counting, Checkpointer]:
        model = nn.Linear(2, 2)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})

    model, optimizer, checkpoints = made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.calls = 5
    optimizer.state["all"] = {"seen": torch.arange(3), 7: "x"}  # type: ignore[index]  # of no parameter
    assert checkpoints.save(1)
    _, loaded, again = made()
    assert again.load() == 1
    assert loaded.calls == 5
    assert str(loaded.state["all"]) == str(optimizer.state["all"])  # type: ignore[index]
    assert str(loaded.state_dict()) == str(optimizer.state_dict())


@pytest.mark.usefixtures("own_processes")
def test_what_would_have_one_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotPlainData, match=r"two values at 'meta\.a\.b'"):
        Checkpointer(tmp_path, {"meta": {"a.b": 1, "a": {"b": 2}}}).save(1)


@pytest.mark.usefixtures("own_processes")
def test_an_evaluation_may_have_an_optimizer_without_its_model(tmp_path: Path) -> None:
    """The parameters are then known by their order alone, as in torch's own `load_state_dict`."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}).save(1)
    alone = torch.optim.Adam(nn.Linear(2, 2).parameters())
    assert Checkpointer(tmp_path, {"optimizer": alone}, read_only=True).load() == 1
    assert str(alone.state_dict()) == str(optimizer.state_dict())


@pytest.mark.usefixtures("own_processes")
def test_an_optimizer_of_each_rank_is_not_loaded_into_one_of_another_kind(tmp_path: Path) -> None:
    """torch takes that without a word."""
    one = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    assert Checkpointer(tmp_path, {"own": one}, per_rank=["own"]).save(1)
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointMismatch, match="another optimizer's"):
        Checkpointer(tmp_path, {"own": other}, per_rank=["own"], read_only=True).load()


def load_where_rank_1_cannot_map(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD)
    training = Training(f"{folder}/disk", is_sharded=False)
    assert training.checkpoints.save(1)
    if rank == 1:
        really_bring = WholeCopies.bring

        def bring(self: WholeCopies, source: Source) -> SharedBytes:
            really_bring(self, source)  # what is mapped is mapped after the last exchange
            raise OSError("no room to map it")

        WholeCopies.bring = bring  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no room to map it"):
        training.checkpoints.load()
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_cannot_map_a_copy_leaves_no_other_one_waiting(tmp_path: Path) -> None:
    mp.spawn(load_where_rank_1_cannot_map, (str(tmp_path),), WORLD)
