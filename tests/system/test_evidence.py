"""What real agents keep of their workers before they end them, and where they say it is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .harness import RECORDER, Agent, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

WARM = "--preload=json"
"""So that workers are forked from a spare; nothing heavy."""


def folder_of(agent: Agent) -> Path:
    """Which the failure's summary names."""
    found = agent.says(r"evidence: (\S+)")
    assert found is not None
    return Path(found[1])


def test_a_failure_leaves_on_every_node_where_its_workers_stood(job: Job, tmp_path: Path) -> None:
    options = "--nnodes=2", "--nproc-per-node=2", WARM, f"--log-dir={tmp_path / 'logs'}"
    agents = [job.join(name, *options) for name in ("a", "b")]
    old = job.wait_for_training(world=4)
    os.kill(old.pid(1), signal.SIGKILL)
    job.wait_for_training(world=4, after=old.number)
    for agent in agents:
        folder = folder_of(agent)
        assert (folder.parent.name, folder.name) == (f"gen{old.number}", "evidence")
        ranks = [
            rank
            for rank in range(4)
            if old.starts[rank]["env"]["ELASTIC_AGENT_NODE"] == agent.name and rank != 1
        ]
        looked = folder / agent.name / "1-failure"
        job.wait_for(lambda: (looked / "summary.txt").exists(), "the files")  # noqa: B023
        for rank in ranks:
            text = (looked / f"rank{rank}.txt").read_text()
            assert re.search(r"recorder\.py:\d+ in ", text), text


def test_workers_that_hang_are_looked_at_before_they_are_ended(job: Job, tmp_path: Path) -> None:
    options = WARM, f"--log-dir={tmp_path / 'logs'}", "--hang-timeout=2s", "--max-restarts=0"
    agent = job.start("a", *options, script=(RECORDER, "--report", "--fault=1:0:3:hang"))
    agent.exit_code()
    looked = folder_of(agent) / "a" / "1-hang"
    assert re.match(r"rank 0: locked, recorder\.py:\d+ in ", (looked / "summary.txt").read_text())
