"""The two decisions: one row for each line of them, then every small combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_agent.rendezvous import records
from elastic_agent.rendezvous.coordinator.decide import FINISHING_S, decide
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
    Refusal,
    Start,
    Stay,
    Stop,
    next_action,
)
from elastic_agent.rendezvous.records import (
    MAX_EXCEPTION,
    MAX_LOG_FILE,
    MAX_LOG_LINE,
    MAX_LOG_LINES,
    MAX_TRACEBACK,
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
LONGEST_END: dict[str, Any] = {
    "local_rank": 0,
    "exception": "\u00fc" * MAX_EXCEPTION,
    "traceback": "\u00fc" * MAX_TRACEBACK,
    "log_tail": ("\u00fc" * MAX_LOG_LINE,) * MAX_LOG_LINES,
    "log_file": "\u00fc" * MAX_LOG_FILE,
}
"""Of what travels of a worker's end."""
OLD_CRASH = replace(CRASH, generation=3)

NOTIFIED, POLLING, STABLE = Condition.NOTIFIED, Condition.POLLING, Condition.STABLE
STATE_SAVED, STOPPED, SUCCEEDED = Condition.STATE_SAVED, Condition.STOPPED, Condition.SUCCEEDED
A = NodeRecord("a", "a-1", "host-a", 4001, slots=2, ready=True)
B = NodeRecord("b", "b-1", "host-b", 4002, slots=1, ready=True)
C = NodeRecord("c", "c-1", "host-c", 4003, slots=3, ready=True)
D = NodeRecord("d", "d-1", "host-d", 4004, slots=1, ready=True)
COLD = replace(C, ready=False)
HOST = replace(B, hosts_store=True)

SA, SB, SC = (replace(node.having(4, STOPPED), port=node.port + 100) for node in (A, B, C))
"""The same nodes after they stopped generation 4, with a fresh port."""


def running(*nodes: NodeRecord, **changes: object) -> World:
    """Generation 4 of these nodes."""
    world = World(
        job="job",
        generation=4,
        phase=Phase.RUNNING,
        members=assign_ranks(nodes),
        master=Endpoint(nodes[0].address, nodes[0].port),
        cause=Cause(CauseKind.START),
        step=20,
        run="the-first",
    )
    return replace(world, **changes)  # type: ignore[arg-type]


def stopping(*nodes: NodeRecord, kind: CauseKind = CauseKind.JOIN, **changes: object) -> World:
    failure = CRASH if kind is CauseKind.FAILURE else None
    cause = Cause(kind, "a", f"{kind.value} of a", failure)
    return replace(running(*nodes, **changes), phase=Phase.STOPPING, cause=cause)


def view(world: World | None, *nodes: NodeRecord, since: float = NOW, **arrived: float) -> View:
    """These nodes, oldest first; they arrived long ago unless `arrived` says when."""
    arrivals = {node.incarnation: arrived.get(node.node, 0.0) for node in nodes}
    return View(nodes, world, since, arrivals, ready_since=arrivals)


def short(decision: Decision) -> str:
    """What a decision does, on one line."""
    if isinstance(decision, Wait):
        return "wait" if decision.until is None else f"wait until {decision.until:g}"
    world = decision.world
    names = " ".join(member.node for member in world.members)
    why = f"{world.cause.kind.value} {world.cause.node}".strip()
    return f"{world.phase.value} {world.generation} [{names}] {why}"


def check(view: View, policy: Policy, short_decision: str, reason: str) -> None:
    decision = decide(view, policy, NOW)
    assert short(decision) == short_decision
    assert reason in decision.reason


# ---------------------------------------------------------------- decide: before the first world


@pytest.mark.parametrize(
    ("seen", "decision", "reason"),
    [
        (view(None), "wait", "2 more of at least 2 nodes (here: none)"),
        (view(None, A), "wait", "1 more of at least 2 nodes (here: a)"),
        (view(None, A, replace(B, leaving=True)), "wait", "1 more"),
        (view(None, A, B, b=99.5), "wait until 100.5", "last call: 2 nodes here, up to 3 may come"),
        (view(None, A, B, a=99.5), "wait until 100.5", "last call"),
        (view(None, A, B, b=99.0), "running 1 [a b] start", "2 nodes are ready"),
        (view(None, A, B, C, c=NOW), "running 1 [a b c] start", "3 nodes are ready"),
        (view(None, C, A, B), "running 1 [c a b] start", "3 nodes are ready"),
        (view(None, C, A, D, B), "running 1 [c a d] start", "3 nodes are ready"),
        # by node rank, then by age; two may have one
        (view(None, C, replace(A, node_rank=1), replace(B, node_rank=0)), "running 1 [b a c] start", ""),
        (view(None, replace(C, node_rank=2), A, D, replace(B, node_rank=2)), "running 1 [c b a] start", ""),
    ],
)
def test_a_cold_start_waits_for_enough_nodes_and_a_last_call(seen: View, decision: str, reason: str) -> None:
    check(seen, POLICY, decision, reason)


def test_the_first_world_in_full() -> None:
    decision = decide(view(None, C, replace(A, step=7), B), POLICY, NOW)
    assert decision == Publish(
        World(
            job="job",
            generation=1,
            phase=Phase.RUNNING,
            members=(Member("c", "c-1", 3, 0), Member("a", "a-1", 2, 3), Member("b", "b-1", 1, 5)),
            master=Endpoint("host-c", 4003),
            cause=Cause(CauseKind.START),
            step=7,
            limits=LIMITS,
            limits_of="c",
            unproven=(0, 1, 2),
            run="c-1",
        ),
        "3 nodes are ready",
    )


# ---------------------------------------------------------------- decide: a generation is running

ABC = running(A, B, C)
AB = running(A, B)


@pytest.mark.parametrize(
    ("seen", "decision", "reason"),
    [
        # nothing happens
        (view(AB, A, B), "wait", "generation 4 is running on 2 nodes"),
        (view(AB, A, replace(B, failure=OLD_CRASH)), "wait", "generation 4 is running on 2 nodes"),
        (
            view(AB, A, B.having(3, STOPPED, SUCCEEDED)),
            "wait",
            "generation 4 is running on 2 nodes",
        ),
        # a member fails
        (view(AB, A, replace(B, failure=CRASH)), "stopping 4 [a b] failure b", CRASH.summary),
        (view(AB, replace(SB, failure=CRASH)), "stopping 4 [a b] failure b", CRASH.summary),
        # a member is lost, or back as another incarnation
        (view(AB, A), "stopping 4 [a b] lost b", "node b is gone"),
        (view(AB, A, replace(B, incarnation="b-2")), "stopping 4 [a b] lost b", "node b is gone"),
        (view(AB, replace(A, leaving=True)), "stopping 4 [a b] lost b", "node b is gone"),
        # a member leaves; one that has stopped its workers already leaves nothing to agree on
        (view(AB, A, replace(B, leaving=True)), "draining 4 [a b] leave b", "node b was asked to stop"),
        (view(AB, A, replace(SB, leaving=True)), "stopping 4 [a b] leave b", "node b was asked to stop"),
        (
            view(AB, A, replace(HOST, leaving=True)),
            "draining 4 [a b] leave b",
            "hosts the c10d rendezvous store",
        ),
        (
            view(AB, A, B, replace(C, hosts_store=True, leaving=True)),
            "draining 4 [a b] leave c",
            "hosts the c10d rendezvous store",
        ),
        # a member stopped by itself
        (view(AB, A, SB), "stopping 4 [a b] withdrawn b", "could not confirm its lease"),
        (view(AB, A, SB), "stopping 4 [a b] withdrawn b", "could not confirm"),
        # members succeed
        (
            view(AB, SA.having(4, SUCCEEDED), SB.having(4, SUCCEEDED)),
            "ended 4 [a b] success",
            "every worker ended with success",
        ),
        (
            view(AB, A, SB.having(4, SUCCEEDED)),
            "wait until 105",
            "of b have ended with success; waiting for",
        ),
        (view(AB, A, SB.having(4, SUCCEEDED), C), "wait until 105", "waiting for those of a"),
        (
            view(AB, replace(A, failure=CRASH), SB.having(4, SUCCEEDED)),
            "stopping 4 [a b] failure a",
            "",
        ),
        (view(AB, SB.having(4, SUCCEEDED)), "stopping 4 [a b] lost a", ""),
        # a newcomer
        (view(AB, A, B, C, c=NOW), "draining 4 [a b] join c", "c joining"),
        (view(AB, A, B, C, D), "draining 4 [a b] join c", "c joining"),
        (view(AB, A, B, replace(C, leaving=True)), "wait", "generation 4 is running on 2 nodes"),
        (view(ABC, A, B, C, D), "wait", "d standing by: the world has all 3 nodes of --max-nodes"),
        (view(running(A), A, B, b=99.5), "wait until 100.5", "last call before b joins"),
        (view(running(A), A, B, b=99.0), "draining 4 [a] join b", "b joining"),
        # one that is not ready keeps no node waiting: neither the others nor a newcomer that is
        (view(AB, A, B, COLD), "wait", "c getting ready to join"),
        (view(AB, A, B, COLD, D), "draining 4 [a b] join d", "d joining"),
        (view(running(A), A, COLD, B, b=99.5), "wait until 100.5", "last call before b joins"),
    ],
)
def test_what_ends_a_running_generation(seen: View, decision: str, reason: str) -> None:
    check(seen, POLICY, decision, reason)


def test_nodes_that_end_late_are_told_once_that_others_have_ended() -> None:
    done = view(AB, A, SB.having(4, SUCCEEDED))
    early, late = (replace(done, succeeded_since={"b-1": NOW - FINISHING_S + more}) for more in (1, 0))
    assert short(decide(early, POLICY, NOW)) == "wait until 101"
    told = decide(late, POLICY, NOW)
    assert isinstance(told, Publish)
    assert told.world == replace(AB, finishing=True)
    assert short(decide(replace(late, world=told.world), POLICY, NOW)) == "wait"


def test_the_end_says_how() -> None:
    done = decide(view(AB, SA.having(4, SUCCEEDED), SB.having(4, SUCCEEDED)), POLICY, NOW)
    host_left = decide(view(stopping(A, B), SA, replace(SB, hosts_store=True, leaving=True)), POLICY, NOW)
    assert isinstance(done, Publish)
    assert isinstance(host_left, Publish)
    assert (done.world.result, host_left.world.result) == (Result.SUCCEEDED, Result.STORE_HOST_LEFT)


def test_a_failure_stays_in_the_world_as_its_cause() -> None:
    decision = decide(view(AB, A, replace(B, failure=CRASH)), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world == replace(
        AB, phase=Phase.STOPPING, cause=Cause(CauseKind.FAILURE, "b", CRASH.summary, CRASH)
    )


@pytest.mark.parametrize("result", Result)
def test_after_the_end_there_is_nothing_to_decide(result: Result) -> None:
    ended = replace(AB, phase=Phase.ENDED, result=result, cause=Cause(CauseKind.SUCCESS, detail="all done"))
    assert decide(view(ended, SA, SB, C), POLICY, NOW) == Wait("the job has ended: all done")


def test_a_new_run_begins_where_the_numbers_of_the_last_one_end() -> None:
    ended = replace(AB, phase=Phase.ENDED, result=Result.CRASH_LOOP, restarts=Restarts(9, 9, "crash", 9))
    again = (replace(C, incarnation="c-9"), replace(D, incarnation="d-9"))
    decision = decide(replace(view(ended, *again), came_after_end=True), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert short(decision) == "running 5 [c d] start"
    assert decision.world.restarts == Restarts()
    assert decision.world.run == "c-9"
    alone = decide(replace(view(ended, again[0]), came_after_end=True), POLICY, NOW)
    assert short(alone) == "wait"
    assert "1 more" in alone.reason


def test_the_last_call_over_a_newcomer_begins_when_it_is_ready() -> None:
    seen = replace(view(running(A), A, B, b=90.0), ready_since={B.incarnation: 99.5})
    check(seen, POLICY, "wait until 100.5", "last call before b joins")


# ---------------------------------------------------------------- decide: a planned change

DRAINING = replace(ABC, phase=Phase.DRAINING, cause=Cause(CauseKind.LEAVE, "c", "node c was asked to stop"))
FRESH = replace(DRAINING, step=0)
"""No worker of the job has ever told of a step."""
DRAINED = replace(DRAINING, phase=Phase.LAST_STEP)
TA, TB, TC = (node.having(4, NOTIFIED) for node in (A, B, C))
"""They have told their workers."""
LA, LB, LC = (node.having(4, POLLING) for node in (TA, TB, TC))
"""And these look at their flags."""
KA, KB, KC = (
    node.having(4, NOTIFIED, POLLING, Condition.DRAINED, STATE_SAVED, STOPPED) for node in (A, B, C)
)
"""Their workers have ended at the agreed step."""
GOING = {"leaving": True}


def rescued(decision: Decision) -> str:
    """As `short`, and who brings the last state to disk."""
    final_saver = (
        f", {decision.world.final_saver} rescues"
        if isinstance(decision, Publish) and decision.world.final_saver
        else ""
    )
    return short(decision) + final_saver


@pytest.mark.parametrize(
    ("seen", "decision", "reason"),
    [
        # all must have told their workers
        (view(DRAINING, A, B, C), "wait", "waiting for a, b, c to notify its workers"),
        (view(DRAINING, LA, B, LC), "wait", "waiting for b to notify its workers"),
        (
            view(DRAINING, LA, B.having(3, NOTIFIED, POLLING), LC),
            "wait",
            "waiting for b to notify its workers",
        ),
        # and then it depends on whether the workers listen
        (
            view(DRAINING, LA, LB, LC),
            "last_step 4 [a b c] leave c",
            "all workers stop at the same step",
        ),
        (
            view(DRAINING, LA, LB, TC),
            "wait until 103",
            "the workers of c to end a step",
        ),
        (view(DRAINING, TA, TB, TC), "wait until 103", "the workers of a, b, c to end a step"),
        (view(DRAINING, LA, LB, TC, since=97.0), "stopping 4 [a b c] leave c", "node c was asked to stop"),
        (view(DRAINING, TA, TB, TC, since=97.0), "stopping 4 [a b c] leave c", "node c was asked to stop"),
        (view(FRESH, TA, TB, TC), "stopping 4 [a b c] leave c", "node c was asked to stop"),
        (view(FRESH, LA, TB, TC), "wait until 103", "the workers of b, c to end a step"),
        (view(FRESH, TA, replace(TB, step=3), TC), "wait until 103", "the workers of a, b, c to end a step"),
        # the machine of one goes away before its workers end: all stop now, also those who still could
        (
            view(DRAINING, LA, B, LC.having(4, Condition.OVERDUE)),
            "stopping 4 [a b c] leave c",
            "node c was asked to stop",
        ),
        (
            view(DRAINED, LA, KB, LC.having(4, Condition.OVERDUE)),
            "stopping 4 [a b c] leave c",
            "node c was asked to stop",
        ),
        # a node whose workers have succeeded has no worker to notify
        (
            view(DRAINING, LA, LB, SC.having(4, SUCCEEDED)),
            "last_step 4 [a b c] leave c",
            "all workers stop at the same step",
        ),
        (
            view(DRAINING, *(node.having(4, SUCCEEDED) for node in (SA, SB, SC))),
            "ended 4 [a b c] success",
            "every worker ended with success",
        ),
        # whatever breaks the generation ends the drain with it
        (view(DRAINING, LA, LB, replace(LC, failure=CRASH)), "stopping 4 [a b c] failure c", CRASH.summary),
        (view(DRAINING, LA, LB), "stopping 4 [a b c] lost c", "node c is gone"),
        (
            view(DRAINING, LA, LB, SC.having(4, NOTIFIED)),
            "stopping 4 [a b c] leave c",
            "asked to stop",
        ),
        (view(DRAINING, LA, LB, SC), "stopping 4 [a b c] leave c", "asked to stop"),
        # a second node that leaves meanwhile, or a joiner that comes or dies, changes nothing
        (view(DRAINING, LA, LB, replace(TC, **GOING)), "wait until 103", ""),
        (view(DRAINING, LA, replace(LB, **GOING), LC, D), "last_step 4 [a b c] leave c", ""),
    ],
)
def test_a_planned_change_waits_until_all_workers_know(seen: View, decision: str, reason: str) -> None:
    made = decide(seen, POLICY, NOW)
    assert rescued(made) == decision
    assert reason in made.reason


@pytest.mark.parametrize(
    ("seen", "decision", "reason"),
    [
        (view(DRAINED, LA, LB, LC), "wait", "a, b, c to stop generation 4"),
        (view(DRAINED, KA, LB, replace(KC, **GOING)), "wait", "b to stop generation 4"),
        (view(DRAINED, KA, KB, replace(KC, **GOING)), "running 5 [a b] leave c", "2 nodes are ready"),
        (
            view(DRAINED, KA, KB, replace(KC, **GOING), D, d=NOW),
            "running 5 [a b d] leave c",
            "3 nodes are ready",
        ),
        # some may have finished the whole training on the way
        (
            view(DRAINED, *(node.having(4, SUCCEEDED) for node in (SA, SB, SC))),
            "ended 4 [a b c] success",
            "every worker ended with success",
        ),
        (view(DRAINED, KA, KB, SC.having(4, SUCCEEDED)), "running 5 [a b c] leave c", ""),
        # whatever breaks the generation: the others need not wait for the time of a drain
        (view(DRAINED, KA, LB, replace(LC, failure=CRASH)), "stopping 4 [a b c] failure c", CRASH.summary),
        (view(DRAINED, KA, LB), "stopping 4 [a b c] lost c", "node c is gone"),
        (
            view(DRAINED, KA, LB, SC.having(4, NOTIFIED)),
            "stopping 4 [a b c] leave c",
            "asked to stop",
        ),
        # the next cannot start: a leaving node need not wait, and one node brings what all have in memory to disk
        (
            view(DRAINED, KA, replace(KB, **GOING), replace(KC, **GOING)),
            "stopping 4 [a b c] leave c, a-1 rescues",
            "1 more of at least 2 nodes (here: a",
        ),
        # it could, but no node that stays keeps the state: first to disk, and only then on
        (
            view(
                DRAINED,
                replace(KA, conditions=KA.conditions - {STATE_SAVED}),
                replace(KB, **GOING),
                replace(KC, **GOING),
                D,
            ),
            "stopping 4 [a b c] leave c, b-1 rescues",
            "2 nodes are ready",
        ),
        (
            view(replace(DRAINED, phase=Phase.STOPPING, final_saver="b-1"), SA, replace(KB, **GOING), D),
            "wait",
            "node b brings the state to disk before it leaves",
        ),
        (
            view(replace(DRAINED, phase=Phase.STOPPING, final_saver="b-1"), SA, D),
            "running 5 [a d] leave c",
            "2 nodes are ready",
        ),
        # the job ends with its store
        (
            view(DRAINED, replace(KA, hosts_store=True, **GOING), KB, KC),
            "ended 4 [a b c] leave a, a-1 rescues",
            "hosts the c10d rendezvous store",
        ),
    ],
)
def test_how_a_drain_ends(seen: View, decision: str, reason: str) -> None:
    made = decide(seen, POLICY, NOW)
    assert rescued(made) == decision
    assert reason in made.reason


def test_a_world_that_can_go_on_does_not_wait() -> None:
    """Whoever is late, or not ready, is invited when it runs."""
    policy = replace(POLICY, max_nodes=5)
    check(view(DRAINED, KA, KB, KC, D, d=NOW), policy, "running 5 [a b c d] leave c", "4 nodes are ready")
    check(view(DRAINED, KA, KB, KC, replace(D, ready=False)), policy, "running 5 [a b c] leave c", "3 nodes")
    alone = view(replace(DRAINED, members=assign_ranks((A,))), KA, replace(D, ready=False))
    check(alone, replace(policy, min_nodes=2), "running 5 [a d] leave c", "2 nodes are ready")


# ---------------------------------------------------------------- decide: worlds of a multiple of nodes

IN_PAIRS = replace(POLICY, max_nodes=6, nodes_multiple_of=2)
SIX = tuple(NodeRecord(name, f"{name}-1", f"host-{name}", 4000, slots=1, ready=True) for name in "abcdef")
STOPPED_SIX = tuple(node.having(4, STOPPED) for node in SIX)
LEFT_OF_FOUR = tuple(
    node.having(4, NOTIFIED, POLLING, Condition.DRAINED, STATE_SAVED, STOPPED) for node in SIX[:4]
)


@pytest.mark.parametrize(
    ("seen", "decision", "reason"),
    [
        # the first one
        (view(None, *SIX[:1]), "wait", "1 more of at least 2 nodes (here: a)"),
        (view(None, *SIX[:3]), "running 1 [a b] start", "2 nodes are ready"),
        (view(None, *SIX[:3], c=99.5), "wait until 100.5", "last call: 3 nodes here, up to 6 may come"),
        # a failure leaves five of six, or four and one that has stood by
        (view(stopping(*SIX), *STOPPED_SIX[:5]), "running 5 [a b c d] join a", "4 nodes are ready"),
        (view(stopping(*SIX), *STOPPED_SIX[1:]), "running 5 [e b c d] join a", "4 nodes are ready"),
        (
            view(stopping(*SIX[:4]), *STOPPED_SIX[:3], SIX[4]),
            "running 5 [a b c e] join a",
            "4 nodes are ready",
        ),
        (view(stopping(*SIX[:2]), *STOPPED_SIX[:1]), "wait", "1 more of at least 2 nodes (here: a"),
        # nodes that join interrupt only for a larger world
        (
            view(running(*SIX[:4]), *SIX[:5]),
            "wait",
            "e standing by: 1 more needed, as worlds are multiples of 2 nodes (--nodes-multiple-of)",
        ),
        (view(running(*SIX[:4]), *SIX), "draining 4 [a b c d] join e", "e, f joining"),
        (view(running(*SIX[:4]), *SIX[:5], replace(SIX[5], ready=False)), "wait", "f getting ready to join"),
        (view(running(*SIX[:2]), *SIX[:5], e=99.5), "wait until 100.5", "last call before c, d joins"),
        (
            view(running(*SIX), *SIX, replace(D, node="g", incarnation="g-1")),
            "wait",
            "all 6 nodes of --max-nodes",
        ),
        # one of four leaves: two go on, of those that keep the state
        (
            view(
                replace(running(*SIX[:4]), phase=Phase.LAST_STEP),
                *LEFT_OF_FOUR[:3],
                replace(LEFT_OF_FOUR[3], **GOING),
            ),
            "running 5 [a b] start",
            "2 nodes are ready",
        ),
        (
            view(
                replace(running(*SIX[:4]), phase=Phase.LAST_STEP),
                *(replace(node, conditions=node.conditions - {STATE_SAVED}) for node in LEFT_OF_FOUR[:2]),
                LEFT_OF_FOUR[2],
                replace(LEFT_OF_FOUR[3], **GOING),
            ),
            "running 5 [a c] start",
            "2 nodes are ready",
        ),
    ],
)
def test_a_world_has_a_multiple_of_nodes_and_the_others_stand_by(
    seen: View, decision: str, reason: str
) -> None:
    check(seen, IN_PAIRS, decision, reason)


def test_a_world_names_the_memory_of_all_nodes_that_stand_by() -> None:
    """Of a survivor that is one too many, of a newcomer that is not ready, and of one that leaves; not of one that has
    left by plan, or has none."""
    b, c, d, e, f = (replace(node, memory=7000 + place) for place, node in enumerate(STOPPED_SIX[1:]))
    fresh, going = replace(e, ready=False), replace(f, leaving=True)
    left = replace(f, node="h", incarnation="h-1", leaving=True).having(4, Condition.DRAINED)
    without = replace(D, node="g", incarnation="g-1")
    seen = view(stopping(*SIX[:4]), *(b, c, d), fresh, going, left, without)
    decision = decide(seen, replace(IN_PAIRS, max_nodes=2), NOW)
    assert isinstance(decision, Publish)
    assert {member.node for member in decision.world.members} == {"b", "c"}
    assert decision.world.standbys == (
        Standby("d", Endpoint("host-d", 7002)),
        Standby("e", Endpoint("host-e", 7003)),
        Standby("f", Endpoint("host-f", 7004)),
    )


# ---------------------------------------------------------------- decide: between two generations


@pytest.mark.parametrize(
    ("seen", "decision", "reason"),
    [
        # no node starts before all have stopped
        (view(stopping(A, B), A, B), "wait", "a, b to stop generation 4"),
        (view(stopping(A, B), SA, B), "wait", "b to stop generation 4"),
        (view(stopping(A, B), SA, B.having(3, STOPPED), C), "wait", "b to stop"),
        (view(stopping(A, B), SA, replace(B, leaving=True)), "wait", "b to stop"),
        # survivors close at once, whatever the last call; a node that is gone holds none up
        (view(stopping(A, B), SA, SB), "running 5 [a b] join a", "2 nodes are ready"),
        (view(stopping(A, B, C), SA, SB, a=NOW), "running 5 [a b] join a", "2 nodes are ready"),
        # survivors keep their places, also where another node is older; newcomers take those that are free
        (view(stopping(C, A, B), SA, SB, SC), "running 5 [c a b] join a", ""),
        (view(stopping(C, A), D, SA, SC), "running 5 [c a d] join a", ""),
        # a spare fills a place that is free, and only that
        (view(stopping(A, B, C), D, SA, SC), "running 5 [a d c] join a", ""),
        (view(stopping(A, B, C), D, SA, SB, SC), "running 5 [a b c] join a", ""),
        (view(stopping(A, B), SA, replace(SB, leaving=True), D, d=99.0), "running 5 [a d] join a", ""),
        # newcomers have their last call unless the world is full
        (view(stopping(A, B), SA, SB, C, c=99.5), "running 5 [a b c] join a", ""),
        (view(stopping(A, B), SA, SB, replace(C, node_rank=0), c=99.5), "running 5 [a b c] join a", ""),
        (view(stopping(A, B), SA, D, d=99.5), "wait until 100.5", "last call: 2 nodes here"),
        # below the minimum it waits, and says for whom and since what
        (
            view(stopping(A, B, kind=CauseKind.LOST), SA),
            "wait",
            "1 more of at least 2 nodes (here: a; last: lost of a)",
        ),
        (view(stopping(A, B), SA, replace(SB, leaving=True)), "wait", "1 more"),
        (view(stopping(A, B)), "wait", "2 more of at least 2 nodes (here: none"),
        # without its host there is no store
        (
            view(stopping(A, B), SA, replace(SB, hosts_store=True, leaving=True), C, D),
            "ended 4 [a b] leave b",
            "hosts the c10d rendezvous store",
        ),
    ],
)
def test_when_the_next_generation_starts(seen: View, decision: str, reason: str) -> None:
    check(seen, POLICY, decision, reason)


def test_the_next_world_in_full() -> None:
    """Ranks are dense with unequal slots, the master has its fresh port, run, cause and budget are kept."""
    restarts = Restarts(2, 1, "crash", 1)
    world = stopping(C, A, restarts=restarts)
    decision = decide(view(world, replace(SA, step=31), SC, replace(B, step=33)), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world == World(
        job="job",
        generation=5,
        phase=Phase.RUNNING,
        members=(Member("c", "c-1", 3, 0), Member("a", "a-1", 2, 3), Member("b", "b-1", 1, 5)),
        master=Endpoint("host-c", 4103),
        cause=world.cause,
        restarts=restarts,
        step=33,
        limits=LIMITS,
        unproven=(2,),
        run="the-first",
    )


def test_the_best_step_outlives_the_node_that_made_it() -> None:
    decision = decide(view(stopping(A, B), SA, SB), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.step == 20


# ---------------------------------------------------------------- decide: after a failure

FAILED = stopping(A, B, kind=CauseKind.FAILURE)
FAILED_AGAIN = replace(FAILED, restarts=Restarts(1, 1, "crash", 1))
STEADY = replace(POLICY, restarts=RestartPolicy(first_backoff_s=8.0))


def test_a_first_failure_is_followed_by_the_next_try_at_once() -> None:
    assert short(decide(view(FAILED, SA, SB, since=NOW), STEADY, NOW)) == "running 5 [a b] failure a"


def test_a_second_fruitless_failure_waits_before_the_next_try() -> None:
    seen = view(FAILED_AGAIN, SA, SB, since=NOW)
    waits = decide(seen, STEADY, NOW)
    assert isinstance(waits, Wait)
    assert waits.until is not None
    assert NOW + 4 <= waits.until <= NOW + 8
    assert f"backing off {waits.until - NOW:.1f} s" in waits.reason

    assert decide(seen, STEADY, waits.until - 0.01) == waits
    assert short(decide(seen, STEADY, waits.until)) == "running 5 [a b] failure a"


def test_every_coordinator_comes_to_the_same_wait_and_every_generation_to_another() -> None:
    def until(world: World) -> float | None:
        nodes = tuple(node.having(world.generation, STOPPED) for node in (SA, SB))
        decision = decide(view(world, *nodes), STEADY, NOW)
        assert isinstance(decision, Wait)
        return decision.until

    assert until(FAILED_AGAIN) == until(FAILED_AGAIN)
    assert until(FAILED_AGAIN) != until(replace(FAILED_AGAIN, generation=5))
    assert until(FAILED_AGAIN) != until(replace(FAILED_AGAIN, job="other"))


FRUITLESS = Restarts(1, 1, "crash", 1, culprit="a-1", blamed=1)
PROGRESS = Restarts(1, 0, "crash", 0, culprit="a-1", blamed=1)
STEPLESS = replace(FAILED, step=0)
"""No worker of the job has ever told of a step."""


@pytest.mark.parametrize(
    ("world", "survivors", "used"),
    [
        (FAILED, (SA, SB), FRUITLESS),
        (FAILED, (replace(SA, step=20), SB), FRUITLESS),
        (FAILED, (SA, replace(SB, step=21)), PROGRESS),
        # a slow script that always fails at one step makes none, however long it takes
        (FAILED, (SA, SB.having(4, STABLE)), FRUITLESS),
        (STEPLESS, (replace(SA, step=1), SB.having(4, STABLE)), PROGRESS),
        (STEPLESS, (SA, SB), FRUITLESS),
        (STEPLESS, (SA, SB.having(4, STABLE)), PROGRESS),
    ],
)
def test_progress_is_a_new_step_or_without_any_steps_a_lasting_generation(
    world: World, survivors: tuple[NodeRecord, ...], used: Restarts
) -> None:
    decision = decide(view(world, *survivors, since=0.0), STEADY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.restarts == used


def test_a_crash_loop_ends_however_long_each_try_takes() -> None:
    world = replace(FAILED, step=999)
    for failures in range(1, 5):
        nodes = tuple(replace(node.having(4, STABLE), step=999) for node in (SA, SB))
        decision = decide(view(world, *nodes, since=0.0), POLICY, NOW)
        assert isinstance(decision, Publish)
        assert decision.world.restarts.failures == failures
        world = replace(world, restarts=decision.world.restarts)
    assert decision.world.result is Result.CRASH_LOOP


def advanced(node: NodeRecord, loaded: int | None, reached: int | None, generation: int = 4) -> NodeRecord:
    return replace(node, step=20, progress=GenerationProgress(generation, loaded, reached))


@pytest.mark.parametrize(
    ("survivors", "bad"),
    [
        ((advanced(SA, 20, None), advanced(SB, 20, None)), BadState(4, 20)),
        # the state that was loaded was saved again
        ((advanced(SA, 20, 20), SB), BadState(4, 20)),
        ((advanced(SA, 20, None), advanced(SB, 20, 21)), None),
        ((advanced(SA, 18, 19), advanced(SB, 18, None)), None),
        # of another generation, or of none
        ((advanced(SA, 20, None, generation=3), SB), None),
        ((advanced(SA, None, None), SB), None),
        ((SA, SB), None),
    ],
)
def test_which_state_ends_all_that_load_it(survivors: tuple[NodeRecord, ...], bad: BadState | None) -> None:
    world = replace(FAILED, restarts=Restarts(2, 1, "crash", 1, at_load=1))
    decision = decide(view(world, *survivors, since=0.0), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.restarts.bad_state == bad


def test_a_failure_that_no_restart_helps_ends_the_job() -> None:
    world = replace(FAILED, cause=replace(FAILED.cause, failure=replace(CRASH, action=records.Action.END)))
    decision = decide(view(world, SA, SB, C), POLICY, NOW)
    assert short(decision) == "ended 4 [a b] failure a"
    assert isinstance(decision, Publish)
    assert decision.world.result is Result.FINAL_FAILURE
    assert decision.world.cause.detail == "no restart helps; the last: failure of a"


BROKEN = replace(CRASH, fingerprint="gloo", summary="its peer is gone", collateral=True)


@pytest.mark.parametrize("nodes", [("a", "b"), ("b", "a")])
def test_a_failure_that_only_follows_from_another_is_not_the_cause(nodes: tuple[str, str]) -> None:
    """Whichever node comes first in the world."""
    failed = [replace(node, failure=BROKEN if node.node == nodes[0] else CRASH) for node in (A, B)]
    decision = decide(view(AB, *failed), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert (decision.world.cause.node, decision.world.cause.failure) == (nodes[1], CRASH)
    alone = decide(view(AB, replace(A, failure=BROKEN), B), POLICY, NOW)
    assert isinstance(alone, Publish)
    assert alone.world.cause == Cause(CauseKind.FAILURE, "a", BROKEN.summary, BROKEN)


def test_a_root_that_comes_to_light_while_the_workers_end_takes_the_place_of_its_collateral() -> None:
    followed = replace(FAILED, cause=Cause(CauseKind.FAILURE, "a", BROKEN.summary, BROKEN))
    root = replace(CRASH, action=records.Action.END)
    decision = decide(view(followed, replace(SA, failure=BROKEN), replace(SB, failure=root)), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.result is Result.FINAL_FAILURE
    assert (decision.world.cause.node, decision.world.cause.failure) == ("b", root)
    old = replace(root, generation=3)
    decision = decide(view(followed, replace(SA, failure=BROKEN), replace(SB, failure=old)), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.cause.failure == BROKEN


def test_the_same_error_of_the_script_again_ends_the_job_unless_a_state_may_be_its_cause() -> None:
    wrong = replace(CRASH, action=records.Action.STOP, cause="import_error")
    again = replace(FAILED, cause=replace(FAILED.cause, failure=wrong), restarts=Restarts(1, 1, "crash", 1))
    decision = decide(view(again, SA, SB), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.result is Result.CRASH_LOOP
    assert "the same error of the script (import_error) 2 times in a row" in decision.world.cause.detail
    loaded = replace(SA, progress=GenerationProgress(4, 30))
    decision = decide(view(again, loaded, SB, since=0.0), POLICY, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.phase is Phase.RUNNING


@pytest.mark.parametrize("kind", [kind for kind in CauseKind if kind is not CauseKind.FAILURE])
def test_only_failures_use_the_budget(kind: CauseKind) -> None:
    policy = replace(POLICY, restarts=RestartPolicy(max_failures=0))
    decision = decide(view(stopping(A, B, kind=kind), SA, SB), policy, NOW)
    assert isinstance(decision, Publish)
    assert decision.world.phase is Phase.RUNNING
    assert decision.world.restarts == Restarts()


@pytest.mark.parametrize(
    ("used", "result", "reason"),
    [
        (Restarts(9, 3, "crash", 3), Result.CRASH_LOOP, "crash loop: 4 failures in a row without progress"),
        (Restarts(9, 3, "other", 3), Result.RESTARTS_EXHAUSTED, "4 failures in a row without progress"),
    ],
)
def test_when_the_budget_is_spent_the_job_ends(used: Restarts, result: Result, reason: str) -> None:
    decision = decide(view(replace(FAILED, restarts=used), SA, SB, C), POLICY, NOW)
    assert short(decision) == "ended 4 [a b] failure a"
    assert isinstance(decision, Publish)
    world = decision.world
    assert (world.result, world.cause.failure, world.restarts.failures) == (result, CRASH, 10)
    assert world.cause.detail.startswith(reason)
    assert world.cause.detail.endswith("; the last: failure of a")


def test_the_budget_is_counted_only_when_every_step_is_known() -> None:
    spent = replace(FAILED, restarts=Restarts(9, 3, "crash", 3))
    check(view(spent, SA, B), POLICY, "wait", "b to stop generation 4")


@pytest.mark.parametrize("used", [Restarts(), Restarts(9, 3, "crash", 3)], ids=["unused", "spent"])
def test_a_failure_beside_a_lost_node_is_blamed_on_the_loss(used: Restarts) -> None:
    world = stopping(A, B, C, kind=CauseKind.FAILURE, restarts=used)
    decision = decide(view(world, SA, SC), STEADY, NOW)
    assert short(decision) == "running 5 [a c] lost b"
    assert isinstance(decision, Publish)
    assert decision.world.restarts == used
    assert decision.world.cause == Cause(CauseKind.LOST, "b", "node b is gone: its lease ended")


def test_a_loss_does_not_change_the_cause_of_a_planned_stop() -> None:
    assert short(decide(view(stopping(A, B, C), SA, SC), POLICY, NOW)) == "running 5 [a c] join a"


# ---------------------------------------------------------------- decide: nodes with other options

OTHER = replace(PLAIN_POLICY, last_call_s=9.0, restarts=RestartPolicy(max_failures=0))
"""Of a coordinator that was started with other options than the job's first one."""
REJOINED = (replace(SA, incarnation="a-1.1"), replace(SB, incarnation="b-1.1"))
RESTARTED = (replace(SA, incarnation="a-2"), replace(SB, incarnation="b-2"))


@pytest.mark.parametrize(
    ("seen", "decision", "holds"),
    [
        # it would shrink the world to one node, or end the job at its first failure
        (view(stopping(A, B, C, limits=LIMITS), SA, SB, SC), "running 5 [a b c] join a", True),
        (
            view(stopping(A, B, kind=CauseKind.FAILURE, limits=LIMITS), SA, SB, since=0.0),
            "running 5 [a b] failure a",
            True,
        ),
        # it would go on alone, where the job wants two
        (view(stopping(A, B, limits=LIMITS), SA), "wait", True),
        # all have lost their leases and joined again
        (view(stopping(A, B, limits=LIMITS), *REJOINED), "running 5 [a b] join a", True),
        # none of the first nodes is left: the options of the new ones count
        (view(stopping(A, B, limits=LIMITS), *RESTARTED, a=0.0, b=0.0), "running 5 [a] join a", False),
        (view(stopping(A, B), SA, SB), "running 5 [a] join a", False),
    ],
)
def test_the_jobs_limits_hold_under_any_coordinator(seen: View, decision: str, holds: bool) -> None:
    decided = decide(seen, OTHER, NOW)
    assert short(decided) == decision
    if isinstance(decided, Publish):
        assert decided.world.limits == (LIMITS if holds else Limits(1, 1, 9.0, 0))


def test_a_full_world_invites_no_node_because_a_coordinator_would() -> None:
    roomy = replace(POLICY, max_nodes=9)
    check(view(replace(ABC, limits=LIMITS), A, B, C, D), roomy, "wait", "all 3 nodes of --max-nodes")


OURS, THEIRS = Program("train.py", "1" * 64), Program("train.py", "2" * 64)
SLOW, PATIENT = replace(OURS, lease_ttl_s=9.0), replace(OURS, outage_grace_s=60.0)


def runs(program: Program | None, *nodes: NodeRecord) -> tuple[NodeRecord, ...]:
    return tuple(replace(node, program=program) for node in nodes)


@pytest.mark.parametrize(
    ("seen", "decision"),
    [
        (view(replace(AB, program=OURS), *runs(OURS, A, B), *runs(THEIRS, C)), "wait"),
        (view(replace(AB, program=OURS), *runs(OURS, A, B), *runs(OURS, C)), "draining 4 [a b] join c"),
        # it says nothing of its script
        (view(replace(AB, program=OURS), A, B, C), "draining 4 [a b] join c"),
        (
            view(replace(AB, program=OURS), A, B, *runs(replace(THEIRS, digest=""), C)),
            "draining 4 [a b] join c",
        ),
        # other times by which to judge who is gone
        (view(replace(AB, program=OURS), *runs(OURS, A, B), *runs(SLOW, C)), "wait"),
        (view(replace(AB, program=OURS), *runs(OURS, A, B), *runs(PATIENT, C)), "wait"),
        # arguments may be a node's own
        (
            view(replace(AB, program=OURS), A, B, *runs(replace(OURS, arguments="x"), C)),
            "draining 4 [a b] join c",
        ),
        # before the first world the oldest node's counts
        (view(None, *runs(OURS, A), *runs(THEIRS, B), *runs(OURS, C), c=0.0), "running 1 [a c] start"),
        # all nodes of the old script are gone
        (
            view(stopping(A, B, program=OURS), *runs(THEIRS, *RESTARTED), a=0.0, b=0.0),
            "running 5 [a b] join a",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_in_no_world(seen: View, decision: str) -> None:
    assert short(decide(seen, POLICY, NOW)) == decision


@pytest.mark.parametrize(
    ("world", "leader", "me", "refused"),
    [
        (None, *runs(OURS, A), *runs(THEIRS, C), True),
        (None, *runs(OURS, A), *runs(OURS, C), False),
        (None, *runs(OURS, A), C, False),
        (replace(AB, program=OURS), *runs(OURS, A), *runs(THEIRS, C), True),
        (replace(AB, program=OURS), *runs(THEIRS, A), *runs(THEIRS, C), True),
        # the coordinator is not of that world: perhaps no node is
        (replace(AB, program=OURS), *runs(THEIRS, D), *runs(THEIRS, C), False),
        (replace(AB, program=OURS), *runs(OURS, D), *runs(THEIRS, C), True),
        # a member is one
        (replace(AB, program=OURS), *runs(OURS, A), *runs(THEIRS, B), False),
    ],
)
def test_a_node_refuses_itself_only_when_it_is_sure(
    world: World | None, leader: NodeRecord, me: NodeRecord, refused: bool
) -> None:
    reason = why_refused(world, leader, me)
    assert (reason is not None) is refused
    assert (
        reason is None
        or "train.py (content 222222222222), and the job runs train.py (111111111111)" in reason
    )


# ---------------------------------------------------------------- decide: one node on which alone workers fail

JOINED = stopping(A, B, C, kind=CauseKind.FAILURE, unproven=(2,), limits=LIMITS)
"""A failure beside two that trained well before."""
OF_C = Cause(
    CauseKind.FAILURE, "c", "rank 3 lacks a package", replace(CRASH, summary="rank 3 lacks a package")
)
OF_A = replace(OF_C, node="a")
ONCE = Restarts(1, 1, "crash", 1, culprit="c-1", blamed=1)
TWICE = replace(ONCE, failures=2, without_progress=2, same_fingerprint=2, blamed=2)
LIMITED = replace(LIMITS, max_restarts=0)
FAILS_ON_C = replace(JOINED, cause=OF_C, restarts=ONCE)
FIRST = replace(FAILS_ON_C, unproven=(0, 1, 2))
"""No generation has been healthy yet."""
OUT = Exclusion("c", "c-1", "unknown", "its workers fail", digest(CRASH), times=2)
LONG = SA.having(4, Condition.STABLE)


def blamed(world: World, *nodes: NodeRecord) -> Decision:
    return decide(view(world, *nodes, since=0.0), POLICY, NOW)


def failing(node: NodeRecord) -> NodeRecord:
    return replace(node, failure=CRASH)


@pytest.mark.parametrize(
    ("world", "nodes", "decision"),
    [
        # the first failure may be any node's fault, unless the job ends with it, and trained well without the node
        (replace(JOINED, cause=OF_C), (SA, SB, SC), "running 5 [a b c] failure c"),
        (replace(JOINED, cause=OF_C, limits=LIMITED), (SA, SB, SC), "running 5 [a b] failure c"),
        (replace(JOINED, cause=OF_C, limits=LIMITED, unproven=()), (SA, SB, SC), "ended 4 [a b c] failure c"),
        (FAILS_ON_C, (SA, SB, SC), "running 5 [a b] failure c"),
        # proven or not: it failed alone, twice in a row; also after some steps
        (replace(FAILS_ON_C, unproven=()), (SA, SB, SC), "running 5 [a b] failure c"),
        (FIRST, (SA, SB, SC), "running 5 [a b] failure c"),
        (FIRST, (replace(SA, step=21), SB, SC), "running 5 [a b] failure c"),
        # one that stands by takes its place
        (FIRST, (SA, SB, SC, D), "running 5 [a b d] failure c"),
        (replace(FIRST, limits=replace(LIMITS, min_nodes=3)), (SA, SB, SC, D), "running 5 [a b d] failure c"),
        # after more than a minute it takes one more, of few nodes
        (FIRST, (LONG, SB, SC), "running 5 [a b c] failure c"),
        (replace(FIRST, restarts=TWICE), (LONG, SB, SC), "running 5 [a b] failure c"),
        (
            replace(FIRST, members=assign_ranks((A, B, C, D)), limits=replace(LIMITS, max_nodes=4)),
            (LONG, SB, SC, replace(D, generation=4, conditions=frozenset({STOPPED}))),
            "running 5 [a b d] failure c",
        ),
        # one began elsewhere
        (replace(FIRST, cause=OF_A, restarts=ONCE), (SA, SB, SC), "running 5 [a b c] failure a"),
        (replace(FIRST, restarts=replace(ONCE, culprit="a-1")), (SA, SB, SC), "running 5 [a b c] failure c"),
        # an earlier life of its agent is another one
        (replace(FIRST, restarts=replace(ONCE, culprit="c-0")), (SA, SB, SC), "running 5 [a b c] failure c"),
        # others failed, too
        (FIRST, (failing(SA), failing(SB), failing(SC)), "running 5 [a b c] failure c"),
        (FIRST, (SA, failing(SB), SC), "running 5 [a b c] failure c"),
        # the same failure was elsewhere, with no progress since
        (
            replace(FIRST, restarts=replace(ONCE, same_fingerprint=2, failures=2)),
            (SA, SB, SC),
            "running 5 [a b c] failure c",
        ),
        # the others are too few: altogether, or for a multiple
        (
            replace(FIRST, limits=replace(LIMITS, min_nodes=3)),
            (SA, SB, SC),
            "running 5 [a b c] failure c",
        ),
        (
            replace(FIRST, limits=replace(LIMITS, min_nodes=3)),
            (SA, SB, SC, replace(D, ready=False)),
            "running 5 [a b c] failure c",
        ),
        (
            replace(FIRST, limits=replace(LIMITS, min_nodes=1, nodes_multiple_of=3)),
            (SA, SB, SC),
            "running 5 [a b c] failure c",
        ),
        # the host of the store stays with its agent
        (FIRST, (SA, SB, replace(SC, hosts_store=True)), "running 5 [a b] failure c"),
    ],
)
def test_a_node_on_which_alone_workers_fail_is_excluded(
    world: World, nodes: tuple[NodeRecord, ...], decision: str
) -> None:
    assert short(blamed(world, *nodes)) == decision


def test_a_failure_that_others_had_too_neither_blames_nor_clears_these() -> None:
    decision = blamed(FIRST, failing(SA), SB, failing(SC))
    assert isinstance(decision, Publish)
    assert (decision.world.restarts.culprit, decision.world.restarts.blamed) == ("c-1", 1)
    decision = blamed(replace(FIRST, cause=OF_A), failing(SA), failing(SB), SC)
    assert isinstance(decision, Publish)
    assert (decision.world.restarts.culprit, decision.world.restarts.blamed) == ("", 0)


def test_who_is_excluded_is_named_and_its_failures_cost_the_job_nothing() -> None:
    used = replace(ONCE, failures=8, free_retries=1)
    decision = blamed(replace(FIRST, restarts=used), SA, SB, SC)
    assert isinstance(decision, Publish)
    world = decision.world
    assert world.restarts == Restarts(7, free_retries=1, exclusions=1)
    reason = "each of 2 failures in a row began there alone; the last: rank 3 lacks a package"
    assert world.exclusions == (Exclusion("c", "c-1", "unknown", reason, digest(CRASH)),)
    assert world.cause.detail == f"node c is excluded: {reason}"


ECC = replace(CRASH, cause="gpu_fault", action=records.Action.EXCLUDE_NODE, summary="GPU 3: ECC")
SCRIPTS = replace(CRASH, action=records.Action.STOP)
REFUSED = replace(CRASH, action=records.Action.END)


@pytest.mark.parametrize(
    ("world", "nodes", "decision"),
    [
        # a collateral failure, or one from outside, neither blames nor clears a node
        (FIRST, (replace(SA, failure=replace(CRASH, collateral=True)), SB, SC), "running 5 [a b] failure c"),
        (FIRST, (replace(SA, failure=replace(CRASH, outside=True)), SB, SC), "running 5 [a b] failure c"),
        (
            replace(FIRST, cause=replace(OF_C, failure=replace(CRASH, outside=True))),
            (SA, SB, SC),
            "running 5 [a b c] failure c",
        ),
        # a broken machine is out at once, whichever failure was heard first
        (
            replace(FIRST, cause=replace(OF_C, failure=ECC), restarts=Restarts()),
            (SA, SB, SC),
            "running 5 [a b] failure c",
        ),
        (
            replace(FIRST, cause=OF_A, restarts=Restarts()),
            (failing(SA), failing(SB), replace(SC, failure=ECC)),
            "running 5 [a b] failure a",
        ),
        (
            replace(FIRST, cause=OF_A, restarts=Restarts(), limits=replace(LIMITS, min_nodes=3)),
            (failing(SA), SB, replace(SC, failure=ECC)),
            "running 5 [a b c] failure a",
        ),
        # an error of the script may be one of the node's environment: a package that only this one lacks
        (replace(FIRST, cause=replace(OF_C, failure=SCRIPTS)), (SA, SB, SC), "running 5 [a b] failure c"),
        (
            replace(FIRST, cause=replace(OF_C, failure=SCRIPTS)),
            (SA, failing(SB), SC),
            "ended 4 [a b c] failure c",
        ),
        (
            replace(FIRST, cause=replace(OF_C, failure=SCRIPTS), limits=replace(LIMITS, min_nodes=3)),
            (SA, SB, SC),
            "ended 4 [a b c] failure c",
        ),
        # what the worker library refuses is the script's, unless training went well without the node
        (replace(FIRST, cause=replace(OF_C, failure=REFUSED)), (SA, SB, SC), "ended 4 [a b c] failure c"),
        (replace(JOINED, cause=replace(OF_C, failure=SCRIPTS)), (SA, SB, SC), "running 5 [a b c] failure c"),
        (
            replace(JOINED, cause=replace(OF_C, failure=SCRIPTS), restarts=ONCE),
            (SA, SB, SC),
            "running 5 [a b] failure c",
        ),
    ],
)
def test_causes_say_who_is_excluded(world: World, nodes: tuple[NodeRecord, ...], decision: str) -> None:
    assert short(blamed(world, *nodes)) == decision


def test_a_second_broken_machine_does_not_clear_the_first() -> None:
    world = replace(
        stopping(A, B, kind=CauseKind.FAILURE, limits=replace(LIMITS, min_nodes=1)),
        cause=replace(OF_A, failure=ECC),
        restarts=Restarts(3, exclusions=1),
        exclusions=(replace(OUT, fingerprint=digest(ECC)),),
    )
    decision = blamed(world, SA, SB, C)
    assert short(decision) == "running 5 [b] failure a"
    assert isinstance(decision, Publish)
    assert [(one.node, one.cause, one.readmitted) for one in decision.world.exclusions] == [
        ("c", "unknown", False),
        ("a", "gpu_fault", False),
    ]
    assert decision.world.exclusions[1].reason == "its machine is broken (gpu_fault): GPU 3: ECC"
    assert decision.world.restarts.failures == 3


def test_what_an_operator_has_excluded_stays_so_though_the_node_fails_once_more() -> None:
    asked = exclude((), "c", "c-1", BY_OPERATOR, "a fan is loud", operator=True)
    decision = blamed(replace(FIRST, exclusions=asked), SA, SB, SC)
    assert short(decision) == "running 5 [a b] failure c"
    assert isinstance(decision, Publish)
    assert decision.world.exclusions == asked


def test_no_exclusion_in_force_gives_way_to_another() -> None:
    full: tuple[Exclusion, ...] = ()
    for number in range(MAX_EXCLUSIONS):
        full = exclude(full, f"n{number}", "l", "gpu_fault", "r" * 600)
    assert all(len(one.reason) == MAX_EXCLUSION_REASON for one in full)
    assert exclude(full, "c", "c-1", BY_OPERATOR, "a fan is loud", operator=True) == full
    assert short(blamed(replace(FIRST, exclusions=full), SA, SB, SC)) == "running 5 [a b c] failure c"
    one_over = readmit(full, frozenset({"n7"}))
    rows = exclude(one_over, "c", "c-1", BY_OPERATOR, "a fan is loud", operator=True)
    assert {one.node for one in full} - {one.node for one in rows} == {"n7"}
    assert left_out(rows).keys() == {one.node for one in rows}


def test_an_exception_of_the_script_moves_from_node_to_node_also_after_minutes_of_progress() -> None:
    """Rank 0's evaluation fails, each 20 minutes: on the node that has rank 0 then."""
    raised = replace(CRASH, cause="exception")
    world = replace(
        stopping(A, B, kind=CauseKind.FAILURE, limits=replace(LIMITS, min_nodes=1)),
        cause=replace(OF_A, failure=raised),
        restarts=replace(TWICE, culprit="a-1", same_fingerprint=0),
        exclusions=(replace(OUT, fingerprint=digest(raised), readmitted=True),),
    )
    assert short(blamed(world, LONG, SB)) == "running 5 [a b] failure a"
    crashed = replace(world, cause=replace(OF_A, failure=CRASH), exclusions=(replace(OUT, readmitted=True),))
    assert short(blamed(crashed, LONG, SB)) == "running 5 [a b] failure a", "a has rank 0: it saves for all"
    assert (
        short(blamed(replace(crashed, members=assign_ranks((B, A))), SB, LONG)) == "running 5 [b] failure a"
    )


def test_each_exclusion_of_a_node_has_the_next_number() -> None:
    again = replace(FIRST, exclusions=(replace(OUT, readmitted=True),))
    for nodes, times in (((SA, SB, SC), 3), ((SA, SB, replace(SC, recheck=Recheck(7, True))), 8)):
        decision = blamed(again, *nodes)
        assert isinstance(decision, Publish)
        (row,) = decision.world.exclusions
        assert (row.times, row.readmitted) == (times, False)


def test_nodes_are_not_excluded_one_after_the_other_when_that_does_not_help() -> None:
    world = replace(FIRST, restarts=replace(TWICE, exclusions=MOST_IN_A_ROW))
    assert short(blamed(world, SA, SB, SC)) == "running 5 [a b c] failure c"
    assert short(blamed(world, LONG, SB, SC)) == "running 5 [a b] failure c"


def test_a_taken_port_that_costs_nothing_blames_no_node() -> None:
    taken = replace(OF_C, failure=replace(CRASH, action=records.Action.FREE))
    for used in (Restarts(), ONCE, TWICE):
        decision = blamed(replace(JOINED, cause=taken, restarts=used), SA, SB, SC)
        assert short(decision) == "running 5 [a b c] failure c"
        assert isinstance(decision, Publish)
        assert decision.world.restarts == replace(used, free_retries=1)


EXCLUDED = replace(AB, exclusions=(OUT,), limits=LIMITS)
PASSED = replace(C, recheck=Recheck(2, True))


@pytest.mark.parametrize(
    "node",
    [
        C,
        replace(C, incarnation="c-1.1"),
        replace(C, incarnation="c-2"),
        replace(C, recheck=Recheck(1, True)),
        replace(C, recheck=Recheck(2, False, "/dev/shm is full")),
    ],
)
def test_no_world_has_an_excluded_node_until_it_has_passed_its_check(node: NodeRecord) -> None:
    assert short(decide(view(EXCLUDED, A, B, node), POLICY, NOW)) == "wait"
    stop = replace(EXCLUDED, phase=Phase.STOPPING, cause=Cause(CauseKind.LOST, "b", "node b is gone"))
    waits = decide(view(stop, SA, node), POLICY, NOW)
    assert "1 more of at least 2 nodes (here: a; excluded: c; last: node b is gone)" in waits.reason
    back = decide(view(stop, SA, replace(node, recheck=Recheck(2, True))), POLICY, NOW)
    assert short(back) == "running 5 [a c] lost b"
    assert isinstance(back, Publish)
    assert back.world.exclusions == (replace(OUT, readmitted=True),)


def test_a_node_that_has_passed_its_check_is_readmitted_and_then_invited() -> None:
    first = decide(view(EXCLUDED, A, B, PASSED), POLICY, NOW)
    assert isinstance(first, Publish)
    assert first.world == replace(EXCLUDED, exclusions=(replace(OUT, readmitted=True),))
    assert short(decide(view(first.world, A, B, PASSED), POLICY, NOW)) == "draining 4 [a b] join c"


def test_only_an_operator_ends_what_an_operator_has_asked_for() -> None:
    asked = replace(EXCLUDED, exclusions=(replace(OUT, by_operator=True),))
    assert short(decide(view(asked, A, B, PASSED), POLICY, NOW)) == "wait"


def test_a_member_that_is_excluded_goes_by_plan_when_the_others_are_enough() -> None:
    rows = exclude((), "b", "b-1", BY_OPERATOR, "a fan is loud", operator=True)
    asked = replace(AB, exclusions=rows, limits=LIMITS)
    assert short(decide(view(asked, A, B), POLICY, NOW)) == "wait", "fewer than --min-nodes would be left"
    assert short(decide(view(asked, A, B, replace(C, ready=False)), POLICY, NOW)) == "wait"
    change = decide(view(asked, A, B, C), POLICY, NOW)
    assert short(change) == "draining 4 [a b] leave b"
    assert isinstance(change, Publish)
    assert change.world.cause.detail == "node b is excluded: a fan is loud"
    last = replace(change.world, phase=Phase.LAST_STEP)
    drained = [one.having(4, Condition.DRAINED, Condition.STATE_SAVED) for one in (SA, SB)]
    assert short(decide(view(last, *drained, C), POLICY, NOW)) == "running 5 [a c] leave b"


def test_no_planned_change_takes_the_newest_state_away_with_the_last_member_that_has_it() -> None:
    """One member goes on with the newcomers, and goes when these have the state."""
    policy = replace(POLICY, min_nodes=1)
    limits = replace(LIMITS, min_nodes=1)
    rows = exclude((), "a", "a-1", BY_OPERATOR, "a fan is loud", operator=True)
    alone = running(A, exclusions=rows, limits=replace(limits, max_nodes=1))
    assert short(decide(view(alone, A, C), policy, NOW)) == "wait"
    failed = replace(alone, phase=Phase.STOPPING, cause=replace(OF_A, failure=CRASH))
    assert short(decide(view(failed, SA, C, since=0.0), policy, NOW)) == "running 5 [c] failure a"
    both = exclude(rows, "b", "b-1", BY_OPERATOR, "another fan", operator=True)
    two = replace(AB, exclusions=both, limits=replace(limits, max_nodes=2))
    assert short(decide(view(two, A, B, C, D), policy, NOW)) == "draining 4 [a b] leave b"
    last = replace(two, phase=Phase.LAST_STEP, cause=Cause(CauseKind.LEAVE, "b", "b goes"))
    drained = SA.having(4, Condition.DRAINED), SB.having(4, Condition.DRAINED, Condition.STATE_SAVED)
    assert short(decide(view(last, *drained, C, D), policy, NOW)) == "running 5 [b c] leave b"


@pytest.mark.parametrize(
    ("world", "nodes", "unproven"),
    [
        # nothing but a planned change has ended it
        (stopping(A, B), (SA, SB, C), "c"),
        (stopping(A, B, kind=CauseKind.LOST, unproven=(0, 1)), (SA, SB), "a b"),
        (stopping(A, B, C, kind=CauseKind.LOST, unproven=(2,)), (SB, SC), "c"),
        (stopping(A, B, C, kind=CauseKind.LOST, unproven=(2,)), (SA, SC, D), "d c"),
        (stopping(A, B, C, kind=CauseKind.FAILURE, unproven=(1, 2)), (SA, SB, SC), "b c"),
        (stopping(A, B, C, kind=CauseKind.FAILURE, unproven=(1, 2)), (SA, SB, replace(SC, step=21)), ""),
    ],
)
def test_who_was_in_the_last_healthy_generation(
    world: World, nodes: tuple[NodeRecord, ...], unproven: str
) -> None:
    decision = blamed(world, *nodes)
    assert isinstance(decision, Publish)
    assert [decision.world.members[place].node for place in decision.world.unproven] == unproven.split()


# ---------------------------------------------------------------- decide: what is written can be read


def crowd(size: int) -> tuple[NodeRecord, ...]:
    return tuple(replace(D, node=f"node-{i:04}.example.org", incarnation=f"i{i}") for i in range(size))


def test_a_thousand_newcomers_at_once_make_a_world_that_all_can_read() -> None:
    policy = replace(POLICY, max_nodes=2000)
    decision = decide(view(AB, A, B, *crowd(1000)), policy, NOW)
    assert isinstance(decision, Publish)
    assert World.from_json(decision.world.to_json()) == decision.world
    assert "node-0000.example.org" in decision.reason
    assert "and 992 more" in decision.reason


def test_giving_up_after_the_longest_failure_makes_a_world_that_all_can_read() -> None:
    failure = replace(CRASH, summary="x" * 4096, **LONGEST_END, fingerprint="x" * 1024)
    policy = replace(POLICY, restarts=RestartPolicy(max_failures=0))
    stop = decide(view(AB, A, replace(B, failure=failure)), policy, NOW)
    assert isinstance(stop, Publish)
    end = decide(view(stop.world, SA, SB), policy, NOW)
    assert isinstance(end, Publish)
    assert end.world.result is Result.RESTARTS_EXHAUSTED
    assert World.from_json(end.world.to_json()) == end.world


@pytest.mark.parametrize(
    ("seen", "min_nodes", "max_nodes"),
    [
        (view(None, *crowd(1000)), 1200, 2000),
        (view(stopping(*crowd(1000)), *crowd(1000)), 2, 2000),
        (view(running(A, B, C), A, B, C, *crowd(1000)), 2, 3),
    ],
)
def test_no_reason_lists_a_thousand_names(seen: View, min_nodes: int, max_nodes: int) -> None:
    decision = decide(seen, replace(POLICY, min_nodes=min_nodes, max_nodes=max_nodes), NOW)
    assert isinstance(decision, Wait)
    assert "node-0007.example.org and 992 more" in decision.reason
    assert "node-0008" not in decision.reason


# ---------------------------------------------------------------- decide: every small combination

HABITS = ("failed", "leaving", "stopped", "succeeded")


def lives(node: NodeRecord) -> Iterator[tuple[bool, NodeRecord | None]]:
    """All that can be said of one node: (is it a member of generation 4, its record, None when gone)."""
    yield False, None
    yield False, node
    yield False, replace(node, leaving=True)
    yield True, None
    for habits in itertools.chain.from_iterable(itertools.combinations(HABITS, n) for n in range(5)):
        yield (
            True,
            replace(
                node,
                failure=CRASH if "failed" in habits else None,
                leaving="leaving" in habits,
                generation=4 if {"stopped", "succeeded"} & {*habits} else 3,
                conditions=frozenset(Condition(one) for one in habits if one in ("stopped", "succeeded"))
                or {STOPPED},
            ),
        )


def lives_in_a_drain(node: NodeRecord) -> Iterator[tuple[bool, NodeRecord | None]]:
    told = node.having(4, NOTIFIED)
    ended = told.having(4, POLLING, Condition.DRAINED, STOPPED)
    kept = ended.having(4, STATE_SAVED)
    yield from ((False, None), (False, node), (False, replace(node, ready=False)), (True, None))
    for record in (
        *(
            node,
            told,
            told.having(4, POLLING),
            told.having(4, STOPPED),
            replace(told, failure=CRASH),
        ),
        *(kept, ended, told.having(4, STOPPED, SUCCEEDED)),
    ):
        yield True, record
        yield True, replace(record, leaving=True)


CHANGES = {
    None: {Phase.RUNNING},
    Phase.RUNNING: {Phase.RUNNING, Phase.DRAINING, Phase.STOPPING, Phase.ENDED},
    Phase.DRAINING: {Phase.LAST_STEP, Phase.STOPPING, Phase.ENDED},
    Phase.LAST_STEP: {Phase.STOPPING, Phase.ENDED, Phase.RUNNING},
    Phase.STOPPING: {Phase.ENDED, Phase.RUNNING},
    Phase.ENDED: {Phase.RUNNING},
}
"""Written once more: the table of the product is what it asserts itself, and the simulator, too."""


def test_the_table_of_transitions_is_this_one() -> None:
    assert TRANSITIONS == CHANGES


def check_promises(seen: View, policy: Policy, decision: Decision) -> None:
    assert decide(seen, policy, NOW) == decision, "two coordinators decide differently"
    assert decision.reason
    before, live = seen.world, {node.incarnation: node for node in seen.nodes}
    if isinstance(decision, Wait):
        assert before is None or not (before.trains or before.drains) or not broken(before, live)
        return
    world = decision.world
    assert World.from_json(world.to_json()) == world
    assert world.phase in CHANGES[before.phase if before is not None else None]
    if world.phase is not Phase.RUNNING:
        assert before is not None
        assert before.phase is not world.phase, "nothing would change"
        kept = replace(world, phase=before.phase, cause=before.cause, result=None, restarts=before.restarts)
        kept = replace(kept, final_saver=before.final_saver)
        assert kept == before, "only the phase and its reason change inside a generation"
        if world.phase is Phase.LAST_STEP:
            training = [
                live[m.incarnation] for m in world.members if not live[m.incarnation].has(SUCCEEDED, 4)
            ]
            both = {NOTIFIED, POLLING}
            assert all(node.generation == 4 and both <= node.conditions for node in training), (
                "some would not stop"
            )
        if world.final_saver:
            assert live[world.final_saver].has(STATE_SAVED, 4)
        return
    assert before is None or before.stops
    assert world.generation == (before.generation + 1 if before is not None else 1)
    assert policy.min_nodes <= len(world.members) <= policy.max_nodes
    chosen = [live[member.incarnation] for member in world.members]
    assert not any(node.leaving for node in chosen)
    assert world.master == Endpoint(chosen[0].address, chosen[0].port)
    ranks = [member.first_rank + local for member in world.members for local in range(member.slots)]
    assert ranks == list(range(sum(node.slots for node in chosen)))
    old = [member.incarnation for member in before.members] if before is not None else []
    assert before is None or all(live[i].has_stopped(before.generation) for i in old if i in live)
    stayed = [i for i in old if i in live and not live[i].leaving]
    goes_on = before is not None and len(stayed) >= policy.min_nodes
    came = [i for i in live if i not in old and not live[i].leaving and (live[i].ready or not goes_on)]
    if before is not None and before.phase is Phase.LAST_STEP:
        keepers = [node for node in seen.nodes if node.has(STATE_SAVED, before.generation)]
        assert not keepers or not all(node.leaving for node in keepers), "the state would be lost"
    size = min(len(stayed + came), policy.max_nodes) // policy.nodes_multiple_of * policy.nodes_multiple_of
    assert {node.incarnation for node in chosen} == set((stayed + came)[:size])
    if before is not None:
        check_places(before, world)


def check_places(before: World, world: World) -> None:
    """No survivor has another place than before that could have kept it, and the first one is a survivor."""
    was = {member.incarnation: place for place, member in enumerate(before.members)}
    stay = [(was[m.incarnation], place) for place, m in enumerate(world.members) if m.incarnation in was]
    assert not stay or world.members[0].incarnation in was
    beyond = sum(old >= len(world.members) for old, _ in stay)
    first_is_free = bool(stay) and not any(old == 0 for old, _ in stay)
    assert sum(old != new for old, new in stay) == max(beyond, first_is_free)


def broken(world: World, live: dict[str, NodeRecord]) -> bool:
    """A member is gone or has failed: the others may hang in a collective."""
    return any(m.incarnation not in live or live[m.incarnation].failure for m in world.members)


@pytest.mark.parametrize("limits", [(1, 1, 1), (1, 3, 1), (2, 2, 1), (2, 3, 1), (3, 3, 1), (2, 2, 2)])
@pytest.mark.parametrize("phase", ["none", "running", "draining", "last step", "stopping", "failed"])
def test_every_small_combination_keeps_the_promises(phase: str, limits: tuple[int, int, int]) -> None:
    policy = replace(
        PLAIN_POLICY,
        min_nodes=limits[0],
        max_nodes=limits[1],
        nodes_multiple_of=limits[2],
        restarts=RestartPolicy(first_backoff_s=0.0),
    )
    published = 0
    each = lives_in_a_drain if phase in ("draining", "last step") else lives
    for combination in itertools.product(each(A), each(HOST), each(C)):
        places = zip((A, HOST, C), combination, strict=True)
        inside = [node for node, (is_member, _) in places if is_member][::-1]
        nodes = [record for _, record in combination if record is not None]
        if (phase == "none") != (not inside) or len(inside) > policy.max_nodes:
            continue
        if phase == "none":
            seen = view(None, *nodes)
        elif phase == "running":
            seen = view(running(*inside), *nodes)
        elif phase == "draining":
            seen = view(running(*inside, phase=Phase.DRAINING, cause=DRAINING.cause), *nodes)
        elif phase == "last step":
            seen = view(replace(stopping(*inside), phase=Phase.LAST_STEP), *nodes)
        else:
            kind = CauseKind.FAILURE if phase == "failed" else CauseKind.LOST
            seen = view(stopping(*inside, kind=kind), *nodes)
        decision = decide(seen, policy, NOW)
        check_promises(seen, policy, decision)
        published += isinstance(decision, Publish)
    assert published, "no combination came to a decision: the promises were not tested"


# ---------------------------------------------------------------- follow

IDLE = LocalState("a-1", started=3)
BUSY = LocalState("a-1", generation=4, started=4)
NEXT = replace(ABC, generation=5)
WITHOUT_US = running(B, C)
STOPPED = stopping(A, B, C, kind=CauseKind.LOST)
DONE = replace(ABC, phase=Phase.ENDED, result=Result.SUCCEEDED, cause=Cause(CauseKind.SUCCESS, detail="done"))
HOST_LEFT = replace(
    DONE, result=Result.STORE_HOST_LEFT, cause=Cause(CauseKind.LEAVE, "b", "its host has left")
)


PLAIN = replace(DRAINED, phase=Phase.STOPPING)
TOO_LATE = "node c was asked to stop; the workers did not end by themselves in time"


def stop(reason: str, planned: bool = False) -> Stop:
    return Stop(4, planned, reason)


UNCONFIRMED = "the rendezvous store does not confirm this node's lease"
WORLD_LOST = "the rendezvous store has lost the world that runs here"


@pytest.mark.parametrize(
    ("world", "local", "order"),
    [
        # no workers here
        (None, IDLE, Stay()),
        (ABC, IDLE, Start(ABC, ABC.members[0])),
        (STOPPED, IDLE, Stay()),
        (WITHOUT_US, IDLE, Stay()),
        (ABC, replace(IDLE, incarnation="a-2"), Stay()),
        (ABC, replace(IDLE, started=4), Stay()),
        (ABC, replace(IDLE, started=5), Stay()),
        (ABC, replace(IDLE, lease_good=False), Stay()),
        (None, replace(IDLE, leaving=True), Leave(Refusal.ASKED, "this node was asked to stop")),
        (ABC, replace(IDLE, leaving=True), Leave(Refusal.ASKED, "this node was asked to stop")),
        (DONE, IDLE, Leave(Result.SUCCEEDED, "done")),
        (DONE, replace(IDLE, leaving=True, lease_good=False), Leave(Result.SUCCEEDED, "done")),
        (DONE, replace(IDLE, incarnation="spare-1"), Leave(Result.SUCCEEDED, "done")),
        # workers of generation 4 here
        (ABC, BUSY, Stay()),
        (ABC, replace(BUSY, lease_good=False), stop(UNCONFIRMED)),
        (DONE, replace(BUSY, lease_good=False), stop(UNCONFIRMED)),
        (None, replace(BUSY, lease_good=False), stop(UNCONFIRMED)),
        (None, BUSY, stop(WORLD_LOST)),
        (replace(ABC, generation=3), BUSY, stop(WORLD_LOST)),
        (NEXT, BUSY, stop("generation 5 has replaced it")),
        (replace(NEXT, phase=Phase.STOPPING), BUSY, stop("generation 5 has replaced it")),
        (WITHOUT_US, BUSY, stop("generation 4 has replaced it")),
        (stopping(A, B, kind=CauseKind.FAILURE), BUSY, stop("failure of a")),
        (stopping(A, B, kind=CauseKind.LOST), BUSY, stop("lost of a")),
        (stopping(A, B, kind=CauseKind.WITHDRAWN), BUSY, stop("withdrawn of a")),
        (stopping(A, B, kind=CauseKind.JOIN), BUSY, stop("join of a", planned=True)),
        (stopping(A, B, kind=CauseKind.LEAVE), BUSY, stop("leave of a", planned=True)),
        (DONE, BUSY, stop("done")),
        (HOST_LEFT, BUSY, stop("its host has left", planned=True)),
        (ABC, replace(BUSY, leaving=True), Stay()),
        # a drain: the workers are told, then left alone, and signalled only when its time is over
        (DRAINING, BUSY, Drain(4, False, "node c was asked to stop")),
        (
            DRAINING,
            replace(BUSY, leaving=True, leave_alone=True),
            Drain(4, False, "node c was asked to stop"),
        ),
        (DRAINED, BUSY, Drain(4, True, "node c was asked to stop")),
        (DRAINING, replace(BUSY, drain_over=True), stop(TOO_LATE, planned=True)),
        (DRAINED, replace(BUSY, drain_over=True), stop(TOO_LATE, planned=True)),
        (DRAINED, replace(BUSY, lease_good=False), stop(UNCONFIRMED)),
        (PLAIN, BUSY, stop("node c was asked to stop", planned=True)),
        (replace(DRAINED, generation=5), BUSY, stop("generation 5 has replaced it")),
        # who leaves stays until the others have what they go on with
        (DRAINING, IDLE, Stay()),
        (DRAINED, replace(IDLE, leaving=True), Stay()),
        (DRAINED, replace(IDLE, leaving=True, drain_over=True), Stay()),
        (
            DRAINED,
            replace(IDLE, leaving=True, wait_over=True),
            Leave(Refusal.ASKED, "this node was asked to stop"),
        ),
        (
            DRAINED,
            replace(IDLE, leaving=True, incarnation="d-1"),
            Leave(Refusal.ASKED, "this node was asked to stop"),
        ),
        (PLAIN, replace(IDLE, leaving=True, hosts_store=True), Stay()),
        (ABC, replace(IDLE, leaving=True, hosts_store=True), Stay()),
        (
            PLAIN,
            replace(IDLE, leaving=True, hosts_store=True, wait_over=True),
            Leave(Refusal.ASKED, "this node was asked to stop"),
        ),
        (
            HOST_LEFT,
            replace(IDLE, leaving=True, hosts_store=True),
            Leave(Result.STORE_HOST_LEFT, "its host has left"),
        ),
        (
            PLAIN,
            replace(IDLE, leaving=True),
            Leave(Refusal.ASKED, "this node was asked to stop"),
        ),
        (
            ABC,
            replace(BUSY, leaving=True, leave_alone=True),
            stop("this node was asked to stop", planned=True),
        ),
    ],
)
def test_what_a_node_does_now(world: World | None, local: LocalState, order: Action) -> None:
    assert next_action(world, local) == order


WORLDS: list[World | None] = [
    None,
    *(
        replace(world, generation=generation)
        for world in (ABC, WITHOUT_US, DRAINING, DRAINED, STOPPED, stopping(B, C), DONE, HOST_LEFT)
        for generation in (3, 4, 5)
    ),
]
FLAGS = (True, False)


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w.phase.value} {w.generation}" if w else "none")
def test_stopping_comes_first_whatever_else_is_true(world: World | None) -> None:
    for generation, started, good, leaving, alone, over, late in itertools.product(
        (0, 4), (0, 4, 5), FLAGS, FLAGS, FLAGS, FLAGS, FLAGS
    ):
        local = LocalState("a-1", generation, started, good, False, leaving, alone, over, over, late, late)
        order = next_action(world, local)
        if generation:
            assert isinstance(order, Stop | Drain | Stay), "workers end before anything else happens"
            assert isinstance(order, Stay) or order.generation == generation
            ours = world is not None and world.generation == generation and world.member("a-1") is not None
            fine = world is not None and ours and good
            assert isinstance(order, Stay) == (
                fine and world.phase is Phase.RUNNING and not (leaving and alone)
            )
            assert isinstance(order, Drain) == (fine and world.drains and not over)
        elif isinstance(order, Start):
            assert good
            assert not leaving
            assert order.world is world
            assert world.phase is Phase.RUNNING
            assert world.generation > started, "a node starts a generation at most once (I4)"
            assert order.member.incarnation == "a-1"
        else:
            assert isinstance(order, Leave | Stay)
            ended = world is not None and world.result is not None
            ours = world is not None and world.member("a-1") is not None
            waits = world is not None and world.drains and ours and not over
            assert isinstance(order, Leave) == ((ended and not late) or (leaving and not waits))
