"""Which nodes may be in the next world, and at which place: as few survivors as can be change theirs.

Those may that fit to the job, are not excluded, and for which there is room. A node's place is its index among the
members, from which the ranks of its workers follow (`assign_ranks`). A worker whose rank changes needs other shards of
the state than those that its node has in memory. So

- a survivor keeps its place, unless the next world is too small to have it: then it fills a hole;
- the first place is a survivor's, as long as there is one: rank 0 has the state, and claims the checkpoint directory.
  Where it is free and no survivor has to move, the last survivor takes it;
- an agent that has lost its lease and joined again takes its old place, if that is free; other newcomers fill what is
  left, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..messages import Exclusion, Limits, differences, fits, why_not
from ..records import Member, NodeRecord, Phase, World, life_of
from ..text import shortened
from .exclusions import left_out
from .view import Policy, View


def newcomers(view: View, exclusions: Sequence[Exclusion]) -> list[NodeRecord]:
    """Nodes outside the world that can be used: by their node rank, if they have one, and else the oldest first."""
    inside = {member.incarnation for member in view.world.members} if view.world is not None else set()
    program, out = view.program, left_out(exclusions)
    found = [
        node
        for node in view.nodes
        if node.incarnation not in inside
        and not node.leaving
        and fits(node.program, program)
        and node.node not in out
    ]
    return sorted(found, key=lambda node: math.inf if node.node_rank is None else node.node_rank)


def suffice(nodes: int, limits: Limits) -> bool:
    """This number of nodes is enough for a world."""
    most = min(nodes, limits.max_nodes)
    return most // limits.nodes_multiple_of * limits.nodes_multiple_of >= max(limits.min_nodes, 1)


def first_that_fit(nodes: Sequence[NodeRecord], policy: Policy) -> Sequence[NodeRecord]:
    """As many as a world may have; those beyond a multiple stand by."""
    most = min(len(nodes), policy.max_nodes)
    return nodes[: most // policy.nodes_multiple_of * policy.nodes_multiple_of]


def why_full(members: int, waiting: int, limits: Limits) -> str:
    """Why no larger world has room for some of `waiting` nodes that fit to the job."""
    if members >= limits.max_nodes:
        return f"the world has all {limits.max_nodes} nodes of --max-nodes"
    multiple = limits.nodes_multiple_of
    return (
        f"{multiple - waiting} more needed, as worlds are multiples of {multiple} nodes (--nodes-multiple-of)"
    )


def why_idle(world: World | None, incarnation: str, leader: str | None) -> str:
    """For a node that neither trains nor coordinates, and does not know how many others wait."""
    if world is None or not world.trains or world.member(incarnation) is not None:
        return f"{leader} coordinates; no new world from it yet"
    limits, why = world.limits, ""
    if limits is not None and len(world.members) >= limits.max_nodes:
        why = f": {why_full(len(world.members), 1, limits)}"
    elif limits is not None and (multiple := limits.nodes_multiple_of) > 1:
        why = f": it waits until {multiple} stand by, as worlds are multiples of {multiple} nodes (--nodes-multiple-of)"
    return f"generation {world.generation} runs without this node, which stands by{why}; {leader} coordinates"


def last_call_ends(nodes: Sequence[NodeRecord], since: Mapping[str, float], policy: Policy) -> float:
    """The instant at which none of these newcomers has come for a while; `since` has when each came."""
    return max((since[node.incarnation] for node in nodes), default=0.0) + policy.last_call_s


def why_refused(world: World | None, leader: NodeRecord, me: NodeRecord) -> str | None:
    """Why a node may not join, if that is so. Only the coordinator, `leader`, knows which members live.

    So a node is sure where the coordinator is a member, or does not fit to it, either.
    """
    program, of = (leader.program, leader.node) if world is None else (world.program, world.limits_of)
    if me.program is None or program is None or fits(me.program, program):
        return None
    lives = {life_of(member.incarnation) for member in world.members} if world is not None else set()
    sure = life_of(leader.incarnation) in lives or not fits(me.program, leader.program)
    if life_of(me.incarnation) in lives or not sure:
        return None
    return why_not(me.program, program, of)


def differences_from_job(world: World | None, leader: NodeRecord | None, me: NodeRecord) -> tuple[str, ...]:
    """How this node's options differ from those of the job; empty when no member lives, as far as it knows."""
    if world is None or leader is None or world.phase is Phase.ENDED:
        return ()
    found = tuple(differences(me.limits, me.program, world.limits, world.program))
    lives = found and {life_of(member.incarnation) for member in world.members}
    return found if lives and life_of(leader.incarnation) in lives else ()


def named(nodes: Sequence[NodeRecord | Member]) -> str:
    return shortened(node.node for node in nodes)


def placed(survivors: Sequence[NodeRecord], joining: Sequence[NodeRecord], before: World) -> list[NodeRecord]:
    """All of them, in the order of the next world; `before` is the one that the survivors come from."""
    was = {member.incarnation: place for place, member in enumerate(before.members)}
    lives = {life_of(member.incarnation): place for place, member in enumerate(before.members)}
    found = places(
        [was[node.incarnation] for node in survivors],
        [lives.get(life_of(node.incarnation)) for node in joining],
    )
    nodes = [*survivors, *joining]
    return [nodes[number] for number in sorted(range(len(nodes)), key=found.__getitem__)]


def places(survivors: Sequence[int], joining: Sequence[int | None]) -> list[int]:
    """The next place of each, in this order, given the old ones; None: it has had none.

    >>> places([0, 2], [None])  # 1 was lost: its successor takes its place
    [0, 2, 1]
    >>> places([0, 2, 3], [])  # and without one the last survivor does
    [0, 2, 1]
    >>> places([1, 2], [None])  # 0 was lost
    [1, 0, 2]
    """
    size = len(survivors) + len(joining)
    node_at = {place: number for number, place in enumerate(survivors) if place < size}
    moving = [number for number, place in enumerate(survivors) if place >= size]
    if survivors and 0 not in node_at and not moving:
        moving = [node_at.pop(max(node_at))]
    _fill(node_at, moving)
    new = []
    for number, place in enumerate(joining, len(survivors)):
        if place is None or place >= size or place in node_at:
            new.append(number)
        else:
            node_at[place] = number
    _fill(node_at, new)
    return sorted(node_at, key=node_at.__getitem__)


def _fill(node_at: dict[int, int], numbers: Sequence[int]) -> None:
    holes = [place for place in range(len(node_at) + len(numbers)) if place not in node_at]
    node_at.update(zip(holes, numbers, strict=False))
