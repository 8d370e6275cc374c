"""What nodes say about themselves, and what follows from pairs: a finding for each bad node, bad link and doubt.

A sentence names who does not reach whom, where and in which direction: it is read by a person who has to find the one
packet filter among those of many nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated

from ...codec import AtMost, Checked, Text, Within
from .finding import (
    Finding,
    Outcome,
    listed,
)
from .pairs import (
    MOST_NODES,
    MUCH_TOO_SLOW,
    Measurement,
    Node,
    Obstacle,
    Pair,
    ProbeEndpoint,
    Reach,
    by_all_reduce,
    by_bandwidth,
    by_reach,
    locate_faults,
    pair_of,
    rates,
    shows_usual,
    slowness,
    usual_rates,
)

Version = Annotated[str, Text(64)]
"""Empty: not known, or not there."""
_Small = Annotated[int, Within(0, 2**31 - 1)]

MOST_FINDINGS = 32


@dataclass(frozen=True, slots=True)
class Software(Checked):
    agent: Version = ""
    python: Version = ""
    torch: Version = ""
    nccl: Version = ""
    driver: Version = ""


@dataclass(frozen=True, slots=True)
class NodeFacts(Checked):
    """One node of a check. `life` is that of its process."""

    node: Node
    life: Node
    endpoint: ProbeEndpoint
    all_reduce_port: Annotated[int, Within(1, 65535)]
    """Where the store of an all-reduce with this node listens, at the endpoint's address."""
    machine: Annotated[str, Text(64)] = ""
    """The same for all that one kernel runs; empty: not known."""
    interface: Annotated[str, Text(64)] = ""
    speed_mbps: _Small = 0
    """0: not known."""
    mtu: _Small = 0
    rdma_ports: _Small = 0
    gpus: _Small = 0
    software: Software = field(default_factory=Software)
    file: Annotated[str, Text(64)] = ""
    """What this node has written into the checkpoint directory for others to find; empty: nothing."""
    findings: Annotated[tuple[Finding, ...], AtMost(MOST_FINDINGS)] = ()
    """Of its own checks, those that are not ok."""


def near_pairs(nodes: Iterable[NodeFacts]) -> frozenset[Pair]:
    """Those of one machine, which say nothing of a network; none, where all nodes are on one machine."""
    machines: dict[str, list[str]] = {}
    for node in nodes:
        machines.setdefault(node.machine or node.node, []).append(node.node)
    if len(machines) < 2:
        return frozenset()
    return frozenset(pair_of(*pair) for group in machines.values() for pair in combinations(group, 2))


def between_machines(nodes: Iterable[NodeFacts], measured: Sequence[Measurement]) -> Sequence[Measurement]:
    near = near_pairs(nodes)
    return [one for one in measured if one.pair not in near]


# --- Findings

MOST_LINKS = 8
"""Bad ones that get a finding each; the others share one."""


@dataclass(frozen=True, slots=True)
class PeerFinding(Checked):
    """A finding about several nodes. `nodes` and `links` are what is bad, or with `decided` false, what may be."""

    finding: Finding
    nodes: Annotated[tuple[Node, ...], AtMost(MOST_NODES)] = ()
    links: Annotated[tuple[tuple[Node, Node], ...], AtMost(MOST_NODES)] = ()
    decided: bool = True


def peer_finding(
    check: str,
    outcome: Outcome,
    summary: str,
    advice: str = "",
    *,
    nodes: tuple[str, ...] = (),
    links: Sequence[Pair] = (),
    decided: bool = True,
) -> PeerFinding:
    finding = Finding(check, outcome, summary[:2048], advice[:2048])
    return PeerFinding(finding, nodes, tuple(pair_of(*pair) for pair in links), decided)


def pair_findings(
    nodes: Sequence[NodeFacts],
    names: Sequence[str],
    reached: Sequence[Reach],
    measured: Sequence[Measurement],
) -> Iterator[PeerFinding]:
    """`names` are those of the nodes that were there to the end, `reached` and `measured` what they have found out."""
    if len(names) < 2:
        return
    compared = between_machines(nodes, measured)
    for check in (
        _reach(nodes, reached, measured),
        _bandwidth(compared),
        _all_reduce(nodes, measured),
    ):
        yield from _judged(check, names)


@dataclass(frozen=True, slots=True)
class _PairCheck:
    """One check. The functions get pairs that failed, `show` the node that they have in common, too."""

    name: str
    results: Mapping[Pair, bool]
    show: Callable[[Sequence[Pair], str | None], str]
    advise: Callable[[Sequence[Pair]], str]
    good: str
    """What is said where all pairs passed."""
    outcome: Callable[[Sequence[Pair]], Outcome] = lambda pairs: Outcome.FAIL
    missing: str = ""
    """Why nothing was tried."""
    broken: Set[Pair] | None = None
    """Where pairs fail by what others do: those that fail by themselves. None: all do."""


def _judged(check: _PairCheck, names: Sequence[str]) -> Iterator[PeerFinding]:
    """One finding for each bad node, bad link and doubt; or that all is well."""
    verdict = locate_faults(names, check.results)
    failed = [pair for pair, well in check.results.items() if not well]
    name = check.name
    if check.broken is not None and set(failed) - check.broken and not shows_usual(names, check.results):
        yield _two_kinds(check, failed)
        return
    for node in verdict.bad_nodes:
        pairs = [pair for pair in failed if node in pair]
        yield peer_finding(
            name,
            check.outcome(pairs),
            f"node {node}: {check.show(pairs, node)}",
            check.advise(pairs),
            nodes=(node,),
        )
    links = verdict.bad_links
    single = links if len(links) <= MOST_LINKS else links[: MOST_LINKS - 1]
    for pair in single:
        summary = f"between {' and '.join(pair)}: {check.show([pair], None)}"
        yield peer_finding(name, check.outcome([pair]), summary, check.advise([pair]), links=(pair,))
    if rest := links[len(single) :]:
        summary = f"and between {len(rest)} more pairs: {listed([' and '.join(pair) for pair in rest], 16)}"
        yield peer_finding(name, check.outcome(rest), summary, check.advise(rest), links=rest)
    for doubt in verdict.undecided:
        if len(doubt.nodes) == 1:
            (other,) = {node for pair in doubt.pairs for node in pair} - set(doubt.nodes) or {""}
            which = f"whether it is node {doubt.nodes[0]} or what lies between it and {other} is not known"
        else:
            which = "which of them it is, or whether it is what lies between, is not known"
        summary = f"{listed(list(doubt.nodes), 16)}: {check.show(doubt.pairs, None)}; {which}"
        advice = f"{check.advise(doubt.pairs)}. A check with more nodes tells which it is"
        outcome = check.outcome(doubt.pairs)
        yield peer_finding(
            name, outcome, summary, advice, nodes=doubt.nodes, links=doubt.pairs, decided=False
        )
    if not check.results:
        yield peer_finding(name, Outcome.UNKNOWN, check.missing or "not tried")
    elif verdict.well:
        yield peer_finding(name, Outcome.OK, check.good)


def _two_kinds(check: _PairCheck, failed: Sequence[Pair]) -> PeerFinding:
    """No node and no link is accused."""
    better = [" and ".join(pair) for pair, well in check.results.items() if well]
    summary = (
        f"{len(failed)} of {len(check.results)} pairs are much worse than the others, and which is usual is not known:"
        f" {check.show(failed, None)}"
    )
    advice = (
        f"if a short way connects {listed(better)} (one machine, one switch), all is well; else"
        f" {check.advise(failed)}"
    )
    fine = {node for pair, well in check.results.items() if well for node in pair}
    worse = dict.fromkeys(node for pair in failed for node in pair)
    nodes = tuple(node for node in worse if node not in fine) or tuple(worse)
    return peer_finding(check.name, Outcome.WARN, summary, advice, nodes=nodes, links=failed, decided=False)


def _reach(
    nodes: Sequence[NodeFacts], reached: Sequence[Reach], measured: Sequence[Measurement]
) -> _PairCheck:
    endpoints = {node.node: node.endpoint for node in nodes}
    blocked = {
        (one.source, one.target): (one.obstacle, one.detail) for one in reached if one.obstacle is not None
    }
    for one in measured:
        if one.obstacle is not None and one.latency_s is None:
            blocked.setdefault((one.first, one.second), (one.obstacle, one.detail))

    def ways(pairs: Iterable[Pair]) -> list[tuple[str, str]]:
        return [way for one, other in pairs for way in ((one, other), (other, one)) if way in blocked]

    def show(pairs: Sequence[Pair], node: str | None) -> str:
        """By what happens and who is asked: a hundred nodes that do not reach one are one sentence."""
        groups: dict[tuple[str, str], list[str]] = {}
        for source, target in ways(pairs):
            obstacle, detail = blocked[source, target]
            what = detail if obstacle is Obstacle.OWN else _OBSTACLES[obstacle][0]
            key = (target, what) if source != node else ("", what)
            there = f"{target} ({endpoints[target].address} port {endpoints[target].port})"
            groups.setdefault(key, []).append(source if source != node else there)
        sentences = []
        for (target, what), names in groups.items():
            there = f"{target} ({endpoints[target].address} port {endpoints[target].port})" if target else ""
            way = f"from {listed(names, 8)} to {there}" if target else f"from {node} to {listed(names, 8)}"
            sentences.append(f"{way}: {what}")
        one_way = [way for way in ways(pairs) if (way[1], way[0]) not in blocked]
        if len(pairs) == 1 and one_way:
            sentences.append(f"the way back, from {one_way[0][1]} to {one_way[0][0]}, is open")
        return "; ".join(sentences)

    def advise(pairs: Sequence[Pair]) -> str:
        found_here = dict.fromkeys(blocked[way][0] for way in ways(pairs))
        return ". ".join(_OBSTACLES[obstacle][1] for obstacle in found_here)

    results = by_reach(reached, measured)
    pairs = f"{len(results)} pair{'s' if len(results) > 1 else ''}"
    good = f"all that tried to reach each other did: {pairs}, {len(reached)} ways"
    return _PairCheck("peer-reachable", results, show, advise, good)


def _bandwidth(measured: Sequence[Measurement]) -> _PairCheck:
    by_pair = {one.pair: one for one in measured if one.latency_s is not None}
    parts, usual = slowness(measured), usual_rates(measured)
    vanished = {pair for pair, one in by_pair.items() if one.obstacle is not None}

    def show(pairs: Sequence[Pair], node: str | None) -> str:
        rest = [by_pair[pair] for pair in pairs if pair not in vanished]
        words = []
        if rest:
            known = [usual[one.pair] for one in rest if one.pair in usual]
            more = f", where {rate(statistics.median(known))} is usual" if known else ""
            ways = (way for one in rest for way in _ways(one))
            shown = [f"{rate(value)} from {source} to {target}" for source, target, value in ways]
            words.append(listed(shown, 8) + more)
        if gone := [pair for pair in pairs if pair in vanished]:
            detail = by_pair[gone[0]].detail
            words.append(detail if len(pairs) == 1 else f"{_all_with(gone, node)}: {detail}")
        return "; ".join(words)

    def advise(pairs: Sequence[Pair]) -> str:
        if vanished.issuperset(pairs):
            return (
                "large packets vanish on the way: the MTU of an interface is larger than that of the network between"
                " (ping -M do -s 8972 ADDRESS; ip link set dev NAME mtu N)"
            )
        return (
            "look for a link that came up with less than its speed (ethtool), for errors (ethtool -S), and for others"
            " that use it now"
        )

    def outcome(pairs: Sequence[Pair]) -> Outcome:
        return Outcome.FAIL if any(parts[pair] < MUCH_TOO_SLOW for pair in pairs) else Outcome.WARN

    every = sorted(value for one in by_pair.values() for value in rates(one)) or [0.0]
    middle, least = statistics.median(every), every[0]
    return _PairCheck(
        "peer-bandwidth",
        by_bandwidth(measured),
        show,
        advise,
        f"one stream carries {rate(middle)}, at least {rate(least)}",
        outcome,
        broken=vanished,
    )


def _all_reduce(nodes: Sequence[NodeFacts], measured: Sequence[Measurement]) -> _PairCheck:
    problems = {one.pair: one.all_reduce_problem for one in measured if one.all_reduce_problem}
    took = [one.all_reduce_s for one in measured if one.all_reduce_s is not None] or [0.0]

    def show(pairs: Sequence[Pair], node: str | None) -> str:
        problem = problems[pairs[0]]
        return problem if len(pairs) == 1 else f"{_all_with(pairs, node)}: {problem}"

    def advise(pairs: Sequence[Pair]) -> str:
        return (
            "if the nodes reach each other else, a packet filter lets only some ports through: gloo and NCCL choose any"
            " free port (net.ipv4.ip_local_port_range), so open all between the nodes"
        )

    without = [node.node for node in nodes if not node.software.torch]
    middle = statistics.median(took)
    return _PairCheck(
        "peer-all-reduce",
        by_all_reduce(measured),
        show,
        advise,
        f"an all-reduce of 4 MiB takes {span(middle)}, at most {span(max(took))}",
        missing=f"not tried: no torch on {listed(without, 8)}" if without else "not tried",
    )


def _all_with(pairs: Sequence[Pair], node: str | None) -> str:
    if node is None:
        return listed([f"between {one} and {other}" for one, other in pairs], 8)
    return f"with {listed([other for pair in pairs for other in pair if other != node], 8)}"


def _ways(one: Measurement) -> Iterator[tuple[str, str, float]]:
    """From whom to whom, and at which rate."""
    if one.sent is not None:
        yield one.first, one.second, one.sent
    if one.received is not None:
        yield one.second, one.first, one.received


def span(seconds: float) -> str:
    """
    >>> span(0.000045), span(0.0021), span(0.4), span(3600.0)
    ('45 us', '2.1 ms', '400 ms', '3600.0 s')
    """
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f}".removesuffix(".0") + " ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def rate(bytes_per_s: float) -> str:
    """
    >>> rate(1.25e9), rate(117.4e6), rate(900.0)
    ('1.2 GB/s', '117 MB/s', '900 B/s')
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            number = bytes_per_s / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


_OBSTACLES = {
    Obstacle.DROPPED: (
        "no answer to SYN, though the node is there (it keeps its lease): a packet filter drops, or a cable or VLAN is"
        " wrong",
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
        " each other with --network-interface",
    ),
    Obstacle.RESET: (
        "the connection is reset",
        "something between them cuts connections: a firewall that knows neither side, or a proxy",
    ),
    Obstacle.SILENT: (
        "the connection comes to be, and then nothing passes",
        "a packet filter drops what belongs to a connection, or packets are larger than the network takes (ping -M do"
        " -s 1472 ADDRESS)",
    ),
    Obstacle.STRANGER: (
        "another program or machine answers there",
        "two machines have that address (arping -D), or NAT or a proxy lead elsewhere",
    ),
    Obstacle.OWN: ("", "look at what the node that asks lacks: ports, descriptors, its address"),
}
"""What is seen, and what to do."""
