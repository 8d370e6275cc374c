"""How the time of a leave is divided where the machine goes away, and that no wait of the leave is longer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastic_agent.rendezvous.node.deadlines import LINGER_S, Deadlines, LeaveTimes, leave_times
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World
from tests.policies import PLAIN_POLICY

POLICY = replace(PLAIN_POLICY, drain_timeout_s=20.0)
DRAINING = World(
    "job",
    4,
    Phase.DRAINING,
    (Member("a", "a-1", 1, 0),),
    Endpoint("h", 1),
    Cause(CauseKind.LEAVE, "a", "asked"),
)


@pytest.mark.parametrize("left_s", [0.5, 2.0, 10.0, 30.0, 120.0])
def test_each_part_of_a_leave_is_over_before_the_next_and_the_machine(left_s: float) -> None:
    by = leave_times(100.0, 100.0 + left_s)
    assert 100.0 < by.drained_by < by.drain_ended_by < by.stopped_by < by.saved_by < 100.0 + left_s
    assert by.drained_by - 100.0 == pytest.approx(left_s * 2 / 3)
    assert 100.0 + left_s - by.saved_by <= 1.0


def test_a_deadline_that_has_passed_leaves_no_time() -> None:
    assert leave_times(100.0, 90.0).drained_by == 100.0


@pytest.mark.parametrize(
    ("ends_at", "alone_at", "drain_over_at", "wait_over_at"),
    [
        (math.inf, 103.0, 121.0, 121.0 + LINGER_S),
        (102.0, 100.0 + 4 / 3, 100.0 + 3 / 2, 100.0 + 5 / 3),
        (109.0, 103.0, 106.5, 107.5),
        (1000.0, 103.0, 121.0, 121.0 + LINGER_S),
    ],
)
def test_no_wait_of_a_leave_outlasts_the_machine(
    ends_at: float, alone_at: float, drain_over_at: float, wait_over_at: float
) -> None:
    """The drain is seen a second after the leave has begun."""
    deadlines = Deadlines(POLICY, 0.0)
    deadlines.leave(100.0, ends_at)
    assert deadlines.drain_over_at == math.inf
    deadlines.look(DRAINING, idle=False, now=101.0)
    found = deadlines.leave_alone_at, deadlines.drain_over_at, deadlines.wait_over_at
    assert found == pytest.approx((alone_at, drain_over_at, wait_over_at))
    assert deadlines.overdue_at == deadlines.leave_times.drained_by
    deadlines.look(None, idle=True, now=101.0)
    assert deadlines.wait_over_at <= deadlines.leave_times.stopped_by


def test_a_leave_is_divided_anew_only_when_its_end_is_another() -> None:
    deadlines = Deadlines(POLICY, 0.0)
    for now, ends_at, divided_at in [(100.0, 130.0, 100.0), (110.0, 130.0, 100.0), (120.0, 126.0, 120.0)]:
        deadlines.leave(now, ends_at)
        assert deadlines.leave_times == leave_times(divided_at, ends_at)
    deadlines.leave(122.0, math.inf)
    assert deadlines.leave_times == LeaveTimes()
