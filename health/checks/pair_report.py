"""The findings of a check of several nodes: what is wrong with which node or link, in words, from all that was found.

Pure: one node makes the report of what all have found, and the others print the same one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ...codec import AtMost, Checked, Count
from .finding import Finding, Outcome, latency, listed
from .pair_findings import NodeFacts, PeerFinding, compare, compare_directories, pair_findings, peer_finding
from .pairs import MOST_NODES, Measurement, Node, NodeResults, Reach

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
    """All that is known at the end. `gone` says when each node ended that did."""

    wanted: int
    waited_s: float
    nodes: tuple[NodeFacts, ...]
    results: Mapping[str, NodeResults] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that were there to the end."""
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
        *(PeerFinding(finding, nodes) for finding, nodes in compare(found.nodes)),
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
            same = Finding(one.check, one.outcome, summary, one.advice, one.values, one.seconds)
            yield PeerFinding(same, (node.node,) if one.outcome is Outcome.FAIL else ())


# --- What they have in common


def _clocks(found: CheckResults) -> Iterator[PeerFinding]:
    offsets = clock_offsets(found.names, found.reached)
    if len(offsets) < 2:
        return
    middle = statistics.median_low(offsets.values())
    off = {node: offset - middle for node, offset in offsets.items() if abs(offset - middle) > OFFSET_S}
    spread_s = max(offsets.values()) - min(offsets.values())
    values = {"spread_seconds": spread_s}
    if not off:
        summary = f"the clocks of {len(offsets)} nodes differ by at most {latency(spread_s)}"
        yield peer_finding("clock-between-nodes", Outcome.OK, summary, values=values)
        return
    advice = "start chrony or another NTP service on all nodes: else logs cannot be compared, and certificates fail"
    if len(offsets) == 2:
        summary = f"the clocks of {' and '.join(offsets)} differ by {latency(spread_s)}"
        yield peer_finding("clock-between-nodes", Outcome.WARN, summary, advice, values=values)
        return
    words = [f"{node} is {latency(abs(by))} {'ahead' if by > 0 else 'behind'}" for node, by in off.items()]
    summary = f"clocks differ from those of most nodes: {listed(words, 8)}"
    yield peer_finding("clock-between-nodes", Outcome.WARN, summary, advice, nodes=tuple(off), values=values)


def _directories(found: CheckResults) -> Iterator[PeerFinding]:
    here = [node for node in found.nodes if node.node in found.names]
    answer = compare_directories(here, found.results)
    if answer is not None:
        yield PeerFinding(*answer)


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
