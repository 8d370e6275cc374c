"""Processes that stand still, from an instant on that the test knows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.waiting import wait_for

PATIENCE_S = 30.0


def stop(pid: int) -> None:
    """Send SIGSTOP, and return when all threads of the process have stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _stands_still(pid), f"pid {pid} to stop", PATIENCE_S, every_s=0.001)


def _stands_still(pid: int) -> bool:
    """SIGSTOP reaches a process' threads one after the other."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} == {"T"}
