"""A real agent in a real cgroup with little memory: a worker that wants more is killed for that, the agent lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_memory import inside, small_memory

from .harness import Job

GREEDY = """
import os
if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
    hoard = [bytearray(2**20) for _ in range(1024)]
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with small_memory(256 * 2**20) as cgroup:
        yield cgroup


def test_a_worker_that_the_kernel_killed_for_its_memory_failed_for_that(job: Job, cgroup: Path) -> None:
    script = job.folder / "greedy.py"
    script.write_text(GREEDY)
    enter = inside(cgroup)
    agent = job.start("a", "--memory-checkpoints=off", script=(script,), enter=enter)
    assert agent.exit_code() == 0
    assert agent.says(r"rank 0 failed: killed by SIGKILL \(signal 9; the kernel's out-of-memory killer")
    assert agent.says(r"generation 2 \(failure\)")
