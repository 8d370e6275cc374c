"""The examples of docs/worker.md, as they stand: killed in the middle, each ends like a run that was left alone."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .users import User

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(said: str) -> list[str]:
    return re.findall(r"epoch \d step \d+: loss [\d.]+", said)


@pytest.mark.parametrize(
    "example", ["elastic_ddp.py", pytest.param("elastic_fsdp.py", marks=pytest.mark.long)]
)
def test_the_example_survives_a_kill(user: User, example: str) -> None:
    line = f"elastic-agent --nproc-per-node 2 {EXAMPLES / example}"
    undisturbed = losses(user.runs(line))
    (user.folder / "again").mkdir()
    agent = user.starts(f"env --chdir again {line}")
    user.job.wait_for_text(agent, "epoch 1 step ")
    victim = next(worker for worker in user.job.workers() if worker.environment["RANK"] == "1")
    os.kill(victim.pid, signal.SIGKILL)
    assert agent.exit_code() == 0
    assert len(undisturbed) == 8
    assert 2 in {generation for _, generation in user.job.watcher.seen}, "the kill hit"
    assert set(losses(agent.text)) == set(undisturbed)
