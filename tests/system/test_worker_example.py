"""The examples of docs/worker.md, as they stand: killed in the middle, each ends like a run that was left alone."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .harness import Agent, Job

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(agent: Agent) -> list[str]:
    return re.findall(r"epoch \d step \d+: loss [\d.]+", agent.text)


@pytest.mark.parametrize(
    "example", ["elastic_ddp.py", pytest.param("elastic_fsdp.py", marks=pytest.mark.long)]
)
def test_the_example_survives_a_kill(job: Job, example: str) -> None:
    for name in ("undisturbed", "disturbed"):
        folder = job.folder / f"{name}-files"
        folder.mkdir()
        agent = job.start(
            name,
            "--nproc-per-node=2",
            "--preload=default,torch.distributed.fsdp",
            script=[EXAMPLES / example],
            enter=["env", f"--chdir={folder}"],
        )
        if name == "disturbed":
            job.wait_for_text(agent, "epoch 1 step ")
            victim = next(worker for worker in job.workers(name) if worker.environment["RANK"] == "1")
            os.kill(victim.pid, signal.SIGKILL)
        assert agent.exit_code() == 0
    undisturbed, disturbed = (losses(agent) for agent in job.agents)
    assert len(undisturbed) == 8
    assert ("disturbed", 2) in job.watcher.seen, "the kill hit"
    assert set(disturbed) == set(undisturbed)
