"""A restart waits until the killed worker's GPU memory is free: real agents, on a GPU that only NVML's words make."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from .fake_gpus import ADDRESS
from .harness import Agent, Generation, Job

ON_A_GPU = (sys.executable, str(Path(__file__).with_name("fake_gpus.py")))
FAKE_NVML = Path(__file__).parents[1] / "fake_nvml"


def uses(job: Job, mib: int) -> None:
    """From now on, by what NVML says."""
    new = job.folder / "nvml.new"
    new.write_text(json.dumps({"used": {ADDRESS: mib}}))
    new.replace(job.folder / "nvml.json")


def train_and_kill(job: Job, *options: str) -> tuple[Agent, Generation]:
    """The worker is dead; its 30,000 MiB are not free yet."""
    uses(job, 600)
    path = os.pathsep.join([str(FAKE_NVML), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "FAKE_NVML": str(job.folder / "nvml.json")}
    agent = job.start("a", *options, environment=environment, enter=ON_A_GPU)
    generation = job.wait_for_training(world=1)
    uses(job, 30_600)
    os.kill(generation.pid(0), signal.SIGKILL)
    return agent, generation


def looks(job: Job) -> int:
    return len((job.folder / "nvml.json.asked").read_text().splitlines())


def test_the_next_generation_waits_for_the_memory(job: Job) -> None:
    agent, first = train_and_kill(job)
    job.wait_for(lambda: looks(job) >= 12, "a second of looking at the memory")
    assert job.generations() == [first]
    assert "GPU memory" in agent.get("/readyz")[1]
    uses(job, 700)
    job.wait_for_training(world=1, after=first.number)
    assert agent.says(r"GPU memory: 30000 MiB were given back within \d+\.\d s$")


def test_the_bound_ends_the_wait(job: Job) -> None:
    agent, first = train_and_kill(job, "--gpu-memory-wait=700ms")
    job.wait_for_training(world=1, after=first.number)
    assert agent.says(
        r"30000 MiB more in use than before, 0.7 s after the workers ended; not waiting any longer"
    )


def test_the_wait_does_not_keep_an_agent_that_is_to_stop(job: Job) -> None:
    agent, _ = train_and_kill(job)
    job.wait_for(lambda: "GPU memory" in agent.get("/readyz")[1], "the agent to wait for the memory")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143


def test_a_restart_budget_that_is_used_up_ends_the_job_without_a_wait(job: Job) -> None:
    agent, _ = train_and_kill(job, "--max-restarts=0")
    assert agent.exit_code() == 1
    assert not agent.says("not waiting any longer")
