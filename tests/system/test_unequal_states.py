"""What is not the same on all ranks is refused by name on all of them, on every way on which a state is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .test_checkpointer import Worlds, worlds

__all__ = ["worlds"]


def run(worlds: Worlds, scenario: str, directory: Path, **more: Any) -> list[dict[str, Any]]:
    return worlds.answers(scenario, [{"directory": str(directory), **more}] * 2)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("partial", ["'rows.0' of part 'table'", "redistribute it"], marks=pytest.mark.long),
        (
            "shards",
            [
                "'0.bias' of part 'model'",
                "other values on rank 1 than on rank 0",
                "from_rank_0=['model', 'optimizer']",
            ],
        ),
    ],
)
def test_a_sharded_state_is_refused_by_name_on_all_ranks(
    worlds: Worlds, tmp_path: Path, kind: str, names: list[str]
) -> None:
    answers = run(worlds, "save_unequal", tmp_path / "checkpoints", kind=kind)
    assert [answer["raised"] for answer in answers] == [
        "NotReplicated" if kind == "shards" else "Sharded"
    ] * 2
    for name in names:
        assert all(name in answer["text"] for answer in answers), answers
    assert [answer["files"] for answer in answers] == [[]] * 2, "nothing was written"


def test_what_can_be_told_by_type_is_refused_before_training(worlds: Worlds, tmp_path: Path) -> None:
    answers = run(worlds, "load_unequal", tmp_path, kind="partial")
    assert [answer["raised"] for answer in answers] == ["Sharded"] * 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("late_feedback", "'0' of part 'compression'"),
        pytest.param("late_in_optimizer", "'state.0.error' of part 'optimizer'", marks=pytest.mark.long),
    ],
)
def test_error_feedback_that_begins_late_is_refused_when_it_has_begun(
    worlds: Worlds, tmp_path: Path, kind: str, name: str
) -> None:
    answers = run(worlds, "save_unequal", tmp_path, kind=kind, times=4)
    for answer in answers:
        assert answer["raised"] == "NotReplicated"
        assert f"{name} has other values" in answer["text"]
        assert [name[:17] for name in answer["files"] if re.fullmatch(r"step-.*\.json", name)] == [
            "step-000000000001", "step-000000000002"
        ]  # fmt: skip


@pytest.mark.long
def test_shards_that_were_equal_at_the_beginning_are_refused_after_it(worlds: Worlds, tmp_path: Path) -> None:
    for answer in run(worlds, "save_what_has_just_begun", tmp_path):
        assert answer["first"] is True
        assert answer["raised"] == "NotReplicated"


@pytest.mark.long
def test_what_differs_by_right_is_saved(worlds: Worlds, tmp_path: Path) -> None:
    """Statistics of BatchNorm, numbers, and what is declared to be rank 0's."""
    answers = run(worlds, "save_unequal", tmp_path / "ddp", kind="ddp", times=2)
    assert [answer["returned"] for answer in answers] == [[True, True]] * 2
    answers = run(worlds, "save_unequal", tmp_path / "own", kind="own")
    assert all("'sample' of part 'best'" in answer["text"] for answer in answers)
    answers = run(worlds, "save_unequal", tmp_path / "own", kind="own", own=["best"])
    assert [answer["returned"] for answer in answers] == [[True]] * 2


WAYS = [
    "memory_every",
    *(
        pytest.param(way, marks=pytest.mark.long)
        for way in ("remember", "just in time", "keep", "keep alone")
    ),
]


@pytest.mark.parametrize("way", WAYS)
def test_no_way_into_memory_is_open_to_what_is_not_the_same(worlds: Worlds, tmp_path: Path, way: str) -> None:
    answers = run(worlds, "copy_unequal", tmp_path / "x", kind="shards", way=way)
    assert [answer.get("raised") for answer in answers] == ["NotReplicated"] * 2
    assert all("'0.bias' of part 'model'" in answer["text"] for answer in answers)
    assert [answer["copies"] for answer in answers] == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_every_way_into_memory_is_open_to_what_is_the_same(worlds: Worlds, tmp_path: Path, way: str) -> None:
    answers = run(worlds, "copy_unequal", tmp_path / "x", kind="ddp", way=way)
    assert [answer.get("raised") for answer in answers] == [None] * 2
    assert set(answers[0]["copies"]) == {1}


@pytest.mark.long
def test_a_copy_does_not_wait_for_ever_for_a_rank_that_does_not_come(worlds: Worlds, tmp_path: Path) -> None:
    answers = run(worlds, "copy_where_one_rank_does_not_come", tmp_path / "x")
    assert answers[0]["remembered"] == [False, False]
    assert worlds.errors.read_text().count("not all ranks have come to this step") == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "growing"])
def test_ranks_are_compared_once(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    """Also where rank 0's own table grows with each step: the other ranks would not come to compare it."""
    answers = run(worlds, "count_comparisons", tmp_path / "x", kind=kind)
    assert answers == [{"looks": 1, "remembered": [True] * 5}] * 2


@pytest.mark.long
def test_ranks_of_other_nodes_are_compared_too_and_copy_nothing_of_rank_0s(
    worlds: Worlds, tmp_path: Path
) -> None:
    answers = run(worlds, "count_comparisons", tmp_path / "x", kind="growing", nodes=2)
    assert answers == [{"looks": 1, "remembered": [copied] * 5} for copied in (True, False)]


@pytest.mark.long
def test_a_second_load_begins_another_comparison(worlds: Worlds, tmp_path: Path) -> None:
    assert run(worlds, "load_twice", tmp_path / "x") == [{"remembered": [True, True]}] * 2


# ---------------------------------------------------------------- a load while a save is under way


@pytest.mark.long
def test_a_load_ends_the_save_that_is_under_way(worlds: Worlds, tmp_path: Path) -> None:
    for answer in run(worlds, "load_after_a_save", tmp_path / "x", refused=False):
        assert (answer["saved"], answer["returned"]) == (True, 1)
        assert "step-000000000001.json" in answer["files"]


@pytest.mark.long
def test_what_became_of_that_save_is_heard_by_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    for answer in run(worlds, "load_after_a_save", tmp_path / "x", refused=True):
        assert answer["raised"] == "Fenced"
        assert "generation 2 has replaced it" in answer["text"]
