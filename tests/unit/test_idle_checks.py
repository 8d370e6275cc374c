"""The checks of a daemon's node: when they run, and what keeps jobs away."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.configuration.config import CheckMode
from elastic_agent.health.checks.finding import Finding
from elastic_agent.pool.daemon import EVERY_S, NOT_YET, IdleChecks

from .test_join_checks import FAILS, GOOD, WARNS, FakeRun


class Checked:
    """What the runs find, in turn."""

    def __init__(self, mode: CheckMode, *found: Sequence[Finding]) -> None:
        self.left = list(found)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.checks = IdleChecks(mode, lambda: FakeRun(self.left.pop(0)), self.events.put)

    def run(self, at: float) -> str:
        """One that is due; the node's problem then."""
        self.checks.turn(at, idle=True)
        event = self.events.get(timeout=5.0)
        assert callable(event)
        event()
        self.checks.turn(at, idle=False)
        return self.checks.problem


def test_a_failed_check_keeps_jobs_away_until_it_fails_no_more_as_does_one_that_has_not_ended() -> None:
    node = Checked("fail", [GOOD, WARNS], [FAILS], [GOOD])
    assert node.checks.problem == NOT_YET
    problems = [node.run(at) for at in (0.0, EVERY_S, 2 * EVERY_S)]
    assert problems == ["", "check gpu-ecc failed: 3 errors", ""]


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_a_node_that_may_fail_takes_jobs_unchecked(mode: CheckMode) -> None:
    node = Checked(mode, [FAILS])
    node.checks.turn(1.0, idle=True)
    assert (node.checks.problem, len(node.left)) == ("", 1)


def test_a_node_is_checked_again_as_soon_as_it_is_idle() -> None:
    node = Checked("fail", [GOOD], [GOOD])
    node.run(0.0)
    node.checks.turn(EVERY_S - 1, idle=True)
    node.checks.turn(EVERY_S, idle=False)
    assert len(node.left) == 1
    node.run(EVERY_S + 1)
    assert not node.left
