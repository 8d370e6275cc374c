"""The change from one world to the next as this node sees it: nodes that came, went or are left out; the failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....rendezvous.records import Cause, CauseKind, Failure, Phase, World
from ..status.pages import worker_failure

_CHANGES = {
    CauseKind.JOIN: "join",
    CauseKind.LEAVE: "leave",
    CauseKind.LOST: "lost",
    CauseKind.WITHDRAWN: "lost",
}


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Numbers of nodes; `incident` is the root of the failure that ended a generation."""

    joined: int = 0
    left: int = 0
    lost: int = 0
    excluded: int = 0
    incident: str | None = None


NOTHING = MembershipChange()


class MembershipWatch:
    """Compares the worlds that this node sees; returns each change once. A node that rejoins is another one."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._asked_to_stop: set[str] = set()

    def asked_to_stop(self, incarnations: Iterable[str]) -> None:
        """When they are gone, they have left, and are not lost."""
        self._asked_to_stop.update(incarnations)

    def see(self, world: World | None) -> MembershipChange:
        before = self._world
        if world is None or world is before:
            return NOTHING
        self._world = world
        if before is None or before.phase is Phase.ENDED or world.generation < before.generation:
            return NOTHING
        old, new = ({member.incarnation for member in each.members} for each in (before, world))
        for each in (before, world):
            if each.cause.kind is CauseKind.LEAVE:
                self.asked_to_stop(m.incarnation for m in before.members if m.node == each.cause.node)
        gone = old - new
        left = gone & self._asked_to_stop
        self._asked_to_stop -= gone
        ended = world.generation > before.generation or world.phase is Phase.ENDED
        return MembershipChange(
            joined=len(new - old),
            left=len(left),
            lost=len(gone - left),
            excluded=len(_excluded(world) - _excluded(before)),
            incident=_incident(world.cause) if ended and not world.stops else None,
        )


def _excluded(world: World) -> set[tuple[str, int]]:
    """Each excluded node with the number of its exclusion: this node may learn of one only after it is over."""
    return {(one.node, one.times) for one in world.exclusions}


def reason(cause: Cause) -> str:
    """Why the generation before this one ended: the cause of its root failure, or the kind of change."""
    change = _CHANGES.get(cause.kind)
    if change is not None:
        return change
    return cause.failure.cause if cause.failure is not None else "unknown"


def because(world: World, shown: Failure | None) -> str:
    """Why the generation before this one ended; `shown` is what the log of this node has in full already."""
    cause, failure = world.cause, world.cause.failure
    worker = worker_failure(world)
    if worker is None or failure is None or cause.detail != failure.summary:
        return cause.detail
    named = f"rank {worker.rank} on node {cause.node} failed"
    return named if failure == shown else f"{named}: {cause.detail}"


def _incident(cause: Cause) -> str | None:
    return reason(cause) if cause.kind in (CauseKind.FAILURE, CauseKind.LOST, CauseKind.WITHDRAWN) else None
