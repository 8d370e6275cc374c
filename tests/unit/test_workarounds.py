"""Workers that end without taking their interpreter apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_BEFORE = """
import atexit, code, sys
from elastic_agent.worker.steps.torch_workarounds import leave_when_failed
class Slow:
    def __del__(self): print('taken apart')
slow = Slow()
atexit.register(print, 'registered before')
leave_when_failed()
atexit.register(print, 'registered after')
kept = open(sys.argv[1], 'w')
kept.write('not flushed yet')
sys.circle = [kept]
sys.circle.append(sys.circle)
del kept
"""


def ended(tmp_path: Path, script: str) -> tuple[int, list[str], str, str]:
    """Its code, the lines that it has printed, the last one of its errors, and what it has written to a file."""
    written = tmp_path / "written"
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + script, str(written)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()[-1:][0], written.read_text()


def test_a_failed_script_leaves_quickly_and_loses_nothing_that_it_has_written(tmp_path: Path) -> None:
    assert ended(tmp_path, "raise RuntimeError('connection reset')") == (
        1,
        ["registered after", "registered before"],
        "RuntimeError: connection reset",
        "not flushed yet",
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("print('done', file=sys.stderr)", 0),
        ("print('done', file=sys.stderr); sys.exit(3)", 3),
        ("code.InteractiveInterpreter().runcode('1 / 0'); print('done', file=sys.stderr)", 0),
        ("import os; os.fork() or sys.exit(0); os.wait(); print('done', file=sys.stderr)", 0),
    ],
    ids=["success", "its own code", "a console's error", "a child"],
)
def test_all_other_ends_are_pythons(tmp_path: Path, script: str, code: int) -> None:
    returncode, printed, last_error, written = ended(tmp_path, script)
    assert (returncode, printed[-1], last_error) == (code, "taken apart", "done")
    assert "not flushed yet" in written


def test_the_switch_leaves_torch_and_python_as_they_are() -> None:
    script = """
import sys
import torch.distributed as dist
from elastic_agent import worker
from elastic_agent.worker.steps import torch_workarounds
before = dist.destroy_process_group, dist.Work.wait, sys.excepthook
torch_workarounds.install()
torch_workarounds.leave_when_failed()
worker.measure_own_time()
worker.step(1)
assert (dist.destroy_process_group, dist.Work.wait, sys.excepthook) == before
"""
    for switch in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "ELASTIC_AGENT_TORCH_WORKAROUNDS": switch},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode == 0) == (switch == "0"), done.stderr


def test_torch_is_as_it_was_for_a_script_that_calls_step() -> None:
    """No frame of ours stands in the traceback of a collective, unless the script asks for the measure."""
    script = """
import torch, torch.distributed as dist
from elastic_agent import worker
before = dist.Work.wait, dist._broadcast_coalesced, torch.autograd.backward
worker.step(1)
worker.step(2)
assert (dist.Work.wait, dist._broadcast_coalesced, torch.autograd.backward) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
