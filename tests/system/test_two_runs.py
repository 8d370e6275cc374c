"""Two jobs in one checkpoint directory, as after an `sbatch` that was sent twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster

from .harness import CHECKPOINTER_PRELOADED, Job

SCRIPT = Path(__file__).with_name("endless_saver.py")
KILLS = 2


def test_a_job_that_waits_for_the_directory_does_not_come_in_at_a_restart(job: Job) -> None:
    """Between two generations no worker of the first job lives; its agent does."""
    command = (SCRIPT, job.folder / "checkpoints")
    options = ("--nproc-per-node=1", "--max-restarts=100", CHECKPOINTER_PRELOADED)
    first = job.start("first", *options, script=command)
    job.wait_for_text(first, "generation 1 goes on from 0")
    second = job.start("second", *options, script=command)
    job.wait_for_text(second, "another run has the checkpoint directory, waiting for its end")
    for generation in range(1, KILLS + 1):
        (worker,) = job.workers("first")
        os.kill(worker.pid, signal.SIGKILL)
        job.wait_for_text(first, f"generation {generation + 1} goes on from [1-9]")
    assert not second.says("goes on from")
    first.signal(signal.SIGTERM)
    assert first.exit_code() == 128 + signal.SIGTERM
    job.wait_for_text(second, "generation 1 goes on from [1-9]")


@pytest.mark.long
def test_nor_does_it_when_the_node_of_rank_0_is_lost(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    command = (SCRIPT, job.folder / "checkpoints")
    options = ("--nproc-per-node=1", CHECKPOINTER_PRELOADED)
    first = job.join("first", "--min-nodes=1", "--max-nodes=2", *options, script=command)
    job.wait_for_text(first, "generation 1 goes on from 0")
    other = job.join("other", "--min-nodes=1", "--max-nodes=2", *options, script=command)
    job.wait_for_text(other, "generation 2 goes on from [1-9]")
    second = job.start("second", *options, script=command)
    job.wait_for_text(second, "another run has the checkpoint directory, waiting for its end")
    first.kill()
    job.wait_for_text(other, "generation 3 goes on from [1-9]")
    assert not second.says("goes on from")


@pytest.mark.long
def test_a_job_that_was_stopped_by_plan_takes_its_directory_back(job: Job, etcd: EtcdCluster) -> None:
    """It is another run now: the one that it was has been replaced meanwhile, and may not come back."""
    job.use_etcd(etcd)
    command = (SCRIPT, job.folder / "checkpoints")
    runs = ((job.join, "first", "0"), (job.start, "other", "[1-9]"), (job.join, "again", "[1-9]"))
    for begin, name, step in runs:
        agent = begin(name, "--nproc-per-node=1", CHECKPOINTER_PRELOADED, script=command)
        job.wait_for_text(agent, f"goes on from {step}")
        job.wait_for_text(agent, "first step is")  # before it there is nothing to keep
        agent.signal(signal.SIGTERM)
        assert agent.exit_code() == 128 + signal.SIGTERM
