"""What the supervisor makes of its workers' ends, without processes: the loop never waits for a log disk."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_agent.agent.training import TAIL_WITHIN_S

from .supervised import Supervised, without_processes

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "ValueError: the loss is not a number",
)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    without_processes(monkeypatch)
    node = Supervised(tmp_path, 8)
    node.start()
    return node


def test_a_failure_is_reported_with_the_last_lines_of_the_worker(node: Supervised) -> None:
    node.exit(3, 1)
    node.turn()
    assert not node.reported, "its last lines are not here yet"
    assert not node.group.stopping
    node.logs.lines = TRACEBACK
    node.logs.answer()
    node.turn()
    assert node.reported == ["exit code 1: ValueError: the loss is not a number"]
    assert node.group.signals == [(rank, signal.SIGTERM) for rank in range(8) if rank != 3]


def test_a_log_disk_that_hangs_while_eight_workers_fail_does_not_hold_the_loop(node: Supervised) -> None:
    """The fake disk never answers: a supervisor that waited for it would not return."""
    for rank in range(8):
        node.exit(rank, 1)
    began = node.now
    node.turn()
    assert not node.reported
    assert node.now == began
    due_at = min(at for at in node.training.wake_at() if at is not None)
    assert due_at == began + TAIL_WITHIN_S
    assert node.turn(TAIL_WITHIN_S), "all have ended, and nothing is waited for twice"
    assert node.reported == ["exit code 1"]
    assert len(node.training._failures) == 8


def test_while_the_log_disk_hangs_a_later_failure_is_reported_at_once(node: Supervised) -> None:
    node.exit(0, 1)
    node.turn()
    node.turn(TAIL_WITHIN_S)
    assert node.reported
    for rank in range(1, 8):
        node.exit(rank, -signal.SIGTERM)
    assert node.turn()
    node.start(2)
    node.exit(0, 2)
    node.turn()
    assert node.reported[1:] == ["exit code 2"]
    node.logs.answer()  # of the first generation
    for rank in range(1, 8):
        node.exit(rank, -signal.SIGTERM)
    assert node.turn()
    node.start(3)
    node.exit(0, 3)
    node.turn()
    assert len(node.reported) == 2, "the disk answers again: its lines are worth the time"


def test_a_generation_is_not_over_before_its_last_failure_is_examined(node: Supervised) -> None:
    node.training.stop(1.0, gently=False, reason="another node has failed")
    for rank in range(8):
        node.exit(rank, 1)
    assert not node.turn()
    node.logs.answer()
    assert node.turn()
    assert len(node.training._failures) == 8
    assert not node.reported, "they have failed after they were asked to end"
