"""What a transition becomes in numbers, where no process is needed to see it."""

from __future__ import annotations

from dataclasses import replace

from elastic_agent.agent.observability.accounting.observer import Observer
from elastic_agent.agent.observability.status.pages import StatusPages
from elastic_agent.health.metrics import Build, Metrics, Place
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


def test_a_state_that_is_passed_over_is_counted_once() -> None:
    metrics = Metrics(
        "job",
        "a",
        Build(version="1"),
        Place(workers=1),
        min_nodes=1,
        max_nodes=1,
        started_at_s=0.0,
        clock=lambda: 0.0,
    )
    pages = StatusPages("job", "a", "a-1", "1", lease_ttl_s=5.0, max_restarts=None, clock=lambda: 0.0)
    observer = Observer(metrics, pages, None, 0.0, lambda: 0.0)
    counted = []
    for bad in (None, BadState(3, 5), BadState(3, 5), BadState(5, 4), None, None):
        observer.starting(replace(WORLD, restarts=Restarts(bad_state=bad)), MEMBER, 0.0)
        [(_, _, value)] = metrics.checkpoint_set_backs_total.samples()
        counted.append(value)
    assert counted == [0, 1, 1, 2, 2, 2]
