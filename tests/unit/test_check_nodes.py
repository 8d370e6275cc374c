"""Several nodes meet in a store, follow the one that leads, and all have the same report; nothing stays behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from elastic_agent.agent.commands import check_nodes
from elastic_agent.agent.commands.check_nodes import (
    CheckStore,
    LeaderGone,
    LocalNode,
    NodesCheck,
    Stage,
)
from elastic_agent.agent.configuration.config import Command, Config
from elastic_agent.agent.configuration.parse import NodeCounts
from elastic_agent.agent.machine.devices import Inventory
from elastic_agent.agent.machine.inventory import Machine
from elastic_agent.agent.machine.network import Network
from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.checks.pairs import (
    AllReduce,
    NodeFacts,
    NodeResults,
    Obstacle,
    PairsReport,
    pair_of,
)
from elastic_agent.rendezvous.errors import LeaseExpired, RecordInvalid, StoreUnavailable
from elastic_agent.rendezvous.store.interface import Put
from elastic_agent.rendezvous.store.memory import MemoryStore

TTL_S = 1.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_nodes, "LOOK_S", 0.005)
    monkeypatch.setattr(check_nodes, "LEAVE_S", 2.0)
    monkeypatch.setattr(check_nodes, "OUTAGE_S", 0.3)
    monkeypatch.setattr(check_nodes, "PAUSE_S", 0.02)


def facts_of(name: str, life: str = "1") -> NodeFacts:
    return NodeFacts(
        name,
        f"{name}-{life}",
        "10.0.0.1",
        29500,
        "0" * 64,
        29501,
        traits={"torch": "2", "number of GPUs": "0"},
    )


class FakeNode(LocalNode):
    """A node of a network where `works` says from whom to whom packets come."""

    def __init__(
        self,
        facts: NodeFacts,
        works: Callable[[str, str], bool] = lambda source, target: True,
        dies_in: int | None = None,
    ) -> None:
        self.facts, self.works, self.dies_in = facts, works, dies_in

    def reach(self, others: Sequence[NodeFacts]) -> NodeResults:
        if self.dies_in == 0:
            raise Killed
        names = [other.node for other in others]
        blocked = {name: Obstacle.DROPPED for name in names if not self.works(self.facts.node, name)}
        return NodeResults(tuple(names), blocked)

    def all_reduce(self, number: int, other: NodeFacts) -> NodeResults:
        if self.dies_in == number:
            raise Killed
        works = self.works(*pair_of(self.facts.node, other.node))
        return NodeResults(all_reduce=AllReduce(other.node, 1e9, "" if works else "it hangs"))


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
            outcomes.reports[name] = NodesCheck(check_store, here, wanted, wait_s, lambda line: None).run()
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
        [("peer-reachable", (), (("b", "d"),)), ("peer-all-reduce", (), (("b", "d"),))]
    ] * 4


def test_nodes_that_do_not_come_are_waited_for_and_those_that_came_are_named(store: MemoryStore) -> None:
    outcomes = check(store, [FakeNode(facts_of(name)) for name in "ab"], 3, wait_s=0.3)
    for report in outcomes.reports.values():
        assert report.missing == 1
        assert report.findings[0].finding.summary == "2 of 3 nodes came: a, b"
    assert len(outcomes.reports) == 2


def test_one_node_alone_says_so(store: MemoryStore) -> None:
    outcomes = check(store, [FakeNode(facts_of("a"))], 2, wait_s=0.1)
    assert fails(outcomes.reports["a"]) == [("peer-present", (), ())]
    assert emptied(store)


@pytest.mark.parametrize("dies_in", [0, 1, 2])
def test_a_node_that_dies_is_named_and_no_other_one_blamed(store: MemoryStore, dies_in: int) -> None:
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
    leader = FakeNode(facts_of("a"), dies_in=2)
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
    first.put(check_nodes.STAGE, check_nodes.STAGES, Stage(0, {"a": "a-1", "b": "b-0"}))
    late = CheckStore(store, 5.0)
    assert late.join(facts_of("b"))
    done = list[PairsReport]()
    here = FakeNode(facts_of("b"))
    thread = threading.Thread(target=lambda: done.append(NodesCheck(late, here, 1, 5.0, said.append).run()))
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


def test_one_that_leads_and_hangs_is_given_up(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_nodes, "STAGE_S", 0.1)
    hanging = CheckStore(store, TTL_S)
    assert hanging.join(facts_of("a"))
    outcomes = check(store, [FakeNode(facts_of("b"))], 2, wait_s=0.1)
    hanging.leave()
    assert "node a hangs" in str(outcomes.errors["b"])
    assert isinstance(outcomes.errors["b"], LeaderGone)


def test_a_node_says_what_it_is_and_answers_until_it_is_closed() -> None:
    network = Network("lo", "127.0.0.1", "")
    config = Config(Command("script", "t.py"), NodeCounts(2, 2))
    findings = [Finding("open-files", Outcome.OK, "many"), Finding("gpu-ecc", Outcome.FAIL, "3", "reset it")]
    here = LocalNode("a", config, Machine(Inventory((), 2), (), network), network, findings, {})
    assert here.reach([here.facts]) == NodeResults(("a",))
    assert (here.facts.findings, here.facts.interface) == (tuple(findings[1:]), "lo")
    assert here.facts.traits["address family"] == "AF_INET"
    assert here.all_reduce(1, facts_of("b")) == NodeResults(), "there is no torch"
    here.close()
    assert here.reach([here.facts]).blocked == {"a": Obstacle.REFUSED}


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
