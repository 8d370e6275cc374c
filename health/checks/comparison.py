"""Traits that the nodes of one job should share: the usual value, the nodes with another one, and what to do about it.

Nothing is refused for a difference: a job may run on two kinds of machines. But a large packet that one of a thousand
nodes cannot take shows up as a hang of all, hours later and far from its cause.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from .text import listed

MOST_NAMED = 5
"""Of the nodes that have the same value; the others are counted."""


@dataclass(frozen=True, slots=True)
class Trait:
    name: str
    advice: str


@dataclass(frozen=True, slots=True)
class NodeValue:
    """What one node has of a trait, in words; None where it is not known. `label` is the node as a person reads it."""

    label: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """`odd` are the labels of the nodes that do not have the usual value."""

    sentence: str
    odd: tuple[str, ...]


def difference(trait: Trait, nodes: Iterable[NodeValue]) -> Difference | None:
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.value is not None:
            groups.setdefault(node.value, []).append(node.label)
    if len(groups) < 2:
        return None
    # The sort is stable: of two groups of one size the one that came first does so here.
    (usual, most), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    outliers = "; ".join(f"{value} on {listed(group, MOST_NAMED)}" for value, group in others)
    majority = listed(most, MOST_NAMED) if len(most) == 1 else f"{len(most)} nodes"
    sentence = f"{trait.name} differs: {usual} on {majority}, but {outliers}. {trait.advice}"
    return Difference(sentence, tuple(label for _, group in others for label in group))


MTU = Trait(
    "the MTU",
    "Large packets may vanish on the way, and collectives hang: give all interfaces one MTU (ip link set dev NAME"
    " mtu N), or choose others with --network-interface.",
)
LINK_SPEED = Trait(
    "the link speed",
    "The slowest link sets the pace of all: check cables and switch ports, or choose another interface with"
    " --network-interface.",
)
RDMA_PORTS = Trait(
    "the number of active RDMA ports",
    "NCCL fails or is slow between nodes whose ports do not match: check `rdma link` on these nodes, or choose"
    " --network-profile ethernet for all.",
)
ADDRESS_FAMILY = Trait(
    "the address family",
    "Workers of one family do not reach those of the other: choose --network-interface or --local-addr alike.",
)


def address_family(address: str) -> str | None:
    """None: it is no address."""
    try:
        return f"IPv{ipaddress.ip_address(address.partition('%')[0]).version}"
    except ValueError:
        return None
