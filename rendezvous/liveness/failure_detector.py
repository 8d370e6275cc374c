"""Which nodes are gone, as seen by peers and not by the store: which peers a node asks, and what the answers mean.

The store notices a dead node when its lease ends, seconds later. Its peers can know at once: where an agent has ended,
its machine *refuses* the connection, or another agent has the port. Such a node is *gone*, and may be evicted. Silence
proves nothing (a frozen machine, a cut cable): then the lease decides.

No node is asked while all is well. The coordinator asks members that are slow to stop; members ask a coordinator that
is slow to go on, a few of them one after the other. This file only decides. Instants are seconds on this node's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..records import Endpoint, Introduction, Member, NodeRecord, Phase, World

ASK_AFTER_S = 0.05
"""A node that has so long not done what is awaited of it may be gone."""
ASK_IN_TURN_S = 0.2
"""Of the members who wait for the coordinator each asks so much later than the one before it: one is enough."""
TURNS = (0, 4, 2, 6, 1, 5, 3, 7)
"""Who they are, in eighths of the world, the next one always far from those before it: members that are lost together
mostly stand side by side."""
ASK_AGAIN_S = 0.5
MOST_AT_ONCE = 32
"""Questions without an answer yet; each may cost its asker a thread for a second."""


class Absence(enum.Enum):
    """How a peer did not answer."""

    REFUSED = "refused"
    """No process listens there any more: the agent has ended."""
    SILENT = "silent"


ProbeResult: TypeAlias = Introduction | Absence


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of one agent, and where it was to be found."""

    incarnation: str
    http: Endpoint


Suspects: TypeAlias = Mapping[str, tuple[Endpoint, float]]
"""Which incarnations may be gone: where each is to be found, and the seconds that it is given before it is asked."""


class FailureDetector:
    """Which peers to ask now, and which were found to be gone."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        """Incarnations whose agent has ended."""
        self._ask_at: dict[str, float] = {}
        """Of all suspects."""
        self._asked: set[str] = set()

    def suspect(self, suspects: Suspects, now: float) -> tuple[Peer, ...]:
        """The suspects to ask now; all other peers are trusted again."""
        self._ask_at = {
            name: self._ask_at.get(name, now + given_s) for name, (_, given_s) in suspects.items()
        }
        due = [name for name, at in self._ask_at.items() if at <= now and name not in self._asked]
        chosen = due[: MOST_AT_ONCE - len(self._asked)]
        self._asked.update(chosen)
        return tuple(Peer(name, suspects[name][0]) for name in chosen)

    def wake_at(self) -> float | None:
        """When the next suspect is to be asked."""
        return min((at for name, at in self._ask_at.items() if name not in self._asked), default=None)

    def found(self, peer: Peer, finding: ProbeResult, now: float, again_s: float = ASK_AGAIN_S) -> None:
        """What came of asking `peer`, to be asked again after `again_s`.

        Of no interest if it has done meanwhile what was awaited.
        """
        self._asked.discard(peer.incarnation)
        if peer.incarnation not in self._ask_at:
            return
        self._ask_at[peer.incarnation] = now + again_s
        another = isinstance(finding, Introduction) and finding.incarnation != peer.incarnation
        if finding is Absence.REFUSED or another:
            self.gone.add(peer.incarnation)


def slow_to_stop(world: World, nodes: Iterable[NodeRecord], incarnation: str) -> Suspects:
    """For the coordinator, itself of `incarnation`: members of a stopping world that have not reported their stop."""
    if not world.stops:
        return {}
    others = {member.incarnation for member in world.members if member.incarnation != incarnation}
    return {
        node.incarnation: (node.http, ASK_AFTER_S)
        for node in nodes
        if not node.has_stopped(world.generation) and node.incarnation in others and node.http is not None
    }


def out_of_sight(members: Iterable[Member]) -> Suspects:
    """For the coordinator: members of which the store knows nothing any more, and who may train all the same."""
    return {member.incarnation: (member.http, 0.0) for member in members if member.http is not None}


def slow_to_go_on(
    world: World, coordinator: NodeRecord, mine: NodeRecord, gone: Collection[str] = ()
) -> Suspects:
    """For a member that has nothing left to do in this generation: the coordinator, whose turn it is.

    Who has found one that was `gone` asks the next one at once: the oldest records may all be of one rack.
    """
    failed = mine.failure is not None and mine.failure.generation == world.generation
    done = failed if world.trains else mine.has_stopped(world.generation)
    if not done or coordinator.http is None or world.phase is Phase.ENDED:
        return {}
    askers = _who_asks([m.incarnation for m in world.members if m.incarnation != coordinator.incarnation])
    if mine.incarnation not in askers:
        return {}
    in_turn_s = ASK_AFTER_S + askers.index(mine.incarnation) * ASK_IN_TURN_S
    after_s = 0.0 if any(member.incarnation in gone for member in world.members) else in_turn_s
    return {coordinator.incarnation: (coordinator.http, after_s)}


def _who_asks(members: Sequence[str]) -> list[str]:
    """In turn."""
    places = (eighths * len(members) // len(TURNS) for eighths in TURNS)
    return list(dict.fromkeys(members[place] for place in places if place < len(members)))
