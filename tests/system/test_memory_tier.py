"""Checkpoints in memory under real agents: they outlive the workers, and nothing outlives the agent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.environment import Run

from .harness import ORPHANS_S, TORCH_PRELOADED, Job

SCRIPT = Path(__file__).with_name("remembering.py")


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


@pytest.mark.long
def test_a_save_right_before_the_end_is_durable_when_the_job_has_ended(job: Job) -> None:
    (job.folder / "finish").touch()
    agent = job.start("a", script=(SCRIPT, job.folder, "1"))
    assert agent.exit_code() == 0
    (start,) = job.history(what="start")
    assert not Path(start["env"]["ELASTIC_AGENT_MEMORY"]).exists()
    assert CheckpointFiles(job.folder / "disk-of-a", keep=2, run=Run("reader")).steps() == [1]


@pytest.mark.long
def test_a_killed_agent_leaves_nothing_in_memory(job: Job) -> None:
    agent = job.start("a", script=(SCRIPT, job.folder))
    training = job.wait_for_training(world=1)
    folder = Path(training.starts[0]["env"]["ELASTIC_AGENT_MEMORY"])
    assert folder.stat().st_mode & 0o777 == 0o700
    job.wait_for(lambda: list(folder.glob("*/*.pt")), "a copy in memory")
    agent.kill()
    job.wait_for(lambda: not folder.exists(), "the memory to be given back", ORPHANS_S)
