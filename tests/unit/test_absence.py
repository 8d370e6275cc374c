"""A world whose members have all gone from the store: how long the next one waits, and which number it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.rendezvous.coordinator.decide import decide
from elastic_agent.rendezvous.coordinator.view import Publish
from elastic_agent.rendezvous.messages import Exclusion
from elastic_agent.rendezvous.records import (
    BadState,
    Cause,
    CauseKind,
    Condition,
    Endpoint,
    NodeRecord,
    Phase,
    Restarts,
    World,
)
from elastic_agent.rendezvous.store.kv_state import KvState

from .bench import POLICY as BENCH_POLICY
from .bench import Bench
from .test_decide import NOW, POLICY, A, B, C, D, check, running, stopping, view

HOSTED = replace(POLICY, min_nodes=1, unleased_s=5.0)
GRACE = replace(HOSTED, store_outage_grace_s=60.0)
HOSTED_BENCH = replace(BENCH_POLICY, min_nodes=1, unleased_s=5.0)
A, B, C, D = (replace(node, http=Endpoint(node.address, 80)) for node in (A, B, C, D))
LOST = running(A, B, C).carried_over()
A2, B2, C2 = (
    replace(node, incarnation=f"{node.node}-2", seen=seen) for node, seen in ((A, 4), (B, 4), (C, 6))
)
BESIDE_C = replace(D, http=Endpoint(C.address, 81))
"""Another agent of c's machine."""


@pytest.mark.parametrize(
    ("nodes", "evicted", "since", "hosted", "grace"),
    [
        ((A2,), (), NOW - 4.9, "wait until 100.1", "wait until 100.1"),
        ((A2,), (), NOW - 5.0, "running 5 [a] lost", "running 5 [a] lost"),
        ((A2, B2), ("c-1",), NOW - 2.0, "wait until 103", "wait until 103"),
        ((A2, BESIDE_C), (), NOW - 2.0, "wait until 103", "wait until 103"),
        ((A2, B2, BESIDE_C), ("c-1",), NOW - 2.0, "running 5 [a b d] lost", "running 5 [a b d] lost"),
        ((A2, B2, C2), (), NOW, "running 7 [a b c] lost", "running 7 [a b c] lost"),
        ((D,), (), NOW - 4.0, "wait until 101", "wait until 161"),
        ((D,), (), NOW - 65.0, "running 5 [d] lost", "running 5 [d] lost"),
        ((D,), ("a-1", "b-1", "c-1"), NOW - 4.0, "wait until 101", "wait until 161"),
        ((BESIDE_C,), ("c-1",), NOW - 4.0, "wait until 101", "wait until 101"),
        ((A.having(4, Condition.STOPPED), D), (), NOW - 1.0, "running 5 [a d] lost", "running 5 [a d] lost"),
    ],
)
def test_a_world_that_vanished_is_waited_for_as_long_as_it_may_train(
    nodes: tuple[NodeRecord, ...], evicted: tuple[str, ...], since: float, hosted: str, grace: str
) -> None:
    """Not where a member is live, and only for members that have not come back and are not known to have ended.

    That their machine refuses connections is known to be their end where another of its agents has the store.
    """
    seen = replace(view(LOST, *nodes, since=since), evicted=evicted)
    for policy, decision in ((HOSTED, hosted), (GRACE, grace)):
        check(seen, policy, decision, "")


def test_a_world_that_can_prove_nothing_is_waited_for_no_longer_than_its_leases() -> None:
    """One node has no peers, and without its address none can be asked. A store that was not lost has ended them."""
    for nodes in ((A,), (replace(A, http=None), B)):
        known_lost = stopping(*nodes, kind=CauseKind.LOST)
        for policy in (HOSTED, GRACE):
            check(view(known_lost.carried_over(), D, since=NOW - 4.0), policy, "wait until 101", "")
            check(view(known_lost, D, since=NOW - 4.0), policy, "running 5 [d] lost a", "")


def test_a_world_that_stops_because_a_member_said_so_is_not_waited_for() -> None:
    """That one has stopped, and so no member goes on beyond its lease."""
    told = replace(LOST, cause=Cause(CauseKind.LEAVE, "a", "a was asked to stop"))
    check(view(told, D), GRACE, "running 5 [d] leave a", "")


def test_the_first_number_is_above_all_that_a_node_here_has_known() -> None:
    check(view(None, A2, B2), POLICY, "running 5 [a b] start", "")
    check(view(None, A2, C2), POLICY, "running 7 [a c] start", "")
    joined = decide(view(replace(running(D), generation=1), D, C2), HOSTED, NOW)
    assert isinstance(joined, Publish)
    assert (joined.world.generation, joined.world.phase) == (1, Phase.DRAINING), (
        "the join itself is no new number"
    )
    over = replace(LOST, generation=1, members=running(D).members)
    check(view(over, D.having(1, Condition.STOPPED), C2), HOSTED, "running 7 [d c] lost", "")


LOOPING = Restarts(3, 3, "crash", 3, 2, BadState(3, 20), "a", 3)
SPENT = replace(LOST, restarts=LOOPING)


def opened(world: World, *nodes: NodeRecord, came_after: bool = False) -> World:
    seen = replace(view(world, *nodes, since=NOW - 65.0), came_after=came_after)
    decision = decide(seen, HOSTED, NOW)
    assert isinstance(decision, Publish)
    return decision.world


def test_another_job_at_the_endpoint_takes_over_nothing_but_the_number_of_a_dead_one() -> None:
    """Its first steps are progress, its budget is whole, and its checkpoints are its own."""
    world = opened(SPENT, D)
    assert (world.generation, world.restarts, world.step, world.run) == (5, Restarts(), 0, "d-1")


LEFT = replace(SPENT, phase=Phase.STOPPING, cause=Cause(CauseKind.LEAVE, "a", "node a was asked to stop"))


def test_a_job_that_was_stopped_by_plan_and_is_started_again_is_another_run() -> None:
    """Its directory may be another one, and its budget is whole. Not where one has stood by, or comes back."""
    world = opened(LEFT, D, came_after=True)
    assert (world.generation, world.restarts, world.step, world.run) == (5, Restarts(), 0, "d-1")
    for nodes, came_after in (((D,), False), ((D, replace(A, incarnation="a-1.1")), True)):
        world = opened(LEFT, *nodes, came_after=came_after)
        assert (world.restarts.failures, world.step, world.run) == (3, 20, "the-first")


def test_what_an_operator_has_excluded_stays_so_in_the_next_run() -> None:
    machine = Exclusion("x", "x-1", "gpu_fault", "GPU 3 is sick")
    asked = Exclusion("y", "y-1", "operator", "a fan is loud", by_operator=True)
    over = replace(asked, node="z", readmitted=True)
    world = opened(replace(LEFT, exclusions=(machine, asked, over)), D, came_after=True)
    assert world.exclusions == (asked,)


def test_a_job_goes_on_as_it_was_when_one_of_its_agents_has_come_back() -> None:
    """In an empty store as in one that has lost all its members but not the job."""
    for store, nodes in (
        (SPENT, (D, replace(A, incarnation="a-1.1"))),
        (replace(SPENT, cause=Cause(CauseKind.LOST, "a", "node a is gone: its lease ended")), (D,)),
    ):
        world = opened(store, *nodes)
        assert (world.restarts.failures, world.step, world.run) == (3, 20, "the-first")


def test_an_empty_store_is_told_the_newest_world_that_a_node_has_known() -> None:
    """With all that it says of the job: its restarts, its step."""
    bench = Bench()
    a, b = bench.joined("a", "b", policy=HOSTED_BENCH)
    old = bench.world()
    bench.kv = KvState(base=1000)
    b.connected = False
    bench.after(1)
    carried = bench.world()
    assert carried == old.carried_over()
    assert carried.member(a.part.incarnation) is None, "a is another incarnation now"
    assert (a.generation, b.generation) == (0, old.generation), "b may still train"
    bench.after(5)
    assert bench.world().generation == old.generation + 1
    b.connected = True
    bench.after(3)
    assert sorted(bench.members()) == ["a", "b"]
    assert bench.world().generation > old.generation + 1
