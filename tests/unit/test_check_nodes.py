"""Several nodes meet in a store, follow the one that leads, and all have the same report; nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elastic_agent.agent.commands import check_stages as stages
from elastic_agent.agent.commands.check_nodes import LocalNode, Sockets
from elastic_agent.agent.commands.check_stages import CheckStore, JoinWait, LeaderGone, Stage, StageDriver
from elastic_agent.health.checks import processes
from elastic_agent.health.checks.finding import Outcome
from elastic_agent.health.checks.pair_findings import NodeFacts
from elastic_agent.health.checks.pair_report import PairsReport
from elastic_agent.health.checks.pairs import Measurement, NodeResults, Obstacle, ProbeEndpoint, Reach
from elastic_agent.rendezvous.errors import LeaseExpired, RecordInvalid, StoreUnavailable
from elastic_agent.rendezvous.store.interface import Put
from elastic_agent.rendezvous.store.memory import MemoryStore

TTL_S = 1.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LOOK_S", 0.005)
    monkeypatch.setattr(stages, "LEAVE_S", 2.0)
    monkeypatch.setattr(stages, "OUTAGE_S", 0.3)
    monkeypatch.setattr(stages, "PAUSE_S", 0.02)


def facts_of(name: str, life: str = "1") -> NodeFacts:
    return NodeFacts(
        name, f"{name}-{life}", ProbeEndpoint(name, "10.0.0.1", 29500, "0" * 32, "1" * 32), 29501
    )


@dataclass
class FakeNode:
    """A node of a network where `works` says from whom to whom packets come."""

    facts: NodeFacts
    works: Callable[[str, str], bool] = lambda source, target: True
    dies_in: str = ""
    stages: list[Stage] = field(default_factory=list)

    def carry_out(self, stage: Stage, others: dict[str, NodeFacts]) -> NodeResults:
        me = self.facts.node
        self.stages.append(stage)
        if self.dies_in == f"{stage.what} {stage.round}":
            raise Killed
        if stage.what == "reach":
            ways = [(me, other) for other in others]
            blocked = {way: None if self.works(*way) else Obstacle.DROPPED for way in ways}
            return NodeResults(reached=tuple(Reach(*way, obstacle) for way, obstacle in blocked.items()))
        mine = [pair for pair in stage.pairs if pair[0] == me]
        return NodeResults(measured=tuple(self._measure(stage.round, other) for _, other in mine))

    def _measure(self, number: int, other: str) -> Measurement:
        me = self.facts.node
        found = Measurement(number, me, other)
        if not self.works(me, other):
            return replace(found, obstacle=Obstacle.DROPPED)
        return replace(found, latency_s=1e-4, sent=1e9, received=1e9)


class Killed(BaseException):
    """The node's process, without a word."""


@dataclass
class Outcomes:
    reports: dict[str, PairsReport] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)


def check(
    store: MemoryStore, nodes: Sequence[FakeNode], wanted: int, wait_s: float = 10.0, within_s: float = 20.0
) -> Outcomes:
    """All at once, each in a thread, as each has a process in truth."""
    outcomes = Outcomes()

    def run(here: FakeNode) -> None:
        check_store = CheckStore(store, TTL_S)
        name = here.facts.node
        try:
            assert check_store.join(here.facts)
            outcomes.reports[name] = StageDriver(check_store, here, JoinWait(wanted, wait_s)).run()
        except Killed as error:
            outcomes.errors[name] = error
            check_store._over.set()
            return
        except Exception as error:
            outcomes.errors[name] = error
        check_store.leave()

    threads = [threading.Thread(target=run, args=(here,)) for here in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with contextlib.closing(MemoryStore()) as store:
        yield store


def emptied(store: MemoryStore) -> bool:
    until = time.monotonic() + 5.0
    while store.read(("",)).entries and time.monotonic() < until:
        time.sleep(0.02)
    return not store.read(("",)).entries


def fails(report: PairsReport) -> list[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]]:
    return [
        (one.finding.check, one.nodes, one.links)
        for one in report.findings
        if one.finding.outcome is Outcome.FAIL
    ]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_all_nodes_have_the_same_report_and_leave_nothing(store: MemoryStore, count: int) -> None:
    nodes = [FakeNode(facts_of(f"n{number}")) for number in range(count)]
    outcomes = check(store, nodes, count)
    assert not outcomes.errors
    (report, *others) = outcomes.reports.values()
    assert len(others) == count - 1
    assert all(other == report for other in others)
    assert fails(report) == []
    assert len(report.nodes) == count
    assert emptied(store)


def test_a_link_that_drops_one_way_is_in_the_report_of_all(store: MemoryStore) -> None:
    nodes = [
        FakeNode(facts_of(name), lambda source, target: (source, target) != ("b", "d")) for name in "abcd"
    ]
    outcomes = check(store, nodes, 4)
    assert [fails(report) for report in outcomes.reports.values()] == [
        [("peer-reachable", (), (("b", "d"),))]
    ] * 4


def test_the_second_round_is_chosen_by_the_first(store: MemoryStore) -> None:
    nodes = [
        FakeNode(facts_of(name), lambda source, target: "b" not in (source, target)) for name in "abcdef"
    ]
    outcomes = check(store, nodes, 6)
    assert fails(outcomes.reports["a"]) == [("peer-reachable", ("b",), ())]
    second = [pair for stage in nodes[0].stages if stage.round == 2 for pair in stage.pairs]
    assert sum("b" in pair for pair in second) == 2
    assert len({node for pair in second if "b" in pair for node in pair}) == 3


def test_nodes_that_do_not_come_are_waited_for_and_those_that_came_are_named(store: MemoryStore) -> None:
    outcomes = check(store, [FakeNode(facts_of(name)) for name in "ab"], 3, wait_s=0.3)
    for report in outcomes.reports.values():
        assert report.missing == 1
        assert report.findings[0].finding.summary == "2 of 3 nodes came within 0.3 s: a, b"
    assert len(outcomes.reports) == 2


def test_one_node_alone_says_so(store: MemoryStore) -> None:
    outcomes = check(store, [FakeNode(facts_of("a"))], 2, wait_s=0.1)
    assert fails(outcomes.reports["a"]) == [("peer-present", (), ())]
    assert emptied(store)


@pytest.mark.parametrize("dies_in", ["reach 0", "pairs 1", "pairs 2"])
def test_a_node_that_dies_is_named_and_no_other_one_blamed(store: MemoryStore, dies_in: str) -> None:
    check_store = CheckStore(store, TTL_S)
    assert check_store.join(facts_of("a"))  # so that it leads
    nodes = [FakeNode(facts_of(name)) for name in "abcd"]
    nodes[2].dies_in = dies_in
    outcomes = check(store, nodes, 4)
    check_store.leave()
    assert set(outcomes.reports) == {"a", "b", "d"}
    assert [fails(report) for report in outcomes.reports.values()] == [[("peer-present", ("c",), ())]] * 3
    assert emptied(store)


def test_the_end_of_the_one_that_leads_is_said(store: MemoryStore) -> None:
    check_store = CheckStore(store, TTL_S)
    leader = FakeNode(facts_of("a"), dies_in="pairs 1")
    assert check_store.join(leader.facts)
    check_store._over.set()
    outcomes = check(store, [leader, *(FakeNode(facts_of(name)) for name in "bc")], 3)
    assert isinstance(outcomes.errors["a"], Killed)
    for name in "bc":
        assert isinstance(outcomes.errors[name], LeaderGone)
        assert "node a led this check" in str(outcomes.errors[name])
    assert emptied(store)


def test_a_node_that_comes_late_waits_for_the_next_check(store: MemoryStore) -> None:
    """And is no part of the one that is under way, even under the name of one of its nodes."""
    first, said = CheckStore(store, 5.0), list[str]()
    assert first.join(facts_of("a"))
    first.publish_stage(Stage(1, "reach"))
    late = CheckStore(store, 5.0)
    assert late.join(facts_of("b"))
    done = list[PairsReport]()
    here = FakeNode(facts_of("b"))
    thread = threading.Thread(
        target=lambda: done.append(StageDriver(late, here, JoinWait(1, 5.0), said.append).run())
    )
    thread.start()
    while not said:
        time.sleep(0.01)
    assert "another check is under way" in said[0]
    first.leave()
    thread.join(10.0)
    late.leave()
    assert done[0].nodes == ("b",)


def test_a_name_is_taken_once(store: MemoryStore) -> None:
    one, other = CheckStore(store, TTL_S), CheckStore(store, TTL_S)
    assert one.join(facts_of("a"))
    assert one.join(facts_of("a")), "asked again after a lost answer"
    assert not other.join(facts_of("a", "2"))
    assert other.join(facts_of("a-2"))
    assert one.oldest() == other.oldest() == "a"
    one.leave()
    assert other.oldest() == "a-2"
    other.leave()
    assert emptied(store)


def test_a_job_in_the_same_store_is_left_alone(store: MemoryStore) -> None:
    store.transact((), (Put("nodes/x", "{}"), Put("world", "{}")))
    outcomes = check(store, [FakeNode(facts_of(name)) for name in "ab"], 2)
    assert outcomes.reports["a"].nodes in (("a", "b"), ("b", "a"))
    assert [entry.key for entry in store.read(("",)).entries] == ["nodes/x", "world"]


def test_of_many_nodes_each_tries_its_neighbours_and_those_that_it_meets(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "MOST_ALL_PAIRS", 4)
    nodes = [
        FakeNode(facts_of(name), lambda source, target: "d" not in (source, target)) for name in "abcdefg"
    ]
    outcomes = check(store, nodes, 7)
    report = outcomes.reports["a"]
    assert fails(report) == [("peer-reachable", ("d",), ())]
    reach = nodes[0].stages[0]
    assert (reach.what, len(reach.pairs)) == ("reach", 7)
    tried = {pair for stage in nodes[0].stages for pair in stage.pairs}
    assert 7 < len(tried) < 21, "more than the ring and fewer than all"


def test_one_that_leads_and_hangs_is_given_up(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SILENT_S", 0.1)
    hanging = CheckStore(store, TTL_S)
    assert hanging.join(facts_of("a"))
    outcomes = check(store, [FakeNode(facts_of("b"))], 2, wait_s=0.1)
    hanging.leave()
    assert "node a hangs" in str(outcomes.errors["b"])
    assert isinstance(outcomes.errors["b"], LeaderGone)


def test_what_a_node_says_for_others_or_of_nodes_that_are_not_there_does_not_count(
    store: MemoryStore,
) -> None:
    class Liar(FakeNode):
        def carry_out(self, stage: Stage, others: dict[str, NodeFacts]) -> NodeResults:
            known = super().carry_out(stage, others)
            lies = Reach("a", "b", Obstacle.DROPPED), Reach("c", "nonesuch", Obstacle.DROPPED)
            slow = Measurement(1, "a", "b", Obstacle.DROPPED), Measurement(1, "c", "none", Obstacle.DROPPED)
            return NodeResults(known.reached + lies, known.measured + slow, ("nobody",))

    nodes = [FakeNode(facts_of("a")), FakeNode(facts_of("b")), Liar(facts_of("c"))]
    outcomes = check(store, nodes, 3)
    assert fails(outcomes.reports["a"]) == []


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[LocalNode]:
    sockets = Sockets(*(socket.create_server(("127.0.0.1", 0)) for _ in range(2)))
    endpoint = ProbeEndpoint("a", "127.0.0.1", sockets.probes.getsockname()[1], "0" * 32, "1" * 32)
    facts = NodeFacts("a", "a-1", endpoint, sockets.all_reduce.getsockname()[1])
    with contextlib.closing(LocalNode(facts, sockets, str(tmp_path), dict(os.environ))) as here:
        here.start()
        yield here


def test_a_node_tries_and_measures_another(alone: LocalNode) -> None:
    """Its own server, under another name."""
    alone.rename("b")
    other = alone.facts
    alone.rename("a")
    found = alone.carry_out(Stage(1, "reach"), {"b": other})
    (reached,) = found.reached
    assert (reached.target, reached.obstacle, found.seen) == ("b", None, ("b",))
    (measured,) = alone.carry_out(Stage(2, "pairs", 1, pairs=(("a", "b"),)), {"b": other}).measured
    assert measured.pair == ("a", "b")
    assert measured.obstacle is None
    assert measured.all_reduce_s is None, "there is no torch"
    assert alone.carry_out(Stage(3, "pairs", 1, pairs=(("b", "a"),)), {"b": other}) == NodeResults()
    assert alone.carry_out(Stage(4, "pairs", 2, pairs=(("a", "x"),)), {}) == NodeResults(), "x has ended"


def test_a_probe_that_crashes_is_this_nodes_own_trouble(
    alone: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = facts_of("b")
    monkeypatch.setattr(processes, "PROGRAM", "raise SystemExit(3)")
    (reached,) = alone.carry_out(Stage(1, "reach"), {"b": other}).reached
    (measured,) = alone.carry_out(Stage(2, "pairs", 1, pairs=(("a", "b"),)), {"b": other}).measured
    assert (reached.obstacle, measured.obstacle) == (Obstacle.OWN, Obstacle.OWN)
    assert "has ended without an answer" in reached.detail


def test_a_record_that_no_node_has_written_is_named(store: MemoryStore) -> None:
    store.transact((), (Put("check/nodes/x", '{"v": 99}'),))
    check_store = CheckStore(store, TTL_S)
    with pytest.raises(RecordInvalid, match="check/nodes/x"):
        check_store.present()


def test_a_lease_that_is_lost_ends_the_check_here(store: MemoryStore) -> None:
    check_store = CheckStore(store, TTL_S)
    assert check_store.join(facts_of("a"))
    store.revoke(check_store._lease or 0)
    until = time.monotonic() + 5.0
    while check_store._lost is None and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(LeaseExpired, match="did not keep its place"):
        check_store.stage()


def test_a_store_that_is_away_for_a_moment_is_asked_again() -> None:
    class Away(MemoryStore):
        until = 0.0

        def _open(self):  # type: ignore[no-untyped-def]
            if time.monotonic() < self.until:
                raise StoreUnavailable("away")
            return super()._open()

    store = Away()
    nodes = [FakeNode(facts_of(name)) for name in "ab"]
    store.until = time.monotonic() + 0.15
    assert not check(store, nodes, 2).errors
    store.until = time.monotonic() + 60.0
    outcomes = check(store, [FakeNode(facts_of("a"))], 1)
    assert isinstance(outcomes.errors["a"], StoreUnavailable)
