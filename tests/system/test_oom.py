"""A real agent in a real cgroup with little memory: a worker that wants more is killed for that, the agent lives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Job

LIMIT = 256 * 2**20
GREEDY = """
import os
if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
    hoard = [bytearray(2**20) for _ in range(1024)]
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        cgroup = Path(root, f"test-{os.getpid()}")
        with contextlib.suppress(OSError):
            cgroup.mkdir()
            if (cgroup / limit).exists():
                (cgroup / limit).write_text(str(LIMIT))
                break
            cgroup.rmdir()
    else:
        pytest.skip("needs root and the memory controller")
    yield cgroup
    with contextlib.suppress(OSError):
        cgroup.rmdir()


def test_a_worker_that_the_kernel_killed_for_its_memory_failed_for_that(job: Job, cgroup: Path) -> None:
    script = job.folder / "greedy.py"
    script.write_text(GREEDY)
    enter = ("sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup))
    agent = job.start("a", "--memory-checkpoints=off", script=(script,), enter=enter)
    assert agent.exit_code() == 0
    assert agent.says(r"rank 0 failed: killed by SIGKILL \(signal 9; the kernel's out-of-memory killer")
    assert agent.says(r"generation 2 \(failure\)")
