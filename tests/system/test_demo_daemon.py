"""`make demo-daemon`, as a newcomer plays it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo_daemon.py"
PLAY_S = 420.0


@pytest.mark.long
@pytest.mark.timeout(PLAY_S + 60)
def test_the_demo_of_daemons_plays_to_its_end(tmp_path: Path) -> None:
    """It fails by itself where a step is lost, a job ends otherwise, or what it waits for does not come."""
    demo = subprocess.Popen(
        [sys.executable, str(DEMO)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = demo.communicate(timeout=PLAY_S)
    except subprocess.TimeoutExpired:
        demo.send_signal(signal.SIGINT)  # it ends its daemons
        said, _ = demo.communicate(timeout=60)
        pytest.fail(f"it did not end within {PLAY_S:g} s:\n{said}")
    assert demo.returncode == 0, said
    acts = (
        "THREE DAEMONS START",
        "ANOTHER JOB WAITS",
        "A DAEMON IS KILLED",
        "THE DAEMON COMES BACK",
        "done:",
    )
    assert all(act in said for act in acts), said
