"""Checks between nodes: they meet in two rounds of pairs, so that the one bad node, or the bad link, is found. Pure.

*Rounds.* One failed pair accuses two nodes and the link between them. In the second round each of its nodes meets two
nodes of pairs that passed: the bad one fails again, the other one passes, and if both pass it is the link. Nodes whose
pairs passed meet those of the next such pair, so that more links are seen, and so that pairs connect all nodes. Of an
odd number of nodes one has no partner in the first round; it meets two nodes in the second. A node may meet several
others in one round, one after the other: `turns` puts them in order.

*Results.* What nodes find out about each other, as they write it down for the one that judges: it may come from another
node, so all of it is bounded and checked. Rates are bytes per second, and no field holds an instant.

*Evidence.* From what was measured to which pairs passed. What is slow is judged by the other pairs: what a link should
do is not known, and all links of a job are meant to be alike. In the first round the usual rate of a pair is the median
of the others'; in the second, which is full of nodes that failed, that of the pairs that passed in the first. Where the
first round has only one pair, it is the median of all others.

*Faults.* A node is *cleared* when one pair with it passed. So a failed pair of two cleared nodes is a bad *link*. A
node without a passed pair that failed with two cleared ones is a bad *node*: that two of its links are bad, and no
other pair shows it, is not excluded, and is mended on the same machine. What remains is *undecided*: with two nodes,
for instance, nothing tells which of them it is, or whether it is what lies between. That is said, and never guessed.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Annotated, TypeAlias

from ...codec import AtMost, Checked, Seconds, Text, Within

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
    place = {node: number for number, node in enumerate(nodes)}
    met, known = list[Pair](), {*results, *near}
    meetings: Counter[str] = Counter()

    def meet(one: str, other: str) -> None:
        pair = pair_of(one, other)
        if one != other and pair not in known:
            met.append(pair)
            known.add(pair)
            meetings.update(pair)

    for one, other in zip(passed[1::2], passed[2::2] + passed[:1], strict=False):
        meet(one, other)
    around = len(met)
    for wanted in range(1, WITNESSES + 1):
        for node in (*failed, *untested):
            for group in (passed, untested, failed) if meetings[node] < wanted else ():
                free = [
                    other
                    for other in group
                    if other != node and meetings[other] < MOST_MEETINGS and pair_of(node, other) not in known
                ]
                if free:
                    # Who has met the fewest; of those the next one in order.
                    ahead = {other: (place[other] - place[node]) % len(nodes) for other in free}
                    meet(node, min(free, key=lambda other: (meetings[other], ahead[other])))
                    break
    return (*met[around:], *met[:around])  # those that meet most others first: it takes the fewest turns


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


def _members(nodes: Sequence[str], pairs: Iterable[Pair]) -> list[str]:
    inside = {node for pair in pairs for node in pair}
    return [node for node in nodes if node in inside]


# --- Results

Node = Annotated[str, Text(128, re.compile(r"[A-Za-z0-9._-]{1,128}"))]
Rate = Annotated[float, Within(0, 2**60)]
Offset = Annotated[float, Within(-(2**40), 2**40)]
Detail = Annotated[str, Text(512)]
Secret = Annotated[str, Text(32, re.compile("[0-9a-f]{32}"))]

MOST_NODES = 4096


class Obstacle(Enum):
    """Why a node does not reach another one."""

    DROPPED = "dropped"
    """No answer at all to SYN."""
    REFUSED = "refused"
    NO_ROUTE = "no-route"
    RESET = "reset"
    """The connection came to be, and then a reset came."""
    SILENT = "silent"
    """The connection came to be, and then nothing more came."""
    STRANGER = "stranger"
    """What answers there is another program, or another machine with the same address."""
    OWN = "own"
    """The node that asks cannot: it is out of descriptors, of ports, or of time."""


@dataclass(frozen=True, slots=True)
class ProbeEndpoint(Checked):
    """Where a node answers the others' probes. A probe begins with `request_token`, and gets `reply_token`."""

    node: Node
    address: Annotated[str, Text(256)]
    port: Annotated[int, Within(1, 65535)]
    request_token: Secret
    reply_token: Secret


@dataclass(frozen=True, slots=True)
class Reach(Checked):
    """One try from `source` to `target`. None: the target answered."""

    source: Node
    target: Node
    obstacle: Obstacle | None = None
    detail: Detail = ""
    clock_offset_s: Offset | None = None
    """The clock of `target` less that of `source`; None: not found out."""


@dataclass(frozen=True, slots=True)
class Measurement(Checked):
    """What `first`, which asked, found out about the pair of itself and `second`; None: not found out, or not tried.

    `sent` is the rate from `first` to `second`, `received` that of the way back.
    """

    round: Annotated[int, Within(1, 2)]
    first: Node
    second: Node
    obstacle: Obstacle | None = None
    detail: Detail = ""
    latency_s: Seconds | None = None
    """Of a byte there and back: the median."""
    sent: Rate | None = None
    received: Rate | None = None
    all_reduce_s: Seconds | None = None
    """Of the fastest of a few."""
    all_reduce_problem: Detail = ""

    @property
    def pair(self) -> Pair:
        return pair_of(self.first, self.second)


@dataclass(frozen=True, slots=True)
class NodeResults(Checked):
    """What one node has to say after one stage of the check."""

    reached: Annotated[tuple[Reach, ...], AtMost(MOST_NODES)] = ()
    measured: Annotated[tuple[Measurement, ...], AtMost(16)] = ()
    seen: Annotated[tuple[Node, ...], AtMost(MOST_NODES)] = ()
    """Whose file in the checkpoint directory this node sees in its own."""


# --- Evidence

SLOW = 0.5
"""Of the usual rate: below it a pair has failed."""
MUCH_TOO_SLOW = 0.25


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
    `compared` are those that others are slow by; None: all."""
    compared = measured if compared is None else compared
    answers = by_reach(reached, measured), by_bandwidth(compared), by_all_reduce(measured)
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


def usual_rates(measured: Sequence[Measurement]) -> dict[Pair, float]:
    """What is usual for each pair, but for those that have no others."""
    known = [one for one in measured if one.latency_s is not None]
    first = [one for one in known if one.round == 1]
    if len(first) < 2:
        return _medians(known, known)
    usual = _medians(first, first)
    passed = [one for one in first if min(rates(one), default=0.0) >= SLOW * usual.get(one.pair, 0.0)]
    return usual | _medians([one for one in known if one.round != 1], passed or first)


def _medians(pairs: Sequence[Measurement], among: Sequence[Measurement]) -> dict[Pair, float]:
    found = {}
    for one in pairs:
        others = [rate for other in among if other.pair != one.pair for rate in rates(other)]
        if others:
            found[one.pair] = statistics.median_high(others)
    return found


# --- Faults

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
    """All empty: each pair passed, or nothing follows from those that did not."""

    bad_nodes: tuple[str, ...] = ()
    bad_links: tuple[Pair, ...] = ()
    undecided: tuple[Doubt, ...] = ()

    @property
    def well(self) -> bool:
        return not (self.bad_nodes or self.bad_links or self.undecided)


def locate_faults(nodes: Sequence[str], results: Mapping[Pair, bool]) -> Verdict:
    """`results`: whether each pair that met has passed. Pairs with a node that ended meanwhile are left out of it."""
    passed = [pair for pair, well in results.items() if well]
    failed = [pair for pair, well in results.items() if not well]
    cleared = {node for pair in passed for node in pair}
    bad = {node for node in nodes if node not in cleared and _accusers(node, failed, cleared) >= ACCUSERS}
    links = [pair for pair in failed if cleared.issuperset(pair)]
    unexplained = [pair for pair in failed if not (cleared.issuperset(pair) or bad.intersection(pair))]
    suspects = [node for node in nodes if node not in cleared and any(node in pair for pair in unexplained)]
    doubts = tuple(
        Doubt(group, tuple(pair for pair in unexplained if set(pair) & set(group)))
        for group in connected(suspects, unexplained)
    )
    bad_nodes = tuple(node for node in nodes if node in bad)
    return Verdict(bad_nodes, tuple(sorted(links)), doubts)


def shows_usual(nodes: Sequence[str], results: Mapping[Pair, bool]) -> bool:
    """Whether pairs that passed connect most nodes, where pairs are judged by the others alone. Else the failed ones
    may be as they should be, and those that passed better: nodes of one machine, or at one switch."""
    passed = [pair for pair, well in results.items() if well]
    groups = [group for group in connected(nodes, passed) if len(group) > 1]
    return len(groups) == 1 and len(groups[0]) >= max(LEAST_USUAL, len(nodes) * MOST_NODES_USUAL)


def _accusers(node: str, failed: Iterable[Pair], cleared: set[str]) -> int:
    return sum(1 for pair in failed if node in pair and cleared.intersection(pair))


def connected(nodes: Sequence[str], pairs: Iterable[Pair]) -> list[tuple[str, ...]]:
    """Of these nodes those together that the pairs connect."""
    group_of = {node: {node} for node in nodes}
    for one, other in pairs:
        if one in group_of and other in group_of and group_of[one] is not group_of[other]:
            group_of[one] |= group_of[other]
            for node in group_of[other]:
                group_of[node] = group_of[one]
    found = {id(group): group for group in group_of.values()}
    return [tuple(node for node in nodes if node in group) for group in found.values()]
