"""A hang that looks from outside as if a rank were at work: torch's own flight records name the guilty rank.

There is no GPU here, so the records are gloo's, and a thread of the script writes them as torch's does for NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Job

pytestmark = [pytest.mark.usefixtures("in_etcd"), pytest.mark.long, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("recorded_rank.py")


def test_the_rank_that_has_not_entered_the_collective_is_named_and_ended(job: Job, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    environment = {"TORCH_FR_BUFFER_SIZE": "2000"}
    agents = [
        job.join(name, "--nnodes=2", f"--log-dir={logs}", script=(SCRIPT, str(logs)), environment=environment)
        for name in ("a", "b")
    ]
    assert [agent.exit_code(300.0) for agent in agents] == [0, 0]
    for agent in agents:
        assert agent.says(
            r"hang: rank 1 on node . \(recorded_rank\.py:\d+ in main.*\) waits by itself and has not entered "
        )
        assert agent.says(r"all_reduce \d+ of default_pg, in which 1 rank waits, by torch's flight recorder")
        assert agent.says("rank . is done in 2$")
