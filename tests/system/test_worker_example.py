"""The examples of docs/worker.md, as they stand: killed in the middle, each ends like a run that was left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .users import User

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLED = Path(__file__).with_name("killed_in_example.py")


def losses(said: str) -> list[str]:
    return re.findall(r"epoch \d step \d+: loss [\d.]+", said)


@pytest.mark.parametrize(
    "example", ["elastic_ddp.py", pytest.param("elastic_fsdp.py", marks=pytest.mark.long)]
)
def test_the_example_survives_a_kill(user: User, example: str) -> None:
    undisturbed = losses(user.runs(f"elastic-agent --nproc-per-node 2 {EXAMPLES / example}"))
    (user.folder / "again").mkdir()
    killed = user.runs(f"env --chdir again elastic-agent --nproc-per-node 2 {KILLED} {EXAMPLES / example}")
    assert "generation 1 dies after a step" in killed
    assert len(undisturbed) == 8
    assert set(losses(killed)) == set(undisturbed)
