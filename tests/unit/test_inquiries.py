"""From a suspicion to a verdict: when all are asked, how long they may take to answer, and what ends a generation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elastic_agent.health.diagnosis import LONG_WAIT_S, STILL_S, all_go_on, ends, weighed
from elastic_agent.health.hang_report import (
    ANSWER_S,
    MAX_GROUPS,
    MAX_RANKS,
    Diagnosis,
    HangFinding,
    HangProbe,
    HangSuspicion,
    InGroup,
    RankActivity,
    RankReport,
    Recorded,
    Urgency,
    telling,
)
from elastic_agent.health.hang_report import HangReport as Said
from elastic_agent.rendezvous.coordinator.decide import decide
from elastic_agent.rendezvous.coordinator.inquiries import FIRST_PAUSE_S, LONGEST_PAUSE_S, asks_at
from elastic_agent.rendezvous.coordinator.view import Decision, Publish, View, Wait
from elastic_agent.rendezvous.node.node_actions import LocalState, Stay, next_action
from elastic_agent.rendezvous.node.node_actions import ReportHang as Answer
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
)
from tests.policies import PLAIN_POLICY

NOW = 100.0
POLICY = replace(PLAIN_POLICY, min_nodes=2, max_nodes=3)
EARLY, OVERDUE, LAST = Urgency
A = NodeRecord("a", "a-1", "host-a", 4001, slots=1, ready=True)
B = NodeRecord("b", "b-1", "host-b", 4002, slots=1, ready=True)
C = NodeRecord("c", "c-1", "host-c", 4003, slots=1, ready=True)
WAITS, ASLEEP, STOPPED, BUSY, DISK = (
    RankActivity.IN_COLLECTIVE,
    RankActivity.WAITS,
    RankActivity.STOPPED,
    RankActivity.WORKS,
    RankActivity.UNINTERRUPTIBLE,
)


def world(inquiry: HangProbe | None = None) -> World:
    members = assign_ranks((A, B))
    start = Cause(CauseKind.START)
    return World("job", 4, Phase.RUNNING, members, Endpoint("host-a", 4001), start, inquiry=inquiry)


def still(node: NodeRecord, urgency: Urgency, generation: int = 4) -> NodeRecord:
    return replace(node, suspicion=HangSuspicion(generation, "no step for 5 s", urgency))


def says(node: NodeRecord, rank: int, doing: RankActivity, inquiry: int = 1) -> NodeRecord:
    return replace(node, hang_report=Said(4, inquiry, (RankReport(rank, doing, 7, 60.0),)))


def decided(seen: World, *nodes: NodeRecord, since: float = NOW) -> Decision:
    arrivals = {node.incarnation: 0.0 for node in nodes}
    seen_by = View(nodes, seen, since, arrivals, ready_since=arrivals, inquiry_since=since)
    return decide(seen_by, POLICY, NOW)


def published(decision: Decision) -> World:
    assert isinstance(decision, Publish)
    return decision.world


def test_a_suspicion_of_this_generation_lets_all_be_asked() -> None:
    asked = published(decided(world(), A, still(B, EARLY)))
    assert (asked.phase, asked.inquiry) == (Phase.RUNNING, HangProbe(1, EARLY))
    assert isinstance(decided(world(), A, still(B, EARLY, generation=3)), Wait)
    assert published(decided(world(), still(A, LAST), still(B, EARLY))).inquiry == HangProbe(1, LAST)


def test_answers_are_waited_for_but_not_for_ever() -> None:
    open_one = world(HangProbe(1, LAST))
    wait = decided(open_one, says(A, 0, WAITS), B)
    assert isinstance(wait, Wait)
    assert wait.until == NOW + ANSWER_S
    assert "b" in wait.reason
    old = says(B, 1, WAITS, inquiry=9)
    assert isinstance(decided(open_one, says(A, 0, WAITS), old), Wait), "to another inquiry"
    late = published(decided(open_one, says(A, 0, ASLEEP), B, since=NOW - ANSWER_S))
    assert late.phase is Phase.RUNNING
    assert late.inquiry is not None
    assert late.inquiry.finding is HangFinding.UNCLEAR, (
        "the rank that said nothing may be the one that is at work"
    )


@pytest.mark.parametrize(
    ("doing", "urgency", "finding"),
    [
        (STOPPED, EARLY, None),
        (ASLEEP, EARLY, HangFinding.LIKELY),
        (ASLEEP, OVERDUE, None),
        (DISK, OVERDUE, HangFinding.DOUBTFUL),
        (DISK, LAST, None),
        (WAITS, OVERDUE, HangFinding.UNCLEAR),
        (WAITS, LAST, None),
        (BUSY, LAST, HangFinding.HEALTHY),
    ],
)
def test_what_ends_a_generation_depends_on_how_sure_and_how_urgent_it_is(
    doing: RankActivity, urgency: Urgency, finding: HangFinding | None
) -> None:
    """`finding` None: the generation is ended."""
    after = published(
        decided(world(HangProbe(1, urgency)), still(says(A, 0, WAITS), urgency), says(B, 1, doing))
    )
    if finding is not None:
        assert after.phase is Phase.RUNNING
        assert after.inquiry is not None
        assert (after.inquiry.finding, after.inquiry.number) == (finding, 1)
        assert after.inquiry.why
        assert (after.inquiry.node, after.inquiry.rank) == (("", None) if doing is WAITS else ("b", 1))
        return
    assert after.phase is Phase.STOPPING
    failure = after.cause.failure
    assert failure is not None
    assert (failure.generation, failure.fingerprint, failure.cause) == (4, "hang", "hang")
    assert after.cause.node == ("" if doing is WAITS else "b")
    assert doing is WAITS or "rank 1 on node b" in failure.summary
    assert (failure.node, failure.rank) == (("", None) if doing is WAITS else ("b", 1))
    assert after.inquiry is not None
    assert after.inquiry.finding is not None
    assert (after.inquiry.node, after.inquiry.rank) == (failure.node, failure.rank)


def test_workers_that_went_on_before_the_verdict_are_not_ended() -> None:
    asked = world(HangProbe(1, LAST))
    after = published(decided(asked, says(A, 0, WAITS), says(B, 1, ASLEEP)))
    assert after.phase is Phase.RUNNING
    assert published(decided(asked, says(A, 0, WAITS), says(B, 1, STOPPED))).phase is Phase.STOPPING


@pytest.mark.parametrize(
    ("waits", "waited_s", "complete", "finding"),
    [
        (WAITS, 60.0, True, HangFinding.HEALTHY),
        (WAITS, None, True, HangFinding.HEALTHY),
        (WAITS, LONG_WAIT_S, False, HangFinding.HEALTHY),
        (BUSY, LONG_WAIT_S, True, HangFinding.HEALTHY),
        (None, None, True, HangFinding.HEALTHY),  # there is no other
        (WAITS, LONG_WAIT_S, True, HangFinding.DOUBTFUL),
    ],
)
def test_who_is_at_work_is_doubtful_only_when_all_others_have_waited_for_long(
    waits: RankActivity | None, waited_s: float | None, complete: bool, finding: HangFinding
) -> None:
    found = Diagnosis(HangFinding.LIKELY, "rank 1 is at work", "b", 1)
    answers = {"b": Said(4, 1, (RankReport(1, BUSY, 7, 0.5),))}
    if waits is not None:
        answers["a"] = Said(4, 1, (RankReport(0, waits, 7, waited_s),))
    assert weighed(found, answers, all_answered=complete).finding is finding


@pytest.mark.parametrize(
    ("doing", "still_s", "finding"),
    [
        (ASLEEP, None, HangFinding.DOUBTFUL),
        (RankActivity.OTHER, 2.0, HangFinding.DOUBTFUL),
        (RankActivity.OTHER, STILL_S, HangFinding.LIKELY),
        (ASLEEP, 1.0, HangFinding.DOUBTFUL),
        (ASLEEP, STILL_S, HangFinding.LIKELY),
        (DISK, 60.0, HangFinding.DOUBTFUL),
        (RankActivity.IN_SAVE, 60.0, HangFinding.DOUBTFUL),
    ],
)
def test_what_waits_for_something_that_moves_may_be_slow(
    doing: RankActivity, still_s: float | None, finding: HangFinding
) -> None:
    found = Diagnosis(HangFinding.LIKELY, "", "b", 1)
    answers = {"b": Said(4, 1, (RankReport(1, doing, 7, still_s),))}
    assert weighed(found, answers, all_answered=True).finding is finding


@pytest.mark.parametrize("urgency", [OVERDUE, LAST])
@pytest.mark.parametrize(
    ("first", "second", "over"),
    [
        # a test without step(): at a look one rank reads, or all are in the same collective
        (RankReport(0, WAITS, 7, 1.0), RankReport(1, ASLEEP, 7, 3.0), False),
        (RankReport(0, WAITS, 7, 1.0), RankReport(1, WAITS, 7, 3.0), False),
        (RankReport(0, WAITS, 7, 1.0), RankReport(1, STOPPED, 7, 3.0), True),
        (RankReport(0, WAITS, 7, 60.0), RankReport(1, ASLEEP, 7, 60.0), True),
    ],
)
def test_while_every_rank_does_something_now_and_then_nothing_hangs(
    first: RankReport, second: RankReport, over: bool, urgency: Urgency
) -> None:
    nodes = [
        replace(still(node, urgency), hang_report=Said(4, 1, (state,)))
        for node, state in ((A, first), (B, second))
    ]
    told = published(decided(world(HangProbe(1, urgency)), *nodes))
    assert (told.phase is Phase.STOPPING) == over
    if not over:
        assert told.inquiry is not None
        assert told.inquiry.finding is HangFinding.HEALTHY
    early = [replace(still(node, EARLY), hang_report=node.hang_report) for node in nodes]
    told = published(decided(world(HangProbe(1, EARLY)), *early))
    assert told.phase is Phase.STOPPING or (told.inquiry and "active" not in told.inquiry.why)


def spins(rank: int, for_s: float, *, waits: bool = True) -> RankReport:
    """A rank whose main thread waits for its GPU, which takes all of a processor."""
    group = InGroup("default_pg", None, 7, 7 if waits else None, "all_reduce")
    return RankReport(rank, RankActivity.OTHER, 7, 0.5, recorded=Recorded(for_s, True, (group,)))


@pytest.mark.parametrize(
    ("named", "states", "expected"),
    [
        # all others only spin: what rank 1 does decides, and it sleeps, or waits in a wrong collective
        (1, (spins(0, STILL_S), RankReport(1, ASLEEP, 7, 60.0)), False),
        (1, (spins(0, STILL_S), spins(1, STILL_S)), False),
        # it may compute for long on its GPU, as an evaluation on one rank does
        (1, (spins(0, 10 * LONG_WAIT_S), spins(1, 10 * LONG_WAIT_S, waits=False)), True),
        (1, (spins(0, 10 * LONG_WAIT_S), RankReport(1, BUSY, 7, 0.5)), True),
        # not yet known for long enough
        (1, (spins(0, STILL_S - 1), spins(1, STILL_S)), True),
        # nobody is named: all wait in the same collective, and GPUs may have much to do before it
        (None, (spins(0, LONG_WAIT_S - 1), spins(1, LONG_WAIT_S)), True),
        (None, (spins(0, LONG_WAIT_S), spins(1, LONG_WAIT_S)), False),
    ],
)
def test_a_thread_that_only_waits_for_its_gpu_is_no_sign_of_life(
    named: int | None, states: tuple[RankReport, ...], expected: bool
) -> None:
    found = Diagnosis(HangFinding.LIKELY if named is not None else HangFinding.UNCLEAR, "", "b", named)
    assert all_go_on(found, {"b": Said(4, 1, states)}) == expected


@pytest.mark.parametrize(
    ("state", "finding"),
    [
        (spins(1, STILL_S), HangFinding.LIKELY),
        (spins(1, STILL_S - 1), HangFinding.DOUBTFUL),
        (spins(1, 10 * LONG_WAIT_S, waits=False), HangFinding.DOUBTFUL),
    ],
)
def test_a_named_rank_that_spins_may_be_slow_unless_it_waits_for_others(
    state: RankReport, finding: HangFinding
) -> None:
    found = Diagnosis(HangFinding.LIKELY, "", "b", 1)
    assert weighed(found, {"b": Said(4, 1, (state,))}, all_answered=True).finding is finding


def test_no_finding_of_health_and_no_partial_knowledge_but_of_the_dead_ends_anything() -> None:
    for finding, urgency, complete in itertools.product(HangFinding, Urgency, (True, False)):
        over = ends(urgency, Diagnosis(finding, ""), all_answered=complete)
        assert not (over and finding is HangFinding.HEALTHY)
        assert not (over and finding is HangFinding.UNCLEAR and not complete)
    for doing in RankActivity:
        answers = {"b": Said(4, 1, (RankReport(1, doing, 7, 60.0),))}
        found = weighed(Diagnosis(HangFinding.CERTAIN, "", "b", 1), answers, all_answered=False)
        assert (found.finding is HangFinding.CERTAIN) == (doing in (RankActivity.GONE, RankActivity.STOPPED))


def test_the_next_inquiry_waits_ever_longer_unless_it_is_more_urgent() -> None:
    pauses = [asks_at(HangProbe(number, EARLY, HangFinding.HEALTHY), 0.0, EARLY) for number in range(1, 12)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert asks_at(HangProbe(9, EARLY, HangFinding.HEALTHY), 50.0, OVERDUE) == 50.0
    closed = world(HangProbe(1, EARLY, HangFinding.UNCLEAR))
    wait = decided(closed, A, still(B, EARLY))
    assert isinstance(wait, Wait)
    assert wait.until == NOW + FIRST_PAUSE_S
    again = published(decided(closed, A, still(B, EARLY), since=NOW - FIRST_PAUSE_S))
    assert again.inquiry == HangProbe(2, EARLY)


def test_a_newcomer_waits_for_the_end_of_a_hang_but_not_for_a_rank_that_is_at_work() -> None:
    stuck = decided(world(HangProbe(1, EARLY, HangFinding.LIKELY)), A, still(B, EARLY), C)
    assert isinstance(stuck, Wait)
    healthy = decided(world(HangProbe(1, EARLY, HangFinding.HEALTHY)), A, still(B, EARLY), C)
    assert published(healthy).phase is Phase.DRAINING
    alone = decided(world(HangProbe(1, EARLY, HangFinding.HEALTHY)), A, still(B, EARLY))
    assert isinstance(alone, Wait)
    assert alone.until == NOW + FIRST_PAUSE_S
    assert "is running" in alone.reason


def test_a_node_answers_each_inquiry_once_while_its_workers_run() -> None:
    local = LocalState("b-1", generation=4, started=4)
    assert next_action(world(HangProbe(2)), local) == Answer(4, 2)
    assert next_action(world(HangProbe(2)), replace(local, answered=2)) == Stay()
    assert next_action(world(HangProbe(2, EARLY, HangFinding.HEALTHY)), local) == Stay()
    assert next_action(world(), local) == Stay()


def test_a_report_keeps_those_that_wait_for_nobody() -> None:
    states = tuple(RankReport(rank, ASLEEP if rank == 300 else WAITS) for rank in range(400))
    kept = telling(states)
    assert len(kept) == MAX_RANKS
    assert RankReport(300, ASLEEP) in kept
    assert telling(states[:5]) == states[:5]


def test_the_records_come_back_as_they_went_and_with_all_ranks_they_fit() -> None:
    group = InGroup("x" * 48, 2**31, 2**62, 2**62, "x" * 48)
    recorded = Recorded(1e6, True, (group,) * MAX_GROUPS)
    state = RankReport(2**31, ASLEEP, 10**9, 1e6, where="ü" * 200, recorded=recorded)
    said = Said(4, 1, (state,) * MAX_RANKS)
    node = replace(still(B, LAST), hang_report=said)
    assert NodeRecord.from_json("nodes/b", node.to_json()) == node
    seen = world(HangProbe(3, LAST, HangFinding.LIKELY, "rank 1 sleeps"))
    assert World.from_json(seen.to_json()) == seen
