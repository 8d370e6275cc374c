"""What the coordinator decides from, and what it may decide: plain data, and the rules of which options are in force.

The nodes of a job may have been started with different options. Those of the node that coordinated the first world hold
as long as one member of that world's job lives; when none does, all begin anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..messages import Limits, Program
from ..records import NodeRecord, World, life_of
from .restarts import RestartPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator asked for."""

    job: str
    min_nodes: int
    max_nodes: int
    nodes_multiple_of: int
    last_call_s: float
    """How long newcomers must have been quiet before a world that is not full closes over them."""
    join_timeout_s: float
    drain_timeout_s: float
    """How long a planned change gives the workers to end by themselves; then they are signalled."""
    store_outage_grace_s: float
    """How long a whole world goes on beyond the proof of its leases while no member reaches the store."""
    unleased_s: float
    """How long, without that, a member may still train whose lease the store has lost."""
    store_outlives_job: bool
    """An agent that comes after the end finds it in the store."""
    runs_again: bool
    """A job that has succeeded begins anew when an agent comes after its end; one that has failed always does."""
    restarts: RestartPolicy
    cool_down_s: float
    """How long this node stays out when it is excluded for the first time."""

    @property
    def limits(self) -> Limits:
        """The part that a coordinator applies for all nodes."""
        return Limits(
            self.min_nodes,
            self.max_nodes,
            self.last_call_s,
            self.restarts.max_failures,
            self.nodes_multiple_of,
        )


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
    """Instant at which this node first saw each incarnation ready."""
    evicted: Collection[str] = ()
    """Incarnations that are not live because their agents have ended, although their leases go on."""
    came_after_end: bool = False
    """All nodes are of a new run of the job: `world` had ended before the oldest of them came."""
    came_after: bool = False
    """The newest change of `world` is older than the oldest of the nodes."""
    inquiry_since: float = 0.0
    """Instant at which this node first saw the present inquiry of the world in its present state."""

    def present(self, world: World) -> tuple[NodeRecord, ...]:
        """The records of its members that live, in the order of their ranks."""
        live = {node.incarnation: node for node in self.nodes}
        return tuple(live[one.incarnation] for one in world.members if one.incarnation in live)

    @property
    def goes_on(self) -> bool:
        """A member of the world lives, perhaps under another incarnation."""
        if self.world is None or self.came_after_end:
            return False
        lives = {life_of(member.incarnation) for member in self.world.members}
        return any(life_of(node.incarnation) in lives for node in self.nodes)

    @property
    def limits_of(self) -> str:
        """The node that was started with the limits in force."""
        if self.world is not None and self.goes_on:
            return self.world.limits_of
        return self.nodes[0].node if self.nodes else ""

    @property
    def program(self) -> Program | None:
        """What the job runs."""
        world, oldest = self.world, self.nodes[0].program if self.nodes else None
        return world.program if world is not None and (oldest == world.program or self.goes_on) else oldest


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


def in_force(view: View, policy: Policy) -> Policy:
    """The coordinator's own `policy`, with the limits that the job began with."""
    limits = view.world.limits if view.world is not None else None
    if limits is None or not view.goes_on:
        return policy
    return replace(
        policy,
        min_nodes=limits.min_nodes,
        max_nodes=limits.max_nodes,
        nodes_multiple_of=limits.nodes_multiple_of,
        last_call_s=limits.last_call_s,
        restarts=replace(policy.restarts, max_failures=limits.max_restarts),
    )
