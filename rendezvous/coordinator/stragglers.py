"""Which ranks are slower than the others: a sequential test over the paces in the nodes' records.

The own time of each rank is compared with the median over all ranks. What is more than usual adds to the rank's
*score*, and what is less takes from it (a CUSUM test on the logarithm of the ratio): a rank is a straggler when its
score reaches `NAMED_AT`, and until it is back at 0. How much one report can add is bounded twice, by `MOST_EXCESS` for
how slow and by `MOST_STEPS` for how long: so one slow step, one checkpoint or one busy second name nobody, however slow
they were, and a rank that is 40 % slower is named with its third report.

Usual is what lies within `TOLERATED` of the median, or within two times the spread (MAD) over the ranks where these
differ more for long, as the stages of a pipeline do. What costs the job less than `MATTERS` of a step is no matter.

A pure function of the records and of what it said before. Whoever coordinates next begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..records import Exclusion, NodeRecord, World, life_of
from ..statements.paces import MAX_STRAGGLERS, Comparison, Paces, Straggler
from .candidates import first_that_fit, newcomers
from .exclusions import exclude, left_out
from .view import Policy, View

STRAGGLER = "straggler"
"""The cause of an exclusion."""
TOLERATED = math.log(1.13)
MOST_EXCESS = math.log(1.41) - TOLERATED
"""Of one step."""
MOST_STEPS = 4
"""Of one report: those that it adds count as at most so many."""
NAMED_AT = 1.8
"""More than two reports can add."""
MOST_SCORE = 3.0
"""A rank that is as fast as the others again is none after `MOST_SCORE / TOLERATED / MOST_STEPS` reports."""
MATTERS = 0.05
SPREADS = 2.0
LONG = 20
"""Steps over which it is smoothed how far the ranks are apart."""
MAD_OF_NORMAL = 1.4826
"""Standard deviations in one median absolute deviation, where what is measured is normally distributed."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of one generation's ranks."""

    generation: int = 0
    reports: Mapping[str, int] = field(default_factory=dict)
    """By incarnation: the steps that its newest report has counted."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """By rank: those that are not 0."""
    ratios: Mapping[int, float] = field(default_factory=dict)
    """By rank: of its own time to the median, the logarithm, smoothed."""
    named: frozenset[int] = frozenset()
    comparison: Comparison | None = None
    """None: too little is known."""


def compare(before: Watched, world: World | None, nodes: Iterable[NodeRecord]) -> Watched:
    """After a change of the records: `nodes` are all that the coordinator knows."""
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


def slow_members(watched: Watched, world: World | None) -> Iterator[str]:
    """The incarnations of those with a straggler."""
    if world is not None and watched.generation == world.generation:
        for member in world.members:
            if not watched.named.isdisjoint(range(member.first_rank, member.first_rank + member.slots)):
                yield member.incarnation


def exclude_slowest(
    world: World, view: View, present: Sequence[NodeRecord], policy: Policy, now: float
) -> tuple[tuple[Exclusion, ...] | None, float | None]:
    """The world's exclusions with that of the node which has held the others up for long enough, longest first; and
    when it will have.

    Only where a node stands by that takes its place: a job that is slow is better than one that is smaller.
    """
    after_s = policy.exclude_stragglers_s
    out = left_out(world.exclusions)
    slow = {
        node.incarnation: node
        for node in present
        if node.incarnation in view.slow_since and node.node not in out
    }
    if after_s is None or not slow:
        return None, None
    since, node = min(
        ((view.slow_since[one], node) for one, node in slow.items()), key=lambda found: found[0]
    )
    if now < since + after_s:
        return None, since + after_s
    reason = f"a rank on it was slower than the others, which waited for it, for {after_s:g} s (--exclude-stragglers)"
    exclusions = exclude(
        world.exclusions, node.node, life_of(node.incarnation), STRAGGLER, reason, record=node
    )
    ready = [one for one in newcomers(view, exclusions) if one.ready]
    others = [one for one in present if one is not node]
    replaced = len(first_that_fit([*others, *ready], policy)) >= len(present)
    return (exclusions if replaced else None), None


def in_words(straggler: Straggler, comparison: Comparison) -> str:
    """A sentence that stands alone."""
    own_s, usual_s = straggler.own_us / 1e6, comparison.usual_us / 1e6
    more = f" ({straggler.own_us / comparison.usual_us - 1:.0%} more)" if comparison.usual_us else ""
    return (
        f"rank {straggler.rank} on node {straggler.node} is slower than the others, which wait for it: it works "
        f"{own_s:.3g} s for a step, {usual_s:.3g} s are usual{more}"
    )


def _paces(world: World, nodes: Iterable[NodeRecord]) -> list[tuple[str, int, Paces]]:
    """Of the members of this world: incarnation, first rank, and what the node has said of this generation."""

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
