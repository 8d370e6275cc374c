"""Which ranks are slower than the others: a sequential test over the paces in the nodes' records.

The own time of each rank is compared with the median over all ranks. Time above the tolerance adds to the rank's
*score*, and time below it takes from it (a CUSUM test on the logarithm of the ratio): a rank is a straggler from when
its score reaches `NAMED_AT` until it is back at 0. One report adds a bounded amount: `MOST_EXCESS` bounds how slow, and
`MOST_STEPS` for how many steps. So a rank is never named for one slow step, one checkpoint or one busy second, and a
rank that is 40 % slower is named with its third report.

The tolerance is `TOLERATED` above the median, or two times the spread (MAD) over the ranks where they differ more for
long, as the stages of a pipeline do. An excess below `MATTERS` of a step is ignored.

A pure function of the records and of its own last result. After a change of the coordinator the scores begin at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..records import NodeRecord, World
from ..statements.paces import MAX_STRAGGLERS, Comparison, Paces, Straggler

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
    comparison: Comparison | None = None
    """None: too few ranks have reported."""


def compare(before: Watched, world: World | None, nodes: Iterable[NodeRecord]) -> Watched:
    """The state of the test after a change of the records; `nodes` are all that the coordinator knows."""
    if world is None or not world.trains:
        return Watched()
    if before.generation != world.generation:
        before = Watched(world.generation)
    known = _paces(world, nodes)
    own = {rank: own_us for _, first, paces in known for rank, own_us in enumerate(paces.own_us, first)}
    if len(own) < 2 or len(own) * 2 < world.size:
        return before
    usual_us = round(_median(own.values()))
    ratios = {rank: math.log(max(own_us, 1) / max(usual_us, 1)) for rank, own_us in own.items()}
    smooth, scores, reports = dict(before.ratios), dict(before.scores), dict(before.reports)
    spread = MAD_OF_NORMAL * _median(map(abs, (smooth.get(rank, 0.0) for rank in own)))
    tolerated = max(TOLERATED, SPREADS * spread)
    for incarnation, first, paces in known:
        steps = min(paces.timed - reports.get(incarnation, 0), MOST_STEPS)
        if steps <= 0:
            continue
        reports[incarnation] = paces.timed
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
    nodes_of = {
        rank: member.node
        for member in world.members
        for rank in range(member.first_rank, member.first_rank + member.slots)
    }
    stragglers = tuple(Straggler(nodes_of[rank], rank, own[rank]) for rank in sorted(slowest))
    comparison = Comparison(world.generation, usual_us, stragglers)
    return Watched(world.generation, reports, scores, smooth, named, comparison)


def in_force(leader: NodeRecord | None, world: World | None) -> Comparison | None:
    """The comparison in the coordinator's record, if it is of the generation that trains."""
    found = leader.comparison if leader is not None else None
    if found is None or world is None or not world.trains or found.generation != world.generation:
        return None
    return found


def in_words(straggler: Straggler, usual_us: int) -> str:
    """A whole sentence for the log and the status; `usual_us`: the median over all ranks."""
    more = f" ({straggler.own_us / usual_us - 1:.0%} more)" if usual_us else ""
    return (
        f"rank {straggler.rank} on node {straggler.node} is slower than the others, which wait for it: it works "
        f"{straggler.own_us / 1e6:.3g} s for a step, {usual_us / 1e6:.3g} s are usual{more}"
    )


def _paces(world: World, nodes: Iterable[NodeRecord]) -> list[tuple[str, int, Paces]]:
    """For each member of this world that has reported in this generation: incarnation, first rank, paces."""

    def known() -> Iterator[tuple[str, int, Paces]]:
        places = {member.incarnation: member for member in world.members}
        for node in nodes:
            member, paces = places.get(node.incarnation), node.paces
            if (
                member
                and paces
                and paces.generation == world.generation
                and len(paces.own_us) == member.slots
            ):
                yield node.incarnation, member.first_rank, paces

    return list(known())


def _median(values: Iterable[float]) -> float:
    """The lower one: of two ranks the faster is the usual one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
