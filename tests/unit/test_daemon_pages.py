"""What a daemon answers: probes, its numbers, and those of the job's agent on its node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.agent.main.heartbeat import STUCK_AFTER_S
from elastic_agent.health.http import PageRequest, Probe
from elastic_agent.pool.pages import DaemonPages, DaemonSnapshot, PoolMetrics
from elastic_agent.pool.records import (
    Allocation,
    Attempt,
    Job,
    Plan,
    PoolCounts,
    PoolNode,
    PoolView,
    Record,
)
from elastic_agent.rendezvous.records import Endpoint, NodeRecord, node_key
from elastic_agent.rendezvous.store.interface import Entry, Put, run_prefix
from elastic_agent.rendezvous.store.interface import Snapshot as StoreSnapshot
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.observed import a_metrics, answering

NOW = 100.0
IDLE = DaemonSnapshot(NOW - 0.5, True, "idle: waiting for a job", None, PoolCounts(3, 2, 5, 1))
BUSY = replace(IDLE, job="j", status="running job j")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def pages() -> DaemonPages:
    return DaemonPages(PoolMetrics("p", "n"), "n", lambda: NOW)


@pytest.fixture
def agent() -> Iterator[Endpoint]:
    """Of a job: where it serves its metrics."""
    with answering({}, a_metrics("j", "n", workers=2).render) as http:
        yield http


def put_agent(store: MemoryStore, http: Endpoint | None) -> None:
    record = NodeRecord("n", "n1", "127.0.0.1", port=1, slots=2, http=http)
    store.transact((), (Put(run_prefix("j") + node_key("n"), record.to_json()),))


def samples(pages: DaemonPages) -> dict[str, list[dict[str, str]]]:
    body = pages.all_metrics(PageRequest({}, "")).body
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_it_lives_from_the_start_and_is_ready_as_long_as_it_follows_the_pool(
    pages: DaemonPages, store: MemoryStore
) -> None:
    assert pages.liveness().ok
    assert pages.readiness() == Probe(False, "looking for the pool's store")
    assert "elastic_agent_pool_nodes" not in samples(pages)
    pages.snapshot, pages.store = IDLE, store
    assert pages.readiness() == Probe(True, "idle: waiting for a job")
    pages.snapshot = replace(IDLE, tracks=False, status="waiting for the pool's store")
    assert pages.readiness() == Probe(False, "waiting for the pool's store")
    assert pages.liveness() == Probe(True, "the main loop turned 0.5 s ago")
    pages.snapshot = replace(IDLE, turned_at=NOW - STUCK_AFTER_S)
    assert not pages.liveness().ok


def test_the_page_has_the_jobs_numbers_with_its_id(
    pages: DaemonPages, store: MemoryStore, agent: Endpoint
) -> None:
    put_agent(store, agent)
    pages.snapshot, pages.store = BUSY, store
    found = samples(pages)
    assert found["elastic_agent_min_nodes"] == [{"run_id": "j", "node": "n"}]
    assert found["elastic_agent_pool_queued_jobs"] == [{"pool": "p", "node": "n"}]
    pages.snapshot, pages.store = IDLE, store
    assert "elastic_agent_min_nodes" not in samples(pages)


def test_a_jobs_agent_that_does_not_answer_costs_its_own_part_alone_and_the_next_one_is_found(
    pages: DaemonPages, store: MemoryStore, agent: Endpoint
) -> None:
    pages.snapshot, pages.store = BUSY, store
    for http in (None, Endpoint("127.0.0.1", 1)):
        assert set(samples(pages)) == {name for name in samples(pages) if "_pool_" in name}
        put_agent(store, http)
    put_agent(store, agent)
    assert "elastic_agent_min_nodes" in samples(pages), "the place is asked for anew"


def test_nodes_and_jobs_are_counted() -> None:
    job = Job("r", "t", (), (), {}, "/", 1, 1, 0.0, "u")
    records: list[Record] = [
        PoolNode("idle", "i1"),
        PoolNode("seated", "s1"),
        PoolNode("leaving", "l1", leaving=True),
        PoolNode("broken", "b1", problem="no GPU"),
        PoolNode("busy", "y1", running=3),
        job,
        replace(job, job="q"),
        Plan(1, (Attempt("r", 1, 0.0, (Allocation("seated", "s1", 1),)),)),
    ]
    view = PoolView()
    entries = (Entry(one.key, one.to_json(), at, at) for at, one in enumerate(records, 1))
    view.read(StoreSnapshot(9, tuple(entries)))
    assert view.counts() == PoolCounts(nodes=5, idle_nodes=1, queued_jobs=1, running_jobs=1)
