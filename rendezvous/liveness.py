"""Which nodes are gone, and why a node may go on training (I10). It only decides; instants are seconds on its clock.

The store notices a dead node when its lease ends, seconds later. Its peers can know at once: where an agent has ended,
its machine *refuses* the connection, or another agent has the port. Such a node is *gone*, and may be evicted. Silence
proves nothing (a frozen machine, a cut cable): then the lease decides. No node is asked while all is well. The
coordinator asks members that are slow to stop; members ask a coordinator that is slow to go on, a few of them one after
the other.

A node trains on while it has *proof* that no other can have been given its place. As a rule that is its lease. It
counts as good for LEASE_MARGIN of its time to live after the newest confirmation; the rest is for stopping the workers,
who are gone before the store can drop the lease. A lease whose time to live is infinite is good from its first
confirmation on.

Unless the operator forbids it (`store_outage_grace_s`), a second proof stands in while *no node* reaches the store: the
world is *whole*, all of its members run its generation and none has had an answer of the store lately. Then none of
them can have changed it, and other nodes wait with the next one as long as this one may go on (`may_still_train`). Its
first member asks all others, and they ask only it: N nodes cost 2 N questions, twice a second, and so a large world
does without. One member that stops, is silent for WHOLE_FRESH_S or has the store for BACK_MARGIN ends it for all. A
node that is cut off alone learns from its peers that they have the store, or learns nothing: either way it stops by
its lease. So does a world of one node, which has no peer to prove anything.

A member that goes from the store while others stay has stopped by its lease. All of them together may be another
matter: the store was lost with what it knew, or they went on through an outage. So the next world waits for those of
which nothing is known, and for no longer than they can train. That a machine refuses connections proves nothing then:
a firewall between it and all others cuts its agents off from the store, and may send the same. But where another agent
of that machine is in the store, the machine reaches it, and an agent that was refused there and lived would have joined
anew.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .records import CauseKind, Endpoint, Member, NodeRecord, PeerStatus, Phase, World

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


class ProbeFailure(enum.Enum):
    """How a peer did not answer."""

    REFUSED = "refused"
    """No process listens there any more: the agent has ended."""
    SILENT = "silent"


ProbeResult: TypeAlias = PeerStatus | ProbeFailure


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
        another = isinstance(finding, PeerStatus) and finding.incarnation != peer.incarnation
        if finding is ProbeFailure.REFUSED or another:
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


LEASE_MARGIN = 0.6
QUIET_MARGIN = 0.3
"""A node that has no answer from the store for this part of the lease's time to live has lost it, or is about to. Lower
than LEASE_MARGIN by more than one interval between keep-alives: when the first node's lease runs out of its margin, the
others have been without the store for nearly as long."""
BACK_MARGIN = 0.1
"""And of it: when the store is back for one member, those of the others who are not cut off alone reach it within this
time. The proof is not renewed meanwhile, so that it ends no later than by that member's silence."""
SOON = 0.01
"""Of the lease's time to live: when a question is repeated that came too early. All members become quiet within one
interval between keep-alives; then the first one's questions and those to it, one after the other, must be answered
before the first lease runs out of its margin."""
WHOLE_FRESH_S = 2.0
MOST_MEMBERS = 256
"""Of a world that may be whole: its first member answers 512 questions in a second then, and asks as many."""


def may_be_whole(world: World) -> bool:
    """Each of its members can be asked, and there are neither too few nor too many."""
    return 1 < len(world.members) <= MOST_MEMBERS and all(member.http is not None for member in world.members)


class LeaseValidity:
    """Until when the workers of one incarnation may go on. Instants are seconds on this node's monotonic clock."""

    def __init__(self, lease_ttl_s: float, store_outage_grace_s: float) -> None:
        self.confirmed_at = -math.inf
        """When the newest confirmed keep-alive was sent."""
        self._lease_ttl_s = lease_ttl_s
        self._grace_s = store_outage_grace_s
        self._whole: _AllAlive | None = None

    def runs(self, world: World | None, incarnation: str) -> None:
        """The world whose workers run here from now on; None when there are none."""
        whole = world is not None and self._grace_s and may_be_whole(world)
        self._whole = _AllAlive(world, incarnation) if world is not None and whole else None

    def lease_proven(self, now: float) -> bool:
        return now < self.proven_until

    def holds(self, now: float) -> bool:
        """May the workers go on?"""
        return now < self.good_until(now)

    def good_until(self, now: float) -> float:
        """How long they may, without any news."""
        if self._whole is None or now < self.proven_until:
            return self.proven_until
        return min(self.proven_until + self._grace_s, self.whole_at + WHOLE_FRESH_S)

    def instants(self) -> Iterator[float]:
        """When `holds` and `suspects` next may answer differently by themselves."""
        yield self.proven_until
        if self._whole is not None:
            yield self._quiet_at
            yield self.proven_until + self._grace_s
            yield self.whole_at + WHOLE_FRESH_S

    def suspects(self, now: float) -> Suspects:
        """The peers that know whether the world is whole, as soon as that may matter."""
        return self._whole.suspects if self._whole is not None and now >= self._quiet_at else {}

    def found(self, peer: Peer, finding: ProbeResult, asked_at: float) -> None:
        """What came of asking a peer at `asked_at`."""
        if self._whole is not None:
            self._whole.found(peer, finding, asked_at, self._lease_ttl_s)

    def ask_again_s(self, finding: ProbeResult, asked_at: float, now: float) -> float:
        """How long to leave a peer alone that was found so.

        After the store is lost, until the peer can have lost it, too.
        """
        known = self._whole is None or self.whole_at > -math.inf
        if known or not self.suspects(now) or not self.lease_proven(now):
            return ASK_AGAIN_S
        if not isinstance(finding, PeerStatus) or finding.confirmed_s is None:
            return ASK_AGAIN_S
        quiet_at = asked_at - finding.confirmed_s + QUIET_MARGIN * self._lease_ttl_s
        return max(quiet_at - now, SOON * self._lease_ttl_s)

    @property
    def whole_at(self) -> float:
        """The newest instant at which the world was known to be whole; minus infinity when there is none."""
        return self._whole.known_at if self._whole is not None else -math.inf

    @property
    def proven_until(self) -> float:
        """Until then the lease cannot have ended."""
        if self.confirmed_at == -math.inf:  # that plus a time to live without end is no number
            return -math.inf
        return self.confirmed_at + LEASE_MARGIN * self._lease_ttl_s

    @property
    def _quiet_at(self) -> float:
        return self.confirmed_at + QUIET_MARGIN * self._lease_ttl_s


class _AllAlive:
    """Since when one world's members are known to be all there, as seen from one of them."""

    def __init__(self, world: World, incarnation: str) -> None:
        first, *others = world.members
        self._generation = world.generation
        self._is_first = first.incarnation == incarnation
        asked = others if self._is_first else [first]
        self._seen_at = {member.incarnation: -math.inf for member in asked}
        self.suspects: Suspects = {
            member.incarnation: (member.http, 0.0) for member in asked if member.http is not None
        }

    def found(self, peer: Peer, finding: ProbeResult, asked_at: float, lease_ttl_s: float) -> None:
        if peer.incarnation not in self._seen_at or finding is ProbeFailure.SILENT:
            return
        seen_at = -math.inf
        if isinstance(finding, PeerStatus) and finding.incarnation == peer.incarnation:
            has_store = finding.confirmed_s is not None and finding.confirmed_s < QUIET_MARGIN * lease_ttl_s
            age_s = 0.0 if self._is_first else finding.whole_s
            if finding.generation == self._generation and has_store:
                over_at = asked_at + BACK_MARGIN * lease_ttl_s
                seen_at = min(self._seen_at[peer.incarnation], over_at - WHOLE_FRESH_S)
            elif finding.generation == self._generation and age_s is not None:
                seen_at = asked_at - age_s
        self._seen_at[peer.incarnation] = seen_at

    @property
    def known_at(self) -> float:
        """The newest instant at which all members were there; minus infinity when there was none."""
        return min(self._seen_at.values())


def may_still_train(
    world: World, nodes: Collection[NodeRecord], refused: Collection[str] = ()
) -> tuple[Member, ...]:
    """Empty where a member is live: the lease judges the others. Empty, too, where this world stops for a known cause.

    An agent has no workers of that world any more when it has joined anew, another one has come with the node's name,
    or it is `refused` on a machine with a live node.
    """
    live = {node.incarnation: node.node for node in nodes}
    known_cause = world.cause.kind is not CauseKind.LOST
    if known_cause or any(member.incarnation in live for member in world.members):
        return ()
    here = set(live.values())
    machines = {node.http.address for node in nodes if node.http is not None}
    return tuple(
        member
        for member in world.members
        if member.node not in here
        and not (
            member.incarnation in refused and member.http is not None and member.http.address in machines
        )
    )


def train_until(
    world: World, missing: Collection[Member], since: float, *, unleased_s: float, grace_s: float
) -> float:
    """When they have stopped for certain, seen by a coordinator that knows this since then.

    No member goes on beyond its lease by the proof that all are there when one of them is known not to be.
    """
    whole = len(missing) == len(world.members) and may_be_whole(world)
    return since + unleased_s + (grace_s if whole else 0.0)
