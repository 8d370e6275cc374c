"""Differences between the nodes of a world, found before training by comparing their records.

Nothing is refused for them: a job may run on two kinds of machines, and nodes may have arguments of their own. But a
large packet that one of a thousand nodes cannot take shows up as a hang of all, hours later and far from its cause.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ...rendezvous import terms
from ...rendezvous.records import NodeRecord, World

MOST_NAMED = 5
"""Of the nodes that have the same value; the others are counted."""


@dataclass(frozen=True, slots=True)
class _Trait:
    """`of` gives a node's value in words, None where it is not known; `advice` is what to do about a difference."""

    name: str
    of: Callable[[NodeRecord], str | None]
    advice: str


def differences(nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
    """A sentence for each trait of the nodes' networks that is not the same on all of them."""
    return tuple(sentence for trait in _TRAITS if (sentence := _difference(trait, nodes)) is not None)


def other_limits(world: World, nodes: Iterable[NodeRecord]) -> Iterator[str]:
    """A sentence for each node that was started with other limits than the job has."""
    for node in nodes:
        if others := "; ".join(terms.differences(node.limits, node.program, world.limits, world.program)):
            yield f"node {node.node} was started with {others}; what the job has is node {world.limits_of}'s"


class Comparison:
    """Compares each world once, and returns what differs there and did not in the world before."""

    def __init__(self) -> None:
        self._generation = 0
        self._before: tuple[str, ...] = ()

    def news(self, world: World, nodes: Iterable[NodeRecord], me: str) -> tuple[str, ...]:
        """`nodes` are all that are known, members of the world or not. Node `me` logs its own limits itself."""
        if not world.trains or world.generation == self._generation:
            return ()
        self._generation, before = world.generation, self._before
        members = {member.incarnation for member in world.members}
        inside = [node for node in nodes if node.incarnation in members]
        odd = other_limits(world, (node for node in inside if node.node != me))
        self._before = (*differences(inside), *_first_few(odd))
        return tuple(difference for difference in self._before if difference not in before)


def _first_few(sentences: Iterator[str]) -> Iterator[str]:
    yield from islice(sentences, MOST_NAMED)
    if more := sum(1 for _ in sentences):
        yield f"{more} more nodes were started with other limits than the job has: see elastic-agent status"


def _difference(trait: _Trait, nodes: Iterable[NodeRecord]) -> str | None:
    groups: dict[str, list[NodeRecord]] = {}
    for node in nodes:
        value = trait.of(node)
        if value is not None:
            groups.setdefault(value, []).append(node)
    if len(groups) < 2:
        return None
    # The sort is stable: of two groups of one size the one of the older node comes first.
    (usual, most), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    outliers = "; ".join(f"{value} on {_named(group)}" for value, group in others)
    majority = _named(most) if len(most) == 1 else f"{len(most)} nodes"
    return f"{trait.name} differs: {usual} on {majority}, but {outliers}. {trait.advice}"


def _named(nodes: Sequence[NodeRecord]) -> str:
    names = [
        f"{node.node} ({node.network.interface})" if node.network is not None else node.node
        for node in nodes[:MOST_NAMED]
    ]
    more = len(nodes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _mtu(node: NodeRecord) -> str | None:
    return f"{node.network.mtu}" if node.network is not None else None


def _speed(node: NodeRecord) -> str | None:
    known = node.network is not None and node.network.speed_mbps
    return f"{known} Mbit/s" if known else None


def _rdma(node: NodeRecord) -> str | None:
    return f"{len(node.network.rdma_ports)}" if node.network is not None else None


def _family(node: NodeRecord) -> str | None:
    try:
        return f"IPv{ipaddress.ip_address(node.address.partition('%')[0]).version}"
    except ValueError:
        return None


_TRAITS = (
    _Trait(
        "the MTU",
        _mtu,
        "Large packets may vanish on the way, and collectives hang: give all interfaces one MTU (ip link set dev NAME"
        " mtu N), or choose others with --network-interface.",
    ),
    _Trait(
        "the link speed",
        _speed,
        "The slowest link sets the pace of all: check cables and switch ports, or choose another interface with"
        " --network-interface.",
    ),
    _Trait(
        "the number of active RDMA ports",
        _rdma,
        "NCCL fails or is slow between nodes whose ports do not match: check `rdma link` on these nodes, or choose"
        " --network-profile ethernet for all.",
    ),
    _Trait(
        "the address family",
        _family,
        "Workers of one family do not reach those of the other: choose --network-interface or --local-addr alike.",
    ),
)
