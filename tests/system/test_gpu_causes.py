"""What NVML shows when a worker fails decides the cause: real agents and workers, on GPUs that only a fake NVML has."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.nvml_library import FakeLibrary

from .harness import DYING, WHOLE_TORCH, Agent, Generation, Job

ON_A_GPU = (sys.executable, str(Path(__file__).with_name("fake_gpus.py")))
LIMITS = ("--min-nodes=1", "--max-nodes=2", "--check=off")
OTHER_GPU = "0000:40:00.0"


@pytest.fixture
def nvml(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path)


def train(job: Job, nvml: FakeLibrary, gpus: int = 1) -> tuple[Agent, Generation]:
    environment = {**nvml.environment, "FAKE_GPUS": str(gpus)}
    options = (f"--nproc-per-node={gpus}", f"--log-dir={job.folder / 'logs'}")
    agent = job.start("a", *options, environment=environment, enter=ON_A_GPU)
    generation = job.wait_for_training(world=gpus)
    job.wait_for(lambda: nvml.asked == gpus, "the first answer of NVML")
    return agent, generation


def test_a_node_whose_gpu_has_memory_errors_is_excluded_at_the_first_failure(
    job: Job, nvml: FakeLibrary
) -> None:
    nvml.says("ecc 1")  # from before
    job.join("a", *LIMITS, script=(DYING,))
    environment = {**nvml.environment, **WHOLE_TORCH}
    bad = job.join("b", *LIMITS, script=(DYING,), environment=environment, enter=ON_A_GPU)
    both = job.wait_for_training(world=2)
    job.wait_for(lambda: nvml.asked, "the first answer of NVML")
    nvml.says("ecc 3")
    os.kill(both.pid(both.rank_on("b")), signal.SIGABRT)
    without = job.wait_for_training(world=1, after=both.number)
    assert without.nodes == ["a"]
    assert bad.says("NVML: GPU 0000:3b:00.0: uncorrected memory errors: 3, were 1")
    assert bad.metric("elastic_agent_worker_exits_total", reason="gpu_fault") == 1
    job.wait_for(lambda: bad.metric("elastic_agent_node_excluded") == 1, "node b to know it")


@pytest.mark.long
def test_healthy_gpus_change_no_cause(job: Job, nvml: FakeLibrary) -> None:
    agent, first = train(job, nvml)
    os.kill(first.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=first.number)
    assert agent.metric("elastic_agent_restarts_total", reason="killed") == 1


@pytest.mark.long
def test_nvml_that_hangs_is_said_once_and_holds_up_no_restart(job: Job, nvml: FakeLibrary) -> None:
    agent, generation = train(job, nvml)
    nvml.says("ask_hangs 1")
    for kills in range(1, 4):
        os.kill(generation.pid(0), signal.SIGKILL)
        generation = job.wait_for_training(world=1, after=generation.number)
        job.wait_for_metric(agent, "elastic_agent_restarts_total", kills, reason="killed")
    assert agent.text.count("NVML does not answer in time") == 1


@pytest.mark.long
def test_what_nvml_shows_counts_when_a_worker_of_that_gpu_fails(job: Job, nvml: FakeLibrary) -> None:
    """Of two workers with a GPU each, one is killed whose own GPU is well: errors of the other's explain no kill."""
    agent, first = train(job, nvml, gpus=2)
    nvml.says("ecc_other 2")
    os.kill(first.pid(0), signal.SIGKILL)
    second = job.wait_for_training(world=2, after=first.number)
    job.wait_for_metric(agent, "elastic_agent_restarts_total", 1, reason="killed")
    os.kill(second.pid(1), signal.SIGABRT)
    third = job.wait_for_training(world=2, after=second.number)
    job.wait_for_metric(agent, "elastic_agent_restarts_total", 1, reason="gpu_fault")
    os.kill(third.pid(1), signal.SIGABRT)
    job.wait_for_training(world=2, after=third.number)
    job.wait_for_metric(agent, "elastic_agent_restarts_total", 1, reason="signal")  # these errors are told
