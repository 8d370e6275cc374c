"""Checkpoints in memory under real agents: they outlive the workers, and nothing outlives the agent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.run import Run

from .harness import ORPHANS_S, TORCH_PRELOADED, Generation, Job

SCRIPT = Path(__file__).with_name("remembering.py")


def expect_to_go_on_where_it_was(job: Job, generation: int, killed_after: int, *ranks: int) -> None:
    """Every one of these ranks has the bits, with its random numbers, that it had after that step before."""
    for rank in ranks:
        loaded = job.wait_for(
            lambda rank=rank: job.history(what="loaded", generation=generation, rank=rank),
            "the state to be loaded",
        )[0]
        assert loaded["step"] >= killed_after - 1, "a step was lost that all had remembered"
        before = job.history(what="step", generation=generation - 1, rank=rank, step=loaded["step"])
        assert [one["bits"] for one in before] == [loaded["bits"]]


def kill(job: Job, training: Generation, rank: int) -> int:
    """After some steps; how many all ranks had done then."""
    job.wait_for(lambda: len(job.history(what="step", generation=training.number)) > 20, "some steps")
    steps = [
        max(one["step"] for one in job.history(what="step", generation=training.number, rank=each))
        for each in training.starts
    ]
    os.kill(training.pid(rank), signal.SIGKILL)
    return min(steps)


def is_read(memory: Path) -> bool:
    """Whether a process holds a slot, as the kernel lists locks: to take one would disturb the writer."""
    locks = Path("/proc/locks").read_text().splitlines()
    slots = [f":{slot.stat().st_ino} " for slot in memory.rglob("*.pt")]
    return any(" READ " in lock and slot in lock for lock in locks for slot in slots)


def test_a_killed_worker_costs_no_step_and_not_one_bit(job: Job) -> None:
    agent = job.start("a", TORCH_PRELOADED, "--nproc-per-node=2", script=(SCRIPT, job.folder))
    for generation, rank in ((1, 0), (2, 1)):
        training = job.wait_for_training(world=2, after=generation - 1)
        folder = Path(training.starts[0]["env"]["ELASTIC_AGENT_MEMORY"])
        assert folder.stat().st_mode & 0o777 == 0o700
        # While the disk writer holds what was loaded, each copy goes over the only other slot, and a kill in the
        # middle of one costs that (`storage/memory/slots.py`).
        files = CheckpointFiles(job.folder / "disk-of-a", keep=2, run=Run("reader"))
        loaded = job.history(what="loaded", generation=generation, rank=0)[0]["step"]
        job.wait_for(
            lambda files=files, step=loaded: not step or step in files.steps(), "what was loaded on disk"
        )  # type: ignore[misc]
        job.wait_for(lambda folder=folder: not is_read(folder), "the disk writer to give the slot free")  # type: ignore[misc]
        done = kill(job, training, rank)
        expect_to_go_on_where_it_was(job, generation + 1, done, 0, 1)
    (job.folder / "finish").touch()
    assert agent.exit_code() == 0
    assert not folder.exists()
    last = job.history(what="loaded", generation=3, rank=0)[0]["step"]
    assert max(CheckpointFiles(job.folder / "disk-of-a", keep=2, run=Run("reader")).steps()) == last, (
        "what was loaded is durable at the end"
    )


def test_a_save_is_durable_though_rank_0_is_killed_right_after_it(job: Job) -> None:
    job.start("a", TORCH_PRELOADED, script=(SCRIPT, job.folder, "5"))
    training = job.wait_for_training(world=1)
    job.wait_for(lambda: job.history(what="saved"), "the save to return")
    os.kill(training.pid(0), signal.SIGKILL)
    files = CheckpointFiles(job.folder / "disk-of-a", keep=2, run=Run("reader"))
    job.wait_for(lambda: files.steps() and files.steps()[0] >= 5, "the save, or what came of it, on the disk")
    found, bad = files.find()
    assert found is not None
    found.stream.close()
    assert not bad


def test_a_save_right_before_the_end_is_durable_when_the_job_has_ended(job: Job) -> None:
    (job.folder / "finish").touch()
    agent = job.start("a", script=(SCRIPT, job.folder, "1"))
    assert agent.exit_code() == 0
    assert CheckpointFiles(job.folder / "disk-of-a", keep=2, run=Run("reader")).steps() == [1]


def test_a_killed_agent_leaves_nothing_in_memory(job: Job) -> None:
    agent = job.start("a", script=(SCRIPT, job.folder))
    training = job.wait_for_training(world=1)
    folder = Path(training.starts[0]["env"]["ELASTIC_AGENT_MEMORY"])
    job.wait_for(lambda: list(folder.glob("*/*.pt")), "a copy in memory")
    agent.kill()
    job.wait_for(lambda: not folder.exists(), "the memory to be given back", ORPHANS_S)
