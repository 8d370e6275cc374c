"""Which nodes keep the replicas of which: a pure function of the nodes of a world, the same on all of them.

The nodes stand on a ring in the order of a hash of their names, and each gives its shards to those that follow it. So
each keeps as many replicas as it gives, and a node that comes or goes changes the partners of those before it only.
Where a partner would be in the failure domain of its node, two nodes swap partners: this one and the next on the ring
with which the swap helps. A swap leaves the load as it is; with no domain of more than half of the nodes, the first
partner of each is elsewhere.

What another node's ranks hold by themselves, as the replica groups of HSDP and DDP do, counts as a replica.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_SAME_NODE = 4
_SAME_KEEPER = 2
_SAME_DOMAIN = 1


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node as its first rank describes it.

    `address` is of its memory server; empty: it has none, neither gives nor keeps. `domain` is the value of the label
    of failure domains; empty: not known, and taken for one of its own. `digests` are those of its ranks' shards.
    """

    node: str
    address: str
    domain: str
    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class Keeper:
    """A node that keeps replicas for another one: of the shards with these digests."""

    node: str
    digests: frozenset[str]


def partners(nodes: Sequence[NodePlace], replicas: int) -> dict[str, tuple[Keeper, ...]]:
    """By node; those to which nothing is to be copied have no partner. The order of `nodes` is of no account."""
    ring = sorted((one for one in nodes if one.address), key=lambda one: _place_on_ring(one.node))
    holders = Counter(digest for one in ring for digest in one.digests)
    chosen: list[list[int]] = [[] for _ in ring]
    for distance in range(1, min(replicas, len(ring) - 1) + 1):
        for place, keeper in enumerate(_keepers(ring, distance, chosen)):
            chosen[place].append(keeper)
    return {
        one.node: _with_digests(one, [ring[keeper] for keeper in keepers], holders, replicas)
        for one, keepers in zip(ring, chosen, strict=True)
    } | {one.node: () for one in nodes if not one.address}


def _place_on_ring(node: str) -> tuple[bytes, str]:
    return hashlib.sha256(node.encode(errors="surrogateescape")).digest(), node


def _keepers(ring: Sequence[NodePlace], distance: int, chosen: Sequence[Sequence[int]]) -> list[int]:
    """A keeper for each place on the ring; each place is one once, unless there is no other way."""
    size = len(ring)
    keepers = [(place + distance) % size for place in range(size)]

    def faults(place: int, keeper: int) -> int:
        domain = ring[place].domain
        return (
            _SAME_NODE * (place == keeper)
            + _SAME_KEEPER * (keeper in chosen[place])
            + _SAME_DOMAIN * bool(domain and domain == ring[keeper].domain)
        )

    hopeless: set[str] = set()
    for place in range(size):
        found = faults(place, keepers[place])
        if not found or (found == _SAME_DOMAIN and ring[place].domain in hopeless):
            continue
        for step in range(1, size):
            other = (place + step) % size
            now = found + faults(other, keepers[other])
            if faults(place, keepers[other]) + faults(other, keepers[place]) < now:
                keepers[place], keepers[other] = keepers[other], keepers[place]
                break
        else:
            if found == _SAME_DOMAIN:
                hopeless.add(ring[place].domain)
    load = Counter(keepers)
    for place in range(size):
        if faults(place, keepers[place]) > _SAME_DOMAIN:
            load[keepers[place]] -= 1
            keepers[place] = min(
                range(size), key=lambda keeper: (faults(place, keeper), load[keeper], keeper)
            )
            load[keepers[place]] += 1
    return keepers


def _with_digests(
    giver: NodePlace, keepers: Sequence[NodePlace], holders: Counter[str], replicas: int
) -> tuple[Keeper, ...]:
    found = []
    missing = {digest: replicas - (holders[digest] - 1) for digest in giver.digests}
    for keeper in keepers:
        kept = frozenset(d for d in giver.digests if missing[d] > 0 and d not in keeper.digests)
        for digest in kept:
            missing[digest] -= 1
        if kept:
            found.append(Keeper(keeper.node, kept))
    return tuple(found)
