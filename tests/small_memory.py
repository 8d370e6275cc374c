"""A cgroup with little memory, in which the kernel's out-of-memory killer really ends a process that wants more."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 10.0


@contextlib.contextmanager
def small_memory(limit_bytes: int) -> Iterator[Path]:
    """The cgroup's folder; skips the test without root or the memory controller."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        cgroup = Path(root, f"test-{os.getpid()}")
        with contextlib.suppress(OSError):
            cgroup.mkdir()
            if (cgroup / limit).exists():
                (cgroup / limit).write_text(str(limit_bytes))
                break
            cgroup.rmdir()
    else:
        pytest.skip("needs root and the memory controller")
    yield cgroup
    deadline = time.monotonic() + PATIENCE_S
    while cgroup.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # as long as the kernel still counts the killed processes
            cgroup.rmdir()


def inside(cgroup: Path) -> tuple[str, ...]:
    """Words before a command that run it in the cgroup."""
    return ("sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup))
