"""The checks of a daemon's node: when they run, and what keeps jobs away."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.configuration.values import CheckMode
from elastic_agent.health.checks.finding import Finding
from elastic_agent.pool.loop import AGAIN_S, EVERY_S, NOT_YET, IdleChecks

from .test_join_checks import FAILS, GOOD, WARNS, FakeRun


class Checked:
    """What the runs find, in turn."""

    def __init__(self, mode: CheckMode, *found: Sequence[Finding]) -> None:
        self.left = list(found)
        self.shown: list[Sequence[Finding]] = []
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.checks = IdleChecks(mode, self.new_run, self.events.put, self.shown.append)

    def new_run(self) -> FakeRun:
        return FakeRun(self.left.pop(0))

    def hear(self, now: float) -> None:
        event = self.events.get(timeout=5.0)
        assert callable(event)
        event()
        assert self.checks.judge(now)


def test_a_node_that_may_not_fail_takes_no_job_before_its_first_checks() -> None:
    node = Checked("fail", [GOOD, WARNS])
    assert node.checks.problem == NOT_YET
    node.checks.turn(0.0)
    node.hear(0.5)
    assert node.checks.problem == ""
    assert node.shown == [(GOOD, WARNS)]


def test_a_failed_check_keeps_jobs_away_until_it_fails_no_more() -> None:
    node = Checked("fail", [FAILS], [GOOD])
    node.checks.turn(0.0)
    node.hear(1.0)
    assert node.checks.problem == "check gpu-ecc failed: 3 errors"
    assert node.checks.turn(2.0) == 1.0 + AGAIN_S
    node.checks.turn(1.0 + AGAIN_S)
    node.hear(1.5 + AGAIN_S)
    assert node.checks.problem == ""


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_a_node_that_may_fail_takes_jobs_at_once_whatever_is_found(mode: CheckMode) -> None:
    node = Checked(mode, [FAILS])
    assert node.checks.problem == ""
    node.checks.turn(0.0)
    if mode == "warn":
        node.hear(1.0)
    assert node.checks.problem == ""


def test_off_never_runs_not_even_after_a_job_that_could_not_run_here() -> None:
    node = Checked("off")
    node.checks.suspect(5.0)
    assert node.checks.turn(10 * EVERY_S) is None


def test_an_idle_node_is_checked_again_and_at_once_after_a_job_that_could_not_run_here() -> None:
    node = Checked("warn", [GOOD], [GOOD], [GOOD])
    assert node.checks.turn(0.0) == EVERY_S
    node.hear(1.0)
    assert node.checks.turn(EVERY_S - 1) == EVERY_S
    node.checks.turn(EVERY_S)
    node.hear(EVERY_S + 1)
    node.checks.suspect(EVERY_S + 2)
    node.checks.turn(EVERY_S + 2)
    node.hear(EVERY_S + 3)
    assert len(node.shown) == 3
