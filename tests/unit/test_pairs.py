"""What follows from the tries of all nodes: which node, which link, or a doubt; and in which words."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.checks.pairs import (
    MOST_TRIED,
    AllReduce,
    NodeFacts,
    NodeResults,
    Pair,
    PairsReport,
    PeerFinding,
    locate_faults,
    make_report,
    rounds,
    tried_by,
)

OK, WARN, FAIL, UNKNOWN = Outcome.OK, Outcome.WARN, Outcome.FAIL, Outcome.UNKNOWN
FAST = 1e9
COUNTS = (4, 5, 6, 9, 16, 33)


def a_node(name: str, **changes: object) -> NodeFacts:
    facts: dict[str, object] = {
        "node": name,
        "address": "10.0.0.1",
        "port": 29500,
        "machine": f"m-{name}",
        "traits": {"MTU": "1500", "torch": "2.13.0", "number of GPUs": "8", "address family": "AF_INET"},
        **changes,
    }
    return NodeFacts(**facts)  # type: ignore[arg-type]


def given(
    nodes: Mapping[str, NodeFacts],
    rate: Callable[[str, str], float | str] = lambda one, other: FAST,
    blocked: Mapping[tuple[str, str], str] | None = None,
) -> dict[str, NodeResults]:
    """What all nodes found out; `rate` is a text where the all-reduce of the two has failed."""
    names, blocked = list(nodes), blocked or {}
    met: dict[str, dict[str, AllReduce]] = {name: {} for name in names}
    for pairs in rounds(names):
        for pair in pairs:
            value = rate(*pair)
            for one, other in (pair, pair[::-1]):
                met[one][other] = (0.0, value) if isinstance(value, str) else (value, "")
    made = {}
    for name in names:
        tried = tried_by(name, names)
        there = {other: blocked[name, other] for other in tried if (name, other) in blocked}
        made[name] = NodeResults(tried, there, met[name])
    return made


def report_of(
    nodes: Mapping[str, NodeFacts],
    rate: Callable[[str, str], float | str] = lambda one, other: FAST,
    blocked: Mapping[tuple[str, str], str] | None = None,
    wanted: int | None = None,
) -> PairsReport:
    """Where all were there to the end."""
    return make_report(wanted or len(nodes), [*nodes.values()], given(nodes, rate, blocked))


def nodes(names: str) -> dict[str, NodeFacts]:
    return {name: a_node(name) for name in names}


def many(count: int) -> dict[str, NodeFacts]:
    return {f"n{number:02}": a_node(f"n{number:02}") for number in range(count)}


def the(report: PairsReport, check: str) -> list[PeerFinding]:
    return [one for one in report.findings if one.check == check]


def blamed(report: PairsReport, check: str) -> list[tuple[Outcome, tuple[str, ...], tuple[Pair, ...], bool]]:
    return [(one.outcome, one.nodes, one.links, one.decided) for one in the(report, check)]


# --- The order


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 33])
def test_each_node_meets_another_one_in_each_round_and_none_twice(count: int) -> None:
    names = list(many(count))
    met = [pair for pairs in rounds(names) for pair in pairs]
    assert len(met) == len(set(met))
    for pairs in rounds(names):
        inside = [node for pair in pairs for node in pair]
        assert len(inside) == len(set(inside)) == count - count % 2
    for name in names:
        assert min(2, count - 1) <= sum(name in pair for pair in met) <= 3


def test_of_many_nodes_each_tries_its_neighbours() -> None:
    names = list(many(200))
    assert len(tried_by("n05", names)) == MOST_TRIED
    assert "n05" not in tried_by("n05", names)
    assert len(tried_by("n05", names[:20])) == 19


# --- The verdict


@pytest.mark.parametrize("count", COUNTS)
def test_each_bad_node_and_each_bad_link_is_found(count: int) -> None:
    names = list(many(count))
    met = [pair for pairs in rounds(names) for pair in pairs]
    for bad in names:
        verdict = locate_faults({pair: bad not in pair for pair in met})
        assert (verdict.nodes, verdict.links, verdict.doubts) == ((bad,), (), ())
    for link in met:
        verdict = locate_faults({pair: pair != link for pair in met})
        assert (verdict.nodes, verdict.links, verdict.doubts) == ((), (link,), ())


def test_two_bad_nodes_of_many_are_found_in_any_order_of_the_results() -> None:
    names, rng = list(many(12)), random.Random(1)
    met = [pair for pairs in rounds(names) for pair in pairs]
    for _ in range(50):
        bad = set(rng.sample(names, 2))
        rng.shuffle(met)
        verdict = locate_faults({pair: not bad.intersection(pair) for pair in met})
        assert set(verdict.nodes) == bad
        assert not verdict.links
        assert not verdict.doubts


def test_where_nothing_has_passed_nobody_is_accused() -> None:
    for count in (2, 5):
        met = [pair for pairs in rounds(list(many(count))) for pair in pairs]
        verdict = locate_faults(dict.fromkeys(met, False))
        assert verdict.nodes == verdict.links == ()
        assert verdict.doubts == tuple(sorted(met))


# --- The report


def test_where_all_is_well_each_check_says_so_once() -> None:
    report = report_of(nodes("abcd"))
    assert {one.outcome for one in report.findings} == {OK}
    assert len({one.check for one in report.findings}) == len(report.findings) == 6


def test_a_packet_filter_is_named_with_node_address_port_and_direction() -> None:
    report = report_of(nodes("abcd"), blocked={("c", "a"): "dropped"})
    assert blamed(report, "peer-reachable") == [(FAIL, (), (("a", "c"),), True)]
    (one,) = the(report, "peer-reachable")
    assert one.summary.startswith("from c to a (10.0.0.1 port 29500): no answer to SYN")
    assert one.summary.endswith("the way back is open")
    assert "nft list ruleset" in one.advice


def test_a_node_that_nobody_reaches_is_one_finding() -> None:
    names = "abcdefghijklm"
    ways = {way: "refused" for other in names[1:] for way in ((other, "a"), ("a", other))}
    report = report_of(nodes(names), blocked=ways)
    assert blamed(report, "peer-reachable") == [(FAIL, ("a",), (), True)]
    (one,) = the(report, "peer-reachable")
    assert one.summary.startswith("node a: ")
    assert one.summary.endswith("and 4 more")


def test_of_two_nodes_it_is_said_that_it_is_not_known_which() -> None:
    report = report_of(nodes("ab"), blocked={("a", "b"): "no-route"})
    assert blamed(report, "peer-reachable") == [(FAIL, ("a", "b"), (("a", "b"),), False)]
    assert "more nodes tell" in the(report, "peer-reachable")[0].summary


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("part", "outcome"), [(0.4, WARN), (0.1, FAIL)])
def test_a_slow_node_is_named(count: int, part: float, outcome: Outcome) -> None:
    rng = random.Random(count)

    def rate(*pair: str) -> float:
        return FAST * rng.uniform(0.8, 1.0) * (part if "n02" in pair else 1.0)

    report = report_of(many(count), rate)
    assert blamed(report, "peer-bandwidth") == [(outcome, ("n02",), (), True)]


def test_a_slow_link_is_named_with_its_rate() -> None:
    report = report_of(nodes("abcd"), lambda *pair: FAST * (0.1 if pair == ("b", "d") else 1.0))
    assert blamed(report, "peer-bandwidth") == [(FAIL, (), (("b", "d"),), True)]
    assert the(report, "peer-bandwidth")[0].summary == "100 MB/s between b and d, 10% of the usual"


def test_nodes_of_one_machine_are_not_compared_with_others() -> None:
    """Each two of eight nodes are pods of one machine, of which four have a short way that the others do not need."""
    machines = {name: a_node(name, machine=f"m{number // 2}") for number, name in enumerate("abcdefgh")}

    def rate(one: str, other: str) -> float:
        return 50 * FAST if machines[one].machine == machines[other].machine else FAST

    assert [outcome for outcome, *_ in blamed(report_of(machines, rate), "peer-bandwidth")] == [OK]


def test_an_all_reduce_that_fails_shows_what_torch_says() -> None:
    report = report_of(nodes("abcd"), lambda *pair: "it hangs" if "b" in pair else FAST)
    assert blamed(report, "peer-all-reduce") == [(FAIL, ("b",), (), True)]
    assert "between a and b: it hangs" in the(report, "peer-all-reduce")[0].summary


def test_nodes_without_torch_are_named_and_not_blamed() -> None:
    without = {name: a_node(name, traits={"torch": "none"}) for name in "ab"}
    report = make_report(2, [*without.values()], {"a": NodeResults(("b",)), "b": NodeResults(("a",))})
    assert blamed(report, "peer-all-reduce") == [(UNKNOWN, (), (), True)]
    assert "no torch on a, b" in the(report, "peer-all-reduce")[0].summary


def test_nothing_follows_from_tries_with_a_node_that_ended() -> None:
    blocked = {(name, "c"): "refused" for name in "abd"}
    made = given(nodes("abcd"), lambda *pair: "reset" if "c" in pair else FAST, blocked)
    del made["c"]
    report = make_report(4, [*nodes("abcd").values()], made)
    assert [(one.check, one.nodes) for one in report.findings if one.outcome is FAIL] == [
        ("peer-present", ("c",))
    ]


def test_what_a_node_found_out_about_itself_is_in_the_report_of_all() -> None:
    bad = Finding("gpu-ecc", FAIL, "GPU 3 has errors", "replace it")
    report = report_of({**nodes("ab"), "c": a_node("c", findings=(bad,))})
    assert blamed(report, "gpu-ecc") == [(FAIL, ("c",), (), True)]
    assert report.findings[0].summary == "node c: GPU 3 has errors"


@pytest.mark.parametrize(
    ("trait", "check", "said"),
    [
        ("MTU", "same-network", "the MTU differs: 1500 on 3 of 4 nodes, but other on d"),
        ("torch", "same-software", "the torch differs: 2.13.0 on 3 of 4 nodes, but other on d"),
    ],
)
def test_what_differs_between_nodes_is_a_warning(trait: str, check: str, said: str) -> None:
    here = nodes("abc")
    odd = a_node("d", traits={**here["a"].traits, trait: "other"})
    report = report_of({**here, "d": odd})
    assert blamed(report, check) == [(WARN, ("d",), (), True)]
    assert the(report, check)[0].summary == said
