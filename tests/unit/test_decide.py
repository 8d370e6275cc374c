"""The two decisions: one row for each line of them, then every small combination.

A row of a table has the world, the nodes that live, the decision and a part of its reason. Nodes are words: `b:leaving`
is node b, which leaves; `c:polls@99.5` is node c, whose workers look at their flags, and which came at 99.5 (without
`@`, long ago). See `node` and `short`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_agent.rendezvous import records
from elastic_agent.rendezvous.coordinator.decide import decide
from elastic_agent.rendezvous.coordinator.exclusions import (
    BY_OPERATOR,
    MOST_IN_A_ROW,
    digest,
    exclude,
    left_out,
    readmit,
)
from elastic_agent.rendezvous.coordinator.next_world import why_refused
from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Decision, Policy, Publish, View, Wait
from elastic_agent.rendezvous.messages import (
    MAX_EXCLUSION_REASON,
    MAX_EXCLUSIONS,
    Exclusion,
    Limits,
    Program,
    Recheck,
)
from elastic_agent.rendezvous.node.node_actions import (
    Action,
    Drain,
    Leave,
    LocalState,
    Start,
    Stay,
    Stop,
    next_action,
)
from elastic_agent.rendezvous.records import (
    TRANSITIONS,
    BadState,
    Cause,
    CauseKind,
    Condition,
    Endpoint,
    Failure,
    GenerationProgress,
    Member,
    NodeRecord,
    Phase,
    Restarts,
    Result,
    Standby,
    World,
    assign_ranks,
)
from tests.policies import PLAIN_POLICY

POLICY = replace(PLAIN_POLICY, min_nodes=2, max_nodes=3)
LIMITS = Limits(2, 3, 1.0, None)
"""Those of `POLICY`."""
NOW = 100.0
CRASH = Failure(4, "crash", "rank 0 raised ValueError")
COLLATERAL = replace(CRASH, fingerprint="gloo", summary="its peer is gone", collateral=True)
NOTIFIED, POLLING, DRAINED = Condition.NOTIFIED, Condition.POLLING, Condition.DRAINED
STATE_SAVED, STOPPED, SUCCEEDED = Condition.STATE_SAVED, Condition.STOPPED, Condition.SUCCEEDED

KNOWN = {
    name: NodeRecord(name, f"{name}-1", f"host-{name}", 4001 + place, slots, ready=True)
    for place, (name, slots) in enumerate([("a", 2), ("b", 1), ("c", 3), ("d", 1), ("e", 1), ("f", 1)])
}
HABITS: dict[str, dict[str, Any]] = {
    "leaving": {"leaving": True},
    "cold": {"ready": False},
    "host": {"hosts_store": True},
    "failed": {"failure": CRASH},
    "failed-before": {"failure": replace(CRASH, generation=3)},
    "collateral": {"failure": COLLATERAL},
    "from-outside": {"failure": replace(CRASH, outside=True)},
    "rank0": {"node_rank": 0},
    "rank1": {"node_rank": 1},
    "again": {"incarnation": "again"},
    "step3": {"step": 3},
    "step20": {"step": 20},
    "step21": {"step": 21},
    "checked": {"recheck": Recheck(2, True)},
    "checked-before": {"recheck": Recheck(1, True)},
    "check-failed": {"recheck": Recheck(2, False, "/dev/shm is full")},
}
CONDITIONS = {
    "polls": (NOTIFIED, POLLING),
    "kept": (NOTIFIED, POLLING, DRAINED, STATE_SAVED, STOPPED),
    "kept-nothing": (NOTIFIED, POLLING, DRAINED, STOPPED),
    **{one.value: (one,) for one in Condition},
}


def node(word: str) -> NodeRecord:
    """`NAME:HABIT,...`: a habit is a key of the two tables above, and a condition holds in generation 4, or with
    `-before` in the one before it. A node that has stopped offers a fresh port."""
    name, _, habits = word.partition(":")
    made = KNOWN[name]
    for habit in filter(None, habits.split(",")):
        if habit in HABITS:
            made = replace(made, **HABITS[habit])
        else:
            made = made.having(3 if "-before" in habit else 4, *CONDITIONS[habit.removesuffix("-before")])
        if habit == "stopped":
            made = replace(made, port=made.port + 100)
    return made if made.incarnation != "again" else replace(made, incarnation=f"{name}-2")


def nodes(words: str, also: str = "") -> tuple[NodeRecord, ...]:
    """All of them are `also` this."""
    whole = (word.partition("@")[0] for word in words.split())
    return tuple(node(word + (f"{',' if ':' in word else ':'}{also}" if also else "")) for word in whole)


def view(
    world: World | None,
    live: str | NodeRecord | tuple[NodeRecord, ...] = (),
    *more: NodeRecord,
    since: float = NOW,
    also: str = "",
) -> View:
    """These nodes, oldest first."""
    if isinstance(live, str):
        seen, came = nodes(live, also), [word.partition("@")[2] for word in live.split()]
    else:
        seen = (live, *more) if isinstance(live, NodeRecord) else live
        came = [""] * len(seen)
    arrivals = {one.incarnation: float(at or 0.0) for one, at in zip(seen, came, strict=True)}
    return View(seen, world, since, arrivals, ready_since=arrivals)


A, B, C, D = nodes("a b c d")
SA, SB, SC = nodes("a b c", "stopped")


def running(*members: NodeRecord, **changes: Any) -> World:
    """Generation 4 of these nodes."""
    world = World(
        job="job",
        generation=4,
        phase=Phase.RUNNING,
        members=assign_ranks(members),
        master=Endpoint(members[0].address, members[0].port),
        cause=Cause(CauseKind.START),
        step=20,
        run="the-first",
    )
    return replace(world, **changes)


def stopping(*members: NodeRecord, kind: CauseKind = CauseKind.JOIN, **changes: Any) -> World:
    failure = CRASH if kind is CauseKind.FAILURE else None
    cause = Cause(kind, "a", f"{kind.value} of a", failure)
    return replace(running(*members, **changes), phase=Phase.STOPPING, cause=cause)


def short(decision: Decision) -> str:
    """What a decision does, on one line; `*` is after the member that brings the last state to disk."""
    if isinstance(decision, Wait):
        return "wait" if decision.until is None else f"wait until {decision.until:g}"
    world = decision.world
    names = " ".join(m.node + "*" * (m.incarnation == world.final_saver) for m in world.members)
    phase = world.phase.value if world.result is None else world.result.value
    return f"{phase} {world.generation} [{names}] {world.cause.kind.value} {world.cause.node}".strip()


def table(text: str) -> list[tuple[str, ...]]:
    """Rows of columns between bars; without those that begin with `#`."""
    rows = (line for line in text.strip().split("\n") if not line.startswith("#"))
    return [tuple(column.strip() for column in row.split("|")) for row in rows]


def check(view: View, policy: Policy, decided: str, reason: str = "") -> None:
    decision = decide(view, policy, NOW)
    assert short(decision) == decided
    assert reason in decision.reason


def published(decision: Decision) -> World:
    assert isinstance(decision, Publish), decision
    return decision.world


AB, ABC = running(A, B), running(A, B, C)
DRAINING = replace(ABC, phase=Phase.DRAINING, cause=Cause(CauseKind.LEAVE, "c", "node c was asked to stop"))
LAST_STEP = replace(DRAINING, phase=Phase.LAST_STEP)
SAVING = replace(LAST_STEP, phase=Phase.STOPPING, final_saver="b-1")
SIX = nodes("a b c d e f")
WORLDS: Mapping[str, World | None] = {
    "none": None,
    "a": running(A),
    "ab": AB,
    "abc": ABC,
    "draining": DRAINING,
    "fresh": replace(DRAINING, step=0),  # no worker of the job has ever told of a step
    "last step": LAST_STEP,
    "last step of a": replace(LAST_STEP, members=assign_ranks((A,))),
    "saving": SAVING,
    "ab stops": stopping(A, B),
    "ab lost": stopping(A, B, kind=CauseKind.LOST),
    "abc stops": stopping(A, B, C),
    "ca stops": stopping(C, A),
    "cab stops": stopping(C, A, B),
    "abcd": running(*SIX[:4]),
    "abcd stops": stopping(*SIX[:4]),
    "abcd's last step": replace(running(*SIX[:4]), phase=Phase.LAST_STEP),
    "six": running(*SIX),
    "six stops": stopping(*SIX),
}

# ---------------------------------------------------------------- decide: what ends a generation, and what follows


@pytest.mark.parametrize(
    ("world", "live", "decision", "reason"),
    table("""
# a cold start waits for enough nodes and a last call
none | | wait | 2 more of at least 2 nodes (here: none)
none | a | wait | 1 more of at least 2 nodes (here: a)
none | a b:leaving | wait | 1 more
none | a b@99.5 | wait until 100.5 | last call: 2 nodes here, up to 3 may come
none | a@99.5 b | wait until 100.5 | last call
none | a b@99 | running 1 [a b] start | 2 nodes are ready
none | a b c@100 | running 1 [a b c] start | 3 nodes are ready
none | c a d b | running 1 [c a d] start | 3 nodes are ready
# by node rank, then by age; two may have one
none | c a:rank1 b:rank0 | running 1 [b a c] start |
none | c:rank1 a d b:rank1 | running 1 [c b a] start |
# nothing ends it
ab | a b | wait | generation 4 is running on 2 nodes
ab | a b:failed-before | wait | generation 4 is running on 2 nodes
ab | a b:stopped-before,succeeded-before | wait | generation 4 is running on 2 nodes
# a member fails, is lost, or back as another incarnation
ab | a b:failed | stopping 4 [a b] failure b | rank 0 raised ValueError
ab | b:failed,stopped | stopping 4 [a b] failure b | rank 0 raised ValueError
ab | a | stopping 4 [a b] lost b | node b is gone
ab | a b:again | stopping 4 [a b] lost b | node b is gone
ab | a:leaving | stopping 4 [a b] lost b | node b is gone
# a member leaves; one that has stopped its workers already leaves nothing to agree on
ab | a b:leaving | draining 4 [a b] leave b | node b was asked to stop
ab | a b:leaving,stopped | stopping 4 [a b] leave b | node b was asked to stop
ab | a b:leaving,host | draining 4 [a b] leave b | hosts the c10d rendezvous store
ab | a b c:leaving,host | draining 4 [a b] leave c | hosts the c10d rendezvous store
# a member stopped by itself
ab | a b:stopped | stopping 4 [a b] withdrawn b | could not confirm its lease
# members succeed
ab | a:stopped,succeeded b:stopped,succeeded | succeeded 4 [a b] success | every worker ended with success
ab | a b:stopped,succeeded c | wait | of b have ended with success; waiting for those of a
ab | a:failed b:stopped,succeeded | stopping 4 [a b] failure a |
ab | b:stopped,succeeded | stopping 4 [a b] lost a |
# a newcomer
ab | a b c@100 | draining 4 [a b] join c | c joining
ab | a b c d | draining 4 [a b] join c | c joining
ab | a b c:leaving | wait | generation 4 is running on 2 nodes
abc | a b c d | wait | d standing by: the world has all 3 nodes of --max-nodes
a | a b@99.5 | wait until 100.5 | last call before b joins
a | a b@99 | draining 4 [a] join b | b joining
# one that is not ready keeps no node waiting: neither the others nor a newcomer that is
ab | a b c:cold | wait | c getting ready to join
ab | a b c:cold d | draining 4 [a b] join d | d joining
a | a c:cold b@99.5 | wait until 100.5 | last call before b joins
# a planned change: all must have told their workers
draining | a b c | wait | waiting for a, b, c to notify its workers
draining | a:polls b c:polls | wait | waiting for b to notify its workers
draining | a:polls b:polls-before c:polls | wait | waiting for b to notify its workers
# and then it depends on whether the workers listen
draining | a:polls b:polls c:polls | last_step 4 [a b c] leave c | all workers stop at the same step
draining | a:polls b:polls c:notified | wait until 103 | the workers of c to end a step
draining | a:notified b:notified c:notified | wait until 103 | the workers of a, b, c to end a step
fresh | a:notified b:notified c:notified | stopping 4 [a b c] leave c | node c was asked to stop
fresh | a:polls b:notified c:notified | wait until 103 | the workers of b, c to end a step
fresh | a:notified b:notified,step3 c:notified | wait until 103 | the workers of a, b, c to end a step
# the machine of one goes away before its workers end: all stop now, also those who still could
draining | a:polls b c:polls,overdue | stopping 4 [a b c] leave c | node c was asked to stop
last step | a:polls b:kept c:polls,overdue | stopping 4 [a b c] leave c | node c was asked to stop
# a node whose workers have succeeded has no worker to notify
draining | a:polls b:polls c:stopped,succeeded | last_step 4 [a b c] leave c | all workers stop at the same step
draining | a:stopped,succeeded b:stopped,succeeded c:stopped,succeeded | succeeded 4 [a b c] success |
# whatever breaks the generation ends the drain with it
draining | a:polls b:polls c:polls,failed | stopping 4 [a b c] failure c | rank 0 raised ValueError
draining | a:polls b:polls | stopping 4 [a b c] lost c | node c is gone
draining | a:polls b:polls c:notified,stopped | stopping 4 [a b c] leave c | asked to stop
# a second node that leaves meanwhile, or a joiner that comes or dies, changes nothing
draining | a:polls b:polls c:notified,leaving | wait until 103 |
draining | a:polls b:polls,leaving c:polls d | last_step 4 [a b c] leave c |
# how a drain ends
last step | a:polls b:polls c:polls | wait | a, b, c to stop generation 4
last step | a:kept b:polls c:kept,leaving | wait | b to stop generation 4
last step | a:kept b:kept c:kept,leaving | running 5 [a b] leave c | 2 nodes are ready
last step | a:kept b:kept c:kept,leaving d@100 | running 5 [a b d] leave c | 3 nodes are ready
last step | a:kept b:kept c:kept d:cold | running 5 [a b c] leave c | 3 nodes are ready
last step of a | a:kept d:cold | running 5 [a d] leave c | 2 nodes are ready
last step | a:kept b:kept c:stopped,succeeded | running 5 [a b c] leave c |
last step | a:stopped,succeeded b:stopped,succeeded c:stopped,succeeded | succeeded 4 [a b c] success |
last step | a:kept b:polls c:polls,failed | stopping 4 [a b c] failure c | rank 0 raised ValueError
last step | a:kept b:polls | stopping 4 [a b c] lost c | node c is gone
last step | a:kept b:polls c:notified,stopped | stopping 4 [a b c] leave c | asked to stop
# the next cannot start: a leaving node need not wait, and one node brings what all have in memory to disk
last step | a:kept b:kept,leaving c:kept,leaving | stopping 4 [a* b c] leave c | 1 more of at least 2 nodes (here: a
# it could, but no node that stays keeps the state: first to disk, and only then on
last step | a:kept-nothing b:kept,leaving c:kept,leaving d | stopping 4 [a b* c] leave c | 2 nodes are ready
saving | a:stopped b:kept,leaving d | wait | node b brings the state to disk before it leaves
saving | a:stopped d | running 5 [a d] leave c | 2 nodes are ready
# the job ends with its store
last step | a:kept,host,leaving b:kept c:kept | store_host_left 4 [a* b c] leave a | hosts the c10d rendezvous store
# no node starts before all have stopped
ab stops | a b | wait | a, b to stop generation 4
ab stops | a:stopped b | wait | b to stop generation 4
ab stops | a:stopped b:stopped-before c | wait | b to stop
ab stops | a:stopped b:leaving | wait | b to stop
# survivors close at once, whatever the last call; a node that is gone holds none up
ab stops | a:stopped b:stopped | running 5 [a b] join a | 2 nodes are ready
abc stops | a:stopped@100 b:stopped | running 5 [a b] join a | 2 nodes are ready
# survivors keep their places, also where another node is older; newcomers take those that are free
cab stops | a:stopped b:stopped c:stopped | running 5 [c a b] join a |
ca stops | d a:stopped c:stopped | running 5 [c a d] join a |
abc stops | d a:stopped c:stopped | running 5 [a d c] join a |
abc stops | d a:stopped b:stopped c:stopped | running 5 [a b c] join a |
ab stops | a:stopped b:stopped,leaving d@99 | running 5 [a d] join a |
# newcomers have their last call unless the world is full
ab stops | a:stopped b:stopped c:rank0@99.5 | running 5 [a b c] join a |
ab stops | a:stopped d@99.5 | wait until 100.5 | last call: 2 nodes here
# below the minimum it waits, and says for whom and since what
ab lost | a:stopped | wait | 1 more of at least 2 nodes (here: a; last: lost of a)
ab stops | a:stopped b:stopped,leaving | wait | 1 more
ab stops | | wait | 2 more of at least 2 nodes (here: none
# without its host there is no store
ab stops | a:stopped b:stopped,host,leaving c d | store_host_left 4 [a b] leave b | hosts the c10d rendezvous store
# a loss does not change the cause of a planned stop
abc stops | a:stopped c:stopped | running 5 [a c] join a |
"""),
)
def test_what_the_coordinator_decides(world: str, live: str, decision: str, reason: str) -> None:
    check(view(WORLDS[world], live), POLICY, decision, reason)


@pytest.mark.parametrize(
    ("world", "live", "decision", "reason"),
    table("""
# the first one
none | a | wait | 1 more of at least 2 nodes (here: a)
none | a b c | running 1 [a b] start | 2 nodes are ready
none | a b c@99.5 | wait until 100.5 | last call: 3 nodes here, up to 6 may come
# a failure leaves five of six, or three and one that has stood by
six stops | a:stopped b:stopped c:stopped d:stopped e:stopped | running 5 [a b c d] join a | 4 nodes are ready
six stops | b:stopped c:stopped d:stopped e:stopped f:stopped | running 5 [e b c d] join a | 4 nodes are ready
abcd stops | a:stopped b:stopped c:stopped e | running 5 [a b c e] join a | 4 nodes are ready
ab stops | a:stopped | wait | 1 more of at least 2 nodes (here: a
# nodes that join interrupt only for a larger world
abcd | a b c d e | wait | e standing by: 1 more needed, as worlds are multiples of 2 nodes (--nodes-multiple-of)
abcd | a b c d e f | draining 4 [a b c d] join e | e, f joining
abcd | a b c d e f:cold | wait | f getting ready to join
ab | a b c d e@99.5 | wait until 100.5 | last call before c, d joins
# one of four leaves: two go on, of those that keep the state
abcd's last step | a:kept b:kept c:kept d:kept,leaving | running 5 [a b] start | 2 nodes are ready
abcd's last step | a:kept-nothing b:kept-nothing c:kept d:kept,leaving | running 5 [a c] start | 2 nodes are ready
"""),
)
def test_a_world_has_a_multiple_of_nodes_and_the_others_stand_by(
    world: str, live: str, decision: str, reason: str
) -> None:
    check(view(WORLDS[world], live), replace(POLICY, max_nodes=6, nodes_multiple_of=2), decision, reason)


def test_workers_that_do_not_listen_are_waited_for_no_longer_than_this() -> None:
    for live in ("a:polls b:polls c:notified", "a:notified b:notified c:notified"):
        check(view(DRAINING, live, since=97.0), POLICY, "stopping 4 [a b c] leave c", "asked to stop")


def test_a_world_that_can_go_on_waits_for_no_newcomer() -> None:
    roomy = replace(POLICY, max_nodes=5)
    check(view(LAST_STEP, "a:kept b:kept c:kept d@100"), roomy, "running 5 [a b c d] leave c", "4 nodes")


def test_the_last_call_over_a_newcomer_begins_when_it_is_ready() -> None:
    seen = replace(view(running(A), "a b@90"), ready_since={B.incarnation: 99.5})
    check(seen, POLICY, "wait until 100.5", "last call before b joins")


@pytest.mark.parametrize("result", Result)
def test_after_the_end_there_is_nothing_to_decide(result: Result) -> None:
    ended = replace(AB, phase=Phase.ENDED, result=result, cause=Cause(CauseKind.SUCCESS, detail="all done"))
    assert decide(view(ended, "a:stopped b:stopped c"), POLICY, NOW) == Wait("the job has ended: all done")


def test_a_new_run_begins_where_the_numbers_of_the_last_one_end() -> None:
    ended = replace(AB, phase=Phase.ENDED, result=Result.CRASH_LOOP, restarts=Restarts(9, 9, "crash", 9))
    decision = decide(replace(view(ended, "c:again d:again"), came_after_end=True), POLICY, NOW)
    assert short(decision) == "running 5 [c d] start"
    assert (published(decision).restarts, published(decision).run) == (Restarts(), "c-2")
    check(replace(view(ended, "c:again"), came_after_end=True), POLICY, "wait", "1 more")


def test_the_first_and_the_next_world_in_full() -> None:
    """Ranks are dense with unequal slots, the master has its fresh port; run, cause, budget and best step are kept."""
    first = World(
        job="job",
        generation=1,
        phase=Phase.RUNNING,
        members=(Member("c", "c-1", 3, 0), Member("a", "a-1", 2, 3), Member("b", "b-1", 1, 5)),
        master=Endpoint("host-c", 4003),
        cause=Cause(CauseKind.START),
        step=3,
        limits=LIMITS,
        limits_of="c",
        unproven=(0, 1, 2),
        run="c-1",
    )
    assert decide(view(None, "c a:step3 b"), POLICY, NOW) == Publish(first, "3 nodes are ready")
    world = stopping(C, A, restarts=Restarts(2, 1, "crash", 1))
    live = "a:stopped,step20 c:stopped b:step21"
    assert published(decide(view(world, live), POLICY, NOW)) == replace(
        first,
        generation=5,
        master=Endpoint("host-c", 4103),
        cause=world.cause,
        restarts=world.restarts,
        step=21,
        limits_of="",
        unproven=(2,),
        run="the-first",
    )
    assert published(decide(view(world, "a:stopped c:stopped"), POLICY, NOW)).step == 20, (
        "that of a lost node"
    )


def test_a_world_names_the_memory_of_all_nodes_that_stand_by() -> None:
    """Of a survivor that is one too many, of a newcomer that is not ready, and of one that leaves; not of one that has
    left by plan, or has none."""
    live = nodes("b:stopped c:stopped d:stopped e:cold f:leaving a:drained,leaving")
    with_memory = tuple(replace(one, memory=7000 + place) for place, one in enumerate(live))
    without = replace(D, node="g", incarnation="g-1")
    pairs = replace(POLICY, nodes_multiple_of=2, max_nodes=2)
    world = published(decide(view(stopping(B, C, D), (*with_memory, without)), pairs, NOW))
    assert {member.node for member in world.members} == {"b", "c"}
    assert world.standbys == tuple(
        Standby(name, Endpoint(f"host-{name}", 7000 + place)) for place, name in enumerate("def", 2)
    )


# ---------------------------------------------------------------- decide: after a failure

FAILED = stopping(A, B, kind=CauseKind.FAILURE)
FAILED_AGAIN = replace(FAILED, restarts=Restarts(1, 1, "crash", 1))
STEADY = replace(POLICY, restarts=RestartPolicy(first_backoff_s=8.0))
BOTH = "a:stopped b:stopped"


def test_a_second_fruitless_failure_waits_before_the_next_try() -> None:
    check(view(FAILED, BOTH), STEADY, "running 5 [a b] failure a")
    seen = view(FAILED_AGAIN, BOTH)
    waits = decide(seen, STEADY, NOW)
    assert isinstance(waits, Wait)
    assert waits.until is not None
    assert NOW + 4 <= waits.until <= NOW + 8
    assert f"backing off {waits.until - NOW:.1f} s" in waits.reason
    assert decide(seen, STEADY, waits.until - 0.01) == waits
    assert short(decide(seen, STEADY, waits.until)) == "running 5 [a b] failure a"


def test_every_coordinator_comes_to_the_same_wait_and_every_generation_to_another() -> None:
    def until(world: World) -> float | None:
        live = tuple(one.having(world.generation, STOPPED) for one in (SA, SB))
        decision = decide(view(world, live), STEADY, NOW)
        assert isinstance(decision, Wait)
        return decision.until

    assert until(FAILED_AGAIN) == until(FAILED_AGAIN)
    others = until(replace(FAILED_AGAIN, generation=5)), until(replace(FAILED_AGAIN, job="x"))
    assert len({until(FAILED_AGAIN), *others}) == 3


def test_progress_is_a_new_step_or_without_any_steps_a_lasting_generation() -> None:
    """A slow script that always fails at one step makes none, however long it takes."""
    fruitless = Restarts(1, 1, "crash", 1, culprit="a-1", blamed=1)
    progress = Restarts(1, 0, "crash", 0, culprit="a-1", blamed=1)
    stepless = replace(FAILED, step=0)
    for world, live, used in (
        (FAILED, BOTH, fruitless),
        (FAILED, "a:stopped,step20 b:stopped", fruitless),
        (FAILED, "a:stopped b:stopped,step21", progress),
        (FAILED, "a:stopped b:stopped,stable", fruitless),
        (stepless, "a:stopped,step3 b:stopped,stable", progress),
        (stepless, BOTH, fruitless),
        (stepless, "a:stopped b:stopped,stable", progress),
    ):
        assert published(decide(view(world, live, since=0.0), STEADY, NOW)).restarts == used, live


def advanced(one: NodeRecord, loaded: int | None, reached: int | None, generation: int = 4) -> NodeRecord:
    return replace(one, step=20, progress=GenerationProgress(generation, loaded, reached))


@pytest.mark.parametrize(
    ("survivors", "bad"),
    [
        ((advanced(SA, 20, None), advanced(SB, 20, None)), BadState(4, 20)),
        ((advanced(SA, 20, 20), SB), BadState(4, 20)),  # the state that was loaded was saved again
        ((advanced(SA, 20, None), advanced(SB, 20, 21)), None),
        ((advanced(SA, 18, 19), advanced(SB, 18, None)), None),
        ((advanced(SA, 20, None, generation=3), SB), None),
        ((advanced(SA, None, None), SB), None),
    ],
)
def test_which_state_ends_all_that_load_it(survivors: tuple[NodeRecord, ...], bad: BadState | None) -> None:
    world = replace(FAILED, restarts=Restarts(2, 1, "crash", 1, at_load=1))
    assert published(decide(view(world, survivors, since=0.0), POLICY, NOW)).restarts.bad_state == bad


def caused(world: World, failure: Failure, **changes: Any) -> World:
    return replace(world, cause=replace(world.cause, failure=failure), **changes)


IMPORT_ERROR = replace(CRASH, action=records.Action.STOP, cause="import_error")
LOOPING = "4 failures in a row without progress"


@pytest.mark.parametrize(
    ("world", "result", "detail"),
    [
        (
            caused(FAILED, replace(CRASH, action=records.Action.END)),
            Result.FINAL_FAILURE,
            "no restart helps; the last: failure of a",
        ),
        (replace(FAILED, restarts=Restarts(9, 3, "crash", 3)), Result.CRASH_LOOP, f"crash loop: {LOOPING}"),
        (replace(FAILED, restarts=Restarts(9, 3, "other", 3)), Result.RESTARTS_EXHAUSTED, LOOPING),
        (
            caused(FAILED_AGAIN, IMPORT_ERROR),
            Result.CRASH_LOOP,
            "the same error of the script (import_error) 2 times in a row",
        ),
    ],
)
def test_failures_that_end_the_job(world: World, result: Result, detail: str) -> None:
    """Counted only when every step is known; a node that stands by changes nothing."""
    check(view(world, "a:stopped b"), POLICY, "wait", "b to stop generation 4")
    end = published(decide(view(world, f"{BOTH} c"), POLICY, NOW))
    assert (end.result, end.restarts.failures) == (result, world.restarts.failures + 1)
    assert end.cause.detail.startswith(detail)
    assert end.cause.detail.endswith("; the last: failure of a")


def test_the_same_error_of_the_script_again_goes_on_where_a_state_may_be_its_cause() -> None:
    loaded = replace(SA, progress=GenerationProgress(4, 30))
    again = decide(view(caused(FAILED_AGAIN, IMPORT_ERROR), (loaded, SB), since=0.0), POLICY, NOW)
    assert short(again) == "running 5 [a b] failure a"


@pytest.mark.parametrize("kind", [kind for kind in CauseKind if kind is not CauseKind.FAILURE])
def test_only_failures_use_the_budget(kind: CauseKind) -> None:
    policy = replace(POLICY, restarts=RestartPolicy(max_failures=0))
    next_one = published(decide(view(stopping(A, B, kind=kind), BOTH), policy, NOW))
    assert (next_one.phase, next_one.restarts) == (Phase.RUNNING, Restarts())


@pytest.mark.parametrize("live", ["a:collateral b:failed", "b:failed a:collateral"])
def test_a_failure_that_only_follows_from_another_is_not_the_cause(live: str) -> None:
    """Whichever node comes first in the world; alone it is. A root that comes to light later takes its place."""
    for world in (AB, running(B, A)):
        cause = published(decide(view(world, live), POLICY, NOW)).cause
        assert (cause.node, cause.failure) == ("b", CRASH)
    alone = published(decide(view(AB, "a:collateral b"), POLICY, NOW)).cause
    assert alone == Cause(CauseKind.FAILURE, "a", COLLATERAL.summary, COLLATERAL)
    followed = replace(FAILED, cause=alone)
    root = replace(CRASH, action=records.Action.END)
    for found, result in ((root, Result.FINAL_FAILURE), (replace(root, generation=3), None)):
        one, other = nodes("a:collateral b", "stopped")
        world = published(decide(view(followed, (one, replace(other, failure=found))), POLICY, NOW))
        assert (world.result, world.cause.failure) == (result, root if result else COLLATERAL)


@pytest.mark.parametrize("used", [Restarts(), Restarts(9, 3, "crash", 3)], ids=["unused", "spent"])
def test_a_failure_beside_a_lost_node_is_blamed_on_the_loss(used: Restarts) -> None:
    failed = stopping(A, B, C, kind=CauseKind.FAILURE, restarts=used)
    world = published(decide(view(failed, "a:stopped c:stopped"), STEADY, NOW))
    assert [member.node for member in world.members] == ["a", "c"]
    assert world.restarts == used
    assert world.cause == Cause(CauseKind.LOST, "b", "node b is gone: its lease ended")


# ---------------------------------------------------------------- decide: nodes with other options

OTHER = replace(PLAIN_POLICY, last_call_s=9.0, restarts=RestartPolicy(max_failures=0))
"""Of a coordinator that was started with other options than the job's first one."""


@pytest.mark.parametrize(
    ("world", "live", "decision", "holds"),
    [
        # it would shrink the world to one node, end the job at its first failure, or go on alone
        (stopping(A, B, C, limits=LIMITS), f"{BOTH} c:stopped", "running 5 [a b c] join a", True),
        (replace(FAILED, limits=LIMITS), BOTH, "running 5 [a b] failure a", True),
        (stopping(A, B, limits=LIMITS), "a:stopped", "wait", True),
        # none of the first nodes is left: the options of the new ones count
        (stopping(A, B, limits=LIMITS), "a:stopped,again b:stopped,again", "running 5 [a] join a", False),
        (stopping(A, B), BOTH, "running 5 [a] join a", False),
    ],
)
def test_the_jobs_limits_hold_under_any_coordinator(
    world: World, live: str, decision: str, holds: bool
) -> None:
    decided = decide(view(world, live, since=0.0), OTHER, NOW)
    assert short(decided) == decision
    assert isinstance(decided, Wait) or decided.world.limits == (LIMITS if holds else Limits(1, 1, 9.0, 0))


def test_the_jobs_limits_hold_also_where_all_have_joined_again_or_there_is_no_room() -> None:
    rejoined = replace(SA, incarnation="a-1.1"), replace(SB, incarnation="b-1.1")
    assert (
        short(decide(view(stopping(A, B, limits=LIMITS), rejoined), OTHER, NOW)) == "running 5 [a b] join a"
    )
    roomy = replace(POLICY, max_nodes=9)
    check(view(replace(ABC, limits=LIMITS), "a b c d"), roomy, "wait", "all 3 nodes of --max-nodes")


OURS, THEIRS = Program("train.py", "1" * 64), Program("train.py", "2" * 64)
OF_OURS = replace(AB, program=OURS)


def runs(program: Program | None, words: str) -> tuple[NodeRecord, ...]:
    return tuple(replace(one, program=program) for one in nodes(words))


@pytest.mark.parametrize(
    ("theirs", "decision"),
    [
        (OURS, "draining 4 [a b] join c"),
        (THEIRS, "wait"),
        # it says nothing of its script; arguments may be a node's own
        (None, "draining 4 [a b] join c"),
        (replace(THEIRS, digest=""), "draining 4 [a b] join c"),
        (replace(OURS, arguments="x"), "draining 4 [a b] join c"),
        # other times by which to judge who is gone
        (replace(OURS, lease_ttl_s=9.0), "wait"),
        (replace(OURS, outage_grace_s=60.0), "wait"),
    ],
)
def test_a_node_that_does_not_fit_is_in_no_world(theirs: Program | None, decision: str) -> None:
    assert short(decide(view(OF_OURS, runs(OURS, "a b") + runs(theirs, "c")), POLICY, NOW)) == decision


def test_whose_program_counts() -> None:
    """Before the first world the oldest node's; when all nodes of the old one are gone, that of the new ones."""
    first = view(None, runs(OURS, "a") + runs(THEIRS, "b") + runs(OURS, "c"))
    assert short(decide(first, POLICY, NOW)) == "running 1 [a c] start"
    changed = view(stopping(A, B, program=OURS), runs(THEIRS, "a:stopped,again b:stopped,again"))
    assert short(decide(changed, POLICY, NOW)) == "running 5 [a b] join a"


@pytest.mark.parametrize(
    ("world", "leader", "me", "refused"),
    [
        (None, runs(OURS, "a"), runs(THEIRS, "c"), True),
        (None, runs(OURS, "a"), runs(OURS, "c"), False),
        (None, runs(OURS, "a"), (C,), False),
        (OF_OURS, runs(OURS, "a"), runs(THEIRS, "c"), True),
        (OF_OURS, runs(THEIRS, "a"), runs(THEIRS, "c"), True),
        # the coordinator is not of that world: perhaps no node is
        (OF_OURS, runs(THEIRS, "d"), runs(THEIRS, "c"), False),
        (OF_OURS, runs(OURS, "d"), runs(THEIRS, "c"), True),
        # a member is one
        (OF_OURS, runs(OURS, "a"), runs(THEIRS, "b"), False),
    ],
)
def test_a_node_refuses_itself_only_when_it_is_sure(
    world: World | None, leader: tuple[NodeRecord], me: tuple[NodeRecord], refused: bool
) -> None:
    reason = why_refused(world, *leader, *me) or ""
    assert bool(reason) is refused
    said = "train.py (content 222222222222), and the job runs train.py (111111111111)"
    assert not refused or said in reason


# ---------------------------------------------------------------- decide: one node on which alone workers fail

LACKS = replace(CRASH, summary="rank 3 lacks a package")
OF_C = Cause(CauseKind.FAILURE, "c", "rank 3 lacks a package", LACKS)
OF_A = replace(OF_C, node="a")
JOINED = replace(stopping(A, B, C, kind=CauseKind.FAILURE, unproven=(2,), limits=LIMITS), cause=OF_C)
"""A failure beside two that trained well before."""
ONCE = Restarts(1, 1, "crash", 1, culprit="c-1", blamed=1)
TWICE = replace(ONCE, failures=2, without_progress=2, same_fingerprint=2, blamed=2)
UNHEALTHY = replace(JOINED, restarts=ONCE, unproven=(0, 1, 2))
"""No generation has been healthy yet."""
OUT = Exclusion("c", "c-1", "unknown", "its workers fail", digest(CRASH), times=2)
ECC = replace(CRASH, cause="gpu_fault", action=records.Action.EXCLUDE_NODE, summary="GPU 3: ECC")
SCRIPTS = replace(CRASH, action=records.Action.STOP)
REFUSED = replace(CRASH, action=records.Action.END)
ALL = "a b c"
ALL_STAY, C_IS_OUT, ENDS = (
    "running 5 [a b c] failure c",
    "running 5 [a b] failure c",
    "crash_loop 4 [a b c] failure c",
)


def least(nodes: int, world: World = UNHEALTHY, **limits: Any) -> World:
    return replace(world, limits=replace(LIMITS, min_nodes=nodes, **limits))


def blamed(world: World, live: str) -> Decision:
    """All of them have stopped."""
    return decide(view(world, live, since=0.0, also="stopped"), POLICY, NOW)


@pytest.mark.parametrize(
    ("world", "live", "decision"),
    [
        # the first failure may be any node's fault, unless the job ends with it, and trained well without the node
        (JOINED, ALL, ALL_STAY),
        (least(2, JOINED, max_restarts=0), ALL, C_IS_OUT),
        (
            least(2, replace(JOINED, unproven=()), max_restarts=0),
            ALL,
            "restarts_exhausted 4 [a b c] failure c",
        ),
        # proven or not: it failed alone, twice in a row; also after some steps; also where it hosts the store
        (replace(JOINED, restarts=ONCE), ALL, C_IS_OUT),
        (replace(JOINED, restarts=ONCE, unproven=()), ALL, C_IS_OUT),
        (UNHEALTHY, ALL, C_IS_OUT),
        (UNHEALTHY, "a:step21 b c", C_IS_OUT),
        (UNHEALTHY, "a b c:host", C_IS_OUT),
        # one that stands by takes its place
        (UNHEALTHY, "a b c d", "running 5 [a b d] failure c"),
        (least(3), "a b c d", "running 5 [a b d] failure c"),
        # after more than a minute it takes one more, of few nodes
        (UNHEALTHY, "a:stable b c", ALL_STAY),
        (replace(UNHEALTHY, restarts=TWICE), "a:stable b c", C_IS_OUT),
        (
            least(2, replace(UNHEALTHY, members=assign_ranks((A, B, C, D))), max_nodes=4),
            "a:stable b c d",
            "running 5 [a b d] failure c",
        ),
        # one began elsewhere; an earlier life of its agent is another one
        (replace(UNHEALTHY, cause=OF_A), ALL, "running 5 [a b c] failure a"),
        (replace(UNHEALTHY, restarts=replace(ONCE, culprit="a-1")), ALL, ALL_STAY),
        (replace(UNHEALTHY, restarts=replace(ONCE, culprit="c-0")), ALL, ALL_STAY),
        # others failed, too; or the same failure was elsewhere, with no progress since
        (UNHEALTHY, "a b:failed c", ALL_STAY),
        (replace(UNHEALTHY, restarts=replace(ONCE, same_fingerprint=2, failures=2)), ALL, ALL_STAY),
        # the others are too few: altogether, as they are not ready, or for a multiple
        (least(3), ALL, ALL_STAY),
        (least(3), "a b c d:cold", ALL_STAY),
        (least(1, nodes_multiple_of=3), ALL, ALL_STAY),
        # a collateral failure, or one from outside, neither blames nor clears a node
        (UNHEALTHY, "a:collateral b c", C_IS_OUT),
        (UNHEALTHY, "a:from-outside b c", C_IS_OUT),
        (caused(UNHEALTHY, replace(CRASH, outside=True)), ALL, ALL_STAY),
        # a broken machine is out at once
        (caused(UNHEALTHY, ECC, restarts=Restarts()), ALL, C_IS_OUT),
        # an error of the script may be one of the node's environment: a package that only this one lacks
        (caused(UNHEALTHY, SCRIPTS), ALL, C_IS_OUT),
        (caused(UNHEALTHY, SCRIPTS), "a b:failed c", ENDS),
        (caused(least(3), SCRIPTS), ALL, ENDS),
        (caused(JOINED, SCRIPTS), ALL, ALL_STAY),
        (caused(JOINED, SCRIPTS, restarts=ONCE), ALL, C_IS_OUT),
        # what the worker library refuses is the script's, unless training went well without the node
        (caused(UNHEALTHY, REFUSED), ALL, "final_failure 4 [a b c] failure c"),
        (caused(JOINED, REFUSED), ALL, "running 5 [a b] failure c"),
        # nodes are not excluded one after the other when that does not help, until one generation has lasted
        (replace(UNHEALTHY, restarts=replace(TWICE, exclusions=MOST_IN_A_ROW)), ALL, ALL_STAY),
        (replace(UNHEALTHY, restarts=replace(TWICE, exclusions=MOST_IN_A_ROW)), "a:stable b c", C_IS_OUT),
    ],
)
def test_which_node_is_excluded(world: World, live: str, decision: str) -> None:
    assert short(blamed(world, live)) == decision


def test_a_failure_that_others_had_too_neither_blames_nor_clears_these() -> None:
    for world, live, counted in (
        (UNHEALTHY, "a:failed b c:failed", ("c-1", 1)),
        (replace(UNHEALTHY, cause=OF_A), "a:failed b:failed c", ("", 0)),
    ):
        used = published(blamed(world, live)).restarts
        assert (used.culprit, used.blamed) == counted


def test_who_is_excluded_is_named_and_its_failures_cost_the_job_nothing() -> None:
    world = published(blamed(replace(UNHEALTHY, restarts=replace(ONCE, failures=8, free_retries=1)), ALL))
    assert world.restarts == Restarts(7, free_retries=1, exclusions=1)
    reason = "each of 2 failures in a row began there alone; the last: rank 3 lacks a package"
    assert world.exclusions == (Exclusion("c", "c-1", "unknown", reason, digest(CRASH)),)
    assert world.cause.detail == f"node c is excluded: {reason}"


def test_a_broken_machine_is_out_whichever_failure_was_heard_first_and_does_not_clear_another() -> None:
    broken = SA, SB, replace(SC, failure=ECC)
    heard = replace(UNHEALTHY, cause=OF_A, restarts=Restarts())
    assert short(decide(view(heard, broken, since=0.0), POLICY, NOW)) == "running 5 [a b] failure a"
    both = least(1, stopping(A, B, kind=CauseKind.FAILURE))
    out = replace(OUT, fingerprint=digest(ECC))
    both = replace(
        both, cause=replace(OF_A, failure=ECC), restarts=Restarts(3, exclusions=1), exclusions=(out,)
    )
    world = published(blamed(both, "a b c"))
    assert [member.node for member in world.members] == ["b"]
    assert [(one.node, one.cause, one.readmitted) for one in world.exclusions] == [
        ("c", "unknown", False),
        ("a", "gpu_fault", False),
    ]
    assert world.exclusions[1].reason == "its machine is broken (gpu_fault): GPU 3: ECC"
    assert world.restarts.failures == 3


def test_a_failure_that_moves_from_node_to_node_blames_no_second_one() -> None:
    """An exception of the script, or what comes wherever rank 0 is, also after minutes of progress. The first, if that
    was just before, is readmitted."""
    just_out = stopping(A, B, kind=CauseKind.FAILURE, limits=LIMITS, restarts=Restarts(exclusions=1))
    again = published(blamed(replace(just_out, exclusions=(OUT,)), "a b c"))
    assert [(one.node, one.readmitted) for one in again.exclusions] == [("c", True)]
    assert [member.node for member in again.members] == ["a", "b", "c"]
    raised = replace(CRASH, cause="exception")
    ab = least(
        1, stopping(A, B, kind=CauseKind.FAILURE, restarts=replace(TWICE, culprit="a-1", same_fingerprint=0))
    )
    for failure in (raised, CRASH):
        out = replace(OUT, fingerprint=digest(failure), readmitted=True)
        world = replace(ab, cause=replace(OF_A, failure=failure), exclusions=(out,))
        assert short(blamed(world, "a:stable b")) == "running 5 [a b] failure a"
    moved = replace(world, members=assign_ranks((B, A)))
    assert short(blamed(moved, "b a:stable")) == "running 5 [b] failure a", (
        "it has not rank 0, which saves for all"
    )
    soon = replace(moved, restarts=replace(TWICE, culprit="a-1", exclusions=1))
    assert short(blamed(soon, "b a")) == "running 5 [b a] failure a", "no generation has lasted since"


def test_a_taken_port_that_costs_nothing_blames_no_node() -> None:
    for used in (Restarts(), ONCE, TWICE):
        taken = caused(JOINED, replace(CRASH, action=records.Action.FREE), restarts=used)
        assert short(blamed(taken, ALL)) == ALL_STAY
        assert published(blamed(taken, ALL)).restarts == replace(used, free_retries=1)


def test_each_exclusion_of_a_node_has_the_next_number_and_none_in_force_gives_way_to_another() -> None:
    again = replace(UNHEALTHY, exclusions=(replace(OUT, readmitted=True),))
    for recheck, times in ((None, 3), (Recheck(7, True), 8)):
        live = (SA, SB, replace(SC, recheck=recheck))
        (row,) = published(decide(view(again, live, since=0.0), POLICY, NOW)).exclusions
        assert (row.times, row.readmitted) == (times, False)
    full: tuple[Exclusion, ...] = ()
    for number in range(MAX_EXCLUSIONS):
        full = exclude(full, f"n{number}", "l", "gpu_fault", "r" * 600)
    assert all(len(one.reason) == MAX_EXCLUSION_REASON for one in full)
    assert exclude(full, "c", "c-1", BY_OPERATOR, "a fan is loud", operator=True) == full
    assert short(blamed(replace(UNHEALTHY, exclusions=full), ALL)) == ALL_STAY
    rows = exclude(readmit(full, frozenset({"n7"})), "c", "c-1", BY_OPERATOR, "a fan is loud", operator=True)
    assert {one.node for one in full} - {one.node for one in rows} == {"n7"}
    assert left_out(rows).keys() == {one.node for one in rows}


EXCLUDED = replace(AB, exclusions=(OUT,), limits=LIMITS)


@pytest.mark.parametrize("c", ["c", "c:again", "c:checked-before", "c:check-failed"])
def test_no_world_has_an_excluded_node_until_it_has_passed_its_check(c: str) -> None:
    assert short(decide(view(EXCLUDED, f"a b {c}"), POLICY, NOW)) == "wait"
    stop = replace(EXCLUDED, phase=Phase.STOPPING, cause=Cause(CauseKind.LOST, "b", "node b is gone"))
    waits = decide(view(stop, f"a:stopped {c}"), POLICY, NOW)
    assert "1 more of at least 2 nodes (here: a; excluded: c; last: node b is gone)" in waits.reason
    back = decide(view(stop, "a:stopped c:checked"), POLICY, NOW)
    assert short(back) == "running 5 [a c] lost b"
    assert published(back).exclusions == (replace(OUT, readmitted=True),)


def test_a_node_that_has_passed_its_check_is_readmitted_and_then_invited() -> None:
    first = published(decide(view(EXCLUDED, "a b c:checked"), POLICY, NOW))
    assert first == replace(EXCLUDED, exclusions=(replace(OUT, readmitted=True),))
    assert short(decide(view(first, "a b c:checked"), POLICY, NOW)) == "draining 4 [a b] join c"
    asked = replace(EXCLUDED, exclusions=(replace(OUT, by_operator=True),))
    assert short(decide(view(asked, "a b c:checked"), POLICY, NOW)) == "wait", "an operator has asked for it"


def by_operator(name: str, rows: tuple[Exclusion, ...] = ()) -> tuple[Exclusion, ...]:
    return exclude(rows, name, f"{name}-1", BY_OPERATOR, "a fan is loud", operator=True)


def test_a_member_that_an_operator_excludes_goes_by_plan_when_the_others_are_enough() -> None:
    asked = replace(AB, exclusions=by_operator("b"), limits=LIMITS)
    for live in ("a b", "a b c:cold"):
        assert short(decide(view(asked, live), POLICY, NOW)) == "wait", "fewer than --min-nodes would be left"
    change = decide(view(asked, "a b c"), POLICY, NOW)
    assert short(change) == "draining 4 [a b] leave b"
    assert change.reason == "node b is excluded: a fan is loud"
    last = replace(published(change), phase=Phase.LAST_STEP)
    drained = "a:stopped,drained,state_saved b:stopped,drained,state_saved c"
    assert short(decide(view(last, drained), POLICY, NOW)) == "running 5 [a c] leave b"
    fails_again = blamed(replace(UNHEALTHY, exclusions=by_operator("c")), ALL)
    assert short(fails_again) == C_IS_OUT
    assert published(fails_again).exclusions == by_operator("c")


def test_no_planned_change_takes_the_newest_state_away_with_the_last_member_that_has_it() -> None:
    """One member goes on with the newcomers, and goes when these have the state."""
    policy, limits = replace(POLICY, min_nodes=1), replace(LIMITS, min_nodes=1)
    alone = running(A, exclusions=by_operator("a"), limits=replace(limits, max_nodes=1))
    assert short(decide(view(alone, "a c"), policy, NOW)) == "wait"
    failed = replace(alone, phase=Phase.STOPPING, cause=replace(OF_A, failure=CRASH))
    assert short(decide(view(failed, "a:stopped c", since=0.0), policy, NOW)) == "running 5 [c] failure a"
    rows = by_operator("b", by_operator("a"))
    two = replace(AB, exclusions=rows, limits=replace(limits, max_nodes=2))
    assert short(decide(view(two, "a b c d"), policy, NOW)) == "draining 4 [a b] leave b"
    last = replace(two, phase=Phase.LAST_STEP, cause=Cause(CauseKind.LEAVE, "b", "b goes"))
    drained = "a:stopped,drained b:stopped,drained,state_saved c d"
    assert short(decide(view(last, drained), policy, NOW)) == "running 5 [b c] leave b"


@pytest.mark.parametrize(
    ("kind", "members", "before", "live", "unproven"),
    [
        # nothing but a planned change has ended it
        (CauseKind.JOIN, (A, B), (), "a b c", "c"),
        (CauseKind.LOST, (A, B), (0, 1), "a b", "a b"),
        (CauseKind.LOST, (A, B, C), (2,), "b c", "c"),
        (CauseKind.LOST, (A, B, C), (2,), "a c d", "d c"),
        (CauseKind.FAILURE, (A, B, C), (1, 2), "a b c", "b c"),
        (CauseKind.FAILURE, (A, B, C), (1, 2), "a b c:step21", ""),
    ],
)
def test_who_was_in_the_last_healthy_generation(
    kind: CauseKind, members: tuple[NodeRecord, ...], before: tuple[int, ...], live: str, unproven: str
) -> None:
    world = published(blamed(stopping(*members, kind=kind, unproven=before), live))
    assert [world.members[place].node for place in world.unproven] == unproven.split()


# ---------------------------------------------------------------- decide: what is written can be read


def test_a_thousand_newcomers_at_once_make_a_world_that_all_can_read() -> None:
    crowd = tuple(replace(D, node=f"node-{i:04}.example.org", incarnation=f"i{i}") for i in range(1000))
    decision = decide(view(AB, (A, B, *crowd)), replace(POLICY, max_nodes=2000), NOW)
    assert World.from_json(published(decision).to_json()) == published(decision)
    waits = [
        decide(view(None, crowd), replace(POLICY, min_nodes=1200, max_nodes=2000), NOW),
        decide(view(stopping(*crowd), crowd), replace(POLICY, max_nodes=2000), NOW),
        decide(view(ABC, (A, B, C, *crowd)), POLICY, NOW),
    ]
    for one in (decision, *waits):
        assert "node-0007.example.org and 992 more" in one.reason
        assert "node-0008" not in one.reason


# ---------------------------------------------------------------- decide: every small combination


def lives(name: str, *, host: bool) -> Iterator[tuple[bool, str]]:
    """All that can be said of one node: (is it a member of generation 4, its word; empty when gone)."""
    name += ":host" if host else ":"
    yield from [(False, ""), (False, name), (False, f"{name},leaving"), (True, "")]
    for number in range(5):
        for habits in itertools.combinations(("failed", "leaving", "stopped", "succeeded"), number):
            before = () if {"stopped", "succeeded"} & {*habits} else ("stopped-before",)
            yield True, ",".join((name, *habits, *before))


def lives_in_a_drain(name: str, *, host: bool) -> Iterator[tuple[bool, str]]:
    name += ":host" if host else ":"
    yield from [(False, ""), (False, name), (False, f"{name},cold"), (True, "")]
    habits = ("", "notified", "polls", "notified,stopped", "notified,failed", "kept", "kept-nothing")
    for habit, leaving in itertools.product((*habits, "notified,stopped,succeeded"), ("", ",leaving")):
        yield True, f"{name},{habit}{leaving}"


CHANGES = {
    None: {Phase.RUNNING},
    Phase.RUNNING: {Phase.RUNNING, Phase.DRAINING, Phase.STOPPING, Phase.ENDED},
    Phase.DRAINING: {Phase.LAST_STEP, Phase.STOPPING, Phase.ENDED},
    Phase.LAST_STEP: {Phase.STOPPING, Phase.ENDED, Phase.RUNNING},
    Phase.STOPPING: {Phase.ENDED, Phase.RUNNING},
    Phase.ENDED: {Phase.RUNNING},
}
"""Written once more: the table of the product is what it asserts itself, and the simulator, too."""


def check_promises(seen: View, policy: Policy, decision: Decision) -> None:
    assert decide(seen, policy, NOW) == decision, "two coordinators decide differently"
    assert decision.reason
    before, live = seen.world, {one.incarnation: one for one in seen.nodes}
    if isinstance(decision, Wait):
        broken = before is not None and any(
            m.incarnation not in live or live[m.incarnation].failure for m in before.members
        )
        assert before is None or not (before.trains or before.drains) or not broken, "the others may hang"
        return
    world = decision.world
    assert World.from_json(world.to_json()) == world
    assert world.phase in CHANGES[before.phase if before is not None else None]
    if world.phase is not Phase.RUNNING:
        assert before is not None
        assert before.phase is not world.phase, "nothing would change"
        kept = replace(world, phase=before.phase, cause=before.cause, result=None, restarts=before.restarts)
        assert replace(kept, final_saver=before.final_saver) == before, "only the phase and its reason change"
        if world.phase is Phase.LAST_STEP:
            training = [
                live[m.incarnation] for m in world.members if not live[m.incarnation].has(SUCCEEDED, 4)
            ]
            both = {NOTIFIED, POLLING}
            assert all(one.generation == 4 and both <= one.conditions for one in training), (
                "some would not stop"
            )
        assert not world.final_saver or live[world.final_saver].has(STATE_SAVED, 4)
        return
    assert before is None or before.stops
    assert world.generation == (before.generation + 1 if before is not None else 1)
    assert policy.min_nodes <= len(world.members) <= policy.max_nodes
    chosen = [live[member.incarnation] for member in world.members]
    assert not any(one.leaving for one in chosen)
    assert world.master == Endpoint(chosen[0].address, chosen[0].port)
    ranks = [member.first_rank + local for member in world.members for local in range(member.slots)]
    assert ranks == list(range(sum(one.slots for one in chosen)))
    old = [member.incarnation for member in before.members] if before is not None else []
    assert before is None or all(live[i].has_stopped(before.generation) for i in old if i in live)
    stayed = [i for i in old if i in live and not live[i].leaving]
    goes_on = before is not None and len(stayed) >= policy.min_nodes
    came = [i for i in live if i not in old and not live[i].leaving and (live[i].ready or not goes_on)]
    if before is not None and before.phase is Phase.LAST_STEP:
        keepers = [one for one in seen.nodes if one.has(STATE_SAVED, before.generation)]
        assert not keepers or not all(one.leaving for one in keepers), "the state would be lost"
    size = min(len(stayed + came), policy.max_nodes) // policy.nodes_multiple_of * policy.nodes_multiple_of
    assert {one.incarnation for one in chosen} == set((stayed + came)[:size])
    check_places(before, world)


def check_places(before: World | None, world: World) -> None:
    """No survivor has another place than before that could have kept it, and the first one is a survivor."""
    was = {
        member.incarnation: place for place, member in enumerate(before.members if before is not None else ())
    }
    stay = [(was[m.incarnation], place) for place, m in enumerate(world.members) if m.incarnation in was]
    assert not stay or world.members[0].incarnation in was
    beyond = sum(old >= len(world.members) for old, _ in stay)
    first_is_free = bool(stay) and not any(old == 0 for old, _ in stay)
    assert sum(old != new for old, new in stay) == max(beyond, first_is_free)


@pytest.mark.parametrize("limits", [(1, 1, 1), (1, 3, 1), (2, 2, 1), (2, 3, 1), (3, 3, 1), (2, 2, 2)])
@pytest.mark.parametrize("phase", ["none", "running", "draining", "last step", "stopping", "failed"])
def test_every_small_combination_keeps_the_promises(phase: str, limits: tuple[int, int, int]) -> None:
    at_least, at_most, multiple = limits
    policy = replace(PLAIN_POLICY, min_nodes=at_least, max_nodes=at_most, nodes_multiple_of=multiple)
    policy = replace(policy, restarts=RestartPolicy(first_backoff_s=0.0))
    decided = 0
    each = lives_in_a_drain if phase in ("draining", "last step") else lives
    kinds = {"failed": CauseKind.FAILURE, "stopping": CauseKind.LOST, "last step": CauseKind.JOIN}
    hosts = {"a": False, "b": True, "c": False}
    words = [list(each(name, host=host)) for name, host in hosts.items()]
    known = {word: node(word) for one in words for _, word in one if word}
    bare = [node(f"{name}:host" if host else name) for name, host in hosts.items()]
    for combination in itertools.product(*words):
        inside = [one for one, (member, _) in zip(bare, combination, strict=True) if member][::-1]
        if (phase == "none") != (not inside) or len(inside) > policy.max_nodes:
            continue
        world: World | None = None
        if phase in ("running", "draining"):
            world = running(*inside)
        elif phase != "none":
            world = stopping(*inside, kind=kinds[phase])
        if world is not None and phase == "draining":
            world = replace(world, phase=Phase.DRAINING, cause=DRAINING.cause)
        elif world is not None and phase == "last step":
            world = replace(world, phase=Phase.LAST_STEP)
        seen = view(world, tuple(known[word] for _, word in combination if word))
        decision = decide(seen, policy, NOW)
        check_promises(seen, policy, decision)
        decided += isinstance(decision, Publish)
    assert TRANSITIONS == CHANGES
    assert decided, "no combination came to a decision: the promises were not tested"


# ---------------------------------------------------------------- what a node does

IDLE = LocalState("a-1", started=3)
BUSY = LocalState("a-1", generation=4, started=4)
END = replace(ABC, phase=Phase.ENDED, result=Result.SUCCEEDED, cause=Cause(CauseKind.SUCCESS, detail="done"))
HOST_LEFT = replace(
    END, result=Result.STORE_HOST_LEFT, cause=Cause(CauseKind.LEAVE, "b", "its host has left")
)
SEEN: Mapping[str, World | None] = {
    **WORLDS,
    "without us": running(B, C),
    "abc lost": stopping(A, B, C, kind=CauseKind.LOST),
    "bc lost": stopping(B, C, kind=CauseKind.LOST),
    "before": replace(ABC, generation=3),
    "next": replace(ABC, generation=5),
    "next stops": replace(ABC, generation=5, phase=Phase.STOPPING),
    "the end": END,
    "host left": HOST_LEFT,
    "left": replace(LAST_STEP, phase=Phase.STOPPING),
    **{f"stops by {kind.value}": stopping(A, B, C, kind=kind) for kind in CauseKind},
}


def told(order: Action) -> str:
    match order:
        case Stop(_, planned, reason):
            return f"stop{' by plan' * planned}: {reason}"
        case Drain(_, stopping_now, reason):
            return f"{'last step' if stopping_now else 'drain'}: {reason}"
        case Leave(why, reason):
            return f"leave {why.value}: {reason}"
    return type(order).__name__.lower()


@pytest.mark.parametrize(
    ("world", "here", "changes", "order"),
    table("""
none | idle | | stay
abc | idle | | start
abc lost | idle | | stay
without us | idle | | stay
abc | idle | incarnation | stay
abc | idle | started | stay
abc | idle | lease lost | stay
none | idle | leaving | leave asked: this node was asked to stop
abc | idle | leaving | leave asked: this node was asked to stop
the end | idle | | leave succeeded: done
the end | idle | leaving, lease lost | leave succeeded: done
the end | idle | incarnation | leave succeeded: done
# workers of generation 4 here
abc | busy | | stay
abc | busy | lease lost | stop: the rendezvous store does not confirm this node's lease
the end | busy | lease lost | stop: the rendezvous store does not confirm this node's lease
none | busy | lease lost | stop: the rendezvous store does not confirm this node's lease
none | busy | | stop: the rendezvous store has lost the world that runs here
before | busy | | stop: the rendezvous store has lost the world that runs here
next | busy | | stop: generation 5 has replaced it
next stops | busy | | stop: generation 5 has replaced it
without us | busy | | stop: generation 4 has replaced it
stops by failure | busy | | stop: failure of a
stops by lost | busy | | stop: lost of a
stops by withdrawn | busy | | stop: withdrawn of a
stops by join | busy | | stop by plan: join of a
stops by leave | busy | | stop by plan: leave of a
the end | busy | | stop: done
host left | busy | | stop by plan: its host has left
abc | busy | leaving | stay
abc | busy | leaving, leave alone | stop by plan: this node was asked to stop
# a drain: the workers are told, then left alone, and signalled only when its time is over
draining | busy | | drain: node c was asked to stop
draining | busy | leaving, leave alone | drain: node c was asked to stop
last step | busy | | last step: node c was asked to stop
draining | busy | drain over | stop by plan: node c was asked to stop; the workers did not end by themselves in time
last step | busy | drain over | stop by plan: node c was asked to stop; the workers did not end by themselves in time
last step | busy | lease lost | stop: the rendezvous store does not confirm this node's lease
left | busy | | stop by plan: node c was asked to stop
# who leaves stays until the others have what they go on with
draining | idle | | stay
last step | idle | leaving | stay
last step | idle | leaving, drain over | stay
last step | idle | leaving, wait over | leave asked: this node was asked to stop
last step | idle | leaving, incarnation | leave asked: this node was asked to stop
left | idle | leaving | leave asked: this node was asked to stop
# and the host of the store until there is nothing left to do
left | idle | leaving, host | stay
abc | idle | leaving, host | stay
left | idle | leaving, host, wait over | leave asked: this node was asked to stop
host left | idle | leaving, host | leave store_host_left: its host has left
"""),
)
def test_what_a_node_does_now(world: str, here: str, changes: str, order: str) -> None:
    said: dict[str, dict[str, Any]] = {
        "lease lost": {"lease_good": False},
        "host": {"hosts_store": True},
        "incarnation": {"incarnation": "d-1"},
        "started": {"started": 4},
    }
    local = IDLE if here == "idle" else BUSY
    for change in filter(None, changes.split(", ")):
        local = replace(local, **said.get(change, {change.replace(" ", "_"): True}))
    assert told(next_action(SEEN[world], local)) == order


FLAGS = (True, False)


@pytest.mark.parametrize(
    "world",
    ["none", "abc", "without us", "draining", "last step", "abc lost", "bc lost", "the end", "host left"],
)
def test_stopping_comes_first_whatever_else_is_true(world: str) -> None:
    found = SEEN[world]
    worlds = [replace(found, generation=number) for number in (3, 4, 5)] if found is not None else [None]
    for one, generation, started, good, leaving, alone, over, late in itertools.product(
        worlds, (0, 4), (0, 4, 5), FLAGS, FLAGS, FLAGS, FLAGS, FLAGS
    ):
        order = next_action(
            one, LocalState("a-1", generation, started, good, False, leaving, alone, over, over, late, late)
        )
        ours = one if one is not None and one.member("a-1") is not None else None
        if generation:
            assert isinstance(order, Stop | Drain | Stay), "workers end before anything else happens"
            assert isinstance(order, Stay) or order.generation == generation
            fine = ours if ours is not None and ours.generation == generation and good else None
            stays = fine is not None and fine.phase is Phase.RUNNING and not (leaving and alone)
            assert isinstance(order, Stay) == stays
            assert isinstance(order, Drain) == (fine is not None and fine.drains and not over)
        elif isinstance(order, Start):
            assert good
            assert not leaving
            assert (order.world, order.member.incarnation) == (one, "a-1")
            assert order.world.phase is Phase.RUNNING
            assert order.world.generation > started, "a node starts a generation at most once (I4)"
        else:
            assert isinstance(order, Leave | Stay)
            ended = one is not None and one.result is not None
            waits = ours is not None and ours.drains and not over
            assert isinstance(order, Leave) == ((ended and not late) or (leaving and not waits))
