"""Which world comes next, given every node's record and the current world: the decision of the coordinator.

`decide` is a pure function over frozen data: it reads no clock, no store, no process. Instants are arguments, seconds
on the coordinator's own monotonic clock. Here is what ends a generation, and how; `next_world` decides what follows it,
and `next_action` what each node makes of the world.

A generation's life is one key, `world`, changed only by compare-and-set:

    (none) ── enough nodes, last call over ──> RUNNING g=1
    RUNNING g ── failure, loss ──> STOPPING g ── all members stopped or gone ──> RUNNING g+1
    RUNNING g ── join, leave ──> DRAINING g ── all workers know of it ──> LAST_STEP g ── all have ended ──> RUNNING g+1
    RUNNING g ── every member succeeded ──> ENDED
    RUNNING g ── workers seem to hang ──> RUNNING g, and all are asked ──> STOPPING g, or RUNNING g (`inquiries`)
    STOPPING g ── all members stopped or gone, budget spent ──> ENDED
    ENDED g ── all nodes came after the end, and the store outlives a job ──> RUNNING g+1

While STOPPING, every member stops its workers and writes that they are stopped, with a fresh port; so the next world
never contains a node that may still run the old generation (I1), and never a port that was used before.

A planned change loses no step (I8). While DRAINING, training goes on and each member raises a flag that its workers
look at after every step. When all flags are up the phase is LAST_STEP: no worker is signalled, rank 0's node says in
`StopAt` after which step all end (see `drain`), and the next generation begins there. Workers that look at no flag are
signalled, as after a failure but with time to save; so are those that a machine which goes away cannot wait for
(`Condition.OVERDUE`). A failure or a loss on the way ends it at once: STOPPING.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..records import Cause, CauseKind, Condition, NodeRecord, Phase, Result, World
from ..text import counted
from .exclusions import left_out, settled
from .inquiries import hinders, inquire, sooner
from .next_world import (
    best_step,
    close,
    end,
    first_that_fit,
    host_left,
    last_call_ends,
    leaving_host,
    lost,
    named,
    newcomers,
    only_leavers_keep,
    root_failure,
    why_full,
    without_excluded,
)
from .view import Decision, Policy, Publish, View, Wait, in_force

POLL_WAIT_S = 3.0
"""How long a planned change waits for workers that have not looked at their flag yet, when the job's workers do so:
they may be in their first step. Training goes on meanwhile."""


def decide(view: View, policy: Policy, now: float) -> Decision:
    """The next world, or what is being waited for. Only the coordinator acts on the answer."""
    world, policy = view.world, in_force(view, policy)
    if world is None:
        return close(view, policy, now)
    if world.phase is Phase.ENDED:
        if view.came_after_end:
            return close(replace(view, world=None), policy, now, least=world.generation + 1)
        return Wait(f"the job has ended: {world.cause.detail}")
    if world.phase is Phase.STOPPING:
        return close(view, policy, now)
    present = view.present(world)
    if (broken := _broken(world, view, present)) is not None:
        return _stop(world, broken)
    if all(node.has(Condition.SUCCEEDED, world.generation) for node in present):
        done = Cause(CauseKind.SUCCESS, detail="every worker ended with success")
        return end(world, Result.SUCCEEDED, done)
    if world.phase is Phase.RUNNING:
        return _running(world, view, present, policy, now)
    if any(node.has(Condition.OVERDUE, world.generation) for node in present):
        return _stop(world, world.cause)  # together: the others' collectives must not break first
    if world.phase is Phase.DRAINING:
        return _draining(world, view, present, now)
    return _last_step(world, view, present, policy, now)


def _broken(world: World, view: View, present: Sequence[NodeRecord]) -> Cause | None:
    """What ends a generation at once: the workers that are left wait for others that will never come."""
    if (failed := root_failure(world, present)) is not None:
        return failed
    here = {node.incarnation for node in present}
    gone = next((member for member in world.members if member.incarnation not in here), None)
    return lost(gone, view) if gone is not None else None


def _running(world: World, view: View, present: Sequence[NodeRecord], policy: Policy, now: float) -> Decision:
    """Nothing is broken: does anything else end the generation?"""
    withdrawn = _withdrawn(world, present)
    host = leaving_host(view)
    leaving = host or next((node for node in present if node.leaving), None)
    if leaving is not None:
        asked = Cause(CauseKind.LEAVE, leaving.node, f"node {leaving.node} was asked to stop")
        cause = host_left(leaving) if leaving is host else asked
        return _stop(world, cause) if withdrawn is not None else _drain(world, cause)
    if withdrawn is not None:
        detail = f"node {withdrawn.node} stopped its workers because it could not confirm its lease"
        return _stop(world, Cause(CauseKind.WITHDRAWN, withdrawn.node, detail))
    if done := [node for node in present if node.has(Condition.SUCCEEDED, world.generation)]:
        late = named([node for node in present if node not in done])
        return Wait(f"the workers of {named(done)} have ended with success; waiting for those of {late}")
    asking = inquire(world, view, present, now)
    if asking is not None and hinders(asking, world):
        return asking
    decision = _invite(world, view, present, policy, now)
    if isinstance(decision, Publish):
        return decision
    return sooner(decision, asking)


def _invite(world: World, view: View, present: Sequence[NodeRecord], policy: Policy, now: float) -> Decision:
    """Everything is well: is there a node to do without, or a newcomer to make room for?"""
    exclusions = settled(world, view.nodes)
    if exclusions != world.exclusions:
        return Publish(
            replace(world, exclusions=exclusions), "a node is readmitted: it has passed its checks"
        )
    stay, out = without_excluded(present, exclusions, view, policy), left_out(exclusions)
    if gone := [node for node in present if node.node in out and node not in stay]:
        node = gone[0].node
        return _drain(world, Cause(CauseKind.LEAVE, node, f"node {node} is excluded: {out[node].reason}"))
    waiting = newcomers(view, exclusions)
    if not waiting:
        return Wait(f"generation {world.generation} is running on {counted(len(world.members), 'node')}")
    if len(first_that_fit([*present, *waiting], policy)) <= len(present):
        return Wait(f"{named(waiting)} standing by: {why_full(len(present), len(waiting), policy.limits)}")
    ready = [node for node in waiting if node.ready]
    joining = first_that_fit([*present, *ready], policy)[len(present) :]
    if not joining:
        return Wait(f"{named([node for node in waiting if not node.ready])} getting ready to join")
    quiet_at = last_call_ends(ready, view.ready_since, policy)
    if len(present) + len(ready) < policy.max_nodes and now < quiet_at:
        return Wait(f"last call before {named(joining)} joins", quiet_at)
    return _drain(world, Cause(CauseKind.JOIN, joining[0].node, f"{named(joining)} joining"))


def _draining(world: World, view: View, present: Sequence[NodeRecord], now: float) -> Decision:
    """A planned change has been announced: do all workers know of it?"""
    generation, change = world.generation, world.cause.detail
    if _withdrawn(world, present) is not None:
        return _stop(world, world.cause)
    training = [node for node in present if not node.has(Condition.SUCCEEDED, generation)]
    if unaware := [node for node in training if not node.has(Condition.NOTIFIED, generation)]:
        return Wait(f"{change}: waiting for {named(unaware)} to notify its workers")
    not_polling = [node for node in training if not node.has(Condition.POLLING, generation)]
    if not not_polling:
        return Publish(replace(world, phase=Phase.LAST_STEP), f"{change}; all workers stop at the same step")
    polls_by = view.world_since + POLL_WAIT_S
    some_poll = len(not_polling) < len(training) or best_step(world, view.nodes) > 0
    if some_poll and now < polls_by:
        return Wait(f"{change}: waiting for the workers of {named(not_polling)} to end a step", polls_by)
    return _stop(world, world.cause)


def _last_step(
    world: World, view: View, present: Sequence[NodeRecord], policy: Policy, now: float
) -> Decision:
    """The workers are about to end by themselves, all at the same step: have they?"""
    generation = world.generation
    if any(not node.has(Condition.DRAINED, generation) for node in _ended_without_success(world, present)):
        return _stop(world, world.cause)  # some have been made to end: the others wait for them in vain
    decision = close(view, policy, now)
    if not all(node.has_stopped(generation) for node in present):
        return decision
    goes_on = isinstance(decision, Publish) and decision.world.phase is Phase.RUNNING
    if goes_on and not only_leavers_keep(world, present):
        return decision
    # No node may be there for long to keep in memory what no generation goes on with. And a node that leaves has stayed
    # for the others until here, but need not wait with them for new nodes.
    savers = [node.incarnation for node in present if node.has(Condition.STATE_SAVED, generation)]
    final_saver = savers[0] if savers else ""
    if isinstance(decision, Publish) and not goes_on:
        return replace(decision, world=replace(decision.world, final_saver=final_saver))
    return Publish(replace(world, phase=Phase.STOPPING, final_saver=final_saver), decision.reason)


def _drain(world: World, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.DRAINING, cause=cause), cause.detail)


def _stop(world: World, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.STOPPING, cause=cause), cause.detail)


def _ended_without_success(world: World, present: Sequence[NodeRecord]) -> list[NodeRecord]:
    generation = world.generation
    stopped = [node for node in present if node.has_stopped(generation)]
    return [node for node in stopped if not node.has(Condition.SUCCEEDED, generation)]


def _withdrawn(world: World, present: Sequence[NodeRecord]) -> NodeRecord | None:
    """A member that has stopped its workers by itself, or has never started them."""
    return next(iter(_ended_without_success(world, present)), None)
