"""Which world comes next, given every node's record and the current world: the decision of the coordinator.

`decide` is a pure function over frozen data: it reads no clock, no store, no process. Instants are arguments, seconds
on the coordinator's own monotonic clock. What each node makes of the world is decided in `follow`.

A generation's life is one key, `world`, changed only by compare-and-set:

    (none) ── enough nodes, last call over ──> RUNNING g=1
    RUNNING g ── failure, loss ──> STOPPING g ── all members settled or gone ──> RUNNING g+1
    RUNNING g ── join, leave ──> DRAINING g ── all workers know of it ──> STOPPING g, drained
    RUNNING g ── every member succeeded, budget spent ──> ENDED
    ENDED g ── all nodes came after the end, and the store outlives a job ──> RUNNING g+1

While STOPPING, every member stops its workers and writes `settled = g` with a fresh port; so the next world never
contains a node that may still run the old generation (I1), and never a port that was used before.

A planned change loses no step (I8). While DRAINING, training goes on and each member raises a flag that its workers
look at after every step. When all flags are up the world is STOPPING and *drained*: nobody is signalled, rank 0's
node says in `StopAt` after which step all end (see `drain`), and the next generation begins there. Workers that look
at no flag are signalled, as after a failure but with time to save. A failure or a loss on the way ends it at once:
STOPPING, and not drained any more.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .records import (
    MAX_TEXT,
    Cause,
    CauseKind,
    Endpoint,
    Member,
    NodeRecord,
    Phase,
    Restarts,
    Result,
    World,
    line_up,
)
from .restarts import GiveUp, RestartPolicy, Retry, after_failure

LISTEN_S = 3.0
"""How long a planned change waits for workers that have not looked at their flag yet, when the job's workers do so:
they may be in their first step. Training goes on meanwhile."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator asked for."""

    job: str
    min_nodes: int = 1
    max_nodes: int = 1
    last_call_s: float = 1.0
    """How long newcomers must have been quiet before a world that is not full closes over them."""
    join_timeout_s: float = 600.0
    drain_timeout_s: float = 20.0
    """How long a planned change gives the workers to end by themselves; then they are signalled."""
    store_outage_grace_s: float = 0.0
    """How long a whole world goes on beyond the proof of its leases while nobody reaches the store."""
    store_outlives_job: bool = False
    """Who comes after the end finds it in the store, and begins the job anew."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True, slots=True)
class View:
    """What the coordinator knows: all live nodes, oldest record first, and the world they are in."""

    nodes: tuple[NodeRecord, ...]
    world: World | None = None
    world_since: float = 0.0
    """Instant at which this node first saw the world in its present phase."""
    arrivals: Mapping[str, float] = field(default_factory=dict)
    """Instant at which this node first saw each incarnation."""
    warm_since: Mapping[str, float] = field(default_factory=dict)
    """And at which it first saw it warm."""
    evicted: Collection[str] = ()
    """Incarnations that are not live because their agents have ended, although their leases go on."""
    came_after_end: bool = False
    """All nodes are of a new run of the job: `world` had ended before the oldest of them came."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Replace the world by this one, if nobody else has replaced it meanwhile."""

    world: World
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do, until something changes or the instant `until` has come."""

    reason: str
    until: float | None = None
    backoff_s: float = 0.0
    """The whole pause before the next try after a failure without progress, while it lasts."""
    short_of_nodes: bool = False
    """Nothing but more nodes can end this."""


Decision: TypeAlias = Publish | Wait


def decide(view: View, policy: Policy, now: float) -> Decision:
    """The next world, or what is being waited for. Only the coordinator acts on the answer."""
    world = view.world
    if world is None:
        return _close(view, policy, now)
    if world.phase is Phase.ENDED:
        if view.came_after_end:
            return _close(replace(view, world=None), policy, now, generation=world.generation + 1)
        return Wait(f"the job has ended: {world.cause.detail}")
    if world.phase is Phase.STOPPING and not world.drained:
        return _close(view, policy, now)
    live = {node.incarnation: node for node in view.nodes}
    present = [live[member.incarnation] for member in world.members if member.incarnation in live]
    broken = _broken(world, view, present)
    if broken is not None:
        return _stop(world, broken)
    if all(node.succeeded == world.generation for node in present):
        return _end(
            world, Result.SUCCEEDED, Cause(CauseKind.SUCCESS, detail="every worker ended with success")
        )
    if world.phase is Phase.RUNNING:
        return _watch_over(world, view, present, policy, now)
    if world.phase is Phase.DRAINING:
        return _gather(world, view, present, now)
    return _finish_drain(world, view, present, policy, now)


def _broken(world: World, view: View, present: Sequence[NodeRecord]) -> Cause | None:
    """What ends a generation at once: the workers that are left wait for others that will never come."""
    for node in present:
        if node.failure is not None and node.failure.generation == world.generation:
            return Cause(CauseKind.FAILURE, node.node, node.failure.summary, node.failure)
    here = {node.incarnation for node in present}
    lost = next((member for member in world.members if member.incarnation not in here), None)
    return _lost(lost, view) if lost is not None else None


def _watch_over(
    world: World, view: View, present: Sequence[NodeRecord], policy: Policy, now: float
) -> Decision:
    """A generation is running, and nothing is broken: does anything else end it?"""
    withdrawn = _withdrawn(world, present)
    host = _leaving_host(view)
    leaving = host or next((node for node in present if node.leaving), None)
    if leaving is not None:
        cause = _host_left(leaving) if leaving is host else _left(leaving)
        return _stop(world, cause) if withdrawn is not None else _drain(world, cause)
    if withdrawn is not None:
        detail = f"node {withdrawn.node} stopped its workers because it could not confirm its lease"
        return _stop(world, Cause(CauseKind.WITHDRAWN, withdrawn.node, detail))
    if any(node.succeeded == world.generation for node in present):
        return Wait("some nodes have finished; the others are about to")
    return _invite(world, view, policy, now)


def _gather(world: World, view: View, present: Sequence[NodeRecord], now: float) -> Decision:
    """A planned change has been announced: do all workers know of it?"""
    generation = world.generation
    if _withdrawn(world, present) is not None:
        return _stop(world, world.cause)
    training = [node for node in present if node.succeeded != generation]
    uninformed = [node for node in training if node.draining < generation]
    if uninformed:
        return Wait(f"{world.cause.detail}: waiting for {_named(uninformed)} to tell its workers")
    deaf = [node for node in training if node.listening < generation]
    if not deaf:
        drained = replace(world, phase=Phase.STOPPING, drained=True)
        return Publish(drained, f"{world.cause.detail}; all workers stop at the same step")
    heard_by = view.world_since + LISTEN_S
    some_listen = len(deaf) < len(training) or _best_step(world, view.nodes) > 0
    if some_listen and now < heard_by:
        return Wait(
            f"{world.cause.detail}: waiting for the workers of {_named(deaf)} to end a step", heard_by
        )
    return _stop(world, world.cause)


def _finish_drain(
    world: World, view: View, present: Sequence[NodeRecord], policy: Policy, now: float
) -> Decision:
    """The workers are about to end by themselves, all at the same step: have they?"""
    generation = world.generation
    if any(node.drained != generation for node in _ended_without_success(world, present)):
        return _stop(world, world.cause)  # some have been made to end: the others wait for them in vain
    if any(node.settled < generation for node in present):
        return _close(view, policy, now)
    decision = _close(view, policy, now)
    goes_on = isinstance(decision, Publish) and decision.world.phase is Phase.RUNNING
    if goes_on and not _only_leavers_keep(world, view):
        return decision
    # Nobody may be there for long to keep in memory what no generation goes on with. And who leaves has stayed for the
    # others until here, but need not wait with them for new nodes.
    rescuer = next((node.incarnation for node in present if node.kept == generation), "")
    if isinstance(decision, Publish) and not goes_on:
        return replace(decision, world=replace(decision.world, rescuer=rescuer))
    return Publish(replace(world, drained=False, rescuer=rescuer), decision.reason)


def _invite(world: World, view: View, policy: Policy, now: float) -> Decision:
    """Everything is well: is there a newcomer to make room for?"""
    newcomers = _newcomers(world, view)
    if not newcomers:
        return Wait(f"generation {world.generation} is running on {len(world.members)} nodes")
    room = policy.max_nodes - len(world.members)
    if room <= 0:
        names = _named(newcomers)
        return Wait(f"{names} standing by: the world has all {policy.max_nodes} nodes of --max-nodes")
    warm = [node for node in newcomers if node.warm]
    if not warm:
        return Wait(f"{_named(newcomers)} getting ready to join")
    quiet_at = _quiet_at(warm, view.warm_since, policy)
    if len(warm) < room and now < quiet_at:
        return Wait(f"last call before {_named(warm)} joins", quiet_at)
    return _drain(world, Cause(CauseKind.JOIN, warm[0].node, f"{_named(warm)} joining"))


def _close(view: View, policy: Policy, now: float, generation: int = 1) -> Decision:
    """No generation is running: can the next one start? `generation` is its number if there is no world to follow."""
    world = view.world
    survivors: list[NodeRecord] = []
    restarts = Restarts()
    if world is not None:
        live = {node.incarnation: node for node in view.nodes}
        survivors = [live[member.incarnation] for member in world.members if member.incarnation in live]
        busy = [node for node in survivors if node.settled < world.generation]
        if busy:
            return Wait(f"waiting for {_named(busy)} to stop generation {world.generation}")
        if world.rescuer in live and _only_leavers_keep(world, view):
            return Wait(f"node {live[world.rescuer].node} brings the state to disk before it leaves")
        restarts = world.restarts
        world = _blame_the_lost(world, live, view)
        if world.cause.kind is CauseKind.FAILURE:
            verdict = _verdict(world, world.cause, survivors, policy)
            restarts = verdict.restarts
            if isinstance(verdict, GiveUp):
                detail = f"{verdict.reason}; the last: {world.cause.detail}"[:MAX_TEXT]
                cause = replace(world.cause, detail=detail)
                return _end(replace(world, restarts=restarts), verdict.result, cause)
            pause_ends = view.world_since + verdict.backoff_s
            if now < pause_ends:
                reason = f"backing off {verdict.backoff_s:.1f} s: no progress"
                return Wait(reason, pause_ends, verdict.backoff_s)
        host = _leaving_host(view)
        if host is not None:
            return _end(world, Result.STORE_HOST_LEFT, _host_left(host))
        survivors = [node for node in survivors if not node.leaving]

    newcomers = _newcomers(world, view)
    goes_on = world is not None and len(survivors) >= policy.min_nodes
    if goes_on:  # whoever is not warm yet would keep the others waiting, and is invited later
        newcomers = [node for node in newcomers if node.warm]
    chosen = (survivors + newcomers)[: policy.max_nodes]
    if len(chosen) < policy.min_nodes:
        here = _named(chosen) or "none"
        missing = policy.min_nodes - len(chosen)
        lost = f"; last: {world.cause.detail}" if world is not None and world.cause.detail else ""
        reason = f"waiting for {missing} more of at least {policy.min_nodes} nodes (here: {here}{lost})"
        return Wait(reason, short_of_nodes=True)
    quiet_at = _quiet_at(newcomers, view.arrivals, policy)
    if newcomers and not goes_on and len(chosen) < policy.max_nodes and now < quiet_at:
        return Wait(f"last call: {len(chosen)} nodes are here, up to {policy.max_nodes} may come", quiet_at)
    return Publish(
        World(
            job=policy.job,
            generation=world.generation + 1 if world is not None else generation,
            phase=Phase.RUNNING,
            members=line_up(tuple(chosen)),
            master=Endpoint(chosen[0].address, chosen[0].port),
            cause=world.cause if world is not None else Cause(CauseKind.START),
            restarts=restarts,
            step=_best_step(world, view.nodes),
        ),
        f"{len(chosen)} nodes are ready",
    )


def _blame_the_lost(world: World, live: Mapping[str, NodeRecord], view: View) -> World:
    """A worker that failed beside a lost node failed because of it: its collective broke. Lost nodes cost no budget."""
    lost = next((member for member in world.members if member.incarnation not in live), None)
    if lost is None or world.cause.kind is not CauseKind.FAILURE:
        return world
    return replace(world, cause=_lost(lost, view))


def _lost(member: Member, view: View) -> Cause:
    why = "its agent has ended" if member.incarnation in view.evicted else "its lease ended"
    return Cause(CauseKind.LOST, member.node, f"node {member.node} is gone: {why}")


def _verdict(world: World, cause: Cause, survivors: Sequence[NodeRecord], policy: Policy) -> Retry | GiveUp:
    """Count the failure that ended `world`, now that every member's last step is known.

    The jitter is drawn from a generator seeded with job and generation: any coordinator, also one that took over
    in between, comes to the same wait.
    """
    assert cause.failure is not None, "a world stopped by a failure names it"
    progressed = any(node.step > world.step or node.lasting == world.generation for node in survivors)
    rng = random.Random(f"{world.job}:{world.generation}")
    return after_failure(world.restarts, cause.failure.fingerprint, progressed, policy.restarts, rng)


def _drain(world: World, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.DRAINING, cause=cause), cause.detail)


def _stop(world: World, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.STOPPING, cause=cause, drained=False), cause.detail)


def _end(world: World, result: Result, cause: Cause) -> Publish:
    ended = replace(world, phase=Phase.ENDED, cause=cause, result=result, drained=False)
    return Publish(ended, cause.detail)


def _ended_without_success(world: World, present: Sequence[NodeRecord]) -> list[NodeRecord]:
    generation = world.generation
    return [node for node in present if node.settled >= generation and node.succeeded != generation]


def _withdrawn(world: World, present: Sequence[NodeRecord]) -> NodeRecord | None:
    """A member that has stopped its workers by itself, or has never started them."""
    return next(iter(_ended_without_success(world, present)), None)


def _only_leavers_keep(world: World, view: View) -> bool:
    """The state after the last step of a drained generation is in the memory of nodes that are about to go."""
    members = {member.incarnation for member in world.members}
    keepers = [n for n in view.nodes if n.incarnation in members and n.kept == world.generation]
    return bool(keepers) and all(node.leaving for node in keepers)


def _left(node: NodeRecord) -> Cause:
    return Cause(CauseKind.LEAVE, node.node, f"node {node.node} was asked to stop")


def _leaving_host(view: View) -> NodeRecord | None:
    """The node that hosts the store, if it was asked to stop; it need not be a member."""
    return next((node for node in view.nodes if node.leaving and node.hosts_store), None)


def _host_left(host: NodeRecord) -> Cause:
    detail = (
        f"node {host.node}, which hosts the c10d rendezvous store, was asked to stop; "
        "the job cannot go on without its store"
    )
    return Cause(CauseKind.LEAVE, host.node, detail)


def _named(nodes: Sequence[NodeRecord]) -> str:
    """The first few by name: a reason is for people, and a world must stay small enough to be read."""
    names = ", ".join(node.node for node in nodes[:8])
    return f"{names} and {len(nodes) - 8} more" if len(nodes) > 8 else names


def _newcomers(world: World | None, view: View) -> list[NodeRecord]:
    """Nodes outside the world that can be used, oldest first."""
    inside = {member.incarnation for member in world.members} if world is not None else set()
    return [node for node in view.nodes if node.incarnation not in inside and not node.leaving]


def _quiet_at(newcomers: Sequence[NodeRecord], since: Mapping[str, float], policy: Policy) -> float:
    """When the last call over these newcomers ends."""
    return max((since[node.incarnation] for node in newcomers), default=0.0) + policy.last_call_s


def _best_step(world: World | None, nodes: Sequence[NodeRecord]) -> int:
    return max([node.step for node in nodes] + ([world.step] if world is not None else []))
