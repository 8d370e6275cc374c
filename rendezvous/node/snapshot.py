"""What one node knows at the end of a turn, frozen, so that any thread may read it.

One thread owns the `Participant` and changes it as events come. All others (the HTTP server, the links that answer for
checkpoints and planned changes, torchrun's agent) read the newest `NodeSnapshot`, which is replaced as a whole. So a
reader takes it once, and never sees half of a change. Instants are seconds on this node's monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..records import Introduction, NodeRecord, World
from ..statements.paces import Comparison, Paces
from ..store.interface import LeaseId
from .session import Session

ANNOUNCED_AFTER_S = 1.0
"""What has been waited for so long is in the log."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node's state after a turn."""

    node: str
    incarnation: str
    undisturbed: int = 0
    """The generation whose workers run here and have not been asked to stop; 0 when there is none."""
    lease: LeaseId | None = None
    confirmed_at: float | None = None
    """When the newest confirmed keep-alive of the lease was sent; None without a lease."""
    proven_until: float = -math.inf
    """Until then the lease cannot have ended."""
    good_until: float = -math.inf
    """Until then no other node can have been given this node's place, if nothing more is known (I10)."""
    whole_at: float = -math.inf
    """The newest instant at which every member of the world that runs here was known to run it."""
    world: World | None = None
    world_revision: int = 0
    world_since: float = 0.0
    """When this node first saw the world in its present phase."""
    known_nodes: tuple[NodeRecord, ...] = ()
    """Oldest first; complete only on the coordinator."""
    leaving: bool = False
    """It was asked to leave its job."""
    coordinates: bool = False
    coordinator: str | None = None
    waiting_for: str = ""
    """A noun phrase or a sentence, which follows "waiting: "."""
    backoff_s: float = 0.0
    """The coordinator's pause before the next generation; 0 on other nodes, and when there is none."""

    paces: Paces | None = None
    """How fast this node's workers are."""
    comparison: Comparison | None = None
    """The coordinator's comparison of the paces of all nodes, for the present generation."""

    def lease_good(self, now: float) -> bool:
        return now < self.good_until

    def introduction(self, now: float) -> Introduction:
        """What this node answers a peer."""
        known_whole = self.undisturbed and self.whole_at > -math.inf
        return Introduction(
            self.node,
            self.incarnation,
            self.undisturbed,
            confirmed_s=now - self.confirmed_at if self.confirmed_at is not None else None,
            whole_s=now - self.whole_at if known_whole else None,
        )


def snapshot_of(
    session: Session, undisturbed: int, waiting_for: str, backoff_s: float, now: float
) -> NodeSnapshot:
    membership, validity, leased = session.membership, session.validity, session.lease is not None
    return NodeSnapshot(
        node=session.record.node,
        incarnation=session.incarnation,
        undisturbed=undisturbed,
        lease=session.lease,
        confirmed_at=validity.confirmed_at if leased else None,
        proven_until=validity.proven_until if leased else -math.inf,
        good_until=validity.good_until(now) if leased else -math.inf,
        whole_at=validity.whole_at,
        world=membership.world,
        world_revision=membership.world_revision,
        world_since=membership.world_since,
        known_nodes=membership.nodes,
        leaving=session.record.leaving,
        coordinates=membership.coordinates,
        coordinator=membership.leader,
        waiting_for=waiting_for,
        backoff_s=backoff_s,
        paces=session.record.paces,
        comparison=membership.comparison,
    )
