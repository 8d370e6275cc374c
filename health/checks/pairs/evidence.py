"""From what was measured to which pairs passed: one answer per pair and check.

What is slow is judged by the other pairs: what a link should do is not known, and all links of a job are meant to be
alike. In the first round the usual rate of a pair is the median of the others'; in the second, which is full of nodes
that failed, that of the pairs that passed in the first. Where the first round has only one pair, it is the median of
all others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from .results import Measurement, Reach
from .rounds import Pair, pair_of

SLOW = 0.5
"""Of the usual rate: below it a pair has failed."""
MUCH_TOO_SLOW = 0.25
LATE = 4.0
"""Times the usual latency, and at least `LATE_BY_S` more than it."""
LATE_BY_S = 0.001


def by_reach(reached: Iterable[Reach], measured: Iterable[Measurement]) -> dict[Pair, bool]:
    """A pair fails with one of its two ways. A measurement that did not even begin is a try, too."""
    found: dict[Pair, bool] = {}
    for one in reached:
        pair = pair_of(one.source, one.target)
        found[pair] = found.get(pair, True) and one.obstacle is None
    for measurement in measured:
        began = measurement.latency_s is not None
        found[measurement.pair] = found.get(measurement.pair, True) and began
    return found


def by_latency(measured: Sequence[Measurement]) -> dict[Pair, bool]:
    return {pair: times < LATE for pair, times in lateness(measured).items()}


def by_bandwidth(measured: Sequence[Measurement]) -> dict[Pair, bool]:
    return {pair: part >= SLOW for pair, part in slowness(measured).items()}


def by_all_reduce(measured: Iterable[Measurement]) -> dict[Pair, bool]:
    return {
        one.pair: not one.all_reduce_problem
        for one in measured
        if one.all_reduce_problem or one.all_reduce_s is not None
    }


def all_well(
    reached: Sequence[Reach],
    measured: Sequence[Measurement],
    compared: Sequence[Measurement] | None = None,
) -> dict[Pair, bool]:
    """Of the pairs that were measured: whether all that was tried has passed. It is what the second round goes by.
    `compared` are those that others are slow or late by; None: all."""
    compared = measured if compared is None else compared
    answers: list[Mapping[Pair, bool]] = [
        by_reach(reached, measured),
        by_latency(compared),
        by_bandwidth(compared),
        by_all_reduce(measured),
    ]
    return {one.pair: all(answer.get(one.pair, True) for answer in answers) for one in measured}


def rates(one: Measurement) -> tuple[float, ...]:
    return tuple(rate for rate in (one.sent, one.received) if rate is not None)


def slowness(measured: Sequence[Measurement]) -> dict[Pair, float]:
    """Of each pair the lower of its two rates as a part of the usual one; 1 where nothing is usual, and 0 when nothing
    of a stream came."""
    usual = usual_rates(measured)

    def part(one: Measurement) -> float:
        if one.obstacle is not None:
            return 0.0
        return min(rates(one), default=0.0) / usual[one.pair] if usual.get(one.pair) else 1.0

    return {one.pair: part(one) for one in measured if one.latency_s is not None}


def lateness(measured: Sequence[Measurement]) -> dict[Pair, float]:
    """Of each pair how many times the usual latency it has; at most 1 within `LATE_BY_S` of it."""
    usual = usual_latency(measured)
    return {one.pair: _times(one, usual.get(one.pair)) for one in measured if one.latency_s is not None}


def usual_latency(measured: Sequence[Measurement]) -> dict[Pair, float]:
    known = [one for one in measured if one.latency_s is not None]
    return _usual(
        known, lambda one: (one.latency_s or 0.0,), lambda one, usual_s: _times(one, usual_s) < LATE
    )


def usual_rates(measured: Sequence[Measurement]) -> dict[Pair, float]:
    known = [one for one in measured if one.latency_s is not None]
    return _usual(known, rates, lambda one, usual: min(rates(one), default=0.0) >= SLOW * usual)


def _times(one: Measurement, usual_s: float | None) -> float:
    latency_s = one.latency_s or 0.0
    if usual_s is None or latency_s <= usual_s + LATE_BY_S:
        return 1.0
    return latency_s / max(usual_s, 1e-9)


def _usual(
    measured: Sequence[Measurement],
    values: Callable[[Measurement], tuple[float, ...]],
    well: Callable[[Measurement, float], bool],
) -> dict[Pair, float]:
    """What is usual for each pair, but for those that have no others."""
    first = [one for one in measured if one.round == 1]
    if len(first) < 2:
        return _medians(measured, measured, values)
    usual = _medians(first, first, values)
    passed = [one for one in first if one.pair not in usual or well(one, usual[one.pair])]
    return usual | _medians([one for one in measured if one.round != 1], passed or first, values)


def _medians(
    pairs: Sequence[Measurement],
    among: Sequence[Measurement],
    values: Callable[[Measurement], tuple[float, ...]],
) -> dict[Pair, float]:
    found = {}
    for one in pairs:
        others = [value for other in among if other.pair != one.pair for value in values(other)]
        if others:
            found[one.pair] = statistics.median_high(others)
    return found
