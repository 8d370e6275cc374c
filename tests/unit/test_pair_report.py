"""What is said of several nodes: who is bad, where and in which direction; and what cannot be known."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.checks.pair_findings import (
    NodeFacts,
    PeerFinding,
    Software,
    between_machines,
    near_pairs,
)
from elastic_agent.health.checks.pair_report import (
    PEER_CHECKS,
    CheckResults,
    PairsReport,
    clock_offsets,
    make_report,
)
from elastic_agent.health.checks.pairs import (
    Measurement,
    NodeResults,
    Obstacle,
    ProbeEndpoint,
    Reach,
    all_well,
    first_round,
    second_round,
    spread,
)

FILTER = (
    "no answer to SYN, though the node is there (it keeps its lease): a packet filter drops, or a cable or VLAN "
    "is wrong"
)


NO_ROUTE = "no route to it, no answer to ARP, or a packet filter rejects it"


def a_node(name: str, **changes: object) -> NodeFacts:
    number = ord(name) - ord("a") + 1
    endpoint = ProbeEndpoint(name, f"10.0.0.{number}", 29500 + number, "0" * 32, "1" * 32)
    facts = NodeFacts(
        name,
        f"{name}-1",
        endpoint,
        29600,
        interface="eth0",
        speed_mbps=10_000,
        mtu=1500,
        gpus=8,
        software=Software("0.1.0", "3.11.7", "2.13.0", "2.30", "580.1"),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def found(
    names: str,
    blocked: Mapping[str, Obstacle] | None = None,
    measured: Iterable[Measurement] = (),
    clocks: Mapping[str, float] | None = None,
    **changes: object,
) -> CheckResults:
    """`blocked`: by the two names, of who asks and who is asked. `clocks`: by how much each is ahead."""
    blocked, clocks = blocked or {}, clocks or {}
    ways = [
        Reach(a, b, blocked.get(a + b), clock_offset_s=clocks.get(b, 0.0) - clocks.get(a, 0.0))
        for a, b in permutations(names, 2)
    ]
    results = {
        name: NodeResults(
            tuple(way for way in ways if way.source == name),
            tuple(one for one in measured if one.first == name),
        )
        for name in names
    }
    whole = CheckResults(len(names), 60.0, tuple(map(a_node, names)), results)
    return replace(whole, **changes)  # type: ignore[arg-type]


def all_pairs(names: str, **slow: float) -> list[Measurement]:
    """As two rounds of them; `slow` are rates by the two names."""
    first = first_round(names)
    return [
        Measurement(
            1 if (a, b) in first else 2,
            a,
            b,
            latency_s=5e-5,
            sent=slow.get(a + b, 1e9),
            received=slow.get(b + a, 1e9),
            all_reduce_s=0.01,
        )
        for a, b in (*first, *second_round(names, dict.fromkeys(first, True)))
    ]


def said(report: PairsReport, check: str) -> list[str]:
    return [one.finding.summary for one in report.findings if one.finding.check == check]


def the(report: PairsReport, check: str) -> tuple[Outcome, tuple[str, ...], tuple[tuple[str, str], ...]]:
    (one,) = [one for one in report.findings if one.finding.check == check]
    return one.finding.outcome, one.nodes, one.links


def test_where_all_is_well_each_check_says_so_once() -> None:
    report = make_report(found("abcd", measured=all_pairs("abcd")))
    assert {one.finding.outcome for one in report.findings} == {Outcome.OK}
    assert [one.finding.check for one in report.findings] == list(PEER_CHECKS[:-1])
    assert [one.finding.summary for one in report.findings] == [
        "all 4 nodes came: a, b, c, d",
        "all that tried to reach each other did: 6 pairs, 12 ways",
        "one stream carries 1.0 GB/s, at least 1.0 GB/s",
        "an all-reduce of 4 MiB takes 10 ms, at most 10 ms",
        "MTU, link speed, RDMA ports and address family are the same on all nodes",
        "versions and the number of GPUs are the same on all nodes",
        "the clocks of 4 nodes differ by at most 0 us",
    ]


def test_a_packet_filter_is_named_with_node_address_port_and_direction() -> None:
    report = make_report(found("abcd", {"ab": Obstacle.DROPPED}, all_pairs("abcd")))
    assert said(report, "peer-reachable") == [
        f"between a and b: from a to b (10.0.0.2 port 29502): {FILTER}; the way back, from b to a, is open"
    ]
    assert the(report, "peer-reachable") == (Outcome.FAIL, (), (("a", "b"),))
    assert "nft list ruleset" in report.findings[0].finding.advice


def test_a_node_that_drops_what_comes_is_one_sentence() -> None:
    blocked = {"ab": Obstacle.DROPPED, "cb": Obstacle.DROPPED, "db": Obstacle.DROPPED}
    report = make_report(found("abcd", blocked, all_pairs("abcd")))
    assert said(report, "peer-reachable") == [f"node b: from a, c, d to b (10.0.0.2 port 29502): {FILTER}"]
    assert the(report, "peer-reachable") == (Outcome.FAIL, ("b",), ())


def test_a_node_that_reaches_nobody_and_is_reached_by_nobody() -> None:
    blocked = dict.fromkeys(("ab", "ba", "bc", "cb"), Obstacle.NO_ROUTE)
    report = make_report(found("abc", blocked))
    there = "a (10.0.0.1 port 29501), c (10.0.0.3 port 29503)"
    assert said(report, "peer-reachable") == [
        f"node b: from a, c to b (10.0.0.2 port 29502): {NO_ROUTE}; from b to {there}: {NO_ROUTE}"
    ]


def test_of_two_nodes_it_is_said_that_it_is_not_known_which() -> None:
    report = make_report(found("ab", {"ab": Obstacle.REFUSED}))
    (one,) = [one for one in report.findings if one.finding.check == "peer-reachable"]
    assert not one.decided
    assert (one.nodes, one.links) == (("a", "b"), (("a", "b"),))
    assert one.finding.summary.endswith(
        "which of them it is, or whether it is what lies between, is not known"
    )
    assert one.finding.advice.endswith("A check with more nodes tells which it is")


def test_many_bad_links_are_a_few_findings() -> None:
    names = "abcdefghijklmnop"
    blocked = {a + b: Obstacle.DROPPED for a, b in permutations(names, 2) if (ord(a) + ord(b)) % 3 == 0}
    report = make_report(found(names, blocked))
    found_there = [one for one in report.findings if one.finding.check == "peer-reachable"]
    assert len(found_there) == 8
    assert sum(len(one.links) for one in found_there) == len(blocked) // 2


def test_a_node_that_sends_slowly_is_named_with_its_rates() -> None:
    slow = {"ab": 1e8, "ac": 1e8, "ad": 1e8}
    measured = all_pairs("abcd", **slow)
    measured.append(replace(measured[-1], first="a", second="c", sent=1e8, received=1e9))
    report = make_report(found("abcd", measured=measured))
    assert the(report, "peer-bandwidth") == (Outcome.FAIL, ("a",), ())
    assert said(report, "peer-bandwidth") == [
        "node a: 100 MB/s from a to b, 1.0 GB/s from b to a, 100 MB/s from a to d, 1.0 GB/s from d to a,"
        " 100 MB/s from a to c, 1.0 GB/s from c to a, where 1.0 GB/s is usual"
    ]


def test_a_slow_link_is_named_with_its_two_rates() -> None:
    report = make_report(found("abcd", measured=all_pairs("abcd", bc=2e8)))
    assert said(report, "peer-bandwidth") == [
        "between b and c: 200 MB/s from b to c, 1.0 GB/s from c to b, where 1.0 GB/s is usual"
    ]


def two_rounds(nodes: Sequence[NodeFacts], rate: Callable[[str, str], float]) -> CheckResults:
    def one(number: int, pair: tuple[str, str]) -> Measurement:
        sent, received = rate(*pair), rate(*reversed(pair))
        return Measurement(number, *pair, latency_s=5e-5, sent=sent, received=received)

    names = spread({node.node: node.machine or node.node for node in nodes})
    measured = [one(1, pair) for pair in first_round(names)]
    well = all_well([], measured, between_machines(nodes, measured))
    measured += [one(2, pair) for pair in second_round(names, well, near_pairs(nodes))]
    results = {
        name: NodeResults(measured=tuple(one for one in measured if one.first == name)) for name in names
    }
    return CheckResults(len(names), 60.0, tuple(nodes), results)


def accused(found: CheckResults) -> list[PeerFinding]:
    return [
        one
        for one in make_report(found).findings
        if one.finding.check == "peer-bandwidth" and one.finding.outcome is not Outcome.OK
    ]


SIZES = range(3, 17)


@pytest.mark.parametrize("count", SIZES)
def test_nodes_near_each_other_make_no_other_one_bad(count: int) -> None:
    """Two virtual machines of one host, or two and two, or half of all."""
    names = string.ascii_lowercase[:count]
    hosts = [{name: "near" if name in pair else name for name in names} for pair in combinations(names, 2)]
    hosts.append({name: str(number // 2) for number, name in enumerate(names)})
    hosts.append({name: str(number * 2 // count) for number, name in enumerate(names)})
    for host in hosts:

        def rate(source: str, target: str, host: Mapping[str, str] = host) -> float:
            return 10e9 if host[source] == host[target] else 1.2e9

        for one in accused(two_rounds([a_node(name) for name in names], rate)):
            assert (one.decided, one.finding.outcome) == (False, Outcome.WARN), one
        known = two_rounds([a_node(name, machine=host[name]) for name in names], rate)
        assert not accused(known), "what stays in a machine is no measure"


@pytest.mark.parametrize("count", SIZES)
def test_a_slow_node_is_found_among_nodes_of_one_machine_and_others(count: int) -> None:
    names = string.ascii_lowercase[:count]
    for bad in names:

        def rate(source: str, target: str, bad: str = bad) -> float:
            return 1e8 if bad in (source, target) else 10e9 if {source, target} == {"a", "b"} else 1.2e9

        for machines in (True, False):
            nodes = [a_node(name, machine="ab" if machines and name in "ab" else "") for name in names]
            found = accused(two_rounds(nodes, rate))
            blamed = [one.nodes for one in found if one.decided]
            assert blamed in ([(bad,)], []), found
            if count >= 8 or (machines and count >= 4):
                assert blamed == [(bad,)], found
            if count >= 4 or not machines:
                assert any(bad in one.nodes for one in found), "it is said at least that something is slow"


def test_of_three_nodes_two_may_be_near_each_other() -> None:
    report = make_report(
        two_rounds([a_node(name) for name in "abc"], lambda a, b: 1e9 if {a, b} == {"a", "b"} else 1e8)
    )
    (one,) = [one for one in report.findings if one.finding.check == "peer-bandwidth"]
    assert (one.finding.outcome, one.decided, one.nodes) == (Outcome.WARN, False, ("c",))
    assert one.links == (("a", "c"), ("b", "c"))
    assert one.finding.summary.startswith(
        "2 of 3 pairs are much worse than the others, and which is usual is"
    )
    assert one.finding.advice.startswith(
        "if a short way connects a and b (one machine, one switch), all is well"
    )


def test_half_as_fast_is_a_warning_and_a_quarter_a_failure() -> None:
    for slow, outcome in ((4.5e8, Outcome.WARN), (2e8, Outcome.FAIL)):
        report = make_report(found("abcd", measured=all_pairs("abcd", bc=slow)))
        assert the(report, "peer-bandwidth") == (outcome, (), (("b", "c"),))


def test_large_packets_that_vanish_are_told_from_a_slow_link() -> None:
    measured = all_pairs("abcd")
    measured[0] = replace(
        measured[0], sent=0.0, received=None, obstacle=Obstacle.SILENT, detail="a stream vanishes"
    )
    report = make_report(found("abcd", measured=measured))
    assert said(report, "peer-bandwidth") == ["between a and b: a stream vanishes"]
    assert "MTU" in report.findings[0].finding.advice


def test_an_all_reduce_that_fails_shows_what_torch_says() -> None:
    measured = all_pairs("abcd")
    measured[0] = replace(measured[0], all_reduce_s=None, all_reduce_problem="RuntimeError: timed out")
    report = make_report(found("abcd", measured=measured))
    assert the(report, "peer-all-reduce") == (Outcome.FAIL, (), (("a", "b"),))
    assert "RuntimeError: timed out" in said(report, "peer-all-reduce")[0]
    assert "ip_local_port_range" in report.findings[0].finding.advice


def test_nodes_without_torch_are_named_and_not_blamed() -> None:
    measured = [replace(one, all_reduce_s=None) for one in all_pairs("ab")]
    nodes = (a_node("a"), a_node("b", software=Software("0.1.0", "3.11.7")))
    report = make_report(found("ab", measured=measured, nodes=nodes))
    assert the(report, "peer-all-reduce")[0] is Outcome.UNKNOWN
    assert said(report, "peer-all-reduce") == ["not tried: no torch on b"]
    assert "the version of torch differs: 2.13.0 on a, but none on b" in said(report, "same-software")


def test_who_is_missing_is_said_by_who_came() -> None:
    report = make_report(found("abc", wanted=4))
    assert report.missing == 1
    assert said(report, "peer-present") == ["3 of 4 nodes came within 60 s: a, b, c"]
    assert said(make_report(CheckResults(2, 5.0, ())), "peer-present") == [
        "0 of 2 nodes came within 5 s: none"
    ]


def test_nothing_follows_from_tries_with_a_node_that_ended() -> None:
    blocked = {"ab": Obstacle.REFUSED, "cb": Obstacle.REFUSED, "db": Obstacle.REFUSED}
    report = make_report(found("abcd", blocked, all_pairs("abcd"), gone={"b": "in the first round"}))
    assert the(report, "peer-present") == (Outcome.FAIL, ("b",), ())
    assert said(report, "peer-present") == ["node b ended, or lost the store, in the first round"]
    assert the(report, "peer-reachable")[0] is Outcome.OK


def test_what_a_node_found_out_about_itself_is_in_the_report_of_all() -> None:
    bad = Finding("gpu-ecc", Outcome.FAIL, "GPU 3 has errors", "replace it")
    report = make_report(found("ab", nodes=(a_node("a"), a_node("b", findings=(bad,)))))
    assert report.findings[0].nodes == ("b",)
    assert report.findings[0].finding == replace(bad, summary="node b: GPU 3 has errors")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mtu": 9000}, "the MTU differs: 1500 on 2 nodes, but 9000 on b"),
        ({"speed_mbps": 1000}, "the link speed differs: 10000 Mbit/s on 2 nodes, but 1000 Mbit/s on b"),
        ({"gpus": 7}, "the number of GPUs differs: 8 on 2 nodes, but 7 on b"),
        (
            {"software": Software("0.1.0", "3.11.7", "2.14.0", "2.30", "580.1")},
            "the version of torch differs: 2.13.0 on 2 nodes, but 2.14.0 on b",
        ),
    ],
)
def test_what_differs_between_nodes_is_a_warning(changes: dict[str, object], expected: str) -> None:
    nodes = (a_node("a"), a_node("b", **changes), a_node("c"))
    report = make_report(found("abc", nodes=nodes))
    (one,) = [one for one in report.findings if one.finding.summary == expected]
    assert (one.finding.outcome, one.nodes) == (Outcome.WARN, ("b",))
    assert one.finding.advice


def test_a_clock_that_is_off_is_named_and_of_two_neither() -> None:
    off = {"b": -3600.0, "c": 0.2}
    report = make_report(found("abc", clocks=off))
    assert the(report, "clock-between-nodes") == (Outcome.WARN, ("b",), ())
    assert said(report, "clock-between-nodes") == [
        "clocks differ from those of most nodes: b is 3600.0 s behind"
    ]
    two = make_report(found("ab", clocks=off))
    assert said(two, "clock-between-nodes") == ["the clocks of a and b differ by 3600.0 s"]
    one_way = [Reach("a", "b", clock_offset_s=-3600.0), Reach("c", "b", clock_offset_s=-3600.2)]
    assert clock_offsets("abcd", one_way) == {
        "a": 0.0,
        "b": -3600.0,
        "c": pytest.approx(0.2),
    }, "of d nothing is known"
    assert clock_offsets("d", one_way) == {}


@pytest.mark.parametrize(
    ("seen", "outcome", "expected"),
    [
        (("abc", "abc", "abc"), Outcome.OK, "the checkpoint directory is shared by all 3 nodes"),
        (("a", "b", "c"), Outcome.WARN, "the checkpoint directory is local to each node"),
        (("", "", ""), Outcome.WARN, "the checkpoint directory is local to each node"),
        (("ab", "ab", "c"), Outcome.FAIL, "the checkpoint directory is not the same for all nodes: a, b | c"),
        (("ab", "b", "c"), Outcome.FAIL, "the checkpoint directory is not the same for all nodes: a, b | c"),
    ],
)
def test_a_shared_checkpoint_directory_is_found_out(
    seen: Sequence[str], outcome: Outcome, expected: str
) -> None:
    nodes = tuple(a_node(name, file=f"file-{name}") for name in "abc")
    results = {name: NodeResults(seen=tuple(names)) for name, names in zip("abc", seen, strict=True)}
    report = make_report(CheckResults(3, 60.0, nodes, results))
    (sentence,) = said(report, "checkpoint-directory-shared")
    assert sentence.startswith(expected)
    assert the(report, "checkpoint-directory-shared")[0] is outcome
    one = make_report(CheckResults(3, 60.0, (nodes[0], a_node("b"), a_node("c")), results))
    assert said(one, "checkpoint-directory-shared") == []


def test_the_worst_comes_first() -> None:
    blocked = {"ab": Obstacle.DROPPED}
    report = make_report(found("abc", blocked, nodes=(a_node("a"), a_node("b", mtu=9000), a_node("c"))))
    ranks = [one.finding.outcome.rank for one in report.findings]
    assert ranks == sorted(ranks)
    assert report.findings[0].finding.check == "peer-reachable"
