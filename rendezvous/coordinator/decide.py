"""Which world comes next, given every node's record and the current world: the decision of the coordinator.

`decide` is a pure function over frozen data: it reads no clock, no store, no process. Instants are arguments, seconds
on the coordinator's own monotonic clock. What each node makes of the world is decided in `next_action`.

A generation's life is one key, `world`, changed only by compare-and-set:

    (none) ── enough nodes, last call over ──> RUNNING g=1
    RUNNING g ── failure, loss ──> STOPPING g ── all members settled or gone ──> RUNNING g+1
    RUNNING g ── join, leave ──> DRAINING g ── all workers know of it ──> LAST_STEP g ── all have ended ──> RUNNING g+1
    RUNNING g ── every member succeeded, budget spent ──> ENDED
    ENDED g ── all nodes came after the end, and the store outlives a job ──> RUNNING g+1

While STOPPING, every member stops its workers and writes that they are stopped, with a fresh port; so the next world
never contains a node that may still run the old generation (I1), and never a port that was used before.

A planned change loses no step (I8). While DRAINING, training goes on and each member raises a flag that its workers
look at after every step. When all flags are up the phase is LAST_STEP: no worker is signalled, rank 0's node says in
`StopAt` after which step all end (see `drain`), and the next generation begins there. Workers that look at no flag are
signalled, as after a failure but with time to save. A failure or a loss on the way ends it at once: STOPPING.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

from .. import terms
from ..liveness import absence
from ..liveness.lease_validity import may_be_whole
from ..records import (
    MAX_ASIDE,
    MAX_MEMBERS_BYTES,
    MAX_ROW_BYTES,
    MAX_TEXT,
    Aside,
    Cause,
    CauseKind,
    Condition,
    Endpoint,
    Member,
    NodeRecord,
    Phase,
    Restarts,
    Result,
    World,
    life_of,
    line_up,
    row_bytes,
)
from ..terms import Limits, Program, fits
from ..text import shortened
from . import blame
from .restarts import Ended, GiveUp, RestartPolicy, Retry, after_failure

_TOO_LARGE = "with one node more the world's record would be larger than a store takes; use shorter names"

LISTEN_S = 3.0
"""How long a planned change waits for workers that have not looked at their flag yet, when the job's workers do so:
they may be in their first step. Training goes on meanwhile."""

FINISHING_S = 5.0
"""Nodes end within seconds of each other; those that have not ended by then are told that others have."""


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
    """How long a whole world goes on beyond the proof of its leases while no member reaches the store."""
    unheard_s: float = 0.0
    """How long, without that, a member may still train of which the store knows nothing any more."""
    store_outlives_job: bool = False
    """Who comes after the end finds it in the store."""
    runs_again: bool = False
    """A job that has succeeded begins anew when an agent comes after its end; one that has failed always does."""
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
    ready_since: Mapping[str, float] = field(default_factory=dict)
    """And at which it first saw it ready."""
    evicted: Collection[str] = ()
    """Incarnations that are not live because their agents have ended, although their leases go on."""
    came_after_end: bool = False
    """All nodes are of a new run of the job: `world` had ended before the oldest of them came."""
    came_after: bool = False
    """The newest change of `world` is older than the oldest of the nodes."""
    succeeded_since: Mapping[str, float] = field(default_factory=dict)
    """Instant at which this node first saw the newest success of each incarnation."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Replace the world by this one, if no other node has replaced it meanwhile."""

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
    world, policy = view.world, in_force(view, policy)
    if world is None:
        return _close(view, policy, now)
    if world.phase is Phase.ENDED:
        if view.came_after_end:
            return _close(replace(view, world=None), policy, now, generation=world.generation + 1)
        return Wait(f"the job has ended: {world.cause.detail}")
    if world.phase is Phase.STOPPING:
        return _close(view, policy, now)
    live = {node.incarnation: node for node in view.nodes}
    present = [live[member.incarnation] for member in world.members if member.incarnation in live]
    broken = _broken(world, view, present)
    if broken is not None:
        return _stop(world, broken)
    if all(node.has(Condition.SUCCEEDED, world.generation) for node in present):
        return _end(
            world, Result.SUCCEEDED, Cause(CauseKind.SUCCESS, detail="every worker ended with success")
        )
    if world.phase is Phase.RUNNING:
        return _watch_over(world, view, present, policy, now)
    if world.phase is Phase.DRAINING:
        return _gather(world, view, present, now)
    return _finish_drain(world, view, present, policy, now)


def limits_of(policy: Policy) -> Limits:
    """The part of it that a coordinator applies for all nodes."""
    return Limits(policy.min_nodes, policy.max_nodes, policy.last_call_s, policy.restarts.max_failures)


def in_force(view: View, policy: Policy) -> Policy:
    """The coordinator's own `policy`, unless the job began with other limits."""
    world = view.world
    if world is None or world.limits in (None, limits_of(policy)) or not _goes_on(view):
        return policy
    limits = world.limits
    assert limits is not None
    return replace(
        policy,
        min_nodes=limits.min_nodes,
        max_nodes=limits.max_nodes,
        last_call_s=limits.last_call_s,
        restarts=replace(policy.restarts, max_failures=limits.max_restarts),
    )


def program_in_force(view: View) -> Program | None:
    """What the job runs."""
    world, oldest = view.world, view.nodes[0].program if view.nodes else None
    if world is not None and (oldest == world.program or _goes_on(view)):
        return world.program
    return oldest


def why_not_in(world: World | None, leader: NodeRecord, me: NodeRecord) -> str | None:
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
    return terms.why_not(me.program, program, of)


def _authority(view: View) -> str:
    """The node that was started with the limits in force."""
    if view.world is not None and _goes_on(view):
        return view.world.limits_of
    return view.nodes[0].node if view.nodes else ""


def _goes_on(view: View) -> bool:
    """A member of the world lives, perhaps under another incarnation; else all begin anew with what they were told."""
    world = view.world
    if world is None or view.came_after_end:
        return False
    lives = {life_of(member.incarnation) for member in world.members}
    return any(life_of(node.incarnation) in lives for node in view.nodes)


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
    if done := [node for node in present if node.has(Condition.SUCCEEDED, world.generation)]:
        return _await_the_others(world, view, done, present, now)
    return _invite(world, view, policy, now)


def _gather(world: World, view: View, present: Sequence[NodeRecord], now: float) -> Decision:
    """A planned change has been announced: do all workers know of it?"""
    generation = world.generation
    if _withdrawn(world, present) is not None:
        return _stop(world, world.cause)
    training = [node for node in present if not node.has(Condition.SUCCEEDED, generation)]
    uninformed = [node for node in training if not node.has(Condition.NOTIFIED, generation)]
    if uninformed:
        return Wait(f"{world.cause.detail}: waiting for {_named(uninformed)} to tell its workers")
    deaf = [node for node in training if not node.has(Condition.POLLING, generation)]
    if not deaf:
        return Publish(
            replace(world, phase=Phase.LAST_STEP), f"{world.cause.detail}; all workers stop at the same step"
        )
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
    if any(not node.has(Condition.DRAINED, generation) for node in _ended_without_success(world, present)):
        return _stop(world, world.cause)  # some have been made to end: the others wait for them in vain
    if not all(node.has_stopped(generation) for node in present):
        return _close(view, policy, now)
    decision = _close(view, policy, now)
    goes_on = isinstance(decision, Publish) and decision.world.phase is Phase.RUNNING
    if goes_on and not _only_leavers_keep(world, view):
        return decision
    # No node may be there for long to keep in memory what no generation goes on with. And a node that leaves has stayed
    # for the others until here, but need not wait with them for new nodes.
    savers = [node.incarnation for node in present if node.has(Condition.STATE_SAVED, generation)]
    final_saver = savers[0] if savers else ""
    if isinstance(decision, Publish) and not goes_on:
        return replace(decision, world=replace(decision.world, final_saver=final_saver))
    return Publish(replace(world, phase=Phase.STOPPING, final_saver=final_saver), decision.reason)


def _await_the_others(
    world: World, view: View, done: Sequence[NodeRecord], present: Sequence[NodeRecord], now: float
) -> Decision:
    """Each node judges its own workers, once it knows that others have ended: only it sees whether they move."""
    others = _named([node for node in present if node not in done])
    reason = f"the workers of {_named(done)} have ended with success; waiting for those of {others}"
    if world.finishing:
        return Wait(reason)
    told_at = min(view.succeeded_since.get(node.incarnation, now) for node in done) + FINISHING_S
    return Wait(reason, told_at) if now < told_at else Publish(replace(world, finishing=True), reason)


def _invite(world: World, view: View, policy: Policy, now: float) -> Decision:
    """Everything is well: is there a newcomer to make room for?"""
    newcomers = _newcomers(view)
    if not newcomers:
        return Wait(f"generation {world.generation} is running on {len(world.members)} nodes")
    room = policy.max_nodes - len(world.members)
    members = {member.incarnation for member in world.members}
    inside = [node for node in view.nodes if node.incarnation in members]
    if room <= 0:
        names = _named(newcomers)
        return Wait(f"{names} standing by: the world has all {policy.max_nodes} nodes of --max-nodes")
    if len(_fitting(inside + newcomers, policy)) <= len(inside):
        return Wait(f"{_named(newcomers)} standing by: {_TOO_LARGE}")
    ready = [node for node in newcomers if node.ready]
    if not ready:
        return Wait(f"{_named(newcomers)} getting ready to join")
    quiet_at = _quiet_at(ready, view.ready_since, policy)
    if len(ready) < room and now < quiet_at:
        return Wait(f"last call before {_named(ready)} joins", quiet_at)
    return _drain(world, Cause(CauseKind.JOIN, ready[0].node, f"{_named(ready)} joining"))


def _close(view: View, policy: Policy, now: float, generation: int = 1) -> Decision:
    """No generation is running: can the next one start? `generation` is its number if there is no world to follow."""
    world = _followed(view)
    survivors: list[NodeRecord] = []
    restarts, good, aside = Restarts(), frozenset[str](), _aside(view)
    if world is not None:
        live = {node.incarnation: node for node in view.nodes}
        survivors = [live[member.incarnation] for member in world.members if member.incarnation in live]
        progressed = _progressed(world, survivors)
        busy = [node for node in survivors if not node.has_stopped(world.generation)]
        if busy:
            return Wait(f"waiting for {_named(busy)} to stop generation {world.generation}")
        if (wait := _wait_for_the_missing(world, view, policy, now)) is not None:
            return wait
        if world.final_saver in live and _only_leavers_keep(world, view):
            return Wait(f"node {live[world.final_saver].node} brings the state to disk before it leaves")
        restarts = world.restarts
        world = _blame_the_lost(world, live, view)
        if world.cause.kind is CauseKind.FAILURE:
            verdict = _verdict(world, world.cause, survivors, policy)
            restarts = verdict.restarts
            others = [node for node in _newcomers(view) if node.ready]
            put = blame.put_aside(
                world, restarts, survivors, others, policy.min_nodes, spent=isinstance(verdict, GiveUp)
            )
            if put is not None:
                restarts, verdict = blame.forgiven(restarts), Retry(restarts, 0.0)
                survivors = [node for node in survivors if life_of(node.incarnation) != put.life]
                aside = (*aside, put)[-MAX_ASIDE:]
                detail = f"node {put.node} is put aside: {put.reason}"[:MAX_TEXT]
                world = replace(world, cause=replace(world.cause, detail=detail))
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
        good = blame.proven(world, survivors, progressed=progressed)

    newcomers = _newcomers(view)
    goes_on = world is not None and len(survivors) >= policy.min_nodes
    if goes_on:  # a node that is not ready yet would keep the others waiting, and is invited later
        newcomers = [node for node in newcomers if node.ready]
    chosen = _fitting(survivors + newcomers, policy)
    if len(chosen) > len(
        survivors
    ):  # whatever failed before they came is nothing that they could be cleared of
        restarts = replace(restarts, culprit="", blamed=0)
    if len(chosen) < policy.min_nodes:
        here = _named(chosen) or "none"
        missing = policy.min_nodes - len(chosen)
        lost = f"; last: {world.cause.detail}" if world is not None and world.cause.detail else ""
        left_out = f"; put aside: {shortened(one.node for one in aside)}" if aside else ""
        reason = (
            f"waiting for {missing} more of at least {policy.min_nodes} nodes (here: {here}{left_out}{lost})"
        )
        return Wait(reason, short_of_nodes=True)
    quiet_at = _quiet_at(newcomers, view.arrivals, policy)
    if newcomers and not goes_on and len(chosen) < policy.max_nodes and now < quiet_at:
        return Wait(f"last call: {len(chosen)} nodes are here, up to {policy.max_nodes} may come", quiet_at)
    return Publish(
        World(
            job=policy.job,
            generation=_next_number(world, view, generation),
            phase=Phase.RUNNING,
            members=line_up(tuple(chosen)),
            master=Endpoint(chosen[0].address, chosen[0].port),
            cause=world.cause if world is not None else Cause(CauseKind.START),
            restarts=restarts,
            step=_best_step(world, view.nodes),
            limits=limits_of(policy),
            limits_of=_authority(view),
            program=program_in_force(view),
            proven=sum(node.incarnation in good for node in chosen),
            aside=aside,
            # The life of an agent is its own, so no second job, wherever its store, has the same.
            run=(world.run if world is not None else "") or life_of(chosen[0].incarnation),
        ),
        f"{len(chosen)} nodes are ready",
    )


def _followed(view: View) -> World | None:
    """The world before the next one; of one that no member has outlived, no more than its number and its members where

    - all nodes, also those that stood by, have left by plan: it is another run of the job now, which may begin anew
      somewhere else;
    - an empty store was told of it: that job may have died long ago, and this be another one.

    What all were killed over goes on with its budget: or else a service manager would repeat it for ever.
    """
    world = view.world
    if world is None or _goes_on(view):
        return world
    all_have_left = world.cause.kind is CauseKind.LEAVE and view.came_after
    if world.was_carried_over or all_have_left:
        return replace(world, restarts=Restarts(), step=0, run="")
    return world


def _wait_for_the_missing(world: World, view: View, policy: Policy, now: float) -> Wait | None:
    went_on = policy.store_outage_grace_s and may_be_whole(world)
    if not policy.unheard_s or not (world.was_carried_over or went_on):
        return None  # the store has ended their leases, and nothing but these let them train
    missing = absence.may_still_train(world, view.nodes, view.evicted)
    stopped_at = absence.until(
        world,
        missing,
        view.world_since,
        unheard_s=policy.unheard_s,
        grace_s=policy.store_outage_grace_s,
    )
    if not missing or now >= stopped_at:
        return None
    reason = (
        f"{_named(missing)} may still train generation {world.generation}, of which the store knows nothing"
    )
    return Wait(reason, stopped_at)


def _next_number(world: World | None, view: View, least: int) -> int:
    """Higher than any that a node here has known, also in a store that is no more (I2)."""
    past = world.generation if world is not None else 0
    return max(least, past + 1, *(node.seen + 1 for node in view.nodes))


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
    progressed = _progressed(world, survivors)
    failure, loaded = cause.failure, _loaded(world, survivors)
    ended = Ended(world.generation, failure.fingerprint, progressed, loaded, failure.final)
    rng = random.Random(f"{world.job}:{world.generation}")
    verdict = after_failure(world.restarts, ended, policy.restarts, rng)
    before = replace(verdict.restarts, culprit=world.restarts.culprit, blamed=world.restarts.blamed)
    counted = blame.count(world, before, cause, survivors, progressed=progressed)
    return replace(verdict, restarts=counted)


def _progressed(world: World, survivors: Sequence[NodeRecord]) -> bool:
    """Time alone is progress only of a job that has no other: a slow script that always fails at one step has none."""
    if _best_step(world, survivors):
        return any(node.step > world.step for node in survivors)
    return any(node.has(Condition.STABLE, world.generation) for node in survivors)


def _loaded(world: World, survivors: Sequence[NodeRecord]) -> int | None:
    """The step of the state that the workers went on from, if none of them came to a step beyond it."""
    told = [n.progress for n in survivors if n.progress and n.progress.generation == world.generation]
    loaded = max((progress.loaded for progress in told if progress.loaded is not None), default=None)
    if loaded is None or any(one.reached is not None and one.reached > loaded for one in told):
        return None
    return loaded


def _drain(world: World, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.DRAINING, cause=cause), cause.detail)


def _stop(world: World, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.STOPPING, cause=cause), cause.detail)


def _end(world: World, result: Result, cause: Cause) -> Publish:
    ended = replace(world, phase=Phase.ENDED, cause=cause, result=result)
    return Publish(ended, cause.detail)


def _ended_without_success(world: World, present: Sequence[NodeRecord]) -> list[NodeRecord]:
    generation = world.generation
    stopped = [node for node in present if node.has_stopped(generation)]
    return [node for node in stopped if not node.has(Condition.SUCCEEDED, generation)]


def _withdrawn(world: World, present: Sequence[NodeRecord]) -> NodeRecord | None:
    """A member that has stopped its workers by itself, or has never started them."""
    return next(iter(_ended_without_success(world, present)), None)


def _only_leavers_keep(world: World, view: View) -> bool:
    """The state after the last step of a drained generation is in the memory of nodes that are about to go."""
    members = {member.incarnation for member in world.members}
    here = [node for node in view.nodes if node.incarnation in members]
    keepers = [node for node in here if node.has(Condition.STATE_SAVED, world.generation)]
    return bool(keepers) and all(node.leaving for node in keepers)


def _fitting(nodes: list[NodeRecord], policy: Policy) -> list[NodeRecord]:
    """The first ones, as many as a world may have and its record can hold."""
    most = nodes[: policy.max_nodes]
    if len(most) * MAX_ROW_BYTES <= MAX_MEMBERS_BYTES:
        return most
    sizes = accumulate(map(row_bytes, most))
    return [node for node, size in zip(most, sizes, strict=True) if size <= MAX_MEMBERS_BYTES]


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


def _named(nodes: Sequence[NodeRecord | Member]) -> str:
    return shortened(node.node for node in nodes)


def _newcomers(view: View) -> list[NodeRecord]:
    """Nodes outside the world that can be used: by their node rank, if they have one, and else the oldest first."""
    inside = {member.incarnation for member in view.world.members} if view.world is not None else set()
    program = program_in_force(view)
    aside = {one.life for one in _aside(view)}
    found = [
        node
        for node in view.nodes
        if node.incarnation not in inside
        and not node.leaving
        and fits(node.program, program)
        and not (aside and life_of(node.incarnation) in aside)
    ]
    return sorted(found, key=lambda node: math.inf if node.node_rank is None else node.node_rank)


def _aside(view: View) -> tuple[Aside, ...]:
    """Who was put aside and is still there."""
    if view.world is None or not view.world.aside:
        return ()
    lives = {life_of(node.incarnation) for node in view.nodes}
    return tuple(one for one in view.world.aside if one.life in lives)


def _quiet_at(newcomers: Sequence[NodeRecord], since: Mapping[str, float], policy: Policy) -> float:
    """When the last call over these newcomers ends."""
    return max((since[node.incarnation] for node in newcomers), default=0.0) + policy.last_call_s


def _best_step(world: World | None, nodes: Sequence[NodeRecord]) -> int:
    return max([node.step for node in nodes] + ([world.step] if world is not None else []))
