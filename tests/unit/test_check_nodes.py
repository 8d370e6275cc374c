"""The workers of a check of several nodes tell each other in the job's store what they find, and have one report."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_agent.agent.commands import check
from elastic_agent.agent.commands.check import NodesCheck, facts_of
from elastic_agent.agent.machine.devices import Inventory
from elastic_agent.agent.machine.inventory import Machine
from elastic_agent.agent.machine.network import Network
from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.checks.pairs import AllReduce, NodeFacts, PairsReport, pair_of
from elastic_agent.rendezvous.records import WORLD_KEY, node_key
from elastic_agent.rendezvous.store.interface import MOST_OPERATIONS, Compare, Delete, Put, Store
from elastic_agent.rendezvous.store.interface import Outcome as StoreOutcome
from elastic_agent.rendezvous.store.memory import MemoryStore


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LOOK_S", 0.005)
    monkeypatch.setattr(check, "STAGE_S", 10.0)
    network(monkeypatch, lambda source, target: True)


def network(monkeypatch: pytest.MonkeyPatch, works: Callable[[str, str], bool]) -> None:
    """`works` says from whom to whom packets come; the address of a node is its name."""

    def reach(address: str, others: Iterable[NodeFacts]) -> dict[str, str]:
        return {other.node: "dropped" for other in others if not works(address, other.node)}

    def all_reduce(number: int, here: NodeFacts, other: NodeFacts, listener: socket.socket) -> AllReduce:
        return 1e9, "" if works(*pair_of(here.node, other.node)) else "it hangs"

    monkeypatch.setattr(check, "reach", reach)
    monkeypatch.setattr(check, "all_reduce", all_reduce)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with contextlib.closing(MemoryStore()) as store:
        yield store


def reports(store: Store, folder: Path, names: str, wanted: int | None = None) -> list[PairsReport]:
    """All at once, each in a thread, as each has a process in truth."""

    def run(rank: int) -> PairsReport:
        here = NodeFacts(names[rank], names[rank], traits={"torch": "2", "number of GPUs": "0"})
        worker = NodesCheck(store, rank, len(names), folder / f"seen-{names[rank]}")
        with socket.socket() as unused:
            return worker.run(here, unused, wanted or len(names))

    with ThreadPoolExecutor(len(names)) as pool:
        return [*pool.map(run, range(len(names)))]


def fails(report: PairsReport) -> list[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]]:
    return [(one.check, one.nodes, one.links) for one in report.findings if one.outcome is Outcome.FAIL]


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcdefgh"])
def test_all_nodes_have_the_same_report(store: MemoryStore, tmp_path: Path, names: str) -> None:
    report, *others = reports(store, tmp_path, names)
    assert others == [report] * (len(names) - 1)
    assert fails(report) == []
    assert report.nodes == tuple(names)


def test_a_link_that_drops_one_way_is_in_the_report_of_all(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network(monkeypatch, lambda source, target: (source, target) != ("b", "d"))
    bad = [("peer-reachable", (), (("b", "d"),)), ("peer-all-reduce", (), (("b", "d"),))]
    assert [fails(report) for report in reports(store, tmp_path, "abcd")] == [bad] * 4


def test_nodes_that_do_not_come_are_counted_and_those_that_came_named(
    store: MemoryStore, tmp_path: Path
) -> None:
    for report in reports(store, tmp_path, "ab", wanted=3):
        assert report.missing == 1
        assert report.findings[0].summary == "2 of 3 nodes came: a, b"


def test_a_worker_that_hangs_is_named_by_the_others(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other one is blamed for it."""
    monkeypatch.setattr(check, "STAGE_S", 0.3)
    silent = NodeFacts("d", "d", traits={"torch": "2"})
    real = NodesCheck.run

    def run(worker: NodesCheck, here: NodeFacts, hosts: socket.socket, wanted: int) -> PairsReport:
        if here.node != silent.node:
            return real(worker, here, hosts, wanted)
        worker._put("facts/3", check._FACTS.encode(silent))
        return PairsReport((), 0, ())

    monkeypatch.setattr(NodesCheck, "run", run)
    *there, _ = reports(store, tmp_path, "abcd")
    assert [fails(report) for report in there] == [[("peer-present", ("d",), ())]] * 3


def test_a_node_that_was_lost_is_named_when_the_others_begin_anew(store: MemoryStore, tmp_path: Path) -> None:
    reports(store, tmp_path, "abc")
    with contextlib.closing(MemoryStore()) as next_generation:
        for report in reports(next_generation, tmp_path, "ab", wanted=3):
            assert report.nodes == ("a", "b", "c")
            assert fails(report) == [("peer-present", ("c",), ())]


def test_a_node_says_what_it_is() -> None:
    network = Network("lo", "127.0.0.1", "")
    findings = [Finding("open-files", Outcome.OK, "many"), Finding("gpu-ecc", Outcome.FAIL, "3", "reset it")]
    facts = facts_of("a", Machine(Inventory((), 2), (), network), network, findings)
    assert (facts.node, facts.address, facts.findings) == ("a", "127.0.0.1", tuple(findings[1:]))
    assert facts.traits["address family"] == "AF_INET"
    assert not facts.has_torch


@pytest.fixture
def left(store: MemoryStore) -> MemoryStore:
    """What a check has left there."""
    for key in (WORLD_KEY, *(f"check/1/facts/{number}" for number in range(2 * MOST_OPERATIONS))):
        store.transact((), (Put(key, "{}"),))
    return store


def keys(store: Store) -> list[str]:
    return [entry.key for entry in store.read(("",)).entries]


def test_nothing_of_a_check_stays_in_the_store(left: MemoryStore) -> None:
    check.delete_job(left)
    assert keys(left) == []


def test_what_a_live_node_still_needs_stays(left: MemoryStore) -> None:
    left.transact((), (Put(node_key("b"), "{}"),))
    before = keys(left)
    check.delete_job(left)
    assert keys(left) == before


def test_a_check_that_begins_meanwhile_keeps_its_world() -> None:
    class Busy(MemoryStore):
        def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> StoreOutcome:
            if Delete(WORLD_KEY) in writes:
                super().transact((), (Put(WORLD_KEY, "{new}"),))
            return super().transact(compares, writes)

    with contextlib.closing(Busy()) as busy:
        busy.transact((), (Put(WORLD_KEY, "{}"),))
        check.delete_job(busy)
        assert keys(busy) == [WORLD_KEY]
