"""How fast the ranks of each node work by themselves, and which are slower than the others: a sequential test.

Each node writes into its record how long its ranks work on a step, without their waits for other ranks (`Paces`). The
coordinator compares them all, and writes the median and the slower ranks into its own record (`PaceComparison`), which
every node follows. Durations are microseconds; no field holds an instant.

The own time of each rank is compared with the median over all ranks. Time above the tolerance adds to the rank's
*score*, and time below it takes from it (a CUSUM test on the logarithm of the ratio): a rank is a straggler from when
its score reaches `NAMED_AT` until it is back at 0. One report adds a bounded amount: `MOST_EXCESS` bounds how slow, and
`MOST_STEPS` for how many steps. So a rank is never named for one slow step, one checkpoint or one busy second, and a
rank that is 40 % slower is named with its third report.

The tolerance is `TOLERATED` above the median, or two times the spread (MAD) over the ranks where they differ more for
long, as the stages of a pipeline do. An excess below `MATTERS` of a step is ignored.

A pure function of the paces and of its own last result. After a change of the coordinator the scores begin at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ..codec import AtMost, Count, Positive
from ..rendezvous.text import Name

MAX_RANKS = 4096
"""Of a node."""
MAX_STRAGGLERS = 16
"""Where more ranks are slower than the others, these are the slowest."""


@dataclass(frozen=True, slots=True)
class Paces:
    """How long the ranks of one node worked on the newest steps of `generation`."""

    generation: Positive
    timed: Count
    """Steps of this generation that were timed so far, on the rank with the fewest."""
    step_us: Count
    """From step to step: the same on all ranks of a synchronous job."""
    own_us: Annotated[tuple[Count, ...], AtMost(MAX_RANKS)]
    """By local rank: the time of a step without the waits for other ranks."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that works longer on each step than the others, which wait for it."""

    node: Name
    rank: Count
    own_us: Count


@dataclass(frozen=True, slots=True)
class PaceComparison:
    """The coordinator's result from the paces of all nodes."""

    generation: Positive
    usual_us: Count
    """The median over all ranks."""
    stragglers: Annotated[tuple[Straggler, ...], AtMost(MAX_STRAGGLERS)] = ()

    @property
    def names(self) -> tuple[int, frozenset[int]]:
        """Which ranks are slower, without the figures."""
        return self.generation, frozenset(straggler.rank for straggler in self.stragglers)


TOLERATED = math.log(1.13)
MOST_EXCESS = math.log(1.41) - TOLERATED
"""The most that one step adds to a score, above the tolerance."""
MOST_STEPS = 4
"""The most steps of one report that count."""
NAMED_AT = 1.8
"""Higher than the score that two reports can reach."""
MOST_SCORE = 3.0
"""A rank that is as fast as the others again is no longer named after `MOST_SCORE / TOLERATED / MOST_STEPS` reports."""
MATTERS = 0.05
SPREADS = 2.0
LONG = 20
"""Steps over which each rank's ratio to the median is smoothed."""
MAD_OF_NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The state of the test for the ranks of one generation."""

    generation: int = 0
    reports: Mapping[str, int] = field(default_factory=dict)
    """By incarnation: the number of timed steps in its newest report."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """By rank; a rank without an entry has the score 0."""
    ratios: Mapping[int, float] = field(default_factory=dict)
    """By rank: the smoothed logarithm of the ratio of its own time to the median."""
    named: frozenset[int] = frozenset()
    comparison: PaceComparison | None = None
    """None: too few ranks have reported."""


def compare(
    before: Watched, generation: int, nodes: Sequence[str], reports: Sequence[tuple[str, int, Paces]]
) -> Watched:
    """The state of the test after a change of the records of `generation`, which trains: `nodes` has the node of each
    rank, `reports` for each member that has reported in it: incarnation, first rank, paces."""
    if before.generation != generation:
        before = Watched(generation)
    own = {rank: own_us for _, first, paces in reports for rank, own_us in enumerate(paces.own_us, first)}
    if len(own) < 2 or len(own) * 2 < len(nodes):
        return before
    usual_us = round(_median(own.values()))
    ratios = {rank: math.log(max(own_us, 1) / max(usual_us, 1)) for rank, own_us in own.items()}
    smooth, scores, seen = dict(before.ratios), dict(before.scores), dict(before.reports)
    spread = MAD_OF_NORMAL * _median(map(abs, (smooth.get(rank, 0.0) for rank in own)))
    tolerated = max(TOLERATED, SPREADS * spread)
    for incarnation, first, paces in reports:
        steps = min(paces.timed - seen.get(incarnation, 0), MOST_STEPS)
        if steps <= 0:
            continue
        seen[incarnation] = paces.timed
        for rank in range(first, first + len(paces.own_us)):
            ratio, matters = ratios[rank], own[rank] - usual_us >= MATTERS * paces.step_us
            was = smooth.get(rank, ratio)
            smooth[rank] = was + (ratio - was) * steps / LONG
            excess = min(ratio if matters else min(ratio, 0.0), TOLERATED + MOST_EXCESS) - tolerated
            scores[rank] = min(max(scores.get(rank, 0.0) + steps * excess, 0.0), MOST_SCORE)
    scores = {rank: score for rank, score in scores.items() if score}
    named = frozenset(rank for rank, score in scores.items() if score >= NAMED_AT or rank in before.named)
    slowest = sorted((rank for rank in named if rank in own), key=lambda rank: (-own[rank], rank))[
        :MAX_STRAGGLERS
    ]
    stragglers = tuple(Straggler(nodes[rank], rank, own[rank]) for rank in sorted(slowest))
    comparison = PaceComparison(generation, usual_us, stragglers)
    return Watched(generation, seen, scores, smooth, named, comparison)


def in_words(straggler: Straggler, usual_us: int) -> str:
    """A whole sentence for the log and the status; `usual_us`: the median over all ranks."""
    more = f" ({straggler.own_us / usual_us - 1:.0%} more)" if usual_us else ""
    return (
        f"rank {straggler.rank} on node {straggler.node} is slower than the others, which wait for it: it works "
        f"{straggler.own_us / 1e6:.3g} s for a step, {usual_us / 1e6:.3g} s are usual{more}"
    )


def _median(values: Iterable[float]) -> float:
    """The lower one: of two ranks the faster is the usual one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
