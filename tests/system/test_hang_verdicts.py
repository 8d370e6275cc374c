"""Hangs with `--hang-timeout auto`, on real agents: the rank that keeps the others waiting is named, and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Job

pytestmark = pytest.mark.usefixtures("in_etcd")

SCRIPT = Path(__file__).with_name("hanging_rank.py")


def run(job: Job, what: str, steps: str) -> None:
    agents = [job.join(name, "--nnodes=2", script=(SCRIPT, "1", what, steps)) for name in ("a", "b")]
    assert [agent.exit_code(120.0) for agent in agents] == [0, 0]
    blamed = next(agent for agent in agents if agent.says(f"rank 1: {what}$"))
    if what == "compute":
        assert all(agent.says("rank . is done in 1$") for agent in agents), "it was only slow"
        return
    words = "is stopped" if what == "stop" else "waits by itself"
    for agent in agents:
        assert agent.says(rf"hang: rank 1 on node {blamed.name} {words}")
        assert agent.says("rank . is done in 2$")


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", ["stop", "sleep", "compute"])
def test_with_steps_known(job: Job, what: str) -> None:
    run(job, what, "steps")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_without_steps(job: Job) -> None:
    run(job, "stop", "none")
