"""Worlds of real processes over gloo: all ranks save and load together, and a kill costs not one bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest


class Worlds:
    """Runs worlds, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._stores = (directory / f"store-{number}" for number in count())
        self.errors = directory / "stderr"
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("checkpointer_workers.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            # numpy's OpenBLAS starts its threads at import, and a process with threads must not fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, scenario: str, args: list[dict[str, Any]], **env: str) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "scenario": scenario,
            "args": args,
            "store": str(next(self._stores)),
            "env": {
                "WORLD_SIZE": str(len(args)),
                "ELASTIC_AGENT_GENERATION": "1",
                "ELASTIC_AGENT_NODE": "a",
                "ELASTIC_AGENT_RUN": "run-a",
                **env,
            },
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return answer

    def answers(self, scenario: str, args: list[dict[str, Any]], **env: str) -> list[dict[str, Any]]:
        """Run a world that must end well; what its ranks returned."""
        ended = self.run(scenario, args, **env)
        assert [rank["status"] for rank in ended] == [0] * len(args), self.errors.read_text()
        return [rank["answer"] for rank in ended]

    def close(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()


def in_directories(*directories: Path) -> list[dict[str, Any]]:
    return [{"directory": str(directory)} for directory in directories]


def saved(worlds: Worlds, directory: Path, step: int, *, ranks: int = 1, generation: int = 1) -> list[Any]:
    args = [{"directory": str(directory), "step": step}] * ranks
    answers = worlds.answers("save", args, ELASTIC_AGENT_GENERATION=str(generation))
    assert [answer["returned"] for answer in answers] == [True] * ranks
    return [answer["next"] for answer in answers]


def spoil(directory: Path, step: int) -> None:
    (data,) = directory.glob(f"step-{step:012d}-*/__0_0.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)


def test_all_ranks_load_the_same_step_and_each_its_own_random_state(worlds: Worlds, tmp_path: Path) -> None:
    drawn_after_saving = saved(worlds, tmp_path, 10, ranks=3)
    assert len({tuple(draws) for draws in drawn_after_saving}) == 3
    answers = worlds.answers("load", in_directories(tmp_path, tmp_path, tmp_path))
    assert [answer["returned"] for answer in answers] == [10, 10, 10]
    assert [answer["meta"] for answer in answers] == ["after 10"] * 3
    assert [answer["next"] for answer in answers] == drawn_after_saving


@pytest.mark.long
def test_a_new_directory_starts_at_zero_and_changes_nothing(worlds: Worlds, tmp_path: Path) -> None:
    answers = worlds.answers("load", in_directories(tmp_path / "a", tmp_path / "b"))
    assert [answer["returned"] for answer in answers] == [0, 0]
    assert [answer["meta"] for answer in answers] == ["as the script set it"] * 2


@pytest.mark.parametrize("owner", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 1)), 2])
def test_one_node_with_the_files_is_enough(worlds: Worlds, tmp_path: Path, owner: int) -> None:
    directories = [tmp_path / str(rank) for rank in range(3)]
    drawn_after_saving = saved(worlds, directories[owner], 10, ranks=3)
    answers = worlds.answers("load", in_directories(*directories))
    assert [answer["returned"] for answer in answers] == [10, 10, 10]
    assert [answer["meta"] for answer in answers] == ["after 10"] * 3
    assert [answer["next"] for answer in answers] == drawn_after_saving


def test_the_newest_good_checkpoint_of_all_nodes_wins(worlds: Worlds, tmp_path: Path) -> None:
    directories = [tmp_path / str(rank) for rank in range(3)]
    for directory, step in zip(directories, (10, 20, 30), strict=True):
        saved(worlds, directory, step)
    spoil(directories[2], 30)
    answers = worlds.answers("load", in_directories(*directories))
    assert [(answer["returned"], answer["meta"]) for answer in answers] == [(20, "after 20")] * 3
    assert "step-000000000030" in worlds.errors.read_text()


@pytest.mark.long
def test_of_the_same_step_the_newest_generation_wins(worlds: Worlds, tmp_path: Path) -> None:
    for generation in (1, 2):
        args = {"directory": str(tmp_path / str(generation)), "step": 10, "texts": {"0": f"of {generation}"}}
        worlds.answers("save", [args], ELASTIC_AGENT_GENERATION=str(generation))
    answers = worlds.answers("load", in_directories(tmp_path / "1", tmp_path / "2"))
    assert [answer["meta"] for answer in answers] == ["of 2", "of 2"]


@pytest.mark.long
def test_a_spoilt_checkpoint_gives_way_to_the_one_before_loudly(worlds: Worlds, tmp_path: Path) -> None:
    saved(worlds, tmp_path, 10, ranks=2)
    saved(worlds, tmp_path, 20, ranks=2)
    spoil(tmp_path, 20)
    answers = worlds.answers("load", in_directories(tmp_path, tmp_path))
    assert [(answer["returned"], answer["meta"]) for answer in answers] == [(10, "after 10")] * 2
    assert f"{tmp_path}/step-000000000020" in worlds.errors.read_text()
    assert "do not match their checksum" in worlds.errors.read_text()


def test_spoilt_checkpoints_only_stop_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    directories = [tmp_path / str(rank) for rank in range(3)]
    saved(worlds, directories[1], 10)
    spoil(directories[1], 10)
    answers = worlds.answers("load", in_directories(*directories))
    assert [answer["raised"] for answer in answers] == ["NoUsableCheckpoint"] * 3
    assert all(
        "rank 1" in answer["text"] and "do not match their checksum" in answer["text"] for answer in answers
    )


@pytest.mark.parametrize("error", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_file_that_breaks_while_it_is_sent_stops_every_rank(
    worlds: Worlds, tmp_path: Path, error: bool
) -> None:
    saved(worlds, tmp_path / "1", 10)
    args = in_directories(tmp_path / "0", tmp_path / "1", tmp_path / "2")
    answers = worlds.answers("load_while_the_disk_rots", [{**arg, "error": error} for arg in args])
    assert [answer["raised"] for answer in answers] == ["CheckpointError"] * 3
    assert "broke on its way from rank 1" in answers[0]["text"]
    assert ("Input/output error" in answers[1]["text"]) == error


def test_another_world_size_loads_the_state(worlds: Worlds, tmp_path: Path) -> None:
    saved(worlds, tmp_path, 10, ranks=3)
    answers = worlds.answers("load", in_directories(tmp_path, tmp_path))
    assert [(answer["returned"], answer["meta"]) for answer in answers] == [(10, "after 10")] * 2
    assert "random numbers start anew" in worlds.errors.read_text()


@pytest.mark.long
def test_a_shape_that_fits_one_rank_only_stops_both(worlds: Worlds, tmp_path: Path) -> None:
    worlds.answers("save_model", in_directories(tmp_path))
    answers = worlds.answers("load_into_another_shape", in_directories(tmp_path, tmp_path))
    assert [answer["raised"] for answer in answers] == ["CheckpointMismatch"] * 2
    assert all("'model.weight' was saved as float32 of shape (1, 2)" in answer["text"] for answer in answers)


@pytest.mark.parametrize(
    ("scenario", "raised", "text"),
    [
        ("save_different_steps", "CheckpointError", "{0: 10, 1: 11}"),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (
                ("save_backwards", "StepNotGrowing", "step 9 is not beyond step 10"),
                ("save_code", "NotPlainData", "random.Random"),
                ("save_with_a_broken_state_dict", "CheckpointError", "a bug in the script"),
            )
        ),
    ],
)
def test_a_save_that_is_wrong_is_wrong_on_every_rank(
    worlds: Worlds, tmp_path: Path, scenario: str, raised: str, text: str
) -> None:
    answers = worlds.answers(scenario, in_directories(tmp_path, tmp_path))
    assert [answer["raised"] for answer in answers] == [raised] * 2
    assert all(text in answer["text"] for answer in answers)


def test_a_failing_disk_ends_training_at_the_limit_only_and_on_every_rank(
    worlds: Worlds, tmp_path: Path
) -> None:
    for answer in worlds.answers("save_on_a_failing_disk", in_directories(tmp_path, tmp_path)):
        *before, last = answer["results"]
        assert [result["returned"] for result in before] == [False, False, True, False, False]
        assert last["raised"] == "SaveFailed"
        assert "No space left" in last["text"]
    assert "training goes on: failed=2 limit=3" in worlds.errors.read_text()


def test_a_run_that_was_replaced_is_refused_on_every_rank_and_its_successor_goes_on(
    worlds: Worlds, tmp_path: Path
) -> None:
    args = in_directories(tmp_path, tmp_path)
    saved(worlds, tmp_path, 10, ranks=2)
    later = worlds.answers("load", args, ELASTIC_AGENT_RUN="run-b")
    assert [answer["returned"] for answer in later] == [10, 10]
    for refused in (
        worlds.answers("save", [{**arg, "step": 20} for arg in args]),
        worlds.answers("load", args, ELASTIC_AGENT_GENERATION="2"),
    ):
        assert [answer["raised"] for answer in refused] == ["OtherRun"] * 2
        assert all("taken over by run run-b" in answer["text"] for answer in refused)
        assert all("this run run-a" in answer["text"] for answer in refused)
    again = worlds.answers("save", [{**arg, "step": 20} for arg in args], ELASTIC_AGENT_RUN="run-b")
    assert [answer["returned"] for answer in again] == [True, True]


def content(directory: Path) -> dict[Path, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "owner.lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.long
def test_another_runs_newer_checkpoints_on_rank_0s_own_disk_are_refused_and_stay_as_they_are(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Rank 0 comes to a node whose disk holds those of another job, which this one would have to overwrite in time."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for step in (85, 200):
        worlds.answers("save", [{"directory": str(theirs), "step": step}], ELASTIC_AGENT_RUN="ended")
    before = content(theirs)
    saved(worlds, ours, 90)
    answers = worlds.answers("load", in_directories(theirs, ours), ELASTIC_AGENT_GENERATION="2")
    assert [answer["raised"] for answer in answers] == ["OtherRun"] * 2
    assert all("holds step 200 of run ended" in answer["text"] for answer in answers)
    assert content(theirs) == before


@pytest.mark.long
def test_another_runs_older_checkpoints_on_rank_0s_own_disk_stay(worlds: Worlds, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    worlds.answers("save", [{"directory": str(one), "step": 10}], ELASTIC_AGENT_RUN="another")
    saved(worlds, other, 20)
    args = in_directories(one, other)
    for step in (30, 40):
        answers = worlds.answers(
            "load_and_save", [{**arg, "step": step} for arg in args], ELASTIC_AGENT_GENERATION=str(step)
        )
        assert [answer["returned"] for answer in answers] == [step - 10] * 2
    assert sorted(path.name for path in one.glob("*.json")) == [
        "owner.json", "step-000000000010.json", "step-000000000030.json", "step-000000000040.json",
    ]  # fmt: skip


def test_no_rank_leaves_save_before_the_checkpoint_exists(worlds: Worlds, tmp_path: Path) -> None:
    answers = worlds.answers("leave_save", in_directories(tmp_path, tmp_path, tmp_path))
    assert all("step-000000000010.json" in answer["visible"] for answer in answers)


def remembering(node: str, local_rank: int, steps: list[int], **more: Any) -> dict[str, Any]:
    return {"directory": "/runs/x", "node": node, "local_rank": local_rank, "steps": steps, **more}


def recalling(*places: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"directory": "/runs/x", "node": node, "local_rank": local_rank} for node, local_rank in places]


def test_all_ranks_go_on_from_what_was_remembered_each_with_its_own_random_state(
    worlds: Worlds, tmp_path: Path
) -> None:
    env = {"TEST_MEMORY": str(tmp_path)}
    args = [remembering(node, rank, [1, 2]) for node in "ab" for rank in (0, 1)]
    drawn = [answer["next"] for answer in worlds.answers("remember", args, **env)]
    answers = worlds.answers("recall", recalling(("a", 0), ("a", 1), ("b", 0), ("b", 1)), **env)
    assert [answer["returned"] for answer in answers] == [2] * 4
    assert [answer["meta"] for answer in answers] == ["after 2"] * 4
    assert [answer["next"] for answer in answers] == drawn
    assert len({tuple(draws) for draws in drawn}) == 4


def test_a_node_that_has_nothing_is_sent_the_state_and_keeps_it(worlds: Worlds, tmp_path: Path) -> None:
    env = {"TEST_MEMORY": str(tmp_path)}
    args = [remembering("a", rank, [1, 2]) for rank in (0, 1)]
    drawn = [answer["next"] for answer in worlds.answers("remember", args, **env)]
    for others in ("a", "c"):
        answers = worlds.answers("recall", recalling(("b", 0), (others, 0)), **env)
        assert [(answer["returned"], answer["meta"]) for answer in answers] == [(2, "after 2")] * 2
        assert [answer["next"] for answer in answers] == drawn
        assert answers[0]["kept"] == [[2, 1, True]], "with every rank's random state"


@pytest.mark.long
def test_without_the_random_state_of_a_lost_node_the_others_have_theirs(
    worlds: Worlds, tmp_path: Path
) -> None:
    env = {"TEST_MEMORY": str(tmp_path)}
    args = [remembering(node, 0, [1, 2]) for node in "ab"]
    drawn = [answer["next"] for answer in worlds.answers("remember", args, **env)]
    answers = worlds.answers("recall", recalling(("c", 0), ("b", 0)), **env)
    assert [answer["meta"] for answer in answers] == ["after 2"] * 2
    assert answers[1]["next"] == drawn[1]
    assert "random state not restored, no rank has kept it: step=2 rank=0" in worlds.errors.read_text()


@pytest.mark.long
def test_a_step_that_some_rank_did_not_come_to_does_not_count(worlds: Worlds, tmp_path: Path) -> None:
    env = {"TEST_MEMORY": str(tmp_path)}
    worlds.answers("remember", [remembering("a", 0, [1, 2]), remembering("a", 1, [1])], **env)
    answers = worlds.answers("recall", recalling(("a", 0), ("a", 1)), **env)
    assert [answer["meta"] for answer in answers] == ["after 1"] * 2


@pytest.mark.long
def test_a_node_that_went_on_alone_does_not_bring_its_past_back(worlds: Worlds, tmp_path: Path) -> None:
    """Generation 1 has remembered step 12 on b only; a began generation 2 at step 10 and came to 11."""
    env = {"TEST_MEMORY": str(tmp_path)}
    worlds.answers("remember", [remembering("a", 0, [10]), remembering("b", 0, [10, 12])], **env)
    old = {**env, "ELASTIC_AGENT_GENERATION": "2"}
    worlds.answers("remember", [remembering("a", 0, [11], text="the present")], **old)
    now = {**env, "ELASTIC_AGENT_GENERATION": "3"}
    answers = worlds.answers("recall", recalling(("a", 0), ("b", 0)), **now)
    assert [(answer["returned"], answer["meta"]) for answer in answers] == [(11, "the present")] * 2


@pytest.mark.long
def test_files_that_some_nodes_have_reach_the_others(worlds: Worlds, tmp_path: Path) -> None:
    saved(worlds, tmp_path / "some", 10, ranks=3)
    answers = worlds.answers("load", in_directories(tmp_path / "some", tmp_path / "some", tmp_path / "none"))
    assert [answer["meta"] for answer in answers] == ["after 10"] * 3


def loading(node: str, local_rank: int, directory: Path, **more: Any) -> dict[str, Any]:
    return {"node": node, "local_rank": local_rank, "directory": str(directory), **more}


@pytest.mark.long
def test_one_rank_of_a_node_reads_or_receives_the_file_and_the_others_map_it(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Node a has the file; b is sent it, into its slot; c has no memory."""
    drawn = saved(worlds, tmp_path / "disk", 10, ranks=6)
    (data,) = (tmp_path / "disk").glob("*/__0_0.distcp")
    nowhere = tmp_path / "nowhere"
    args = [loading("a", rank, tmp_path / "disk") for rank in (0, 1)]
    args += [loading("b", rank, nowhere) for rank in (0, 1)]
    args += [loading("c", rank, nowhere, memory=False) for rank in (0, 1)]
    answers = worlds.answers("load_at", args, TEST_MEMORY=str(tmp_path))
    assert [(answer["returned"], answer["meta"]) for answer in answers] == [(10, "after 10")] * 6
    assert [answer["next"] for answer in answers] == drawn
    assert [answer["verified"] for answer in answers] == [[10], [], [], [], [], []]
    mapped = [answer["mapped"] for answer in answers]
    assert mapped[:2] == [[str(data)]] * 2
    assert mapped[2] == mapped[3]
    assert mapped[2][0].startswith(str(tmp_path / "b"))
    assert all("memfd" in path for paths in mapped[4:] for path in paths)
    again = worlds.answers(
        "recall", [{"directory": str(nowhere), "node": "b", "local_rank": 0}], TEST_MEMORY=str(tmp_path)
    )
    assert again[0]["returned"] == 10, "and it is in memory there"


@pytest.mark.long
def test_a_rank_whose_file_is_another_one_does_not_trust_it(worlds: Worlds, tmp_path: Path) -> None:
    """Both ranks are of one node and name one directory, which is not the same to them: containers can do that."""
    drawn = saved(worlds, tmp_path / "0", 10, ranks=2)
    saved(worlds, tmp_path / "1", 10, ranks=2)
    spoil(tmp_path / "1", 10)
    args = [loading("a", rank, tmp_path / str(rank), memory=False) for rank in (0, 1)]
    answers = worlds.answers("load_at", [{**arg, "as_directory": "/runs/x"} for arg in args])
    assert [answer["next"] for answer in answers] == drawn
    assert [answer["verified"] for answer in answers] == [[10], []]
    assert "memfd" in answers[1]["mapped"][0]


@pytest.mark.long
def test_a_node_without_room_in_memory_receives_the_file_all_the_same(worlds: Worlds, tmp_path: Path) -> None:
    saved(worlds, tmp_path / "disk", 10, ranks=3)
    args = [loading("a", 0, tmp_path / "disk")]
    args += [loading("b", rank, tmp_path / "nowhere", limit=1) for rank in (0, 1)]
    answers = worlds.answers("load_at", args, TEST_MEMORY=str(tmp_path))
    assert [answer["meta"] for answer in answers] == ["after 10"] * 3
    assert all("memfd" in answer["mapped"][0] for answer in answers[1:])


@pytest.mark.long
def test_a_copy_in_memory_reaches_each_node_once(worlds: Worlds, tmp_path: Path) -> None:
    env = {"TEST_MEMORY": str(tmp_path)}
    drawn = [
        answer["next"]
        for answer in worlds.answers(
            "remember", [remembering("a", rank, [1, 2]) for rank in (0, 1, 2)], **env
        )
    ]
    places = [("a", 0), ("b", 0), ("b", 1)]
    args = [loading(node, rank, Path("/runs/x")) for node, rank in places]
    answers = worlds.answers("load_at", args, **env)
    assert [answer["next"] for answer in answers] == drawn
    assert answers[1]["mapped"] == answers[2]["mapped"] != answers[0]["mapped"]
    assert answers[1]["mapped"][0].startswith(str(tmp_path / "b"))


STEPS, EVERY = 80, 3
EVENTS_PER_STEP = {0: 30, 1: 3}  # at least; rank 0 writes the checkpoints, too


@pytest.fixture(scope="module")
def undisturbed(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    return worlds.answers("train", [train_args(directory, directory / "journal")] * 2)


def train_args(directory: Path, journal: Path, **kill: int) -> dict[str, Any]:
    return {"directory": str(directory), "journal": str(journal), "steps": STEPS, "every": EVERY, **kill}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
@pytest.mark.parametrize("memory_every", [None, 1])
def test_five_kills_change_not_one_bit(
    worlds: Worlds, undisturbed: list[Any], tmp_path: Path, seed: int, memory_every: int | None
) -> None:
    draw = random.Random(seed)
    directory, journal = tmp_path / "checkpoints", tmp_path / "journal"
    args = train_args(directory, journal)
    env: dict[str, str] = {}
    if memory_every:
        args["memory_every"] = memory_every
        (tmp_path / "memory").mkdir()
        env = {"ELASTIC_AGENT_MEMORY": str(tmp_path / "memory"), "ELASTIC_AGENT_MEMORY_BYTES": str(1 << 30)}
    for generation in range(1, 6):
        env["ELASTIC_AGENT_GENERATION"] = str(generation)
        victim = draw.randrange(2)
        event = draw.randrange(1, 15 * EVENTS_PER_STEP[victim])
        ended = worlds.run("train", [{**args, "victim": victim, "event": event}] * 2, **env)
        assert ended[victim]["status"] == -signal.SIGKILL, "a run without its fault proves nothing"
        assert ended[1 - victim]["status"] == 1

    final = worlds.answers("train", [args] * 2, **{**env, "ELASTIC_AGENT_GENERATION": "6"})
    assert final == undisturbed

    committed = remembered = 0
    for line in journal.read_text().splitlines():
        what, step = line.split()
        assert int(step) >= committed, f"{line}, though {committed} had been committed"
        assert what != "start" or int(step) >= remembered - 1, f"{line}, though {remembered} was in memory"
        if what == "saved":
            committed = int(step)
        elif what == "remembered":
            remembered = int(step)
    assert committed == STEPS // EVERY * EVERY
    assert len(list(directory.glob("step-*.json"))) == 2
