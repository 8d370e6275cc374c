"""A restart waits until the killed worker's GPU memory is free: real agents, on a GPU that only NVML's words make."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.nvml_library import FakeLibrary

from .harness import Agent, Generation, Job, planted

ON_A_GPU = (sys.executable, str(Path(__file__).with_name("fake_gpus.py")))


@pytest.fixture
def nvml(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path)


def train_and_kill(
    job: Job, nvml: FakeLibrary, *options: str, **environment: str
) -> tuple[Agent, Generation]:
    """The worker is dead; its 30,000 MiB are not free yet."""
    nvml.says("used 600")
    agent = job.start("a", *options, environment={**nvml.environment, **environment}, enter=ON_A_GPU)
    generation = job.wait_for_training(world=1)
    nvml.says("used 30600")
    os.kill(generation.pid(0), signal.SIGKILL)
    return agent, generation


def test_the_next_generation_waits_for_the_memory(job: Job, nvml: FakeLibrary) -> None:
    agent, first = train_and_kill(job, nvml)
    job.wait_for(lambda: nvml.looks >= 12, "a second of looking at the memory")
    assert job.generations() == [first]
    assert "GPU memory" in agent.get("/readyz")[1]
    nvml.says("used 700")
    job.wait_for_training(world=1, after=first.number)
    assert agent.says(r"GPU memory: 30000 MiB were given back within \d+\.\d s$")


@pytest.mark.long
def test_the_bound_ends_the_wait(job: Job, nvml: FakeLibrary) -> None:
    agent, first = train_and_kill(job, nvml, **planted("constants gpu_memory_wait_s=0.7"))
    job.wait_for_training(world=1, after=first.number)
    assert agent.says(
        r"30000 MiB more in use than before, 0.7 s after the workers ended; not waiting any longer"
    )


@pytest.mark.long
def test_the_wait_does_not_keep_an_agent_that_is_to_stop(job: Job, nvml: FakeLibrary) -> None:
    agent, _ = train_and_kill(job, nvml)
    job.wait_for(lambda: "GPU memory" in agent.get("/readyz")[1], "the agent to wait for the memory")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143


@pytest.mark.long
def test_a_restart_budget_that_is_used_up_ends_the_job_without_a_wait(job: Job, nvml: FakeLibrary) -> None:
    agent, _ = train_and_kill(job, nvml, "--max-restarts=0")
    assert agent.exit_code() == 1
    assert not agent.says("not waiting any longer")
