"""What one node must do, given the world as it knows it and what runs here: the decision of every node.

`next_action` is pure, like the coordinator's `decide`: no clock, no store, no process. Its answer is repeated until the
driver has carried it out, and may change at any time.

- Workers run here: they go on only while the world is theirs and the lease is proven (I10). In a planned change they
  are first left to end by themselves (`Drain`); only when the time for that is over are they signalled.
- None run here: start those of a generation that this node is a member of and never started before (I4).
- The coordinator asks what the workers do, since some seem to hang: look at those of this node (`ReportHang`).
- This node was asked to leave: stop with all others if they stop soon, else alone; then stay until the others have
  what they go on with, and leave.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from ..records import CauseKind, Member, Phase, Result, World


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one node knows about itself."""

    incarnation: str
    generation: int = 0
    """The generation whose workers exist on this node; 0 when there are none."""
    started: int = 0
    """The highest generation that this incarnation has ever started (I4)."""
    lease_good: bool = True
    """The lease was confirmed so recently that no other node can have been given this node's place (I10)."""
    hosts_store: bool = False
    leaving: bool = False
    leave_alone: bool = False
    """A leaving node has waited long enough for the others to stop with it."""
    drain_over: bool = False
    """The workers have had the whole time of a drain to end by themselves."""
    wait_over: bool = False
    """And the others a little more, in which a leaving node has waited for them; or it has waited long enough."""
    came_after_end: bool = False
    """The world had ended before this agent came."""
    runs_again: bool = False
    """Then this agent is of a new run of the job."""
    answered: int = 0
    """The newest inquiry of the generation that runs here to which this node has an answer."""


@dataclass(frozen=True, slots=True)
class Start:
    world: World
    member: Member


@dataclass(frozen=True, slots=True)
class Stop:
    """End the workers of `generation`; a planned stop gives them time to save."""

    generation: int
    planned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReportHang:
    """Look at what the workers of `generation` do, and answer this inquiry. They run on."""

    generation: int
    inquiry: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Notify the workers of `generation` that a change waits, and report it.

    `stopping`: all have been notified. They end by themselves, and are not signalled.
    """

    generation: int
    stopping: bool
    reason: str


class Refusal(enum.Enum):
    """Why one node ends although its job has not."""

    JOIN_TIMEOUT = "join_timeout"
    STORE_AWAY = "store_away"
    """As long as that, and the store itself gives no answer."""
    DUPLICATE_NODE = "duplicate_node"
    STORE_MISMATCH = "store_mismatch"
    UNLIKE_THE_JOB = "unlike_the_job"
    UNFIT = "unfit"
    """Its own checks keep it out."""
    ASKED = "asked"


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing is left to do here: give up the lease and end."""

    why: Result | Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class Stay:
    """Go on as before."""


Action: TypeAlias = Start | Drain | ReportHang | Stop | Leave | Stay


def next_action(world: World | None, local: LocalState) -> Action:
    """What this node must do now. Stopping comes before everything else."""
    if local.generation:
        return _with_workers(world, local)
    if world is not None and world.result is not None and not local.runs_again:
        reason = world.cause.detail
        if local.came_after_end:
            reason = (
                f"job {world.job} had ended before this agent came: {reason}. To run it again, start it under"
                f" another --rdzv-id, or after `etcdctl del --prefix /elastic-agent/{world.job}/` (in place of"
                " /elastic-agent the path of --rdzv-endpoint, if it has one)"
            )
        return Leave(world.result, reason)
    if local.leaving:
        if world is not None and _needed(world, local) and not local.wait_over:
            return Stay()
        return Leave(Refusal.ASKED, "this node was asked to stop")
    if world is not None and world.phase is Phase.RUNNING and local.lease_good:
        member = world.member(local.incarnation)
        if member is not None and world.generation > local.started:
            return Start(world, member)
    return Stay()


def _needed(world: World, local: LocalState) -> bool:
    """A leaving node without workers stays until all others have what they go on with, or know that there is no more.

    It may be the coordinator, or the host of the store.
    """
    if local.hosts_store:
        return world.phase is not Phase.ENDED
    return world.drains and world.member(local.incarnation) is not None


def _with_workers(world: World | None, local: LocalState) -> Action:
    if not local.lease_good:
        return Stop(local.generation, False, "the rendezvous store does not confirm this node's lease")
    if world is None or world.generation < local.generation:
        return Stop(local.generation, False, "the rendezvous store has lost the world that runs here")
    if world.generation > local.generation or world.member(local.incarnation) is None:
        return Stop(local.generation, False, f"generation {world.generation} has replaced it")
    if world.drains and not local.drain_over:
        return Drain(local.generation, world.phase is Phase.LAST_STEP, world.cause.detail)
    if world.drains:
        return Stop(
            local.generation, True, f"{world.cause.detail}; the workers did not end by themselves in time"
        )
    if world.phase is not Phase.RUNNING:
        planned = world.cause.kind in (CauseKind.JOIN, CauseKind.LEAVE)
        return Stop(local.generation, planned, world.cause.detail)
    if local.leaving and local.leave_alone:
        return Stop(local.generation, True, "this node was asked to stop")
    inquiry = world.inquiry
    if inquiry is not None and inquiry.finding is None and inquiry.number > local.answered:
        return ReportHang(local.generation, inquiry.number)
    return Stay()
