"""Whether the next generation can begin, once the one before has ended: who is in it, and with what restart budget.

Three steps, each of which may find instead that the coordinator waits, or that the job ends:

1. `_left_over`: have the members stopped, and what is left of their world?
2. `_after_failure`: what does the failure that ended it cost, and is one node to blame? Which survivors go on?
3. `_form`: are there enough nodes, and has the last call been long enough?

Those may be in it that fit to the job, are not excluded, and for which there is room. A node's place is its index among
the members, from which the ranks of its workers follow (`assign_ranks`). A worker whose rank changes needs other shards
of the state than those that its node has in memory: so as few survivors as can be change theirs (`places`).

- a survivor keeps its place, unless the next world is too small to have it: then it fills a hole;
- the first place is a survivor's, as long as there is one: rank 0 has the state, and claims the checkpoint directory.
  Where it is free and no survivor has to move, the last survivor takes it;
- an agent that has lost its lease and joined again takes its old place, if that is free; other newcomers fill what is
  left, in their order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..liveness import may_be_whole, may_still_train, train_until
from ..messages import Exclusion, Limits, differences, fits, why_not
from ..records import (
    MAX_TEXT,
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
    assign_ranks,
    life_of,
    standbys_among,
)
from ..text import counted, shortened
from .exclusions import (
    by_operator,
    count_blame,
    digest,
    exclude,
    forgiven,
    left_out,
    moved,
    proven,
    readmit,
    settled,
    to_exclude,
    why_to_blame,
)
from .restarts import Ended, GiveUp, Retry, after_failure
from .view import Decision, Policy, Publish, View, Wait


@dataclass(frozen=True, slots=True)
class _Basis:
    """What the next world is made of, besides newcomers."""

    exclusions: tuple[Exclusion, ...]
    world: World | None = None
    """The one before."""
    survivors: tuple[NodeRecord, ...] = ()
    restarts: Restarts = field(default_factory=Restarts)
    proven: frozenset[str] = frozenset()
    """Incarnations of survivors, see `exclusions`."""


def close(view: View, policy: Policy, now: float, least: int = 1) -> Decision:
    """The next world, if it can begin now. Its number is `least` or higher."""
    world = _followed(view)
    basis = _Basis(()) if world is None else _left_over(world, view, policy, now)
    return _form(basis, view, policy, now, least) if isinstance(basis, _Basis) else basis


def end(world: World, result: Result, cause: Cause) -> Publish:
    return Publish(replace(world, phase=Phase.ENDED, cause=cause, result=result), cause.detail)


def lost(member: Member, view: View) -> Cause:
    why = "its agent has ended" if member.incarnation in view.evicted else "its lease ended"
    return Cause(CauseKind.LOST, member.node, f"node {member.node} is gone: {why}")


def root_failure(world: World, present: Sequence[NodeRecord]) -> Cause | None:
    """The failure that ended this generation: a collateral one only where no other is known."""
    failed = [
        Cause(CauseKind.FAILURE, node.node, node.failure.summary, node.failure)
        for node in present
        if node.failure is not None and node.failure.generation == world.generation
    ]
    roots = [cause for cause in failed if cause.failure is not None and not cause.failure.collateral]
    return next(iter(roots or failed), None)


def leaving_host(view: View) -> NodeRecord | None:
    """The node that hosts the store, if it was asked to stop; it need not be a member."""
    return next((node for node in view.nodes if node.leaving and node.hosts_store), None)


def host_left(host: NodeRecord) -> Cause:
    detail = (
        f"node {host.node}, which hosts the c10d rendezvous store, was asked to stop; "
        "the job cannot go on without its store"
    )
    return Cause(CauseKind.LEAVE, host.node, detail)


def best_step(world: World | None, nodes: Sequence[NodeRecord]) -> int:
    return max([node.step for node in nodes] + ([world.step] if world is not None else []))


def only_leavers_keep(world: World, present: Sequence[NodeRecord]) -> bool:
    """The state after the last step of a drained generation is in the memory of nodes that are about to go."""
    keepers = [node for node in present if node.has(Condition.STATE_SAVED, world.generation)]
    return bool(keepers) and all(node.leaving for node in keepers)


def _followed(view: View) -> World | None:
    """The world before the next one; of one that no member has outlived, no more than its number and its members where

    - all nodes, also those that stood by, have left by plan: it is another run of the job now, which may begin anew
      somewhere else. What an operator has excluded stays excluded;
    - an empty store was filled with it: that job may have died long ago, and this be another one.

    What all were killed over goes on with its budget: or else a service manager would repeat it for ever.
    """
    world = view.world
    if world is None or view.goes_on:
        return world
    all_have_left = world.cause.kind is CauseKind.LEAVE and view.came_after
    if world.was_carried_over or all_have_left:
        kept = () if world.was_carried_over else tuple(filter(by_operator, world.exclusions))
        return replace(world, restarts=Restarts(), step=0, exclusions=kept, run="")
    return world


def _left_over(world: World, view: View, policy: Policy, now: float) -> _Basis | Decision:
    present = view.present(world)
    if busy := [node for node in present if not node.has_stopped(world.generation)]:
        return Wait(f"{named(busy)} to stop generation {world.generation}")
    if (wait := _wait_for_the_missing(world, view, policy, now)) is not None:
        return wait
    saver = next((node for node in present if node.incarnation == world.final_saver), None)
    if saver is not None and only_leavers_keep(world, present):
        return Wait(f"node {saver.node} brings the state to disk before it leaves")
    progressed = _progressed(world, present)
    world = _blame_the_lost(world, present, view)
    basis = _Basis(settled(world, view.nodes), world, present, world.restarts)
    if world.cause.kind is CauseKind.FAILURE:
        if world.cause.failure is not None and world.cause.failure.collateral:
            world = replace(world, cause=root_failure(world, present) or world.cause)
            basis = replace(basis, world=world)
        judged = _after_failure(basis, world, view, policy, now)
        if not isinstance(judged, _Basis):
            return judged
        basis = judged
    if (host := leaving_host(view)) is not None:
        return end(world, Result.STORE_HOST_LEFT, host_left(host))
    # Where some of them have to stand by, one that keeps the state after the last step goes on.
    survivors = tuple(
        sorted(
            without_excluded(basis.survivors, basis.exclusions, view, policy),
            key=lambda node: not node.has(Condition.STATE_SAVED, world.generation),
        )
    )
    return replace(basis, survivors=survivors, proven=proven(world, survivors, progressed=progressed))


def without_excluded(
    members: Sequence[NodeRecord], exclusions: Sequence[Exclusion], view: View, policy: Policy
) -> Sequence[NodeRecord]:
    """The members that go on. Excluded ones go on, too, while the others and the standbys are too few for a world. In a
    planned change one goes on until another has the state after the last step, which it would take with it."""
    stay, out = [node for node in members if not node.leaving], left_out(exclusions)
    others = [node for node in stay if node.node not in out]
    if len(others) == len(stay):
        return stay
    world = view.world
    if not others and world is not None and not _stops_unplanned(world):
        others = sorted(stay, key=lambda node: not node.has(Condition.STATE_SAVED, world.generation))[:1]
    ready = [node for node in newcomers(view, exclusions) if node.ready]
    return others if suffice(len(others) + len(ready), policy.limits) else stay


def _stops_unplanned(world: World) -> bool:
    return world.phase is Phase.STOPPING and world.cause.kind not in (CauseKind.JOIN, CauseKind.LEAVE)


def _after_failure(basis: _Basis, world: World, view: View, policy: Policy, now: float) -> _Basis | Decision:
    progressed = _progressed(world, basis.survivors)
    budget = _count_failure(world, basis.survivors, policy, progressed=progressed)
    free = isinstance(budget, Retry) and budget.free
    basis = replace(basis, restarts=budget.restarts)
    if not free and (excluded := _excluded(basis, world, view, policy, budget, progressed)) is not None:
        return excluded
    if not free and (erred := moved(world, basis.restarts, basis.survivors)):
        basis = replace(basis, exclusions=readmit(basis.exclusions, frozenset(one.node for one in erred)))
    if isinstance(budget, GiveUp):
        ended = _explained(world, f"{budget.reason}; the last: {world.cause.detail}")
        return end(replace(ended, restarts=basis.restarts), budget.result, ended.cause)
    pause_ends = view.world_since + budget.backoff_s
    if now < pause_ends:
        failure = world.cause.failure
        why = failure.cause if budget.free and failure is not None else "no progress"
        return Wait(f"backing off {budget.backoff_s:.1f} s: {why}", pause_ends, budget.backoff_s)
    return basis


def _excluded(
    basis: _Basis, world: World, view: View, policy: Policy, budget: Retry | GiveUp, progressed: bool
) -> _Basis | None:
    """The basis without the node that is to blame; None if no node is, or if the others are too few for a world."""
    spent = isinstance(budget, GiveUp)
    node = to_exclude(world, basis.restarts, basis.survivors, progressed=progressed, spent=spent)
    if node is None:
        return None
    failure, reason = world.cause.failure, why_to_blame(world, basis.restarts, node)
    assert failure is not None, "a world stopped by a failure names it"
    exclusions = exclude(
        basis.exclusions,
        node.node,
        life_of(node.incarnation),
        failure.cause,
        reason,
        record=node,
        fingerprint=digest(failure),
    )
    if node in without_excluded(basis.survivors, exclusions, view, policy):
        return None
    return replace(
        basis,
        exclusions=exclusions,
        world=_explained(world, f"node {node.node} is excluded: {reason}"),
        restarts=forgiven(basis.restarts, node),
    )


def _form(basis: _Basis, view: View, policy: Policy, now: float, least: int) -> Decision:
    world, survivors = basis.world, basis.survivors
    joining = newcomers(view, basis.exclusions)
    goes_on = world is not None and len(survivors) >= policy.min_nodes
    if goes_on:  # a node that is not ready yet would keep the others waiting, and is invited later
        joining = [node for node in joining if node.ready]
    here = [*survivors, *joining]
    chosen = first_that_fit(here, policy)
    if len(chosen) < policy.min_nodes:
        last = f"; last: {world.cause.detail}" if world is not None and world.cause.detail else ""
        out = left_out(basis.exclusions)
        excluded = f"; excluded: {shortened(out)}" if out else ""
        return Wait(
            f"{max(policy.min_nodes - len(here), 1)} more of at least {counted(policy.min_nodes, 'node')} "
            f"(here: {named(here) or 'none'}{excluded}{last})",
            short_of_nodes=True,
        )
    quiet_at = last_call_ends(joining, view.arrivals, policy)
    if joining and not goes_on and len(here) < policy.max_nodes and now < quiet_at:
        return Wait(
            f"last call: {counted(len(here), 'node')} here, up to {policy.max_nodes} may come", quiet_at
        )
    if world is not None:
        chosen = placed(chosen[: len(survivors)], chosen[len(survivors) :], world)
    next_world = World(
        job=policy.job,
        # Higher than any that a node here has known, also in a store that is no more (I2).
        generation=max(least, *(node.seen + 1 for node in view.nodes), world.generation + 1 if world else 1),
        phase=Phase.RUNNING,
        members=assign_ranks(tuple(chosen)),
        master=Endpoint(chosen[0].address, chosen[0].port),
        cause=world.cause if world is not None else Cause(CauseKind.START),
        restarts=basis.restarts,
        step=best_step(world, view.nodes),
        limits=policy.limits,
        limits_of=view.limits_of,
        program=view.program,
        unproven=tuple(place for place, node in enumerate(chosen) if node.incarnation not in basis.proven),
        exclusions=basis.exclusions,
        standbys=standbys_among(
            _outside(chosen, [*here, *view.nodes]), world.generation if world is not None else 0
        ),
        # The life of an agent is its own, so no second job, wherever its store, has the same.
        run=(world.run if world is not None else "") or life_of(chosen[0].incarnation),
    )
    return Publish(next_world, f"{len(chosen)} nodes are ready")


def _outside(chosen: Sequence[NodeRecord], nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    inside = {node.incarnation for node in chosen}
    return [
        node for node in {node.incarnation: node for node in nodes}.values() if node.incarnation not in inside
    ]


def _explained(world: World, detail: str) -> World:
    return replace(world, cause=replace(world.cause, detail=detail[:MAX_TEXT]))


def _wait_for_the_missing(world: World, view: View, policy: Policy, now: float) -> Wait | None:
    went_on = policy.store_outage_grace_s and may_be_whole(world)
    if not policy.unleased_s or not (world.was_carried_over or went_on):
        return None  # the store has ended their leases, and nothing but these let them train
    missing = may_still_train(world, view.nodes, view.evicted)
    stopped_at = train_until(
        world,
        missing,
        view.world_since,
        unleased_s=policy.unleased_s,
        grace_s=policy.store_outage_grace_s,
    )
    if not missing or now >= stopped_at:
        return None
    reason = (
        f"{named(missing)} may still train generation {world.generation}, of which the store knows nothing"
    )
    return Wait(reason, stopped_at)


def _blame_the_lost(world: World, present: Sequence[NodeRecord], view: View) -> World:
    """A worker that failed beside a lost node failed because of it: its collective broke. Lost nodes cost no budget."""
    live = {node.incarnation for node in present}
    gone = next((member for member in world.members if member.incarnation not in live), None)
    if gone is None or world.cause.kind is not CauseKind.FAILURE:
        return world
    return replace(world, cause=lost(gone, view))


def _count_failure(
    world: World, survivors: Sequence[NodeRecord], policy: Policy, *, progressed: bool
) -> Retry | GiveUp:
    """Count the failure that ended `world` on the restart budget, now that every member's last step is known.

    The jitter is drawn from a generator seeded with job and generation: any coordinator, also one that took over
    in between, comes to the same wait.
    """
    failure = world.cause.failure
    assert failure is not None, "a world stopped by a failure names it"
    loaded = _loaded(world, survivors)
    ended = Ended(
        world.generation,
        failure.fingerprint,
        progressed,
        loaded,
        failure.action,
        failure.outside,
        failure.cause,
        stepped=_stepped(world, survivors),
    )
    rng = random.Random(f"{world.job}:{world.generation}")
    budget = after_failure(world.restarts, ended, policy.restarts, rng)
    if isinstance(budget, Retry) and budget.free:
        return budget
    used = world.restarts
    before = replace(budget.restarts, culprit=used.culprit, blamed=used.blamed, exclusions=used.exclusions)
    return replace(budget, restarts=count_blame(world, before, survivors))


def _progressed(world: World, survivors: Sequence[NodeRecord]) -> bool:
    """Time alone is progress only of a job that has no other: a slow script that always fails at one step has none."""
    if best_step(world, survivors):
        return _stepped(world, survivors)
    return any(node.has(Condition.STABLE, world.generation) for node in survivors)


def _stepped(world: World, survivors: Sequence[NodeRecord]) -> bool:
    return any(node.step > world.step for node in survivors)


def _loaded(world: World, survivors: Sequence[NodeRecord]) -> int | None:
    """The step of the state that the workers went on from, if none of them came to a step beyond it."""
    reports = [n.progress for n in survivors if n.progress and n.progress.generation == world.generation]
    loaded = max((one.loaded for one in reports if one.loaded is not None), default=None)
    if loaded is None or any(one.reached is not None and one.reached > loaded for one in reports):
        return None
    return loaded


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
