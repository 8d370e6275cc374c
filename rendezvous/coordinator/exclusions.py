"""Which node is to blame for failures, and the nodes that the worlds do without.

A failure is *a node's own* if it does not follow from another node's failure, and if no signal from outside the job
ended the worker. A generation in which exactly one node had a failure of its own is counted against the life of that
node's agent; generations in a row that are counted against the same life add up. The node is excluded

- after the first whose cause shows that its machine is broken (`Action.EXCLUDE_NODE`);
- after `EXCLUDE_AFTER` in a row; or, in a world of fewer than `MANY` nodes whose newest generation ran for longer than
  a minute, after `EXCLUDE_AFTER_LONG`: among few nodes, chance soon hits the same one twice. An error of the script
  (`STOP`) counts, too: a package may be missing on this node alone. What the worker library refuses (`END`) counts only
  against a node that has joined a job which trained well without it;
- after the first that would end the job, if the node has joined a job that trained well without it. A generation was
  *healthy* if it made progress, or if nothing but a planned change ended it. Those of its members that are in the world
  are *proven*; the world lists the others.

No node is excluded for a failure that happens on several nodes: its origin is then the script, the state, or the place
among the ranks. That is assumed where the same failure was on another node before, with no progress since, or where it
comes on another node after the first was excluded for it, before any generation has run for a minute: `moved` says
which exclusions were in error.

An exclusion is a row of the world; each node has at most one. It is in force until the node has passed its checks after
the cool-down (`NodeRecord.recheck`), or, where an operator asked for it, until an operator readmits the node. The row
stays as history: the node's next exclusion has the next number, and a cool-down twice as long. The agent of an excluded
node goes on: it may host the store, and other nodes load the copies that it has in memory.

Pure functions over records; `next_world` acts on the answers given here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..messages import MAX_EXCLUSION_REASON, MAX_EXCLUSIONS, Exclusion
from ..records import Action, CauseKind, Condition, Failure, NodeRecord, Restarts, World, life_of
from ..text import counted

EXCEPTION = "exception"
"""The cause of a failure that is known by its exception only."""
EXCLUDE_AFTER = 2
EXCLUDE_AFTER_LONG = 3
MANY = 4

MOST_IN_A_ROW = 3
"""So many nodes may be excluded one after the other, each with its failures forgiven, while no world lasts for a
minute. Further failures use up the job's budget again: a fault that is not a node's must end the job."""


def proven(world: World, survivors: Sequence[NodeRecord], *, progressed: bool) -> frozenset[str]:
    """The incarnations of the survivors of `world` that have shown that training goes well with them."""
    planned = world.cause.kind in (CauseKind.JOIN, CauseKind.LEAVE)
    unproven = frozenset() if progressed or planned else frozenset(world.unproven)
    known = {one.incarnation for place, one in enumerate(world.members) if place not in unproven}
    return frozenset(known) & {node.incarnation for node in survivors}


def count_blame(world: World, used: Restarts, survivors: Sequence[NodeRecord]) -> Restarts:
    """`used` with the failure that ended `world` counted against the node that alone had a failure of its own.

    A failure that several nodes had neither blames nor clears any of these nodes, and clears all others.
    """
    if _lasted(world, survivors):
        used = replace(used, exclusions=0)
    lives = {life_of(node.incarnation) for node in _failed(world, survivors)}
    if not lives:
        return used
    if len(lives) > 1:
        return used if used.culprit in lives else replace(used, culprit="", blamed=0)
    (life,) = lives
    return replace(used, culprit=life, blamed=used.blamed + 1 if used.culprit == life else 1)


def to_exclude(
    world: World, restarts: Restarts, survivors: Sequence[NodeRecord], *, progressed: bool, spent: bool
) -> NodeRecord | None:
    """The member that the next world is to do without, if the others are enough.

    `restarts` has counted the failure that ended `world`; `spent`: else this is the end of the job.
    """
    if restarts.exclusions >= MOST_IN_A_ROW:
        return None
    if (
        broken := next((node for node in _failed(world, survivors) if _is_broken(world, node)), None)
    ) is not None:
        return broken
    suspect = next((node for node in survivors if life_of(node.incarnation) == restarts.culprit), None)
    if suspect is None:
        return None
    good = proven(world, survivors, progressed=progressed)
    joined_healthy_job = bool(good) and suspect.incarnation not in good
    was_elsewhere = not joined_healthy_job and restarts.same_fingerprint > restarts.blamed
    if was_elsewhere or _elsewhere(world, restarts, suspect.node):
        return None
    failure = world.cause.failure
    if failure is not None and failure.action is Action.END and not joined_healthy_job:
        return None
    by_chance = _lasted(world, survivors) and len(world.members) < MANY
    enough = EXCLUDE_AFTER_LONG if by_chance else EXCLUDE_AFTER
    if spent and joined_healthy_job:
        enough = 1
    return suspect if restarts.blamed >= enough else None


def moved(world: World, restarts: Restarts, survivors: Sequence[NodeRecord]) -> tuple[Exclusion, ...]:
    """The exclusions in force for the failure that has ended `world` on another node, soon after."""
    suspect = next((node for node in survivors if life_of(node.incarnation) == restarts.culprit), None)
    if suspect is None:
        return ()
    return tuple(one for one in _elsewhere(world, restarts, suspect.node) if not one.readmitted)


def why_to_blame(world: World, restarts: Restarts, node: NodeRecord) -> str:
    """A sentence for people on the node that is excluded."""
    failure = _failure(world, node)
    if _is_broken(world, node) and failure is not None:
        return f"its machine is broken ({failure.cause}): {failure.summary}"
    failures = "the only failure" if restarts.blamed == 1 else f"each of {restarts.blamed} failures in a row"
    return f"{failures} began there alone; the last: {world.cause.detail}"


def forgiven(restarts: Restarts, node: NodeRecord) -> Restarts:
    """The budget without the failures of a node that is excluded."""
    its = restarts.blamed if life_of(node.incarnation) == restarts.culprit else 1
    return Restarts(
        max(0, restarts.failures - its),
        free_retries=restarts.free_retries,
        from_outside=restarts.from_outside,
        exclusions=restarts.exclusions + 1,
    )


def digest(failure: Failure) -> str:
    """A digest of the failure's fingerprint, short enough for an exclusion's row."""
    return hashlib.blake2b(failure.fingerprint.encode(), digest_size=8).hexdigest()


def _lasted(world: World, survivors: Sequence[NodeRecord]) -> bool:
    return any(node.has(Condition.STABLE, world.generation) for node in survivors)


def _failed(world: World, survivors: Sequence[NodeRecord]) -> list[NodeRecord]:
    """The nodes with a failure of their own in this generation."""
    failures = ((node, _failure(world, node)) for node in survivors)
    return [node for node, one in failures if one is not None and not one.collateral and not one.outside]


def _failure(world: World, node: NodeRecord) -> Failure | None:
    """This node's failure in this generation."""
    if node.failure is not None and node.failure.generation == world.generation:
        return node.failure
    return world.cause.failure if world.cause.node == node.node else None


def _is_broken(world: World, node: NodeRecord) -> bool:
    failure = _failure(world, node)
    return failure is not None and failure.action is Action.EXCLUDE_NODE


def _elsewhere(world: World, restarts: Restarts, node: str) -> tuple[Exclusion, ...]:
    """Exclusions of other nodes for this very failure, made since the last generation that ran for a minute; or ever,
    for an exception of the script, as few machines break in the same words, and on the node of rank 0, which evaluates,
    saves and runs out of memory for all others."""
    failure = world.cause.failure
    if failure is None or failure.action is Action.EXCLUDE_NODE:
        return ()
    if not (restarts.exclusions or failure.cause == EXCEPTION or node == world.members[0].node):
        return ()
    found = digest(failure)
    return tuple(one for one in world.exclusions if one.node != node and one.fingerprint == found)


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
