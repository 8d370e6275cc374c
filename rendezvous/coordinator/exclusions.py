"""The nodes that the worlds do without: how one is excluded, what brings it back, and what people read of it.

An exclusion is a row of the world; each node has at most one. It is in force until the node has passed its checks after
the cool-down (`NodeRecord.recheck`), or, where an operator asked for it, until an operator readmits the node. The row
stays as history: the node's next exclusion has the next number, and a cool-down twice as long.

The agent of an excluded node goes on: it may host the store, and other nodes load the copies that it has in memory.

Pure functions over records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..messages import MAX_EXCLUSION_REASON, MAX_EXCLUSIONS, Exclusion
from ..records import NodeRecord, World
from ..text import counted

BY_OPERATOR = "operator"
"""The cause of an exclusion that an operator has asked for."""


def exclude(
    rows: Sequence[Exclusion],
    node: str,
    life: str,
    cause: str,
    reason: str,
    *,
    record: NodeRecord | None = None,
    fingerprint: str = "",
    operator: bool = False,
) -> tuple[Exclusion, ...]:
    """`rows` with a new exclusion of this node in place of its old one. If there are too many rows, the oldest that is
    history is dropped.

    `rows` as they are if an operator has excluded the node already, or if all rows are in force: then there is no room.

    `record` is the node's, if it is known: the new exclusion's number is higher than that of any check it has reported.
    """
    before = next((one for one in rows if one.node == node), None)
    kept = [one for one in rows if one.node != node]
    if before is not None and by_operator(before) and not operator:
        return tuple(rows)
    if len(kept) >= MAX_EXCLUSIONS:
        oldest = next((one for one in kept if one.readmitted), None)
        if oldest is None:
            return tuple(rows)
        kept.remove(oldest)
    checked = record.recheck.times if record is not None and record.recheck is not None else 0
    new = Exclusion(
        node,
        life,
        cause,
        reason[:MAX_EXCLUSION_REASON],
        fingerprint,
        max(before.times if before is not None else 0, checked) + 1,
        operator,
    )
    return (*kept, new)


def readmit(rows: Sequence[Exclusion], nodes: frozenset[str]) -> tuple[Exclusion, ...]:
    """`rows`, in which the exclusions of these nodes are over."""
    return tuple(replace(one, readmitted=True) if one.node in nodes else one for one in rows)


def settled(world: World | None, nodes: Sequence[NodeRecord]) -> tuple[Exclusion, ...]:
    """The rows of `world`, with every node readmitted that has passed its checks."""
    if world is None or not world.exclusions:
        return ()
    passed = {
        node.node: node.recheck.times for node in nodes if node.recheck is not None and node.recheck.passed
    }
    return readmit(
        world.exclusions,
        frozenset(
            one.node for one in world.exclusions if not one.by_operator and passed.get(one.node) == one.times
        ),
    )


def left_out(rows: Sequence[Exclusion]) -> Mapping[str, Exclusion]:
    """The exclusions in force, by node."""
    return {one.node: one for one in rows if not one.readmitted}


def by_operator(one: Exclusion) -> bool:
    """An operator has excluded the node, and not readmitted it."""
    return one.by_operator and not one.readmitted


def in_words(one: Exclusion) -> str:
    """Why this node is excluded, and what its operator can do; reads on from "node c is", or stands alone."""
    again = "" if one.times == 1 else f" again ({counted(one.times, 'time')} by now)"
    if one.by_operator:
        return f"excluded{again} by an operator: {one.reason}. It stays out until `elastic-agent readmit {one.node}`"
    return (
        f"excluded{again}: {one.reason}. It checks itself after a cool-down and comes back when the checks pass;"
        f" `elastic-agent readmit {one.node}` brings it back now"
    )


def why_excluded(world: World | None, me: NodeRecord) -> str:
    """Why this node is excluded; empty if it is not."""
    one = world.exclusion(me.node) if world is not None else None
    if one is None:
        return ""
    failed = me.recheck if me.recheck is not None and me.recheck.times == one.times else None
    if failed is None or failed.passed:
        return in_words(one)
    return f"{in_words(one)}. Its last check failed: {failed.summary}"
