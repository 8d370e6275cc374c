"""Real DDP training over gloo that has none of the library: killed again and again, it goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .harness import TORCH_PRELOADED, Agent, Job
from .processes import Process, port_for_a_store

PLAIN_DDP = Path(__file__).with_name("plain_ddp.py")
OWN_STORES = Path(__file__).with_name("own_stores.py")
DESTROYING_DDP = Path(__file__).with_name("destroying_ddp.py")

KILLS = int(os.environ.get("KILLS", "3"))
"""30 takes a few minutes: KILLS=30 pytest tests/system/test_ddp.py"""


def steps(agent: Agent, restart: int) -> list[int]:
    """What rank 0 has printed in that generation."""
    return [int(step) for step in re.findall(rf"restart {restart} step (\d+)", agent.text)]


def worker(job: Job, generation: int, rank: int) -> Process:
    def found() -> Process | None:
        for process in job.workers():
            if process.generation == generation and process.environment["RANK"] == str(rank):
                return process
        return None

    process = job.wait_for(found, f"rank {rank} of generation {generation} to run")
    assert process is not None
    return process


@pytest.mark.long
def test_a_model_that_outlives_its_process_group_does_not_hold_the_job(job: Job) -> None:
    """Four ranks on two processors: nearly all such jobs hung in torch's gloo threads (`worker/ranks/gloo_threads`)."""
    options = ("--nproc-per-node=4", "--max-restarts=0", TORCH_PRELOADED)
    agent = job.start("a", *options, script=(DESTROYING_DDP,))
    job.wait_for(lambda: agent.text.count("done: 4") == 4, "the end of the script on each rank")
    assert agent.exit_code(within_s=20) == 0


@pytest.mark.parametrize("kills", [KILLS])
@pytest.mark.timeout(60 + 20 * KILLS)
def test_plain_ddp_survives_kills(job: Job, kills: int) -> None:
    """No line of the script is ours, and after each kill it trains on from its own checkpoint."""
    script = (PLAIN_DDP, job.folder / "checkpoint.pt", 1_000_000, 0.01)
    agent = job.start("a", "--nproc-per-node=2", "--max-restarts=1000", TORCH_PRELOADED, script=script)
    for kill in range(kills):
        job.wait_for(lambda kill=kill: len(steps(agent, kill)) >= 3, f"steps after {kill} kills")  # type: ignore[misc]
        os.kill(worker(job, kill + 1, kill % 2).pid, signal.SIGKILL)
    job.wait_for(lambda: len(steps(agent, kills)) >= 3, "steps after the last kill")
    for kill in range(kills):
        before, after = steps(agent, kill), steps(agent, kill + 1)
        assert after[0] > 1, "it did not begin again"
        assert before[-1] <= after[0] <= before[-1] + 2, "it went on from its newest checkpoint"
    assert [generation for _, generation in sorted(job.watcher.seen)] == list(range(1, kills + 2))


@pytest.mark.long
def test_a_script_may_open_stores_of_its_own_beside_the_agents(job: Job) -> None:
    """Up to torch 2.13 all ranks waited for a server that nobody had started."""
    ports = [port_for_a_store(), port_for_a_store()]
    agent = job.start("a", "--nproc-per-node=2", TORCH_PRELOADED, script=(OWN_STORES, *ports))
    assert agent.exit_code() == 0
    for how in ("env://", f"tcp://127.0.0.1:{ports[0]}"):
        assert f"met at {how}: 3" in agent.text
    assert agent.text.count("met at env://: 3") == 4, (
        "at the agent's port and at the script's own, two ranks each"
    )
    assert not agent.says("has failed to bind")
