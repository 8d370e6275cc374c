"""What counts as slow among pairs, and that two rounds of real numbers find each slow node."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from elastic_agent.health.checks.pairs import (
    Measurement,
    Obstacle,
    Pair,
    Reach,
    Verdict,
    all_well,
    by_all_reduce,
    by_bandwidth,
    by_reach,
    first_round,
    locate_faults,
    second_round,
)

FAST = 1e9
Rate = Callable[[str, str], float]
"""From one node to another."""


def names(count: int) -> list[str]:
    return [f"n{number:02d}" for number in range(count)]


def measured(number: int, pair: Pair, rate: Rate, rng: random.Random) -> Measurement:
    """Links of one kind differ by a quarter or so."""

    def one(source: str, target: str) -> float:
        return rate(source, target) * rng.uniform(0.8, 1.0)

    first, second = pair
    return Measurement(
        number, first, second, latency_s=5e-5, sent=one(first, second), received=one(second, first)
    )


def two_rounds(nodes: Sequence[str], rate: Rate, seed: int = 0) -> tuple[Verdict, set[Pair]]:
    rng = random.Random(seed)
    found = [measured(1, pair, rate, rng) for pair in first_round(nodes)]
    found += [measured(2, pair, rate, rng) for pair in second_round(nodes, all_well([], found))]
    return locate_faults(nodes, by_bandwidth(found)), {one.pair for one in found}


@pytest.mark.parametrize("count", range(3, 17))
def test_each_node_that_is_slow_both_ways_or_in_one_direction_only_is_found(count: int) -> None:
    for bad in names(count):
        ways: list[Rate] = [
            lambda source, target, bad=bad: FAST / 5 if bad in (source, target) else FAST,  # type: ignore[misc]
            lambda source, target, bad=bad: FAST / 5 if bad == source else FAST,  # type: ignore[misc]
            lambda source, target, bad=bad: FAST / 5 if bad == target else FAST,  # type: ignore[misc]
        ]
        for rate in ways:
            assert two_rounds(names(count), rate, count)[0] == Verdict(bad_nodes=(bad,)), bad


@pytest.mark.parametrize("count", range(3, 17))
def test_each_slow_link_that_a_round_tries_is_found(count: int) -> None:
    for link in combinations(names(count), 2):
        verdict, tried = two_rounds(
            names(count),
            lambda source, target, link=link: FAST / 10 if (source, target) == link else FAST,  # type: ignore[misc]
            count,
        )
        assert verdict == (Verdict(bad_links=(link,)) if link in tried else Verdict()), link


@pytest.mark.parametrize("count", range(2, 17))
def test_links_that_are_alike_but_for_a_quarter_are_not_slow(count: int) -> None:
    for seed in range(20):
        assert two_rounds(names(count), lambda source, target: FAST, seed)[0].well


@pytest.mark.parametrize("count", range(6, 17))
def test_two_slow_nodes_are_found(count: int) -> None:
    """With six nodes two of three pairs of the first round are slow then."""
    for bad in combinations(names(count), 2):
        verdict, _ = two_rounds(
            names(count),
            lambda source, target, bad=bad: FAST / 8 if {source, target} & set(bad) else FAST,  # type: ignore[misc]
        )
        assert verdict.bad_nodes == bad


def test_of_two_nodes_none_is_slow_as_nothing_is_usual() -> None:
    assert two_rounds(["a", "b"], lambda source, target: 10.0)[0].well


def a_pair(first: str, second: str, number: int = 1, **changes: object) -> Measurement:
    good = Measurement(number, first, second, latency_s=5e-5, sent=FAST, received=FAST)
    return replace(good, **changes)  # type: ignore[arg-type]


GOOD = [a_pair("c", "d"), a_pair("e", "f")]


def test_a_stream_of_which_nothing_came_is_slow_even_without_others() -> None:
    vanished = a_pair("a", "b", sent=0.0, received=None, obstacle=Obstacle.SILENT)
    assert by_bandwidth([vanished]) == {("a", "b"): False}
    assert by_reach([], [vanished]) == {("a", "b"): True}, "single bytes pass"


def test_a_pair_that_was_not_reached_says_nothing_of_its_speed() -> None:
    blocked = Measurement(1, "a", "b", Obstacle.DROPPED, "no answer to SYN")
    assert by_reach([], [blocked]) == {("a", "b"): False}
    assert by_bandwidth([blocked]) == by_all_reduce([blocked]) == {}
    assert all_well([], [blocked, *GOOD]) == {("a", "b"): False, ("c", "d"): True, ("e", "f"): True}


def test_a_pair_is_not_reached_when_one_way_is_not() -> None:
    there, back = Reach("a", "b"), Reach("b", "a", Obstacle.DROPPED)
    assert by_reach([there], []) == {("a", "b"): True}
    assert by_reach([there, back], []) == by_reach([back, there], []) == {("a", "b"): False}


def test_an_all_reduce_that_was_not_tried_says_nothing() -> None:
    found = [
        a_pair("a", "b"),
        a_pair("c", "d", all_reduce_s=0.01),
        a_pair("e", "f", all_reduce_problem="RuntimeError: timed out"),
    ]
    assert by_all_reduce(found) == {("c", "d"): True, ("e", "f"): False}
    assert all_well([], found) == {("a", "b"): True, ("c", "d"): True, ("e", "f"): False}
