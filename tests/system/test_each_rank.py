"""What each rank has for itself goes on after a kill and after planned changes: PowerSGD ends as if there were none."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.shards import state_on_disk

from .harness import Job
from .test_checkpointer import Worlds, in_directories, spoil, worlds
from .test_just_in_time import Run, digest

__all__ = ["worlds"]


class CompressedRun(Run):
    script = Path(__file__).with_name("power_sgd_ddp.py")


def end(directory: Path, steps: int) -> dict[str, str]:
    """The digest of each part of the final state, and of each rank's own."""
    saved = state_on_disk(directory, steps)
    found = {name: digest(part) for name, part in saved.items()}
    for rank, of_rank in saved["ranks"].items():
        own = of_rank["parts"]["hook"]
        assert own["error_dict"], "PowerSGD has begun"
        found |= {f"rank {rank} {name}": digest(value) for name, value in own.items()}
    return found


@pytest.mark.long
@pytest.mark.timeout(120)
def test_power_sgd_ends_as_if_it_had_not_been_disturbed(job: Job, worlds: Worlds, tmp_path: Path) -> None:
    steps = 65
    how = {"RANK_1_DIES_AFTER": "27", "MEMORY_EVERY": "4", "STEP_S": "0.03", "HOLD_EVERY": "30"}
    run = CompressedRun(job, "disturbed", 1, steps, **how)
    job.wait_for(lambda: run.newest(2) > 26, "steps after the kill")
    assert run.begun(2) == 24
    (first,) = run.agents
    first.signal(signal.SIGTERM)
    assert first.exit_code() == 143
    last = run.last(2)
    run.go()
    run.agents = [run.start("again")]
    args = [
        {**one, "steps": steps} for one in in_directories(tmp_path / "undisturbed", tmp_path / "undisturbed")
    ]
    worlds.answers("power_sgd", args, STEPS_FILE=str(tmp_path / "steps of no interest"))
    undisturbed = end(tmp_path / "undisturbed", steps)
    assert undisturbed["rank 0 error_dict"] != undisturbed["rank 1 error_dict"]
    assert run.agents[0].exit_code(120) == 0
    assert end(run.directory, steps) == undisturbed
    assert run.notes(what="begun")[-1]["step"] == last, "a planned change loses no step"


def saved_own(worlds: Worlds, directory: Path, *steps: int, ranks: int = 2) -> None:
    args = [{**one, "steps": steps} for one in in_directories(*[directory] * ranks)]
    assert [answer["raised"] for answer in worlds.answers("save_own", args)] == [""] * ranks


def test_each_rank_gets_its_own_wherever_the_file_is(worlds: Worlds, tmp_path: Path) -> None:
    saved_own(worlds, tmp_path / "0", 5, 6)
    for args in (
        in_directories(tmp_path / "0", tmp_path / "0"),
        in_directories(tmp_path / "1", tmp_path / "0"),
    ):
        answers = worlds.answers("load_own", args)
        assert [(one["step"], one["of"], one["length"]) for one in answers] == [(6, 0, 6), (6, 1, 16)]


@pytest.mark.parametrize("remembers", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("lost", [*(pytest.param(lost, marks=pytest.mark.long) for lost in ((), (0,))), (1,)])
def test_each_rank_gets_its_own_from_memory_also_of_a_node_that_was_lost(
    worlds: Worlds, tmp_path: Path, lost: tuple[int, ...], remembers: bool
) -> None:
    args = in_directories(tmp_path / "a", tmp_path / "b")
    more = {"steps": [4, 5], "remembers": remembers}
    before = [{**one, **more, "memory": str(tmp_path / f"node-{rank}")} for rank, one in enumerate(args)]
    assert [answer["raised"] for answer in worlds.answers("save_own", before)] == ["", ""]
    for directory in ("a", "b"):
        shutil.rmtree(tmp_path / directory, ignore_errors=True)
    nodes = [tmp_path / ("new-" if rank in lost else "node-") for rank in range(2)]
    after = [{**one, "memory": f"{nodes[rank]}{rank}"} for rank, one in enumerate(args)]
    answers = worlds.answers("load_own", after, ELASTIC_AGENT_GENERATION="2")
    assert [(one["step"], one["of"], one["length"]) for one in answers] == [(5, 0, 5), (5, 1, 15)]


@pytest.mark.long
def test_what_is_damaged_gives_way_to_the_older_one_of_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    saved_own(worlds, tmp_path, 5, 6)
    spoil(tmp_path, 6)
    answers = worlds.answers("load_own", in_directories(tmp_path, tmp_path))
    assert [(one["step"], one["of"], one["length"]) for one in answers] == [(5, 0, 5), (5, 1, 15)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_world_of_another_size_is_refused_on_all_ranks_unless_there_is_a_rule(
    worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    saved_own(worlds, tmp_path, 5)
    args = in_directories(*[tmp_path] * ranks)
    answers = worlds.answers("load_own", args)
    assert [answer["raised"] for answer in answers] == ["OtherWorldSize"] * ranks
    for answer in answers:
        assert f"holds ['own'] of each of 2 ranks, and this world has {ranks}" in answer["text"]
        assert set(answer["as"]) == {"the script set it"}
    answers = worlds.answers("load_own", [{**one, "rule": "merges"} for one in args])
    assert [(one["of"], one["length"]) for one in answers] == [([rank, ranks], 20) for rank in range(ranks)]


@pytest.mark.parametrize("remembers", [pytest.param(False, marks=pytest.mark.long), True])
def test_nothing_is_lost_or_doubled_where_the_world_grows_and_shrinks(
    worlds: Worlds, tmp_path: Path, remembers: bool
) -> None:
    """Node 1 of the second world is another one than before: it has no copy of what it loads."""
    for generation, ranks in enumerate((2, 3, 2, 1, 2), start=1):
        args: list[dict[str, Any]] = in_directories(*[tmp_path / "disk"] * ranks)
        for rank, one in enumerate(args if remembers else ()):
            node = tmp_path / ("new-1" if (generation, rank) == (2, 1) else f"node-{rank}")
            one.update(memory=str(node), remembers=True)
        answers = worlds.answers("go_on", args, ELASTIC_AGENT_GENERATION=str(generation))
        assert [answer["step"] for answer in answers] == [generation - 1] * ranks
    owned = sorted(one for answer in answers for one in answer["owns"])
    assert owned == [[step, rank] for step, ranks in enumerate((2, 3, 2, 1, 2), 1) for rank in range(ranks)]


@pytest.mark.long
def test_a_rule_that_breaks_on_one_rank_stops_all(worlds: Worlds, tmp_path: Path) -> None:
    saved_own(worlds, tmp_path, 5)
    args = [{**one, "rule": "breaks"} for one in in_directories(*[tmp_path] * 3)]
    answers = worlds.answers("load_own", args)
    assert [answer["raised"] for answer in answers] == ["CheckpointMismatch"] * 3
    assert all("the rule of 'own' in per_rank cannot reshape" in answer["text"] for answer in answers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"own": [], "shared": ["text", "own"]}, "the checkpoint has no part 'own'"),
        ({"own": []}, "holds of rank 0 ['own'], this script declares []"),
        ({"own": ["own", "more"]}, "holds of rank 0 ['own'], this script declares ['more', 'own']"),
        ({"own": ["own", "text"], "shared": ["other"]}, "has the parts ['text'], which this script does not have"),
    ],
    ids=str,
)  # fmt: skip
def test_other_declarations_are_refused(
    worlds: Worlds, tmp_path: Path, parts: dict[str, Any], text: str
) -> None:
    saved_own(worlds, tmp_path, 5)
    answers = worlds.answers("load_own", [{**one, **parts} for one in in_directories(tmp_path, tmp_path)])
    assert [answer["raised"] for answer in answers] == ["CheckpointMismatch"] * 2
    assert text in answers[0]["text"]


@pytest.mark.long
def test_a_checkpoint_without_ranks_own_states_is_refused_by_name(worlds: Worlds, tmp_path: Path) -> None:
    """As one that was saved before the script had such a part, or by an older version."""
    args = [{**one, "steps": [5], "declares": False} for one in in_directories(tmp_path, tmp_path)]
    worlds.answers("save_own", args)
    answers = worlds.answers("load_own", in_directories(tmp_path, tmp_path))
    assert [answer["raised"] for answer in answers] == ["CheckpointMismatch"] * 2
    assert "holds of rank 0 [], this script declares ['own']" in answers[0]["text"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("of_rank_1", "raised", "text"),
    [
        ({"declares": False}, "CheckpointError", "ranks [1] declare no part per_rank and others do"),
        ({"code": True}, "NotPlainData", "random.Random"),
    ],
    ids=str,
)
def test_what_one_rank_cannot_save_is_refused_on_all(
    worlds: Worlds, tmp_path: Path, of_rank_1: dict[str, Any], raised: str, text: str
) -> None:
    first, second = [{**one, "steps": [5]} for one in in_directories(tmp_path, tmp_path)]
    answers = worlds.answers("save_own", [first, {**second, **of_rank_1}])
    assert [answer["raised"] for answer in answers] == [raised] * 2
    assert all(text in answer["text"] for answer in answers)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.long
@pytest.mark.parametrize("with_memory", [(), (0,), (1,)], ids=str)
def test_ranks_remember_together_also_where_a_node_has_no_memory(
    worlds: Worlds, tmp_path: Path, with_memory: tuple[int, ...]
) -> None:
    args = [{**one, "steps": [5, 6], "remembers": True} for one in in_directories(tmp_path, tmp_path)]
    for rank in with_memory:
        args[rank]["memory"] = str(tmp_path / f"node-{rank}")
    answers = worlds.answers("save_own", args)
    assert [answer["remembered"] for answer in answers] == [rank in with_memory for rank in range(2)]
    after = [{"directory": str(tmp_path), "memory": str(tmp_path / f"node-{rank}")} for rank in range(2)]
    answers = worlds.answers("load_own", after, ELASTIC_AGENT_GENERATION="2")
    found = [(one["step"], one["of"], one["length"]) for one in answers]
    assert found == ([(6, 0, 6), (6, 1, 16)] if with_memory else [(0, None, 0)] * 2)
