"""Chooses the pairs of nodes that meet: two rounds, the second chosen by what the first has shown.

One failed pair accuses two nodes and the link between them. In the second round each of its nodes meets two nodes of
pairs that passed: the bad one fails again, the other one passes, and if both pass it is the link. Nodes whose pairs
passed meet new partners, so that more links are seen, and so that pairs connect all nodes.

Of an odd number of nodes one has no partner in the first round; it meets two nodes in the second. A node may meet
several others in one round, one after the other: `turns` puts them in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeAlias

Pair: TypeAlias = tuple[str, str]
"""Two nodes, as `pair_of` orders them."""

WITNESSES = 2
"""How many nodes one that is in doubt meets in the second round: two failures with nodes that pass elsewhere are the
node's fault, unless two of its links are bad."""
MOST_MEETINGS = 4
"""Of one node in the second round: each takes seconds."""


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def spread(nodes: Mapping[str, str]) -> tuple[str, ...]:
    """So that few neighbours are on one machine. `nodes`: the machine of each; the first one stays the first.

    >>> spread({"a": "x", "b": "x", "c": "y", "d": "y", "e": "z"})
    ('a', 'c', 'e', 'b', 'd')
    """
    machines: dict[str, list[str]] = {}
    for node, machine in nodes.items():
        machines.setdefault(machine, []).append(node)
    rows = zip_longest(*machines.values())
    return tuple(node for row in rows for node in row if node is not None)


def first_round(nodes: Sequence[str]) -> tuple[Pair, ...]:
    """Neighbours meet; the last of an odd number meets no other."""
    return tuple(pair_of(*both) for both in zip(nodes[::2], nodes[1::2], strict=False))


def second_round(
    nodes: Sequence[str], results: Mapping[Pair, bool], near: Collection[Pair] = ()
) -> tuple[Pair, ...]:
    """`nodes` are those that are still there; `results` says of each pair of the first round whether it passed. Those
    of `near` need not meet."""
    passed = _members(nodes, (pair for pair, well in results.items() if well))
    failed = [
        node
        for node in _members(nodes, (pair for pair, well in results.items() if not well))
        if node not in passed
    ]
    untested = [node for node in nodes if node not in (*passed, *failed)]
    round_two = _Round(nodes, results, (*failed, *untested) if failed else (), near)
    for meetings in range(1, WITNESSES + 1):
        for node in (*failed, *untested):
            if round_two.meetings[node] < meetings:
                round_two.meet(node, passed, untested, failed)
    rest = [node for node in passed if not round_two.meetings[node]]
    for one, other in zip(rest[1::2], rest[2::2] + rest[:1], strict=False):
        round_two.add(one, other)
    for node in passed:  # clocks are compared along pairs
        if not round_two.connected(node, passed[0]):
            round_two.meet(node, [other for other in passed if not round_two.connected(other, node)])
    return tuple(round_two.pairs)


def turns(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """The same pairs, so that each node is in one pair of a turn at most."""
    found: list[list[Pair]] = []
    for pair in pairs:
        free = (turn for turn in found if not any(node in other for other in turn for node in pair))
        turn = next(free, None)
        if turn is None:
            found.append([pair])
        else:
            turn.append(pair)
    return tuple(map(tuple, found))


def ring(nodes: Sequence[str]) -> tuple[Pair, ...]:
    """Each node and the next one."""
    around = zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
    return tuple(dict.fromkeys(pair_of(one, other) for one, other in around if one != other))


class _Round:
    """The pairs of a round as they are chosen."""

    def __init__(
        self,
        nodes: Sequence[str],
        results: Mapping[Pair, bool],
        in_doubt: Iterable[str],
        near: Collection[Pair],
    ) -> None:
        self.pairs: list[Pair] = []
        self.meetings: Counter[str] = Counter()
        self._place = {node: place for place, node in enumerate(nodes)}
        self._known = {*results, *near}
        self._groups = {node: {node} for node in nodes}
        for pair, well in results.items():
            if well:
                self._connect(*pair)
        self._in_doubt = set(in_doubt)

    def meet(self, node: str, *groups: Sequence[str]) -> None:
        """One of the first group that has a node to meet: who has met the fewest, of those one that no pairs connect
        with this node yet, the next in order first."""
        for group in groups:
            free = [
                other
                for other in group
                if other != node
                and pair_of(node, other) not in self._known
                and self.meetings[other] < MOST_MEETINGS
            ]
            if free:
                self.add(node, min(free, key=lambda other: self._preference(node, other)))
                return

    def add(self, one: str, other: str) -> None:
        pair = pair_of(one, other)
        if one != other and pair not in self._known:
            self._known.add(pair)
            self.pairs.append(pair)
            self.meetings.update(pair)
            if not self._in_doubt & set(pair):
                self._connect(one, other)

    def connected(self, one: str, other: str) -> bool:
        """By pairs of both rounds that have passed, or may be thought to."""
        return self._groups[one] is self._groups[other]

    def _connect(self, one: str, other: str) -> None:
        """Without nodes that have ended."""
        if one in self._groups and other in self._groups and not self.connected(one, other):
            group = self._groups[one] | self._groups[other]
            self._groups.update(dict.fromkeys(group, group))

    def _preference(self, node: str, other: str) -> tuple[int, bool, int]:
        return self.meetings[other], self.connected(node, other), self._distance(node, other)

    def _distance(self, node: str, other: str) -> int:
        return (self._place[other] - self._place[node]) % len(self._place)


def _members(nodes: Sequence[str], pairs: Iterable[Pair]) -> list[str]:
    inside = {node for pair in pairs for node in pair}
    return [node for node in nodes if node in inside]
