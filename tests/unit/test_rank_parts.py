"""Parts that each rank has for itself, in one process: what is declared, and what does not keep them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import Checkpointer, CheckpointError, NotPlainData
from elastic_agent.worker.state.rank_parts import pack, rules_of, states_for, unpack


@pytest.mark.parametrize(
    ("of_each_rank", "of_rank_0", "text"),
    [
        (["c"], [], r"of_each_rank names \['c'\], which are no parts"),
        ("ab", ["b"], r"\['b'\] cannot be of_rank_0 and of_each_rank"),
        ({"a": None, "c": None}, [], r"of_each_rank names \['c'\]"),
    ],
    ids=str,
)
def test_wrong_declarations_are_refused_at_once(
    tmp_path: Path, of_each_rank: Any, of_rank_0: list[str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Checkpointer(tmp_path, {"a": {}, "b": {}}, of_each_rank=of_each_rank, of_rank_0=of_rank_0)
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

    assert states_for(1, 2, rows, {"own": rule}, "x") == {"own": {"of": 1}}
    assert not seen
    assert states_for(2, 3, rows, {"own": rule}, "x") == {"own": {"of": "new"}}
    assert seen == [({0: {"of": 0}, 1: {"of": 1}}, 2, 3)]
    assert states_for(0, 3, [], {}, "x") == {}


@pytest.mark.usefixtures("only_worker")
def test_ways_to_keep_a_state_without_the_other_ranks_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"of_each_rank": ["own"]}
    with pytest.raises(
        CheckpointError, match=r"memory_every keeps no parts that are of_each_rank, as \['own'\]"
    ):
        Checkpointer(tmp_path, {"own": {}}, memory_every=2, **options)
    checkpoints = Checkpointer(tmp_path, {"own": {}}, **options)
    checkpoints.load()
    with pytest.raises(CheckpointError, match="remember\\(\\) keeps no parts"):
        checkpoints.remember(1)
    with pytest.raises(CheckpointError, match="just_in_time\\(\\) keeps no parts"):
        checkpoints.just_in_time()
    assert not checkpoints._planned.saves_alone
    assert not checkpoints._planned.save_just_in_time(1, {}), "beside another Checkpointer that is guarded"


@pytest.mark.usefixtures("only_worker")
def test_what_was_saved_comes_back_from_memory_and_from_disk(tmp_path: Path) -> None:
    own = {"error": torch.arange(3.0)}
    checkpoints = Checkpointer(tmp_path / "disk", {"own": own, "text": {}}, of_each_rank=["own"])
    assert checkpoints.save(1)
    assert checkpoints.wait()
    own["error"] = torch.zeros(5)
    assert checkpoints.save(2)
    back: dict[str, Any] = {}
    assert Checkpointer(tmp_path / "disk", {"own": back, "text": {}}, of_each_rank=["own"]).load() == 2
    assert back["error"].tolist() == [0.0] * 5
