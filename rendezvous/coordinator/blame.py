"""Which node is to blame for failures: a newcomer on which alone the workers fail must not end a healthy job.

A generation was *healthy* if it made progress, or if nothing but a planned change ended it. Those of its members that
are in the world are *proven*; the world lists the others. When all failures since then began on one member that is not
proven, and the others are enough, it is *put aside*: its agent stays and stands ready, but no world includes this life
of it. Its next life is a newcomer like any other.

Pure functions over records. What to do with the answer is `decide`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..records import MAX_ASIDE_REASON, Aside, Cause, CauseKind, NodeRecord, Restarts, World, life_of

PUT_ASIDE_AFTER = 2
"""Failures in a row. One may begin on any node; the budget of a job is at least three."""


def proven(world: World, survivors: Sequence[NodeRecord], *, progressed: bool) -> frozenset[str]:
    """The incarnations of the survivors of `world` that have shown that training goes well with them."""
    planned = world.cause.kind in (CauseKind.JOIN, CauseKind.LEAVE)
    unproven = frozenset() if progressed or planned else frozenset(world.unproven)
    known = {one.incarnation for place, one in enumerate(world.members) if place not in unproven}
    return frozenset(known) & {node.incarnation for node in survivors}


def count(
    world: World, used: Restarts, cause: Cause, survivors: Sequence[NodeRecord], *, progressed: bool
) -> Restarts:
    """`used` with one more failure put down to the node on which it began.

    One that came first from a proven member, and from another one, too, is put down to none: a worker that waits for
    one that has ended may fail, and be reported, before it.
    """
    if progressed:
        return replace(used, culprit="", blamed=0)
    good = proven(world, survivors, progressed=False)
    failed = [node for node in survivors if node.failure and node.failure.generation == world.generation]
    first_is_good = any(node.node == cause.node and node.incarnation in good for node in failed)
    if first_is_good and any(node.incarnation not in good for node in failed):
        return used
    alone = not used.blamed or used.culprit == cause.node
    return replace(used, culprit=cause.node if alone else "", blamed=used.blamed + 1)


def put_aside(
    world: World,
    restarts: Restarts,
    survivors: Sequence[NodeRecord],
    others: Sequence[NodeRecord],
    min_nodes: int,
    *,
    spent: bool,
) -> Aside | None:
    """The member that the next world is to do without; `spent`: else this is the end of the job.

    `restarts` has counted the failure that ended `world`; `others` stand ready beside the survivors.
    """
    good = proven(world, survivors, progressed=False)
    suspect = next((node for node in survivors if node.node == restarts.culprit), None)
    if suspect is None or suspect.incarnation in good or not good or suspect.hosts_store:
        return None
    if len(survivors) - 1 + len(others) < min_nodes or not (spent or restarts.blamed >= PUT_ASIDE_AFTER):
        return None
    failures = "the only failure" if restarts.blamed == 1 else f"all {restarts.blamed} failures"
    reason = (
        f"{failures} since it joined began there, and without it training went well; the last: "
        f"{world.cause.detail}"
    )
    return Aside(suspect.node, life_of(suspect.incarnation), reason[:MAX_ASIDE_REASON])


def in_words(aside: Aside) -> str:
    """What is true of this node, and what its operator can do."""
    return f"put aside: {aside.reason}. To let node {aside.node} back in, repair it and start its agent again"


def forgiven(restarts: Restarts) -> Restarts:
    """The budget without the failures of a node that has been put aside."""
    return Restarts(restarts.failures - restarts.blamed, free_retries=restarts.free_retries)
