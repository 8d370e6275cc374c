"""Differences between the nodes of a world, found before training by comparing their records: of their networks, by the
rules of `health/checks/comparison.py`, and of the limits that they were started with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ...health.checks.comparison import (
    ADDRESS_FAMILY,
    LINK_SPEED,
    MOST_NAMED,
    MTU,
    RDMA_PORTS,
    NodeValue,
    address_family,
    difference,
)
from ...rendezvous.records import NodeRecord, World
from ...rendezvous.statements import terms


def differences(nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
    """A sentence for each trait of the nodes' networks that is not the same on all of them."""
    found = (
        difference(trait, [NodeValue(_label(node), value(node)) for node in nodes])
        for trait, value in _TRAITS
    )
    return tuple(one.sentence for one in found if one is not None)


def other_limits(world: World, nodes: Iterable[NodeRecord]) -> Iterator[str]:
    """A sentence for each node that was started with other limits than the job has."""
    for node in nodes:
        if others := "; ".join(terms.differences(node.limits, node.program, world.limits, world.program)):
            yield f"node {node.node} was started with {others}; what the job has is node {world.limits_of}'s"


class WorldComparison:
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
        return tuple(sentence for sentence in self._before if sentence not in before)


def _first_few(sentences: Iterator[str]) -> Iterator[str]:
    yield from islice(sentences, MOST_NAMED)
    if more := sum(1 for _ in sentences):
        yield f"{more} more nodes were started with other limits than the job has: see elastic-agent status"


def _label(node: NodeRecord) -> str:
    return f"{node.node} ({node.network.interface})" if node.network is not None else node.node


def _mtu(node: NodeRecord) -> str | None:
    return f"{node.network.mtu}" if node.network is not None else None


def _speed(node: NodeRecord) -> str | None:
    known = node.network is not None and node.network.speed_mbps
    return f"{known} Mbit/s" if known else None


def _rdma(node: NodeRecord) -> str | None:
    return f"{len(node.network.rdma_ports)}" if node.network is not None else None


def _family(node: NodeRecord) -> str | None:
    return address_family(node.address)


_TRAITS = ((MTU, _mtu), (LINK_SPEED, _speed), (RDMA_PORTS, _rdma), (ADDRESS_FAMILY, _family))
