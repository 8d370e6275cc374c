"""The scripts of `examples/tutorial`, each with a kill."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from .harness import TORCH_PRELOADED, Job
from .processes import Process, port_for_a_store

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
KILLED = Path(__file__).with_name("killed_in_example.py")
ON_GPUS = (sys.executable, str(Path(__file__).with_name("fake_gpus.py")))
WITHIN_S = 150.0


def started(job: Job, generation: int) -> list[Process]:
    """The worker first, and then the processes that it has started for its ranks."""

    def found() -> list[Process] | None:
        there = [each for each in job.workers() if each.generation == generation]
        pids = {each.pid for each in there}
        (*workers,) = (each for each in there if each.parent not in pids)
        ranks = [each for each in there if each.parent in pids and "spawn_main" in str(each)]
        return [workers[0], *ranks] if len(workers) == 1 and len(ranks) == 2 else None

    processes = job.wait_for(found, f"generation {generation} to have started its ranks", WITHIN_S)
    assert processes is not None
    return processes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_script_that_starts_its_own_ranks_is_ended_whole_and_started_again(job: Job) -> None:
    """First one of its ranks is killed, then the worker itself, which leaves its ranks behind."""
    agent = job.start("a", TORCH_PRELOADED, script=(TUTORIAL / "basic.py", port_for_a_store()))
    first = started(job, 1)
    os.kill(first[1].pid, signal.SIGKILL)
    second = started(job, 2)
    os.kill(second[0].pid, signal.SIGKILL)
    assert agent.exit_code(WITHIN_S) == 0
    # torch may abort a rank of gloo's while it exits, rarely; then its generation is not the last one.
    disturbed, *trained = re.split(r"generation 3: 1 worker from spares", agent.text)
    ends = [re.findall(r"rank (\d) of 2 has trained: weights add up to ([-\d.]+)", text) for text in trained]
    assert "has trained" not in disturbed, "the third generation was the first to come to its end"
    assert {rank for rank, _ in ends[0]} == {"0", "1"}
    assert len({total for _, total in ends[0]}) == 1
    if "terminate called without an active exception" not in agent.text:
        assert len(ends[0]) == 2, "and the last"
    assert ("a", 3) in job.watcher.seen


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_checkpoint_of_one_rank_survives_a_kill_at_every_place(job: Job) -> None:
    file = job.folder / "model.checkpoint"
    script = (KILLED, TUTORIAL / "checkpoint.py", file)
    agent = job.start("a", "--nproc-per-node=2", "--max-restarts=9", TORCH_PRELOADED, script=script)
    assert agent.exit_code(WITHIN_S) == 0
    assert re.findall(r"generation (\d) dies (.*)", agent.text) == [
        ("1", "in the middle of a save"),
        ("2", "between a save and the barrier"),
        ("3", "between the barrier and a load"),
        ("4", "before the file is removed"),
    ]
    loaded = re.findall(r"rank 0 has loaded step (\d)", agent.text)
    # The third generation may end before rank 0 says so.
    assert [step for step in loaded if step != "3"] == ["1", "4"], (
        "each went on from what the former had saved"
    )
    assert not file.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model_parallel", ("--nproc-per-node=gpu", "--devices-per-worker=2")),
        ("torchrun_ddp", ("--nproc-per-node=2",)),
    ],
)
@pytest.mark.timeout(300)
def test_a_script_that_the_agent_starts_begins_anew_after_a_kill(
    job: Job, name: str, options: tuple[str, ...]
) -> None:
    """On a machine that seems to have four GPUs, for a torch that finds none."""
    script = (KILLED, TUTORIAL / f"{name}.py")
    agent = job.start(
        "a", *options, TORCH_PRELOADED, script=script, enter=ON_GPUS, environment={"FAKE_GPUS": "4"}
    )
    assert agent.exit_code(WITHIN_S) == 0
    assert agent.says("generation 1 dies after a step")
    for rank in (0, 1):
        assert agent.says(rf"rank {rank} on cpu.*, step 5: loss")
