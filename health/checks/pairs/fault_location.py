"""Which nodes and which links are bad, as far as it follows from which pairs passed and which failed.

Words: a node is *cleared* when one pair with it passed. So a failed pair of two cleared nodes is a bad *link*. A node
without a passed pair that failed with two cleared ones is a bad *node*: that two of its links are bad, and no other
pair shows it, is not excluded, and is mended on the same machine. What remains is *undecided*: with two nodes, for
instance, nothing tells which of them it is, or whether it is what lies between. That is said, and never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from .rounds import Pair, pair_of

ACCUSERS = 2
LEAST_USUAL = 3
"""Nodes: two may have a short way of their own."""
MOST_NODES_USUAL = 2 / 3


@dataclass(frozen=True, slots=True)
class Doubt:
    """These pairs failed, and nothing tells whether it is one of `nodes`, or what lies between."""

    nodes: tuple[str, ...]
    """Those that no passed pair has cleared."""
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All empty: each pair passed. `untested` nodes met none, or only bad ones."""

    bad_nodes: tuple[str, ...] = ()
    bad_links: tuple[Pair, ...] = ()
    undecided: tuple[Doubt, ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
    """Groups of nodes that pass among themselves, and never with a node of another group: each such pair was tried.
    What lies between groups is the cause, and not listed in `bad_links`."""
    untested: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        return not (self.bad_nodes or self.bad_links or self.undecided or self.parts)


def locate_faults(nodes: Sequence[str], results: Mapping[Pair, bool]) -> Verdict:
    """`results`: whether each pair that met has passed. Pairs with a node that ended meanwhile are left out of it."""
    passed = [pair for pair, well in results.items() if well]
    failed = [pair for pair, well in results.items() if not well]
    cleared = {node for pair in passed for node in pair}
    bad = {node for node in nodes if node not in cleared and _accusers(node, failed, cleared) >= ACCUSERS}
    links = [pair for pair in failed if cleared.issuperset(pair)]
    parts = _parts(nodes, passed, results)
    unexplained = [pair for pair in failed if not (cleared.issuperset(pair) or bad.intersection(pair))]
    suspects = [node for node in nodes if node not in cleared and any(node in pair for pair in unexplained)]
    doubts = tuple(
        Doubt(group, tuple(pair for pair in unexplained if set(pair) & set(group)))
        for group in _groups(suspects, unexplained)
    )
    known = cleared | bad | {node for doubt in doubts for node in doubt.nodes}
    return Verdict(
        tuple(node for node in nodes if node in bad),
        () if parts else tuple(sorted(links)),
        doubts,
        parts,
        tuple(node for node in nodes if node not in known),
    )


def shows_usual(nodes: Sequence[str], results: Mapping[Pair, bool]) -> bool:
    """Whether pairs that passed connect most nodes, where pairs are judged by the others alone. Else the failed ones
    may be as they should be, and those that passed better: nodes of one machine, or at one switch."""
    passed = [pair for pair, well in results.items() if well]
    groups = [group for group in _groups(nodes, passed) if len(group) > 1]
    return len(groups) == 1 and len(groups[0]) >= max(LEAST_USUAL, len(nodes) * MOST_NODES_USUAL)


def _accusers(node: str, failed: Iterable[Pair], cleared: set[str]) -> int:
    return sum(1 for pair in failed if node in pair and cleared.intersection(pair))


def _parts(
    nodes: Sequence[str], passed: Sequence[Pair], results: Mapping[Pair, bool]
) -> tuple[tuple[str, ...], ...]:
    groups = [group for group in _groups(nodes, passed) if len(group) > 1]
    between = (pair_of(one, other) for a, b in combinations(groups, 2) for one in a for other in b)
    whole = len(groups) > 1 and all(pair in results for pair in between)
    return tuple(groups) if whole else ()


def _groups(nodes: Sequence[str], pairs: Iterable[Pair]) -> list[tuple[str, ...]]:
    """Of these nodes those together that the pairs connect."""
    group_of = {node: {node} for node in nodes}
    for one, other in pairs:
        if one in group_of and other in group_of and group_of[one] is not group_of[other]:
            group_of[one] |= group_of[other]
            for node in group_of[other]:
                group_of[node] = group_of[one]
    found = {id(group): group for group in group_of.values()}
    return [tuple(node for node in nodes if node in group) for group in found.values()]
