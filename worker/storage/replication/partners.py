"""Which nodes keep the replicas of which: a pure function of the nodes of a world, the same on all of them.

The nodes stand on a ring in the order of a hash of their names, and each gives its shards to those that follow it. So
each keeps as many replicas as it gives, and a node that comes or goes changes the partners of those before it only.

What another node's ranks hold by themselves, as the replica groups of HSDP and DDP do, counts as a replica.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node as its first rank describes it.

    `address` is of its memory server; empty: it has none, neither gives nor keeps. `digests` are those of
    its ranks' shards.
    """

    node: str
    address: str
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
    kept = min(replicas, len(ring) - 1)
    return {
        one.node: _with_digests(one, (ring * 2)[place + 1 : place + 1 + kept], holders, replicas)
        for place, one in enumerate(ring)
    } | {one.node: () for one in nodes if not one.address}


def _place_on_ring(node: str) -> tuple[bytes, str]:
    return hashlib.sha256(node.encode(errors="surrogateescape")).digest(), node


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
