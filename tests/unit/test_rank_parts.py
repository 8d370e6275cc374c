"""Parts that each rank has for itself, in one process: what is declared, and what does not keep them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import Checkpointer, CheckpointError, NotPlainData
from elastic_agent.worker.checkpointing.replicated.contents import Boundary
from elastic_agent.worker.state.rank_parts import pack, rules_of, unpack
from elastic_agent.worker.state.sharding.parts import ShardedParts
from elastic_agent.worker.steps import progress


@pytest.mark.parametrize(
    ("per_rank", "from_rank_0", "text"),
    [
        (["c"], [], r"per_rank names \['c'\], which are no parts"),
        ("ab", ["b"], r"\['b'\] cannot be from_rank_0 and per_rank"),
        ({"a": None, "c": None}, [], r"per_rank names \['c'\]"),
    ],
    ids=str,
)
def test_wrong_declarations_are_refused_at_once(
    tmp_path: Path, per_rank: Any, from_rank_0: list[str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Checkpointer(tmp_path, {"a": {}, "b": {}}, per_rank=per_rank, from_rank_0=from_rank_0)
    assert rules_of(["b"], {"a", "b"}, ["a"]) == {"b": None}


def test_a_row_holds_what_the_part_held() -> None:
    shared = torch.arange(4)
    row = pack({"own": {1: shared, "view": shared[1:3], "text": "x"}}, 5)
    state = unpack(torch.frombuffer(bytearray(row), dtype=torch.uint8))["own"]
    assert (state[1].tolist(), state["view"].tolist(), state["text"]) == ([0, 1, 2, 3], [1, 2], "x")
    with pytest.raises(NotPlainData, match=r"step 5 .*random\.Random"):
        pack({"own": {"code": random.Random()}}, 5)


def test_a_rule_sees_all_ranks_and_is_not_asked_in_a_world_of_the_same_size() -> None:
    rows = [
        torch.frombuffer(bytearray(pack({"own": {"of": rank}}, 1)), dtype=torch.uint8) for rank in range(2)
    ]
    seen: list[Any] = []

    def rule(states: Any, rank: int, world_size: int) -> Any:
        seen.append((states, rank, world_size))
        return {"of": "new"}

    def loaded(rank: int, world_size: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        payload = {"state": {}, "ranks": rows, "rng": [torch.zeros(1)] * 2}
        ShardedParts({"own": own}, (), {"own": rule}).prepare_file(payload, rank, world_size).apply()
        return own

    assert loaded(1, 2) == {"of": 1}
    assert not seen
    assert loaded(2, 3) == {"of": "new"}
    assert seen == [({0: {"of": 0}, 1: {"of": 1}}, 2, 3)]


@pytest.mark.usefixtures("only_worker")
def test_no_rank_keeps_a_state_without_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path, {"own": {}, "text": {}}, per_rank=["own"])
    checkpoints.load()
    with pytest.raises(CheckpointError, match=r"just_in_time\(\) cannot keep \['own'\]"):
        checkpoints.just_in_time()
    planned = checkpoints._state
    assert not planned.saves_alone
    assert not planned.save_last_step_alone(1)
    assert "step 1 is not kept: ['own'] are each rank's own" in caplog.text
    assert set(planned.parts) == {"text"}, "what the guard of another Checkpointer looks after"
    boundary = Boundary({}, {})
    assert not planned.save_just_in_time(1, boundary)
    assert checkpoints.save_to_memory(1)
    assert planned.save_just_in_time(1, boundary), "the copy of that step has all ranks' own states already"
    assert not planned.save_just_in_time(2, boundary)


@pytest.mark.usefixtures("only_worker")
@pytest.mark.parametrize("way", ["save", "remember", "memory_every"])
def test_what_was_copied_to_memory_comes_back(tmp_path: Path, way: str) -> None:
    own = {"error": torch.arange(3.0)}
    every = 1 if way == "memory_every" else None
    checkpoints = Checkpointer(
        tmp_path / "disk", {"own": own, "text": {}}, per_rank=["own"], memory_every=every
    )
    for step in (1, 2):
        own["error"] = torch.full((step + 3,), float(step))
        if way == "memory_every":
            progress.step(step)
        else:
            assert getattr(checkpoints, way)(step)
    back: dict[str, Any] = {}
    assert Checkpointer(tmp_path / "disk", {"own": back, "text": {}}, per_rank=["own"]).load() == 2
    assert back["error"].tolist() == [2.0] * 5


@pytest.mark.usefixtures("own_processes")
def test_modules_and_optimizers_may_be_each_ranks_own(tmp_path: Path) -> None:
    """As with post-local SGD, whose ranks have other weights between two averages."""

    def made() -> tuple[torch.nn.Linear, torch.optim.Optimizer, Checkpointer]:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        return model, optimizer, Checkpointer(tmp_path, state, per_rank=state.keys())

    model, optimizer, checkpoints = made()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert checkpoints.save(1)
    loaded, its_optimizer, again = made()
    assert again.load() == 1
    assert str(loaded.state_dict()) == str(model.state_dict())
    assert str(its_optimizer.state_dict()) == str(optimizer.state_dict())
