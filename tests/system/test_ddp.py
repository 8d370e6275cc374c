"""Real DDP training over gloo, killed again and again: it goes on, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
from pathlib import Path

import pytest
import torch

from .harness import TORCH_PRELOADED, Agent, Job
from .processes import Process, port_for_a_store

PLAIN_DDP = Path(__file__).with_name("plain_ddp.py")
OWN_STORES = Path(__file__).with_name("own_stores.py")
DESTROYING_DDP = Path(__file__).with_name("destroying_ddp.py")
CHECKPOINTED_DDP = Path(__file__).with_name("checkpointed_ddp.py")

KILLS = int(os.environ.get("KILLS", "3"))
"""30 takes a few minutes: KILLS=30 pytest tests/system/test_ddp.py"""

STEPS = 600
"""Enough for five kills: a first step may be told a second late, and training goes on meanwhile."""


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


def weights(checkpoints: Path) -> str:
    """The digest of the last checkpoint's model."""
    newest = max(checkpoints.rglob("*.pt"), key=lambda path: path.name)
    saved = torch.load(newest, weights_only=True)
    assert saved["step"] == STEPS, "the run came to its end"
    model = saved["state"]["model"]
    digest = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def train(job: Job, name: str) -> tuple[Agent, Path]:
    checkpoints = job.folder / name
    script = (CHECKPOINTED_DDP, checkpoints, STEPS, 0.01)
    return job.start(name, "--nproc-per-node=2", TORCH_PRELOADED, script=script), checkpoints


@pytest.mark.timeout(300)
def test_a_run_with_five_kills_ends_with_the_weights_of_one_without(job: Job) -> None:
    undisturbed, expected = train(job, "undisturbed")
    assert undisturbed.exit_code(within_s=90) == 0

    rng = random.Random(20)
    agent, checkpoints = train(job, "disturbed")
    for generation in range(1, 6):
        begun = job.wait_for_text(agent, rf"generation {generation}: first step is (\d+)")
        target = int(begun[1]) + rng.randrange(5, 25)
        job.wait_for(lambda t=target: agent.metric("elastic_agent_step") >= t, f"step {target}")  # type: ignore[misc]
        os.kill(worker(job, generation, rng.randrange(2)).pid, signal.SIGKILL)
    assert agent.exit_code(within_s=90) == 0

    # Not all failures: a gloo process that has finished may still abort while it exits, and is then repeated.
    kills = re.findall(r"rank \d failed(?: before that, .*)?: killed by SIGKILL", agent.text)
    assert len(kills) == 5, "all kills hit"
    assert weights(checkpoints) == weights(expected)


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
    assert "has failed to bind" not in agent.text
