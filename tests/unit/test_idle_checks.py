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
        self.checks = IdleChecks(mode, self.new_run, self.events.put)

    def new_run(self) -> FakeRun:
        return FakeRun(self.left.pop(0))

    def hear(self, now: float) -> None:
        event = self.events.get(timeout=5.0)
        assert callable(event)
        event()
        assert self.checks.turn(now, idle=False)


def test_a_node_that_may_not_fail_takes_no_job_before_its_first_checks() -> None:
    node = Checked("fail", [GOOD, WARNS])
    assert node.checks.problem == NOT_YET
    node.checks.turn(0.0, idle=True)
    node.hear(0.5)
    assert node.checks.problem == ""


def test_a_failed_check_keeps_jobs_away_until_it_fails_no_more() -> None:
    node = Checked("fail", [FAILS], [GOOD])
    node.checks.turn(0.0, idle=True)
    node.hear(1.0)
    assert node.checks.problem == "check gpu-ecc failed: 3 errors"
    node.checks.turn(EVERY_S, idle=True)
    node.hear(EVERY_S + 1)
    assert node.checks.problem == ""


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_a_node_that_may_fail_takes_jobs_at_once_whatever_is_found(mode: CheckMode) -> None:
    node = Checked(mode, [FAILS])
    assert node.checks.problem == ""
    node.checks.turn(0.0, idle=True)
    if mode == "warn":
        node.hear(1.0)
    assert node.checks.problem == ""


def test_off_never_runs() -> None:
    assert not Checked("off").checks.turn(10 * EVERY_S, idle=True)


def test_a_node_is_checked_again_as_soon_as_it_is_idle() -> None:
    node = Checked("warn", [GOOD], [GOOD])
    node.checks.turn(0.0, idle=True)
    node.hear(1.0)
    node.checks.turn(EVERY_S - 1, idle=True)
    node.checks.turn(EVERY_S, idle=False)
    assert len(node.left) == 1
    node.checks.turn(EVERY_S + 1, idle=True)
    node.hear(EVERY_S + 2)
    assert not node.left
