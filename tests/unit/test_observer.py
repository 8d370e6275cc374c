"""What a transition becomes in numbers, where no process is needed to see it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_agent.agent.observability.observer import Observer
from elastic_agent.agent.observability.status import STATUS_PAGE, NodeState
from elastic_agent.agent.observability.training_account import Activity, TrainingEvent
from elastic_agent.agent.output.journal import EventKind, Journal
from elastic_agent.agent.workers.processes.workers import WorkerGroup
from elastic_agent.health.hang_report import HangFinding, HangProbe
from elastic_agent.health.metrics import Metrics
from elastic_agent.health.stragglers import PaceComparison, Straggler
from elastic_agent.rendezvous.messages import Exclusion
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Failure, Member, Phase, Result, World
from elastic_agent.worker.wire.messages import SaveReport
from elastic_agent.worker.wire.shared_progress import Reading
from tests.observed import a_metrics, a_node

MEMBER = Member("a", "a-1", 1, 0)
WORLD = World("job", 1, Phase.RUNNING, (MEMBER,), Endpoint("h", 1), Cause(CauseKind.START))


@pytest.fixture
def metrics() -> Metrics:
    return a_metrics("job")


@pytest.fixture
def node(metrics: Metrics) -> NodeState:
    return a_node(metrics, "job")


@pytest.fixture
def journal() -> Journal:
    return Journal("a", lambda: 1000.0)


@pytest.fixture
def observer(metrics: Metrics, node: NodeState, journal: Journal) -> Observer:
    return Observer(metrics, node, journal, None, 0.0)


def test_the_deadline_of_a_notice_is_shown_until_it_is_withdrawn(
    observer: Observer, node: NodeState, journal: Journal
) -> None:
    for deadline in (30.0, 20.0):
        observer.noticed("the cloud ends it", deadline)
    shown = STATUS_PAGE.decode(node.node())
    assert (shown.notice, shown.notice_s) == ("the cloud ends it", 20.0)
    observer.noticed("the cloud may end it", None)
    shown = STATUS_PAGE.decode(node.node())
    assert (shown.notice, shown.notice_s) == ("the cloud may end it", None)
    observer.noticed("", None)
    shown = STATUS_PAGE.decode(node.node())
    assert (shown.notice, shown.notice_s) == ("", None)
    assert journal.since(0, 9)[-1].text == "the notice is withdrawn"


def test_what_a_node_waits_for_is_logged_once_it_lasts(
    observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for now, reason in (
        (0.0, "the rendezvous store"),
        (0.9, "last call: 1 node here, up to 3 may come"),
        (1.8, "last call: 1 node here, up to 3 may come"),
        (2.0, "last call: 1 node here, up to 3 may come"),
        (3.0, "last call: 1 node here, up to 3 may come"),
        (4.0, "a to stop generation 1"),
        (5.0, "a to stop generation 1"),
    ):
        observer.update(NodeSnapshot("a", "a-1", waiting_for=reason), None, now)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting: last call: 1 node here, up to 3 may come",
        "waiting: a to stop generation 1",
    ]


def test_each_world_is_an_event_of_the_journal_and_each_change_of_it_once(
    observer: Observer, journal: Journal
) -> None:
    failure = Failure(1, fingerprint="x", summary="exit code 1", cause="exception")
    failed = Cause(CauseKind.FAILURE, "b", "exit code 1", failure)
    left = Cause(CauseKind.LEAVE, "b", "node b leaves")
    for world in (
        None,
        WORLD,
        WORLD,
        replace(WORLD, phase=Phase.STOPPING, cause=failed),
        replace(WORLD, generation=2, cause=failed),
        replace(WORLD, generation=2, phase=Phase.DRAINING, cause=left),
        replace(WORLD, generation=2, phase=Phase.LAST_STEP, cause=left),
        replace(WORLD, generation=3, cause=left),
        replace(
            WORLD, generation=3, phase=Phase.ENDED, result=Result.SUCCEEDED, cause=Cause(CauseKind.SUCCESS)
        ),
    ):
        observer.update(NodeSnapshot("a", "a-1", world=world, waiting_for=""), None, 0.0)
    observer.failure_shown(failure)
    observer.failure_shown(failure)
    observer.ended_with(0, "all is done", 60.0)
    assert [(event.generation, event.kind, event.text, event.cause) for event in journal.since(0, 99)] == [
        (1, EventKind.WORLD, "the job starts", "start"),
        (2, EventKind.WORLD, "exit code 1", "exception"),
        (2, EventKind.DRAIN, "node b leaves", "leave"),
        (3, EventKind.WORLD, "node b leaves", "leave"),
        (3, EventKind.JOB_ENDED, "the job starts", "succeeded"),
        (1, EventKind.FAILURE, "exit code 1", "exception"),
        (3, EventKind.ACCOUNTING, "0 steps, 0 s of 60 s were productive", ""),
        (3, EventKind.AGENT_ENDED, "all is done", ""),
    ]


def test_events_of_a_hang_and_of_a_failure_name_rank_and_node_in_fields(
    observer: Observer, journal: Journal
) -> None:
    found = HangProbe(1, finding=HangFinding.LIKELY, why="rank 3 on node b sleeps", node="b", rank=3)
    observer.heard_verdict(2, found)
    observer.failure_shown(Failure(2, "hang", "hang: rank 3", cause="hang", node="b", rank=3))
    observer.heard_verdict(2, HangProbe(2, finding=HangFinding.UNCLEAR, why="nothing moves"))
    told = [(event.kind, event.rank, event.about) for event in journal.since(0, 9)]
    assert told == [(EventKind.VERDICT, 3, "b"), (EventKind.FAILURE, 3, "b"), (EventKind.VERDICT, None, "")]


def test_an_agent_that_comes_late_does_not_take_the_cause_of_a_world_s_end_for_that_of_its_begin(
    observer: Observer, journal: Journal
) -> None:
    lost = Cause(CauseKind.LOST, "b", "node b is gone")
    rows = (Exclusion("c", "c-1", "gpu_fault", "GPU 3 is sick", times=3),)
    ends = replace(WORLD, generation=4, phase=Phase.STOPPING, cause=lost, exclusions=rows)
    for world in (ends, replace(ends, generation=5, phase=Phase.RUNNING)):
        observer.update(NodeSnapshot("a", "a-1", world=world, waiting_for=""), None, 0.0)
    assert [(event.generation, event.kind, event.cause, event.counts) for event in journal.since(0, 99)] == [
        (0, EventKind.EXCLUSION, "gpu_fault", {"times": 3}),
        (5, EventKind.WORLD, "lost", {"nodes": 1, "workers": 1}),
    ]


def test_what_all_seconds_went_into_is_an_event_a_minute(observer: Observer, journal: Journal) -> None:
    for now in (0.0, 30.0, 60.0, 61.0, 119.0, 120.5):
        observer.update(NodeSnapshot("a", "a-1", waiting_for="others"), None, now)
    events = [event for event in journal.since(0, 99) if event.kind is EventKind.ACCOUNTING]
    assert [event.seconds["waiting"] for event in events] == [60.0, 120.5]
    assert events[0].seconds.keys() == {*(activity.value for activity in Activity), "blocked"}
    assert events[0].counts == dict.fromkeys(("steps", "steps_redone", "saves", "saves_failed"), 0)


@pytest.mark.parametrize(
    ("steps", "text"),
    [(True, "training resumed after 3.5 s"), (False, "workers started again after 2 s (no steps reported)")],
)
def test_what_a_recovery_ended_with_is_said(
    steps: bool, text: str, observer: Observer, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stepped = [Reading(1, 2.0, 1, 2.0, script_at=1.0)] if steps else [Reading(script_at=1.0)]
    observer.starting(WORLD, MEMBER, 0.5)
    observer.training.progressed(stepped)
    for event, at in (
        (TrainingEvent.FAILED, 11.0),
        (TrainingEvent.STOPPING, 11.5),
        (TrainingEvent.GONE, 12.0),
    ):
        observer.training.record(event, at)
    failed = Cause(CauseKind.FAILURE, "a", "exit code 1", Failure(1, "x", "exit code 1"))
    observer.starting(replace(WORLD, generation=2, cause=failed), MEMBER, 12.5)
    again = Reading(2, 14.5, 2, 14.5, script_at=13.0) if steps else Reading(script_at=13.0)
    observer.training.progressed([again])
    assert [event.text for event in journal.since(0, 99) if event.kind is EventKind.RECOVERY] == [text]
    assert (text in caplog.text) is not steps, "else the first step is logged, with its phases"


def test_workers_run_when_their_scripts_have_begun_whether_they_report_steps_or_not(
    observer: Observer, node: NodeState
) -> None:
    group = cast(WorkerGroup, SimpleNamespace(generation=1, running=1, stopping=False))
    snapshot = NodeSnapshot("a", "a-1", world=WORLD, waiting_for="")
    states = []
    observer.starting(WORLD, MEMBER, 1.0)
    for reading in (Reading(), Reading(script_at=2.0), Reading(1, 4.0, 1, 4.0, script_at=2.0)):
        observer.training.progressed([reading])
        observer.update(snapshot, group, 5.0)
        states.append(STATUS_PAGE.decode(node.node()).state)
    assert states == ["starting", "running", "running"]


def test_accounts_are_split_where_workers_begin_or_cease_to_step(
    observer: Observer, journal: Journal
) -> None:
    """So that a report, which knows no order within one of them, has little to spread."""
    training = observer.training
    observer.starting(WORLD, MEMBER, 1.0)
    for event, at in (
        (TrainingEvent.BEGAN, 2.0),
        (TrainingEvent.STEPPED, 4.0),
        (TrainingEvent.STEPPED, 10.0),
        (TrainingEvent.FAILED, 11.0),
        (TrainingEvent.STOPPING, 11.5),
        (TrainingEvent.GONE, 12.0),
        (TrainingEvent.SET_ASIDE, 13.0),
    ):
        training.record(event, at)
    accounts = [event.seconds for event in journal.since(0, 99) if event.kind is EventKind.ACCOUNTING]
    assert [sum(account.values()) for account in accounts] == [1.0, 4.0, 11.0, 13.0]


# ---------------------------------------------------------------- slow ranks

TWO = replace(WORLD, members=(Member("a", "a-1", 2, 0), Member("b", "b-1", 2, 2)))
SLOW = PaceComparison(3, 200_000, (Straggler("b", 3, 280_000),))
EVEN = PaceComparison(3, 200_000)


def compared(comparison: PaceComparison | None, generation: int = 3) -> NodeSnapshot:
    world = replace(TWO, generation=generation)
    return NodeSnapshot("a", "a-1", world=world, comparison=comparison, waiting_for="")


def test_it_is_said_once_when_a_rank_is_slow_and_once_when_it_is_no_more(
    observer: Observer, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for comparison in (None, EVEN, SLOW, SLOW, replace(SLOW, usual_us=201_000), None, EVEN, EVEN):
        observer.update(compared(comparison), None, 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 3 on node b is slower than the others, which wait for it: it works 0.28 s for a step, 0.2 s are usual "
        "(40% more)",
        "rank 3 on node b is as fast as the others again",
    ]
    events = [event for event in journal.since(0, 100) if event.kind is EventKind.STRAGGLER]
    told = [(event.rank, event.about, event.cause) for event in events]
    assert told == [(3, "b", "slow"), (3, "b", "recovered")]


# ---------------------------------------------------------------- checkpoints


def test_an_account_has_the_saves_and_what_training_stood_still_for_them(
    observer: Observer, node: NodeState, metrics: Metrics, journal: Journal
) -> None:
    def saved(step: int, result: str = "ok", tier: str = "local") -> SaveReport:
        return SaveReport(1, 0, step, result, 0.5, 100, tier, 0.25)  # type: ignore[arg-type]

    training = observer.training
    for report in (saved(10, "error"), saved(12), saved(15, tier="memory"), saved(14, tier="part")):
        training.reported(report, 3.0)
    training.saved_later(saved(16), 9.0)
    training.account(60.0)
    (event,) = journal.since(0, 9)
    assert event.counts == {"steps": 0, "steps_redone": 0, "saves": 2, "saves_failed": 1}
    assert event.seconds["blocked"] == 1.0, "not while the disk was written behind it"
    samples = metrics.checkpoint_saves_total.samples()
    assert {tuple(labels.values()): count for _, labels, count in samples if count} == {
        ("local", "error"): 1,
        ("local", "ok"): 2,
        ("memory", "ok"): 1,
        ("part", "ok"): 1,
    }
    assert {tier: copy.step for tier, copy in node.saved.items()} == {"local": 16, "memory": 15, "part": 14}
