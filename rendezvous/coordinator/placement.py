"""At which place of the next world each of its nodes stands: as few survivors as can be change theirs.

A node's place is its index among the members, from which the ranks of its workers follow (`line_up`). A worker whose
rank changes needs other shards of the state than those that its node has in memory. So

- a survivor keeps its place, unless the next world is too small to have it: then it fills a hole;
- the first place is a survivor's, as long as there is one: rank 0 has the state, and claims the checkpoint directory.
  Where it is free and no survivor has to move, the last survivor takes it;
- an agent that has lost its lease and joined again takes its old place, if that is free; other newcomers fill what is
  left, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import NodeRecord, World, life_of


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
