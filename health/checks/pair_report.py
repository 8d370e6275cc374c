"""The findings of a check of several nodes: what is wrong with which node or link, in words, from all that was found.

Pure: one node makes the report of what all have found, and the others print the same one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ...codec import AtMost, Checked, Count
from .finding import Finding, Outcome, listed
from .pair_findings import NodeFacts, PeerFinding, pair_findings, peer_finding, span
from .pairs import MOST_NODES, Measurement, Node, NodeResults, Reach, connected

MOST_FINDINGS = 512


PEER_CHECKS = (
    "peer-present",
    "peer-reachable",
    "peer-bandwidth",
    "peer-all-reduce",
    "same-network",
    "same-software",
    "clock-between-nodes",
    "checkpoint-directory-shared",
)
"""The names of all findings here; those of nodes' own checks are besides."""


@dataclass(frozen=True, slots=True)
class PairsReport(Checked):
    """What every node prints. `missing` is how many nodes did not come."""

    nodes: Annotated[tuple[Node, ...], AtMost(MOST_NODES)]
    missing: Count
    findings: Annotated[tuple[PeerFinding, ...], AtMost(MOST_FINDINGS)]
    measured: Annotated[tuple[Measurement, ...], AtMost(3 * MOST_NODES)] = ()


@dataclass(frozen=True, slots=True)
class CheckResults:
    """All that is known so far. `gone` says when each node ended that did."""

    wanted: int
    waited_s: float
    nodes: tuple[NodeFacts, ...]
    results: dict[str, NodeResults] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are still there."""
        return tuple(node.node for node in self.nodes if node.node not in self.gone)

    @property
    def reached(self) -> tuple[Reach, ...]:
        """Without nodes that ended: nothing follows from what was tried with them."""
        return tuple(
            one
            for result in self.results.values()
            for one in result.reached
            if one.source not in self.gone and one.target not in self.gone
        )

    @property
    def measured(self) -> tuple[Measurement, ...]:
        return tuple(
            one
            for result in self.results.values()
            for one in result.measured
            if one.first not in self.gone and one.second not in self.gone
        )


def make_report(found: CheckResults) -> PairsReport:
    findings = (
        *_present(found),
        *_own(found.nodes),
        *pair_findings(found.nodes, found.names, found.reached, found.measured),
        *_compare(found.nodes),
        *_clocks(found),
        *_directories(found),
    )
    by_rank = sorted(findings, key=lambda one: one.finding.outcome.rank)
    names = tuple(node.node for node in found.nodes)
    missing = max(0, found.wanted - len(names))
    return PairsReport(names, missing, tuple(by_rank[:MOST_FINDINGS]), found.measured)


# --- Who came


def _present(found: CheckResults) -> Iterator[PeerFinding]:
    names = [node.node for node in found.nodes]
    if len(names) < found.wanted:
        summary = f"{len(names)} of {found.wanted} nodes came within {found.waited_s:g} s: {_all(names)}"
        advice = (
            "look on the others whether `elastic-agent check` runs there, with the same --nodes, --rdzv-endpoint and"
            " --rdzv-id; --wait sets how long to wait"
        )
        yield peer_finding("peer-present", Outcome.FAIL, summary, advice)
    elif not found.gone:
        yield peer_finding("peer-present", Outcome.OK, f"all {len(names)} nodes came: {_all(names)}")
    for node, when in found.gone.items():
        summary = f"node {node} ended, or lost the store, {when}"
        advice = f"look at what `elastic-agent check` has printed on {node}, and whether that machine is up"
        yield peer_finding("peer-present", Outcome.FAIL, summary, advice, nodes=(node,))


def _own(nodes: Sequence[NodeFacts]) -> Iterator[PeerFinding]:
    """What nodes have found out about themselves."""
    for node in nodes:
        for one in node.findings:
            summary = f"node {node.node}: {one.summary}"[:2048]
            same = Finding(one.check, one.outcome, summary, one.advice)
            yield PeerFinding(same, (node.node,) if one.outcome is Outcome.FAIL else ())


# --- What they have in common

MOST_NAMED = 5
"""Of the nodes that have the same value; the others are counted."""

_Trait = tuple[str, str, Callable[[NodeFacts], str | None]]
"""What nodes should share, what to do where they do not, and what one node has; None where that is not known.

Nothing is refused for a difference: a job may run on two kinds of machines. But a large packet that one of a thousand
nodes cannot take shows up as a hang of all, hours later.
"""

_NETWORK: tuple[_Trait, ...] = (
    (
        "the MTU",
        "Large packets may vanish on the way, and collectives hang: give all interfaces one MTU (ip link set dev NAME"
        " mtu N), or choose others with --network-interface.",
        lambda node: f"{node.mtu}" if node.mtu else None,
    ),
    (
        "the link speed",
        "The slowest link sets the pace of all: check cables and switch ports, or choose another interface with"
        " --network-interface.",
        lambda node: f"{node.speed_mbps} Mbit/s" if node.speed_mbps else None,
    ),
    (
        "the number of active RDMA ports",
        "NCCL fails or is slow between nodes whose ports do not match: check `rdma link` on these nodes, or set"
        " NCCL_IB_DISABLE=1 on all.",
        lambda node: f"{node.rdma_ports}",
    ),
    (
        "the address family",
        "Workers of one family do not reach those of the other: choose --network-interface or --local-addr alike.",
        lambda node: "IPv6" if ":" in node.endpoint.address else "IPv4",
    ),
)

_ONE_IMAGE = "Give all nodes one image, or one environment."

_SOFTWARE: tuple[_Trait, ...] = (
    (
        "the version of elastic-agent",
        "Nodes of different versions may not understand each other: install one on all.",
        lambda node: node.software.agent or None,
    ),
    (
        "the version of Python",
        f"What one node pickles another may not read. {_ONE_IMAGE}",
        lambda node: node.software.python or None,
    ),
    (
        "the version of torch",
        f"Collectives fail or hang between versions. {_ONE_IMAGE}",
        lambda node: node.software.torch or "none",
    ),
    (
        "the version of NCCL",
        f"NCCL refuses to work with another version of itself. {_ONE_IMAGE}",
        lambda node: node.software.nccl or None,
    ),
    (
        "the version of the NVIDIA driver",
        "Upgrade the older ones: NCCL and CUDA fall back, or fail, where they differ.",
        lambda node: node.software.driver or None,
    ),
    (
        "the number of GPUs",
        "One that is missing has fallen off the bus (dmesg: Xid 79), or is not given to this job.",
        lambda node: f"{node.gpus}",
    ),
)


def _compare(nodes: Sequence[NodeFacts]) -> Iterator[PeerFinding]:
    same = "MTU, link speed, RDMA ports and address family are the same on all nodes"
    yield from _differences("same-network", _NETWORK, same, nodes)
    same = "versions and the number of GPUs are the same on all nodes"
    yield from _differences("same-software", _SOFTWARE, same, nodes)


def _differences(
    check: str, traits: Iterable[_Trait], same: str, nodes: Sequence[NodeFacts]
) -> Iterator[PeerFinding]:
    """Each with the nodes that differ from most others."""
    well = True
    for name, advice, value in traits:
        groups: dict[str, list[str]] = {}
        for node in nodes:
            if (one := value(node)) is not None:
                groups.setdefault(one, []).append(node.node)
        if len(groups) < 2:
            continue
        well = False
        # The sort is stable: of two groups of one size the one that came first does so here.
        (usual, most), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
        outliers = "; ".join(f"{odd} on {listed(group, MOST_NAMED)}" for odd, group in others)
        majority = listed(most, MOST_NAMED) if len(most) == 1 else f"{len(most)} nodes"
        summary = f"{name} differs: {usual} on {majority}, but {outliers}"
        odd_nodes = tuple(node for _, group in others for node in group)
        yield peer_finding(check, Outcome.WARN, summary, advice, nodes=odd_nodes)
    if well and len(nodes) > 1:
        yield peer_finding(check, Outcome.OK, same)


def _clocks(found: CheckResults) -> Iterator[PeerFinding]:
    offsets = clock_offsets(found.names, found.reached)
    if len(offsets) < 2:
        return
    middle = statistics.median_low(offsets.values())
    off = {node: offset - middle for node, offset in offsets.items() if abs(offset - middle) > OFFSET_S}
    spread_s = max(offsets.values()) - min(offsets.values())
    if not off:
        summary = f"the clocks of {len(offsets)} nodes differ by at most {span(spread_s)}"
        yield peer_finding("clock-between-nodes", Outcome.OK, summary)
        return
    advice = "start chrony or another NTP service on all nodes: else logs cannot be compared, and certificates fail"
    if len(offsets) == 2:
        summary = f"the clocks of {' and '.join(offsets)} differ by {span(spread_s)}"
        yield peer_finding("clock-between-nodes", Outcome.WARN, summary, advice)
        return
    words = [f"{node} is {span(abs(by))} {'ahead' if by > 0 else 'behind'}" for node, by in off.items()]
    summary = f"clocks differ from those of most nodes: {listed(words, 8)}"
    yield peer_finding("clock-between-nodes", Outcome.WARN, summary, advice, nodes=tuple(off))


def _directories(found: CheckResults) -> Iterator[PeerFinding]:
    """Whether the checkpoint directory is one for all nodes; nothing where fewer than two have one."""
    check = "checkpoint-directory-shared"
    there = [node for node in found.names if node in found.results]
    having = [node.node for node in found.nodes if node.file and node.node in there]
    if len(having) < 2:
        return
    groups = connected(having, [(node, other) for node in having for other in found.results[node].seen])
    if len(groups) == 1:
        yield peer_finding(
            check, Outcome.OK, f"the checkpoint directory is shared by all {len(having)} nodes"
        )
    elif len(groups) == len(having):
        advice = (
            "name one on a file system that all nodes mount; or accept that what a lost machine has written is lost,"
            " and that each restart sends the newest state to the other nodes"
        )
        summary = "the checkpoint directory is local to each node: none sees what another writes there"
        yield peer_finding(check, Outcome.WARN, summary, advice)
    else:
        groups.sort(key=lambda group: (-len(group), min(group)))
        words = " | ".join(map(", ".join, groups))
        summary = f"the checkpoint directory is not the same for all nodes: {words}"
        advice = "mount the same file system there on all nodes: look at findmnt -T DIRECTORY on each"
        odd = tuple(node for node in having if node not in groups[0])
        yield peer_finding(check, Outcome.FAIL, summary, advice, nodes=odd)


def _all(names: Sequence[str]) -> str:
    return listed(names, 64) or "none"


# --- Clocks

OFFSET_S = 1.0
"""More than this is worth a warning: logs cannot be put in order, and certificates may not be valid yet."""


def clock_offsets(nodes: Sequence[str], reached: Iterable[Reach]) -> dict[str, float]:
    """Seconds by which each clock is ahead of the first node's, for all that tries connect with it."""
    known: dict[str, dict[str, float]] = {}
    for one in reached:
        if one.clock_offset_s is not None:
            known.setdefault(one.source, {})[one.target] = one.clock_offset_s
            known.setdefault(one.target, {})[one.source] = -one.clock_offset_s
    start = next((node for node in nodes if node in known), None)
    if start is None:
        return {}
    offsets = {start: 0.0}
    ahead = [start]
    for node in ahead:
        for other, offset_s in known[node].items():
            if other not in offsets:
                offsets[other] = offsets[node] + offset_s
                ahead.append(other)
    return offsets
