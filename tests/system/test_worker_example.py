"""The example of docs/worker.md, as it stands: killed in the middle, it ends like a run that was left alone."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from .harness import Agent, Job

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(agent: Agent) -> list[str]:
    return re.findall(r"epoch \d step \d+: loss [\d.]+", agent.text)


def test_the_example_survives_a_kill(job: Job) -> None:
    for name in ("undisturbed", "disturbed"):
        folder = job.folder / f"{name}-files"
        folder.mkdir()
        script = ("--no-python", "env", f"--chdir={folder}", sys.executable, EXAMPLES / "elastic_ddp.py")
        agent = job.start(name, "--nproc-per-node=2", script=script)
        if name == "disturbed":
            job.wait_for_text(agent, "epoch 1 step ")
            victim = next(worker for worker in job.workers(name) if worker.environment["RANK"] == "1")
            os.kill(victim.pid, signal.SIGKILL)
        assert agent.exit_code() == 0
    undisturbed, disturbed = (losses(agent) for agent in job.agents)
    assert len(undisturbed) == 8
    assert ("disturbed", 2) in job.watcher.seen, "the kill hit"
    assert set(disturbed) == set(undisturbed)
