"""Why one world followed another, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.observability.observer import because, reason
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Failure, Member, Phase, Result, World

OOM = Failure(1, "f", "s", "host_out_of_memory", node="a", rank=0, local_rank=0, returncode=-9)
FAILED = Cause(CauseKind.FAILURE, "a", "s", OOM)


def world(generation: int, nodes: str, cause: Cause, phase: Phase = Phase.RUNNING) -> World:
    """`nodes` are letters, each the node and the incarnation; an upper case one is its next life."""
    members = tuple(Member(node.lower(), f"{node}-1", 1, rank) for rank, node in enumerate(nodes))
    result = Result.RESTARTS_EXHAUSTED if phase is Phase.ENDED else None
    return World("job", generation, phase, members, Endpoint("h", 1), cause, result=result)


START, JOIN = Cause(CauseKind.START), Cause(CauseKind.JOIN, "c")
LEAVE_B, LOST_B = Cause(CauseKind.LEAVE, "b"), Cause(CauseKind.LOST, "b")


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
