"""Who came, who went and why, and what had failed: counted once, however a world is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.observability.membership import (
    NOTHING,
    MembershipChange,
    MembershipWatch,
    because,
    reason,
)
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Failure, Member, Phase, Result, World
from elastic_agent.rendezvous.statements.exclusion import Exclusion

OOM = Failure(1, "f", "s", "host_out_of_memory", node="a", rank=0, local_rank=0, returncode=-9)
FAILED = Cause(CauseKind.FAILURE, "a", "s", OOM)


def world(generation: int, nodes: str, cause: Cause, phase: Phase = Phase.RUNNING) -> World:
    """`nodes` are letters, each the node and the incarnation; an upper case one is its next life."""
    members = tuple(Member(node.lower(), f"{node}-1", 1, rank) for rank, node in enumerate(nodes))
    result = Result.RESTARTS_EXHAUSTED if phase is Phase.ENDED else None
    return World("job", generation, phase, members, Endpoint("h", 1), cause, result=result)


def seen(*worlds: World | None, asked: tuple[str, ...] = ()) -> list[MembershipChange]:
    """What changes, one after the other; the same look twice changes nothing."""
    watch = MembershipWatch()
    watch.asked_to_stop(asked)
    changes = []
    for each in worlds:
        changes.append(watch.see(each))
        assert watch.see(each) == NOTHING
        if each is not None:
            assert watch.see(replace(each)) == NOTHING
    return changes


def stopped(generation: int, nodes: str, cause: Cause) -> World:
    return world(generation, nodes, cause, Phase.STOPPING)


START, JOIN = Cause(CauseKind.START), Cause(CauseKind.JOIN, "c")
LEAVE_B, LOST_B = Cause(CauseKind.LEAVE, "b"), Cause(CauseKind.LOST, "b")


@pytest.mark.parametrize(
    ("cause", "nodes", "expected"),
    [
        pytest.param(JOIN, "abc", MembershipChange(joined=1), id="one joins"),
        pytest.param(JOIN, "abcde", MembershipChange(joined=3), id="three join"),
        pytest.param(LEAVE_B, "a", MembershipChange(left=1), id="one leaves"),
        pytest.param(LOST_B, "a", MembershipChange(lost=1, incident="lost"), id="one is lost"),
        pytest.param(
            LOST_B, "aB", MembershipChange(joined=1, lost=1, incident="lost"), id="one comes back anew"
        ),
        pytest.param(
            LEAVE_B, "z", MembershipChange(joined=1, left=1, lost=1), id="one leaves, one is gone, one joins"
        ),
        pytest.param(FAILED, "ab", MembershipChange(incident="host_out_of_memory"), id="a worker fails"),
        pytest.param(
            Cause(CauseKind.WITHDRAWN, "b"), "ab", MembershipChange(incident="lost"), id="one is cut off"
        ),
    ],
)
def test_what_changes_between_two_generations(cause: Cause, nodes: str, expected: MembershipChange) -> None:
    after = world(2, nodes, cause)
    assert seen(world(1, "ab", START), stopped(1, "ab", cause), after) == [NOTHING, NOTHING, expected]
    assert seen(world(1, "ab", START), after) == [NOTHING, expected], "the stop may be missed"


def test_an_exclusion_is_counted_once() -> None:
    bad = Exclusion("c", "c-1", "repeated", "its workers fail")
    worse = replace(bad, life="C-1", times=2)
    worlds = [
        world(1, "abc", START),
        replace(world(2, "ab", FAILED), exclusions=(bad,)),
        replace(world(3, "ab", FAILED), exclusions=(bad,)),
        replace(world(4, "abC", JOIN), exclusions=(replace(bad, readmitted=True),)),
        replace(world(5, "ab", FAILED), exclusions=(worse,)),
    ]
    assert [change.excluded for change in seen(*worlds)] == [0, 1, 0, 0, 1]
    late = [
        replace(world(2, "ab", FAILED), exclusions=(bad,)),
        replace(world(3, "ab", FAILED), exclusions=(bad,)),
    ]
    assert [change.excluded for change in seen(*late)] == [0, 0], "it was before this node came"


def test_a_node_known_to_leave_beside_another_has_left() -> None:
    worlds = (world(1, "abc", START), stopped(1, "abc", LEAVE_B), world(2, "a", LEAVE_B))
    assert seen(*worlds)[2] == MembershipChange(left=1, lost=1)
    assert seen(*worlds, asked=("c-1",))[2] == MembershipChange(left=2)


def test_what_was_before_this_agent_came_is_not_its_to_count() -> None:
    assert seen(world(7, "ab", FAILED)) == [NOTHING]
    assert seen(None, stopped(7, "ab", FAILED), world(8, "abc", FAILED))[2] == MembershipChange(
        joined=1, incident="host_out_of_memory"
    )


def test_a_failure_counts_as_what_the_next_world_calls_it() -> None:
    """A worker that failed beside a lost node failed because of it."""
    worlds = (world(1, "ab", START), stopped(1, "ab", FAILED), world(2, "a", LOST_B))
    assert seen(*worlds)[1:] == [NOTHING, MembershipChange(lost=1, incident="lost")]


def test_a_generation_that_was_missed_does_not_lend_its_end_to_the_one_before() -> None:
    worlds = (world(1, "ab", START), stopped(2, "abc", FAILED), world(3, "abc", FAILED))
    assert seen(*worlds)[1:] == [MembershipChange(joined=1), MembershipChange(incident="host_out_of_memory")]


def test_the_failure_that_ends_the_job_counts() -> None:
    worlds = (world(1, "a", START), stopped(1, "a", FAILED), world(1, "a", FAILED, Phase.ENDED))
    assert seen(*worlds)[1:] == [NOTHING, MembershipChange(incident="host_out_of_memory")]


def test_a_new_run_of_the_job_is_no_change_of_the_old_one() -> None:
    old = world(3, "ab", Cause(CauseKind.SUCCESS), Phase.ENDED)
    assert seen(old, world(4, "cd", START)) == [NOTHING, NOTHING]


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (FAILED, "host_out_of_memory"),
        (replace(FAILED, failure=Failure(1, "f", "s")), "unknown"),
        (JOIN, "join"),
        (LEAVE_B, "leave"),
        (LOST_B, "lost"),
        (Cause(CauseKind.WITHDRAWN, "b"), "lost"),
    ],
)
def test_the_reason_of_a_restart(cause: Cause, expected: str) -> None:
    assert reason(cause) == expected


@pytest.mark.parametrize(
    ("cause", "short", "in_full"),
    [
        (START, "", ""),
        (Cause(CauseKind.JOIN, "c", "c joining"), "c joining", "c joining"),
        (FAILED, "rank 0 on node a failed", "rank 0 on node a failed: s"),
        (replace(FAILED, detail="c is excluded: s"), "c is excluded: s", "c is excluded: s"),
        (Cause(CauseKind.FAILURE, "a", "none", Failure(1, "f", "none")), "none", "none"),
    ],
)
def test_a_failure_that_was_shown_is_named_and_not_repeated(cause: Cause, short: str, in_full: str) -> None:
    """One of another node is not shown where no worker was left, or where one had failed by itself."""
    assert because(world(2, "ab", cause), cause.failure) == short
    assert because(world(2, "ab", cause), None) == in_full
    assert because(world(2, "ab", cause), replace(OOM, generation=7)) == in_full
