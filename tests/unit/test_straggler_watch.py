"""A comparison reaches all nodes by the coordinator's record, and becomes a log line, an event, numbers and a note."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.observability.straggler_watch import StragglerWatch
from elastic_agent.agent.output.journal import Journal, Kind
from elastic_agent.health.metrics import Build, Metrics
from elastic_agent.rendezvous.node.snapshot import NodeSnapshot
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World
from elastic_agent.rendezvous.statements.paces import Comparison, Paces, Straggler

from .bench import Bench, Peer

MEMBERS = (Member("a", "a-1", 2, 0), Member("b", "b-1", 2, 2))
WORLD = World("job", 3, Phase.RUNNING, MEMBERS, Endpoint("h", 1), Cause(CauseKind.START))
SLOW = Comparison(3, 200_000, (Straggler("b", 3, 280_000),))
EVEN = Comparison(3, 200_000)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(
        "job",
        "b",
        Build(version="1"),
        workers=2,
        min_nodes=1,
        max_nodes=2,
        started_at_s=0.0,
        clock=lambda: 0.0,
    )


def seen(comparison: Comparison | None, world: World | None = WORLD) -> NodeSnapshot:
    paces = Paces(3, 20, 300_000, (210_000, 280_000))
    return NodeSnapshot("b", "b-1", world=world, comparison=comparison, paces=paces)


def shown(metrics: Metrics) -> tuple[dict[str, float], dict[str, float]]:
    families = metrics.step_time_skew_ratio, metrics.straggler
    ratios, named = ({labels["local_rank"]: v for _, labels, v in family.samples()} for family in families)
    return ratios, named


def test_it_is_said_once_when_a_rank_is_slow_and_once_when_it_is_no_more(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    journal = Journal("b", lambda: 1000.0)
    watch = StragglerWatch(metrics, journal)
    for comparison in (None, EVEN, SLOW, SLOW, replace(SLOW, usual_us=201_000), EVEN, EVEN):
        watch.update(seen(comparison))
    assert [record.getMessage() for record in caplog.records] == [
        "rank 3 on node b is slower than the others, which wait for it: it works 0.28 s for a step, 0.2 s are usual "
        "(40% more)",
        "rank 3 on node b is as fast as the others again",
    ]
    events = [(event.kind, event.rank, event.about, event.cause) for event in journal.since(0, 100)]
    assert events == [(Kind.STRAGGLER, 3, "b", "slow"), (Kind.STRAGGLER, 3, "b", "recovered")]


def test_the_numbers_are_those_of_this_node_s_ranks(metrics: Metrics) -> None:
    watch = StragglerWatch(metrics, Journal("b", lambda: 1000.0))
    watch.update(seen(SLOW))
    assert shown(metrics) == ({"0": 1.05, "1": 1.4}, {"0": 0, "1": 1})
    watch.update(seen(None, replace(WORLD, phase=Phase.STOPPING)))
    assert shown(metrics) == ({}, {"0": 0, "1": 0})


def test_a_straggler_that_ends_with_its_generation_has_not_recovered(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch = StragglerWatch(metrics, Journal("b", lambda: 1000.0))
    watch.update(seen(SLOW))
    watch.update(seen(Comparison(4, 200_000), replace(WORLD, generation=4)))
    assert len(caplog.records) == 1


# ---------------------------------------------------------------- from node to node


def pace(bench: Bench, peers: list[Peer], slow_us: int, report: int) -> None:
    for peer in (one for one in peers if one.generation):
        own_us = slow_us if peer is peers[1] else 200_000
        peer.part.workers_paced(Paces(peer.generation, 10 * report, 300_000, (200_000, own_us)))
    bench.settle()


def named(peer: Peer) -> list[tuple[str, int]]:
    peer.part.take_snapshot(0, "", 0.0)
    comparison = peer.part.snapshot.comparison
    return [(one.node, one.rank) for one in comparison.stragglers] if comparison is not None else []


def test_every_node_learns_who_is_slow() -> None:
    bench = Bench()
    peers = bench.joined("a", "b")
    world = bench.world()
    assert world is not None
    rank = next(member.first_rank + 1 for member in world.members if member.node == "b")
    for report in range(1, 11):
        pace(bench, peers, 200_000, report)
    assert [named(peer) for peer in peers] == [[], []]
    for report in range(11, 21):
        pace(bench, peers, 280_000, report)
    assert [named(peer) for peer in peers] == [[("b", rank)]] * 2


def test_a_report_is_one_write_and_a_comparison_travels_with_the_coordinator_s() -> None:
    """But for a change of who is named."""
    bench = Bench()
    peers = bench.joined("a", "b")
    pace(bench, peers, 200_000, 1)
    before = [len(peer.asked) for peer in peers]
    for report in range(2, 12):
        pace(bench, peers, 200_000, report)
    assert [len(peer.asked) - one for peer, one in zip(peers, before, strict=True)] == [10, 10]
