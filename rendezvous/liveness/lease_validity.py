"""Why a node may go on training: the *proof* that no other node can have been given its place (I10).

As a rule that is its lease. It counts as good for LEASE_MARGIN of its time to live after the newest confirmation, on
this node's own clock; the rest is for stopping the workers, who are gone before the store can drop the lease. A lease
whose time to live is infinite is good from its first confirmation on.

Unless the operator forbids it (`store_outage_grace_s`), a second proof stands in while *no node* reaches the store: the
world is *whole*, all of its members run its generation and none has had an answer of the store lately. Then none of
them can have changed it, and other nodes wait with the next one as long as this one may go on (`absence`). Its first
member asks all others, and they ask only it: N nodes cost 2 N questions, twice a second, and so a large world does
without. One member that stops, is silent for WHOLE_FRESH_S or has the store for BACK_MARGIN ends it for all. A node
that is cut off alone learns from its peers that they have the store, or learns nothing: either way it stops by its
lease. So does a world of one node, which has no peer to prove anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..records import Introduction, World
from .failure_detector import ASK_AGAIN_S, Absence, Peer, ProbeResult, Suspects

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
        self._whole: _Whole | None = None

    def runs(self, world: World | None, incarnation: str) -> None:
        """The world whose workers run here from now on; None when there are none."""
        whole = world is not None and self._grace_s and may_be_whole(world)
        self._whole = _Whole(world, incarnation) if world is not None and whole else None

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
        if not isinstance(finding, Introduction) or finding.confirmed_s is None:
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


class _Whole:
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
        if peer.incarnation not in self._seen_at or finding is Absence.SILENT:
            return
        seen_at = -math.inf
        if isinstance(finding, Introduction) and finding.incarnation == peer.incarnation:
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
