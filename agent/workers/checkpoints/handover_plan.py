"""What a node that leaves hands over, and to whom: pure functions of the job's nodes and of the copies in its memory.

A copy is handed over to a node of the next world, as far as that is known: shards that come to one that stands by are
not lost either, as the others load from there. Each leaving node does so with the copies of its own workers, and with
replicas whose node does not: it is gone, or stands by in the next world. Of a state that is the same on all ranks
nothing needs to go anywhere when a member stays that has written that it keeps it.

That condition, `STATE_SAVED`, proves that the state outlives that node's workers: in the node's memory, or, where some
node has no room for a copy, on rank 0's disk. So one case is not handed over: rank 0's node leaves with a disk that no
other node sees, and the one that stays had no room. It would have none for what is handed over, either.

All nodes rank the takers of a copy in the same way (by a hash), so that two that have a replica of it choose one taker,
which takes it once. Those that are known to have it come first: asked to keep it, they answer that they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ....rendezvous.coordinator.exclusions import left_out
from ....rendezvous.records import Condition, Endpoint, NodeRecord, World
from ....rendezvous.statements.terms import fits
from ....worker.storage.memory.copy_header import FoundCopy


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that goes on. `address` is of its memory server, HOST:PORT; `ranks` are those that it had until now."""

    node: str
    address: str
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Others:
    """The job's other nodes, as one that leaves sees them."""

    go_on: tuple[Peer, ...]
    """Those of the next world, as far as it is known, that can take a copy: members first."""
    leaving: frozenset[str] = frozenset()
    """They hand over what is theirs."""
    member_keeps: bool = False
    """A member that stays has written that it keeps the state after the last step that all have done."""
    busy: tuple[str, ...] = ()
    """Members that stay and still have workers; none where this node is no member, but stands by: then they train."""
    need_nothing: bool = False
    """They have trained for more than a minute without this node."""


@dataclass(frozen=True, slots=True)
class Task:
    """`takers` are asked one after the other; none: no node goes on."""

    copy: FoundCopy
    takers: tuple[Peer, ...]


def others(world: World, node: str, nodes: Sequence[NodeRecord]) -> Others:
    """`node` leaves `world`, whose generation has ended there, or in which it stands by.

    `nodes` are all that have a lease, oldest first. Where the one that hosts the store leaves, the job ends, and no
    node goes on.
    """
    ranks = {one.incarnation: range(one.first_rank, one.first_rank + one.slots) for one in world.members}
    is_member = any(member.node == node for member in world.members)
    excluded = left_out(world.exclusions)
    stay = [one for one in nodes if one.incarnation in ranks and not one.leaving]
    stay.sort(key=lambda one: not one.has(Condition.STATE_SAVED, world.generation))
    come = [
        one
        for one in nodes
        if one.incarnation not in ranks
        and not one.leaving
        and fits(one.program, world.program)
        and one.node not in excluded
    ]
    come.sort(key=lambda one: not one.ready)
    if any(one.leaving and one.hosts_store for one in nodes):
        stay = come = []
    return Others(
        tuple(
            Peer(one.node, str(Endpoint(one.address, one.memory)), frozenset(ranks.get(one.incarnation, ())))
            for one in _next_world(world, [*stay, *come])
            if one.memory
        ),
        frozenset(one.node for one in nodes if one.leaving and one.memory and one.node != node),
        any(one.has(Condition.STATE_SAVED, world.generation) for one in stay),
        tuple(one.node for one in stay if is_member and not one.has_stopped(world.generation)),
        not is_member and bool(stay) and all(one.has(Condition.STABLE, world.generation) for one in stay),
    )


def _next_world(world: World, nodes: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
    """As the coordinator is going to choose; all, where they are too few for a world."""
    limits = world.limits
    if limits is None:
        return nodes
    most = min(len(nodes), limits.max_nodes)
    return nodes[: most // limits.nodes_multiple_of * limits.nodes_multiple_of] or nodes


def waits_for(copies: Sequence[FoundCopy], others: Others, *, kept: bool) -> tuple[str, ...]:
    """The nodes whose workers have to end first; `kept` as for `tasks`.

    Where this node has the state after the last step, they only matter to a state that is the same on all ranks: until
    one that stays has written that it keeps it.
    """
    if kept and (others.member_keeps or all(copy.folder.local_rank is not None for copy in copies)):
        return ()
    return others.busy


def tasks(
    copies: Sequence[FoundCopy],
    acked: Mapping[tuple[str, str], Collection[str]],
    others: Others,
    *,
    kept: bool,
) -> tuple[Task, ...]:
    """In this order; `copies` are all on this node, and `acked` has the nodes with a replica, by folder and slot.

    `kept`: this node has the state after the last step that all have done, and so no older one counts.
    """
    if others.need_nothing:
        return ()
    found: list[Task] = []
    by_folder = sorted(copies, key=lambda copy: copy.folder.name)
    for folder, of_folder in groupby(by_folder, key=lambda copy: copy.folder):
        newest_first = sorted(of_folder, key=lambda copy: copy.header.version, reverse=True)
        if folder.local_rank is None:
            if not (kept and others.member_keeps):
                found.append(Task(newest_first[0], others.go_on))
        elif not (folder.origin and _has_its_node(newest_first[0], others)):
            for copy in newest_first[:1] if kept else newest_first:
                holders = acked.get((folder.name, copy.slot), ())
                found.append(Task(copy, _ranked(copy, holders, others.go_on)))
    return tuple(sorted(found, key=lambda task: task.copy.header.version, reverse=True))


def _has_its_node(copy: FoundCopy, others: Others) -> bool:
    """A node that goes on, or hands it over itself, has this replica's own copy."""
    here = (*(peer.node for peer in others.go_on), *others.leaving)
    return any(copy.folder.replica_of(node) == copy.folder for node in here)


def _ranked(copy: FoundCopy, holders: Collection[str], peers: Sequence[Peer]) -> tuple[Peer, ...]:
    shards = copy.header.shards
    assert shards is not None, "only shards have a local rank"
    twins = frozenset(shards.twins)

    def rank(peer: Peer) -> tuple[bool, bytes]:
        has_it = peer.node in holders or not twins.isdisjoint(peer.ranks)
        # Of the shards' own name, which is the same wherever a replica of them lies.
        name = f"{copy.folder.directory} {shards.digest} {peer.node}"
        return not has_it, hashlib.sha256(name.encode()).digest()

    return tuple(sorted(peers, key=rank))
