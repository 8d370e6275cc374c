"""What a node says about itself before it meets others, and how the nodes compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated

from ....codec import AtMost, Checked, Text, Within
from ..finding import (
    ADDRESS_FAMILY,
    LINK_SPEED,
    MTU,
    RDMA_PORTS,
    Finding,
    NodeValue,
    Outcome,
    Trait,
    address_family,
    difference,
)
from .results import MOST_NODES, Measurement, Node, NodeResults, ProbeEndpoint
from .rounds import Pair, pair_of

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
    """One node of a check. `life` is that of its process; `wanted` is how many nodes it waits for."""

    node: Node
    life: Node
    wanted: Annotated[int, Within(1, MOST_NODES)]
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


_Value = Callable[[NodeFacts], str | None]

_NETWORK: tuple[tuple[Trait, _Value], ...] = (
    (MTU, lambda node: f"{node.mtu}" if node.mtu else None),
    (LINK_SPEED, lambda node: f"{node.speed_mbps} Mbit/s" if node.speed_mbps else None),
    (RDMA_PORTS, lambda node: f"{node.rdma_ports}"),
    (ADDRESS_FAMILY, lambda node: address_family(node.endpoint.address)),
)

_ONE_IMAGE = "Give all nodes one image, or one environment."

_SOFTWARE: tuple[tuple[Trait, _Value], ...] = (
    (
        Trait(
            "the version of elastic-agent",
            "Nodes of different versions may not understand each other: install one on all.",
        ),
        lambda node: node.software.agent or None,
    ),
    (
        Trait("the version of Python", f"What one node pickles another may not read. {_ONE_IMAGE}"),
        lambda node: node.software.python or None,
    ),
    (
        Trait("the version of torch", f"Collectives fail or hang between versions. {_ONE_IMAGE}"),
        lambda node: node.software.torch or "none",
    ),
    (
        Trait("the version of NCCL", f"NCCL refuses to work with another version of itself. {_ONE_IMAGE}"),
        lambda node: node.software.nccl or None,
    ),
    (
        Trait(
            "the version of the NVIDIA driver",
            "Upgrade the older ones: NCCL and CUDA fall back, or fail, where they differ.",
        ),
        lambda node: node.software.driver or None,
    ),
    (
        Trait(
            "the number of GPUs",
            "One that is missing has fallen off the bus (dmesg: Xid 79), or is not given to this job.",
        ),
        lambda node: f"{node.gpus}",
    ),
)


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


def compare(nodes: Sequence[NodeFacts]) -> Iterator[tuple[Finding, tuple[str, ...]]]:
    """Each with the nodes that differ from most others."""
    for check, traits, same in (
        (
            "same-network",
            _NETWORK,
            "MTU, link speed, RDMA ports and address family are the same on all nodes",
        ),
        ("same-software", _SOFTWARE, "versions and the number of GPUs are the same on all nodes"),
    ):
        found = [
            one
            for trait, value in traits
            if (one := difference(trait, [NodeValue(node.node, value(node)) for node in nodes])) is not None
        ]
        for one in found:
            summary, _, advice = one.sentence.partition(". ")
            yield Finding(check, Outcome.WARN, summary, advice), one.odd
        if not found and len(nodes) > 1:
            yield Finding(check, Outcome.OK, same), ()


def compare_directories(
    nodes: Sequence[NodeFacts], results: Mapping[str, NodeResults]
) -> tuple[Finding, tuple[str, ...]] | None:
    """Whether the checkpoint directory is one for all nodes; None where fewer than two have one."""
    having = [node.node for node in nodes if node.file and node.node in results]
    if len(having) < 2:
        return None
    groups: list[set[str]] = [{node} for node in having]
    for node in having:
        together = {node, *(other for other in results[node].seen if other in having)}
        joined = [group for group in groups if group & together]
        groups = [group for group in groups if not group & together] + [set().union(*joined)]
    check = "checkpoint-directory-shared"
    if len(groups) == 1:
        return Finding(
            check, Outcome.OK, f"the checkpoint directory is shared by all {len(having)} nodes"
        ), ()
    if len(groups) == len(having):
        advice = (
            "name one on a file system that all nodes mount; or accept that what a lost machine has written is lost,"
            " and that each restart sends the newest state to the other nodes"
        )
        summary = "the checkpoint directory is local to each node: none sees what another writes there"
        return Finding(check, Outcome.WARN, summary, advice), ()
    groups.sort(key=lambda group: (-len(group), min(group)))
    words = " | ".join(", ".join(node for node in having if node in group) for group in groups)
    summary = f"the checkpoint directory is not the same for all nodes: {words}"
    advice = "mount the same file system there on all nodes: look at findmnt -T DIRECTORY on each"
    odd = tuple(node for node in having if node not in groups[0])
    return Finding(check, Outcome.FAIL, summary, advice), odd
