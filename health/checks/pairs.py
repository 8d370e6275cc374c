"""Checks between nodes, as far as they are pure: who tries whom, and what follows for which node or link.

First each node tries to reach the others, then pairs do an all-reduce, in rounds: in each, every node meets another
one. What nodes find out about each other may come from another node, so all of it is bounded and checked.

*Verdict.* A failed pair accuses two nodes and the link between them. A node is *cleared* when one pair with it passed.
So a failed pair of two cleared nodes is a bad *link*, and a node without a passed pair that failed with two cleared
ones is a bad *node*. What remains is in *doubt*, as with two nodes alone: that is said, and never guessed.

*Slow* is what has less than half of the median of the other pairs: what a link should do is not known. Pairs of one
machine are left out of that, but where all nodes are on one.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, TypeAlias

from ...codec import AtMost, Checked, Count, Text, Within
from .finding import Finding, Outcome, listed

MOST_NODES = 4096
MOST_TRIED = 64
"""Other nodes that one tries to reach: of more, the nearest in the order of the nodes."""
ROUNDS = 3
"""So that two others of each node tell whether it is the node."""
ACCUSERS = 2
SLOW, MUCH_TOO_SLOW = 0.5, 0.25
"""Of the usual rate: a warning, and a failure."""
LEAST_USUAL = 4
"""Nodes: of three, two may have a short way of their own."""

Pair: TypeAlias = tuple[str, str]
"""Two nodes, as `pair_of` orders them."""
Node = Annotated[str, Text(128, re.compile(r"[A-Za-z0-9._-]{1,128}"))]
Port = Annotated[int, Within(1, 65535)]
Trait = Annotated[str, Text(64)]


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def rounds(nodes: Sequence[str]) -> Iterator[tuple[Pair, ...]]:
    """The first ones of a tournament; of an odd number of nodes one rests in each.

    >>> list(rounds(["a", "b", "c"]))
    [(('b', 'c'),), (('a', 'c'),), (('a', 'b'),)]
    """
    circle = [*nodes, *([""] if len(nodes) % 2 else [])]
    for _ in range(min(ROUNDS, len(circle) - 1)):
        both = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        yield tuple(pair_of(*pair) for pair in both if all(pair))
        circle[1:] = [circle[-1], *circle[1:-1]]


def tried_by(node: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Whom it tries to reach."""
    place = nodes.index(node)
    others = [*nodes[place + 1 :], *nodes[:place]]
    half = MOST_TRIED // 2
    return tuple(others if len(others) <= MOST_TRIED else others[:half] + others[-half:])


# --- What nodes say


class Obstacle(Enum):
    """Why a node does not reach another one."""

    DROPPED = "dropped"
    REFUSED = "refused"
    NO_ROUTE = "no-route"
    SILENT = "silent"
    """The connection came to be, and then nothing more came, or a reset."""
    STRANGER = "stranger"
    OWN = "own"
    """The node that asks cannot: it is out of descriptors or of ports, or its address has gone."""


WHAT_AND_ADVICE = {
    Obstacle.DROPPED: (
        "no answer to SYN, though the node is there: a packet filter drops, or a cable or VLAN is wrong",
        "look at `nft list ruleset` on both nodes, and at security groups and NetworkPolicies between them: open the"
        " port, and those of --port-range; else look at cables, VLANs and routes",
    ),
    Obstacle.REFUSED: (
        "refused: no process listens there, or a packet filter rejects",
        "look whether the check still runs on that node, and for a `reject` rule (nft list ruleset)",
    ),
    Obstacle.NO_ROUTE: (
        "no route to it, no answer to ARP, or a packet filter rejects it",
        "look at `ip route get ADDRESS`, `ip neigh`, and `nft list ruleset` on both nodes; choose interfaces that see"
        " each other",
    ),
    Obstacle.SILENT: (
        "the connection comes to be, and then nothing passes",
        "a firewall cuts connections, or packets are larger than the network takes (ping -M do -s 1472 ADDRESS)",
    ),
    Obstacle.STRANGER: (
        "another program or machine answers there",
        "two machines have that address (arping -D), or NAT or a proxy lead elsewhere",
    ),
    Obstacle.OWN: ("it cannot ask", "look at what the node that asks lacks: ports, descriptors, its address"),
}


@dataclass(frozen=True, slots=True)
class NodeFacts(Checked):
    """One node of a check. `life` is that of its process."""

    node: Node
    life: Node
    address: Annotated[str, Text(256)]
    port: Port
    """Where it answers the others."""
    token: Annotated[str, Text(64, re.compile("[0-9a-f]{64}"))]
    """They show the first half, and it answers with the second."""
    store_port: Port
    """Where the store of an all-reduce with this node listens."""
    machine: Trait = ""
    """The same for all that one kernel runs; empty: not known."""
    interface: Trait = ""
    traits: dict[str, Trait] = field(default_factory=dict)
    """By the names of `TRAITS`; what is not known is not there."""
    findings: Annotated[tuple[Finding, ...], AtMost(32)] = ()
    """Of its own checks, those that are not ok."""

    @property
    def has_torch(self) -> bool:
        return self.traits.get("torch", "none") != "none"


@dataclass(frozen=True, slots=True)
class AllReduce(Checked):
    """Of this node with another one: bytes per second, or what went wrong."""

    other: Node
    rate: Annotated[float, Within(0, 2**60)] = 0.0
    problem: Annotated[str, Text(512)] = ""


@dataclass(frozen=True, slots=True)
class NodeResults(Checked):
    """What one node has found out in one stage."""

    tried: Annotated[tuple[Node, ...], AtMost(MOST_TRIED)] = ()
    blocked: dict[str, Obstacle] = field(default_factory=dict)
    """Those of `tried` that it does not reach."""
    all_reduce: AllReduce | None = None


# --- The verdict


@dataclass(frozen=True, slots=True)
class Verdict:
    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    doubts: tuple[Pair, ...] = ()


def locate_faults(passed: Mapping[Pair, bool]) -> Verdict:
    """`passed`: whether each pair that was tried did."""
    cleared = {node for pair, well in passed.items() if well for node in pair}
    failed = [pair for pair, well in passed.items() if not well]
    accused = Counter(node for pair in failed for node in set(pair) - cleared if cleared.intersection(pair))
    nodes = {node for node, times in accused.items() if times >= ACCUSERS}
    links = [pair for pair in failed if cleared.issuperset(pair)]
    doubts = [pair for pair in failed if pair not in links and not nodes.intersection(pair)]
    return Verdict(tuple(sorted(nodes)), tuple(sorted(links)), tuple(sorted(doubts)))


def slowness(rates: Mapping[Pair, float]) -> dict[Pair, float]:
    """Of each pair its rate as a part of the usual one; nothing where there are no two others to compare with."""
    others = {pair: [rate for other, rate in rates.items() if other != pair] for pair in rates}
    return {
        pair: rates[pair] / (statistics.median_high(usual) or 1.0)
        for pair, usual in others.items()
        if len(usual) > 1
    }


# --- The report


@dataclass(frozen=True, slots=True)
class PeerFinding(Checked):
    """A finding about several nodes. `nodes` and `links` are what is bad, or with `decided` false, what may be."""

    finding: Finding
    nodes: Annotated[tuple[Node, ...], AtMost(MOST_NODES)] = ()
    links: Annotated[tuple[tuple[Node, Node], ...], AtMost(MOST_NODES)] = ()
    decided: bool = True


@dataclass(frozen=True, slots=True)
class PairsReport(Checked):
    """What every node prints. `missing` is how many nodes did not come."""

    nodes: Annotated[tuple[Node, ...], AtMost(MOST_NODES)]
    missing: Count
    findings: Annotated[tuple[PeerFinding, ...], AtMost(512)]


@dataclass(slots=True)
class CheckResults:
    """All that is known so far. `gone` says when each node ended that did: nothing follows from what was tried with
    it."""

    wanted: int
    nodes: tuple[NodeFacts, ...]
    given: list[tuple[str, NodeResults]] = field(default_factory=list)
    gone: dict[str, str] = field(default_factory=dict)

    def there(self) -> Iterator[tuple[str, NodeResults]]:
        names = {node.node for node in self.nodes}
        for name, results in self.given:
            others = {*results.tried, *([results.all_reduce.other] if results.all_reduce else [])}
            if name not in self.gone and others <= names:
                yield name, results


def make_report(found: CheckResults) -> PairsReport:
    findings = [*_present(found), *_own(found.nodes)]
    if len(found.nodes) - len(found.gone) > 1:
        findings += [*_reach(found), *_all_reduces(found), *_differences(found.nodes)]
    findings.sort(key=lambda one: one.finding.outcome.rank)
    names = tuple(sorted(node.node for node in found.nodes))
    return PairsReport(names, max(0, found.wanted - len(names)), tuple(findings[:512]))


def _said(
    check: str,
    outcome: Outcome,
    summary: str,
    advice: str = "",
    nodes: Sequence[str] = (),
    links: Sequence[Pair] = (),
    *,
    decided: bool = True,
) -> PeerFinding:
    finding = Finding(check, outcome, summary[:2048], advice[:2048])
    return PeerFinding(finding, tuple(nodes), tuple(links), decided)


def _present(found: CheckResults) -> Iterator[PeerFinding]:
    names = sorted(node.node for node in found.nodes)
    came = listed(names, 64)
    if len(names) < found.wanted:
        advice = (
            "look on the others whether `elastic-agent check` runs there, with the same --nodes, --rdzv-endpoint and"
            " --rdzv-id; --wait sets how long to wait"
        )
        summary = f"{len(names)} of {found.wanted} nodes came: {came}"
        yield _said("peer-present", Outcome.FAIL, summary, advice)
    elif not found.gone:
        yield _said("peer-present", Outcome.OK, f"all {len(names)} nodes came: {came}")
    for node, when in found.gone.items():
        advice = f"look at what `elastic-agent check` has printed on {node}, and whether that machine is up"
        yield _said("peer-present", Outcome.FAIL, f"node {node} ended, or hangs, {when}", advice, (node,))


def _own(nodes: Sequence[NodeFacts]) -> Iterator[PeerFinding]:
    for node in nodes:
        for one in node.findings:
            bad = (node.node,) if one.outcome is Outcome.FAIL else ()
            yield _said(one.check, one.outcome, f"node {node.node}: {one.summary}", one.advice, bad)


def _judged(
    check: str,
    passed: Mapping[Pair, bool],
    good: str,
    show: Callable[[Pair], str],
    advise: Callable[[Sequence[Pair]], str],
    outcome: Callable[[Sequence[Pair]], Outcome] = lambda pairs: Outcome.FAIL,
) -> Iterator[PeerFinding]:
    """One finding for each bad node, one for all bad links, and one for what is in doubt; or that all is well."""
    verdict = locate_faults(passed)
    failed = [pair for pair, well in passed.items() if not well]

    def words(pairs: Sequence[Pair]) -> str:
        return listed([show(pair) for pair in pairs], 8)

    if not failed:
        yield _said(check, Outcome.OK if passed else Outcome.UNKNOWN, good)
    for node in verdict.nodes:
        pairs = [pair for pair in failed if node in pair]
        yield _said(check, outcome(pairs), f"node {node}: {words(pairs)}", advise(pairs), (node,))
    if links := verdict.links:
        yield _said(check, outcome(links), words(links), advise(links), (), links)
    if doubts := verdict.doubts:
        nodes = sorted({node for pair in doubts for node in pair})
        summary = f"{words(doubts)}; whether it is one of the nodes, or what lies between, more nodes tell"
        yield _said(check, outcome(doubts), summary, advise(doubts), nodes, doubts, decided=False)


def _reach(found: CheckResults) -> Iterator[PeerFinding]:
    there = {node.node: node for node in found.nodes if node.node not in found.gone}
    blocked: dict[tuple[str, str], Obstacle] = {}
    passed: dict[Pair, bool] = {}
    for source, results in found.there():
        for target in filter(there.__contains__, results.tried):
            pair, obstacle = pair_of(source, target), results.blocked.get(target)
            passed[pair] = passed.get(pair, True) and obstacle is None
            if obstacle is not None:
                blocked[source, target] = obstacle

    def ways(pair: Pair) -> list[tuple[str, str]]:
        return [way for way in (pair, (pair[1], pair[0])) if way in blocked]

    def show(pair: Pair) -> str:
        words = [
            f"from {source} to {target} ({there[target].address} port {there[target].port}):"
            f" {WHAT_AND_ADVICE[blocked[source, target]][0]}"
            for source, target in ways(pair)
        ]
        return "; ".join(words) + ("; the way back is open" if len(words) == 1 else "")

    def advise(pairs: Sequence[Pair]) -> str:
        obstacles = dict.fromkeys(blocked[way] for pair in pairs for way in ways(pair))
        return ". ".join(WHAT_AND_ADVICE[obstacle][1] for obstacle in obstacles)

    yield from _judged("peer-reachable", passed, f"{len(passed)} pairs reach each other", show, advise)


def _all_reduces(found: CheckResults) -> Iterator[PeerFinding]:
    problems: dict[Pair, str] = {}
    rates: dict[Pair, float] = {}
    for name, results in found.there():
        one = results.all_reduce
        if one is not None and one.other not in found.gone:
            pair = pair_of(name, one.other)
            problems[pair] = problems.get(pair) or one.problem
            rates[pair] = min(one.rate, rates.get(pair, one.rate))
    without = sorted(node.node for node in found.nodes if not node.has_torch)
    good = f"{len(problems)} pairs did it" if problems else f"not tried: no torch on {listed(without)}"
    advice = (
        "if the nodes reach each other else, a packet filter lets only some ports through: gloo and NCCL choose any"
        " free port (net.ipv4.ip_local_port_range), so open all between the nodes"
    )
    yield from _judged(
        "peer-all-reduce",
        {pair: not problem for pair, problem in problems.items()},
        good,
        lambda pair: f"between {' and '.join(pair)}: {problems[pair]}",
        lambda pairs: advice,
    )
    machines = {node.node: node.machine or node.node for node in found.nodes}
    apart = len(set(machines.values())) > 1
    known = {
        pair: rate
        for pair, rate in rates.items()
        if not problems[pair] and not (apart and machines[pair[0]] == machines[pair[1]])
    }
    yield from _bandwidth(known)


def _bandwidth(rates: Mapping[Pair, float]) -> Iterator[PeerFinding]:
    parts = slowness(rates)
    usual = statistics.median_high(rates.values()) if rates else 0.0
    sure = len({node for pair in rates for node in pair}) >= LEAST_USUAL

    def outcome(pairs: Sequence[Pair]) -> Outcome:
        return Outcome.FAIL if sure and min(map(parts.__getitem__, pairs)) < MUCH_TOO_SLOW else Outcome.WARN

    good = (
        f"an all-reduce moves {usual / 1e6:.4g} MB/s, at least {min(rates.values(), default=0.0) / 1e6:.4g}"
    )
    judged = _judged(
        "peer-bandwidth",
        {pair: parts.get(pair, 1.0) >= SLOW for pair in rates},
        good if rates else "not measured",
        lambda pair: (
            f"{rates[pair] / 1e6:.4g} MB/s between {' and '.join(pair)}, {parts[pair]:.0%} of the usual"
        ),
        lambda pairs: (
            "look for a link that came up with less than its speed (ethtool), for errors (ethtool -S), for another"
            " MTU, and for others that use it now"
        ),
        outcome,
    )
    for one in judged:
        yield one if sure or not one.nodes else PeerFinding(one.finding, one.nodes, one.links, decided=False)


# --- What they have in common

_ONE_IMAGE = "give all nodes one image, or one environment"

TRAITS = {
    "MTU": ("same-network", "large packets may vanish, and collectives hang: ip link set dev NAME mtu N"),
    "link speed": ("same-network", "the slowest link sets the pace of all: check cables and switch ports"),
    "number of RDMA ports": ("same-network", "check `rdma link`, or set NCCL_IB_DISABLE=1 on all"),
    "address family": (
        "same-network",
        "workers of one family do not reach the other: choose --local-addr alike",
    ),
    "version of elastic-agent": ("same-software", _ONE_IMAGE),
    "version of Python": ("same-software", _ONE_IMAGE),
    "torch": ("same-software", f"collectives fail or hang between versions: {_ONE_IMAGE}"),
    "NCCL": ("same-software", f"NCCL refuses to work with another version of itself: {_ONE_IMAGE}"),
    "NVIDIA driver": ("same-software", "upgrade the older ones: NCCL and CUDA fall back, or fail"),
    "number of GPUs": ("same-software", "one that is missing has fallen off the bus (dmesg: Xid 79)"),
}
"""What nodes should share: the check, and what to do. A difference is never more than a warning."""


def _differences(nodes: Sequence[NodeFacts]) -> Iterator[PeerFinding]:
    well = {"same-network", "same-software"}
    for trait, (check, advice) in TRAITS.items():
        counts = Counter(node.traits[trait] for node in nodes if trait in node.traits)
        if len(counts) < 2:
            continue
        well.discard(check)
        usual, most = counts.most_common(1)[0]
        odd = [node for node in nodes if node.traits.get(trait, usual) != usual]
        words = listed([f"{node.traits[trait]} on {node.node}" for node in odd])
        summary = f"the {trait} differs: {usual} on {most} of {len(nodes)} nodes, but {words}"
        yield _said(check, Outcome.WARN, summary, advice, [node.node for node in odd])
    for check in sorted(well):
        names = ", ".join(trait for trait, (of, _) in TRAITS.items() if of == check)
        yield _said(check, Outcome.OK, f"the same on all nodes: {names}")
