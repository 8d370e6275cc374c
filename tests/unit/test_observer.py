"""What a transition becomes in numbers, where no process is needed to see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.observability.accounting.observer import Observer
from elastic_agent.agent.observability.status.pages import STATUS_PAGE, StatusPages
from elastic_agent.health.metrics import Build, Metrics, Place
from elastic_agent.rendezvous.node.snapshot import NodeSnapshot
from elastic_agent.rendezvous.records import (
    BadState,
    Cause,
    CauseKind,
    Endpoint,
    Member,
    Phase,
    Restarts,
    World,
)

MEMBER = Member("a", "a-1", 1, 0)
WORLD = World("job", 1, Phase.RUNNING, (MEMBER,), Endpoint("h", 1), Cause(CauseKind.START))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(
        "job",
        "a",
        Build(version="1"),
        Place(workers=1),
        min_nodes=1,
        max_nodes=1,
        started_at_s=0.0,
        clock=lambda: 0.0,
    )


@pytest.fixture
def pages() -> StatusPages:
    return StatusPages("job", "a", "a-1", "1", lease_ttl_s=5.0, max_restarts=None, clock=lambda: 0.0)


@pytest.fixture
def observer(metrics: Metrics, pages: StatusPages) -> Observer:
    return Observer(metrics, pages, None, 0.0, lambda: 0.0)


def test_a_state_that_is_passed_over_is_counted_once(metrics: Metrics, observer: Observer) -> None:
    counted = []
    for bad in (None, BadState(3, 5), BadState(3, 5), BadState(5, 4), None, None):
        observer.starting(replace(WORLD, restarts=Restarts(bad_state=bad)), MEMBER, 0.0)
        [(_, _, value)] = metrics.checkpoint_set_backs_total.samples()
        counted.append(value)
    assert counted == [0, 1, 1, 2, 2, 2]


def test_a_notice_is_counted_and_its_deadline_shown_until_it_is_withdrawn(
    metrics: Metrics, pages: StatusPages
) -> None:
    """The machine's monotonic clock shows 0 s, its wall clock 1000 s."""
    observer = Observer(metrics, pages, None, 0.0, lambda: 1000.0)
    for deadline in (30.0, 20.0):
        observer.noticed("the cloud ends it", deadline, 0.0)
    assert [value for *_, value in metrics.notices_total.samples()] == [2]
    assert [value for *_, value in metrics.notice_deadline_timestamp_seconds.samples()] == [1020.0]
    shown = STATUS_PAGE.decode(pages.node())
    assert (shown.notice, shown.notice_s) == ("the cloud ends it", 20.0)
    observer.noticed("the cloud may end it", None, 0.0)
    assert not list(metrics.notice_deadline_timestamp_seconds.samples())
    shown = STATUS_PAGE.decode(pages.node())
    assert (shown.notice, shown.notice_s) == ("the cloud may end it", None)
    observer.notice_withdrawn()
    shown = STATUS_PAGE.decode(pages.node())
    assert (shown.notice, shown.notice_s) == ("", None)


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
