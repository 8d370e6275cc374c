"""Two rounds of pairs find each bad node and each bad link; what they cannot decide is said."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from elastic_agent.health.checks.pairs import (
    MOST_MEETINGS,
    Doubt,
    Pair,
    Verdict,
    first_round,
    locate_faults,
    pair_of,
    ring,
    second_round,
    turns,
)

Works = Callable[[Pair], bool]
SIZES = range(2, 17)


def names(count: int) -> list[str]:
    return [f"n{number:02d}" for number in range(count)]


def two_rounds(
    nodes: Sequence[str], works: Works, *, gone: Sequence[str] = ()
) -> tuple[Verdict, dict[Pair, bool]]:
    """What is judged of nodes of which `gone` end between the rounds."""
    results = {pair: works(pair) for pair in first_round(nodes)}
    left = [node for node in nodes if node not in gone]
    results = {pair: well for pair, well in results.items() if not set(pair) & set(gone)}
    results |= {pair: works(pair) for pair in second_round(left, results)}
    return locate_faults(left, results), results


def without(*bad: str) -> Works:
    return lambda pair: not set(pair) & set(bad)


def all_pairs(nodes: Sequence[str], works: Works) -> Verdict:
    return locate_faults(nodes, {pair: works(pair) for pair in combinations(nodes, 2)})


@pytest.mark.parametrize("count", SIZES)
def test_without_a_fault_all_is_well_and_each_node_was_tested(count: int) -> None:
    verdict, results = two_rounds(names(count), without())
    assert verdict == Verdict()
    assert {node for pair in results for node in pair} == set(names(count))


@pytest.mark.parametrize("count", range(3, 17))
def test_two_rounds_find_each_bad_node(count: int) -> None:
    for bad in names(count):
        verdict, _ = two_rounds(names(count), without(bad))
        assert verdict == Verdict(bad_nodes=(bad,)), bad


@pytest.mark.parametrize("count", range(3, 17))
def test_two_rounds_find_each_bad_link_that_one_of_them_tries(count: int) -> None:
    found = 0
    for link in combinations(names(count), 2):
        verdict, results = two_rounds(names(count), lambda pair, link=link: pair != link)  # type: ignore[misc]
        assert verdict == (Verdict(bad_links=(link,)) if link in results else Verdict()), link
        found += link in results
    assert found >= count // 2


@pytest.mark.parametrize("count", range(3, 17))
def test_all_pairs_find_each_bad_node_and_each_bad_link(count: int) -> None:
    nodes = names(count)
    for bad in nodes:
        assert all_pairs(nodes, without(bad)) == Verdict(bad_nodes=(bad,))
    for link in combinations(nodes, 2):
        expected = Verdict(bad_links=(link,))
        assert all_pairs(nodes, lambda pair, link=link: pair != link) == expected  # type: ignore[misc]


@pytest.mark.parametrize("count", range(4, 17))
def test_two_bad_nodes_are_both_found(count: int) -> None:
    """With four nodes of two pairs, too: of the failed ones, each meets all others."""
    for bad in combinations(names(count), 2):
        verdict, _ = two_rounds(names(count), without(*bad))
        assert verdict.bad_nodes == bad
        assert not verdict.bad_links
        assert not verdict.undecided


@pytest.mark.parametrize("count", range(5, 13))
def test_a_bad_node_and_a_bad_link_elsewhere_are_both_found(count: int) -> None:
    nodes = names(count)
    for bad in nodes:
        for link in combinations([node for node in nodes if node != bad], 2):
            verdict, results = two_rounds(
                nodes,
                lambda pair, bad=bad, link=link: bad not in pair and pair != link,  # type: ignore[misc]
            )
            blamed = {*verdict.bad_nodes, *(node for doubt in verdict.undecided for node in doubt.nodes)}
            assert bad in blamed or not any(bad in pair and well for pair, well in results.items())
            assert blamed <= {bad, *link}, "no other node is accused"
            assert set(verdict.bad_links) <= {link}, "no other link is accused"
            if link in results:
                assert (
                    link in verdict.bad_links
                    or any(link in doubt.pairs for doubt in verdict.undecided)
                    or (blamed & set(link))
                )


@pytest.mark.parametrize("count", SIZES)
def test_where_all_are_bad_it_is_said_that_nothing_passed(count: int) -> None:
    verdict, results = two_rounds(names(count), lambda pair: False)
    assert not verdict.bad_nodes
    assert not verdict.bad_links
    assert sorted(node for doubt in verdict.undecided for node in doubt.nodes) == names(count)
    assert sorted(pair for doubt in verdict.undecided for pair in doubt.pairs) == sorted(results)


def test_of_two_nodes_none_is_accused() -> None:
    verdict, _ = two_rounds(["a", "b"], without("b"))
    assert verdict == Verdict(undecided=(Doubt(("a", "b"), (("a", "b"),)),))


def test_a_node_with_one_witness_is_accused_together_with_its_link() -> None:
    verdict = locate_faults(["a", "b", "c"], {("a", "b"): True, ("b", "c"): False})
    assert verdict == Verdict(undecided=(Doubt(("c",), (("b", "c"),)),))


def test_two_nodes_with_the_same_only_witness_are_two_doubts() -> None:
    verdict = locate_faults(["a", "b", "c", "d"], {("a", "b"): True, ("b", "c"): False, ("b", "d"): False})
    assert verdict.undecided == (Doubt(("c",), (("b", "c"),)), Doubt(("d",), (("b", "d"),)))


def test_a_node_that_met_only_a_bad_one_is_not_accused() -> None:
    """Whether it would pass with another is not known."""
    results = {("a", "b"): True, ("a", "x"): False, ("b", "x"): False, ("x", "y"): False}
    assert locate_faults(["a", "b", "x", "y"], results) == Verdict(bad_nodes=("x",))


@pytest.mark.parametrize("count", range(3, 17))
def test_a_node_that_ends_between_the_rounds_makes_no_other_bad(count: int) -> None:
    for gone in names(count):
        verdict, results = two_rounds(names(count), without(), gone=[gone])
        assert verdict.well
        assert gone not in {node for pair in results for node in pair}
        left = [node for node in names(count) if node != gone]
        assert {node for pair in results for node in pair} == set(left), "its partner meets others"


@pytest.mark.parametrize("count", range(5, 17))
def test_a_bad_node_is_found_though_another_one_ends(count: int) -> None:
    for gone in names(count):
        for bad in names(count):
            if bad != gone:
                verdict, _ = two_rounds(names(count), without(bad), gone=[gone])
                assert verdict.bad_nodes == (bad,), gone


def test_each_node_of_a_failed_pair_meets_nodes_that_passed() -> None:
    for count in range(6, 17):
        nodes = names(count)
        for bad in first_round(nodes):
            results = {pair: pair != bad for pair in first_round(nodes)}
            passed = {node for pair, well in results.items() if well for node in pair}
            met = second_round(nodes, results)
            for suspect in bad:
                partners = {node for pair in met if suspect in pair for node in pair} - {suspect}
                assert len(partners & passed) >= 2


def test_nodes_that_passed_meet_new_ones_in_the_second_round() -> None:
    for count in range(4, 65, 2):
        nodes = names(count)
        first = dict.fromkeys(first_round(nodes), True)
        second = second_round(nodes, first)
        assert not set(first) & set(second)
        assert {node for pair in second for node in pair} == set(nodes)


@pytest.mark.parametrize("count", range(2, 18))
def test_pairs_connect_all_nodes_that_pass(count: int) -> None:
    """So that it is known which rate is usual."""
    for bad in [(), *((node,) for node in names(count)), *combinations(names(count), 2)]:
        good = [node for node in names(count) if node not in bad]
        _, results = two_rounds(names(count), without(*bad))
        pairs = {pair for pair, well in results.items() if well}
        reached = {*good[:1]}
        for _ in good:
            reached |= {node for pair in pairs if reached & set(pair) for node in pair}
        assert reached == set(good) or (len(bad) == 2 and count < 6), bad


def test_no_node_meets_more_than_a_few_however_many_failed() -> None:
    rng = random.Random(1)
    for count in (7, 64, 301):
        nodes = names(count)
        for share in (0.1, 0.5, 0.9, 0.99, 1.0):
            results = {pair: rng.random() > share for pair in first_round(nodes)}
            met = Counter(node for pair in second_round(nodes, results) for node in pair)
            assert max(met.values(), default=0) <= MOST_MEETINGS


def test_a_turn_has_each_node_once() -> None:
    pairs = [("a", "b"), ("a", "c"), ("b", "c"), ("d", "e")]
    assert turns(pairs) == ((("a", "b"), ("d", "e")), (("a", "c"),), (("b", "c"),))
    assert turns([]) == ()


def test_without_any_fault_the_second_round_has_two_turns_at_most() -> None:
    for count in SIZES:
        first = dict.fromkeys(first_round(names(count)), True)
        assert len(turns(second_round(names(count), first))) <= 2


def test_the_order_of_the_results_changes_nothing() -> None:
    rng = random.Random(2)
    nodes = names(9)
    for _ in range(200):
        results = {pair: rng.random() < 0.6 for pair in combinations(nodes, 2) if rng.random() < 0.4}
        shuffled = list(results.items())
        rng.shuffle(shuffled)
        one, other = locate_faults(nodes, results), locate_faults(nodes, dict(shuffled))
        assert (one.bad_nodes, one.bad_links) == (other.bad_nodes, other.bad_links)
        assert {doubt.nodes for doubt in one.undecided} == {doubt.nodes for doubt in other.undecided}


def test_of_a_network_in_two_parts_the_links_between_them_are_bad_and_no_node() -> None:
    nodes = names(6)
    verdict = all_pairs(nodes, lambda pair: (pair[0] < "n03") == (pair[1] < "n03"))
    assert not verdict.bad_nodes
    assert len(verdict.bad_links) == 9
    beside = all_pairs([*nodes, "x"], lambda pair: "x" not in pair and (pair[0] < "n03") == (pair[1] < "n03"))
    assert (beside.bad_nodes, len(beside.bad_links)) == (("x",), 9)


def test_a_failed_pair_of_two_pairs_that_passed_is_a_link() -> None:
    verdict = locate_faults(["a", "b", "c", "d"], {("a", "b"): True, ("c", "d"): True, ("b", "c"): False})
    assert verdict == Verdict(bad_links=(("b", "c"),))


def test_a_ring_has_each_node_twice() -> None:
    assert ring(["a", "b", "c"]) == (("a", "b"), ("b", "c"), ("a", "c"))
    assert ring(["b", "a"]) == (("a", "b"),)
    assert ring(["a"]) == ()


def test_a_pair_has_one_order() -> None:
    assert pair_of("b", "a") == pair_of("a", "b") == ("a", "b")
