"""Who is gone, as seen by its peers and not by the store: whom a node asks, and what the answers mean.

The store notices a dead node when its lease ends, seconds later. Its peers can know at once: where an agent has ended,
its machine *refuses* the connection, or another agent has the port. Such a node is *gone*, and may be evicted. Silence
proves nothing (a frozen machine, a cut cable): then the lease decides.

Nobody is asked while all is well. The coordinator asks members that are slow to stop; members ask a coordinator that is
slow to go on, the first few of them one after the other. This file asks nobody itself. Instants are seconds on this
node's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .records import Endpoint, Introduction, Member, NodeRecord, Phase, World

ASK_AFTER_S = 0.1
"""A node that has so long not done what is awaited of it may be gone."""
ASK_IN_TURN_S = 0.2
"""Of the members who wait for the coordinator each asks so much later than the one before it: one is enough."""
MOST_WHO_ASK = 4
ASK_AGAIN_S = 0.5
MOST_AT_ONCE = 32
"""Questions without an answer yet; each may cost its asker a thread for a second."""


class Absence(enum.Enum):
    """How a peer did not answer."""

    REFUSED = "refused"
    """Nobody listens there any more: the process has ended."""
    SILENT = "silent"


Finding: TypeAlias = Introduction | Absence


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of one agent, and where it was to be found."""

    incarnation: str
    http: Endpoint


Suspects: TypeAlias = Mapping[Peer, float]
"""Who may be gone, each with the seconds that it is given before it is asked."""


class Peers:
    """Whom to ask now, and who was found to be gone."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        """Incarnations whose agent has ended."""
        self._suspected_at: dict[Peer, float] = {}
        self._ask_at: dict[Peer, float] = {}
        self._asked: set[Peer] = set()

    def suspect(self, suspects: Suspects, now: float) -> tuple[Peer, ...]:
        """Whom of the suspects to ask now; everybody else is trusted again."""
        self._suspected_at = {peer: self._suspected_at.get(peer, now) for peer in suspects}
        self._ask_at = {
            peer: max(since + suspects[peer], self._ask_at.get(peer, since))
            for peer, since in self._suspected_at.items()
        }
        due = [peer for peer, at in self._ask_at.items() if at <= now and peer not in self._asked]
        chosen = tuple(due[: MOST_AT_ONCE - len(self._asked)])
        self._asked |= set(chosen)
        return chosen

    def wake_at(self) -> float | None:
        """When somebody is next to be asked."""
        return min((at for peer, at in self._ask_at.items() if peer not in self._asked), default=None)

    def found(self, peer: Peer, finding: Finding, now: float, again_s: float = ASK_AGAIN_S) -> None:
        """What came of asking `peer`, to be asked again after `again_s`.

        Of no interest if it has done meanwhile what was awaited.
        """
        self._asked.discard(peer)
        if peer not in self._suspected_at:
            return
        self._ask_at[peer] = now + again_s
        another = isinstance(finding, Introduction) and finding.incarnation != peer.incarnation
        if finding is Absence.REFUSED or another:
            self.gone.add(peer.incarnation)


def as_peer(node: Member | NodeRecord) -> Peer | None:
    """None when its peers cannot reach it."""
    return Peer(node.incarnation, node.http) if node.http is not None else None


def slow_to_stop(world: World, nodes: Iterable[NodeRecord], incarnation: str) -> Suspects:
    """For the coordinator, itself of `incarnation`: members of a stopping world that have not said they are done."""
    if world.phase is not Phase.STOPPING:
        return {}
    busy = [node for node in nodes if node.settled < world.generation and node.incarnation != incarnation]
    members = {member.incarnation for member in world.members}
    peers = (as_peer(node) for node in busy if node.incarnation in members)
    return {peer: ASK_AFTER_S for peer in peers if peer is not None}


def slow_to_go_on(world: World, coordinator: NodeRecord, mine: NodeRecord) -> Suspects:
    """For a member that has nothing left to do in this generation: the coordinator, whose turn it is."""
    failed = mine.failure is not None and mine.failure.generation == world.generation
    done = failed if world.phase is Phase.RUNNING else mine.settled >= world.generation
    peer = as_peer(coordinator)
    if not done or peer is None or world.phase is Phase.ENDED:
        return {}
    for place, member in enumerate(world.members[:MOST_WHO_ASK]):
        if member.incarnation == mine.incarnation:
            return {peer: ASK_AFTER_S + place * ASK_IN_TURN_S}
    return {}
