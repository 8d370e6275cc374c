"""What the HTTP server answers of this node, in its own thread: from the newest snapshot, once there is one."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...health.http import Probe
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Introduction
from ..output.masking import masked
from .heartbeat import STUCK_AFTER_S, Heartbeat


class Probes:
    """All methods but `begin` are for any thread."""

    def __init__(
        self, before: Introduction, clock: Callable[[], float], secrets: Collection[str] = ()
    ) -> None:
        """`before` is the answer to a peer until `begin`. `secrets` are known values, which no answer has."""
        self._before = before
        self._clock = clock
        self._secrets = secrets
        self._parts: tuple[Participant, Heartbeat] | None = None

    def begin(self, participant: Participant, heartbeat: Heartbeat) -> None:
        self._parts = participant, heartbeat

    def liveness(self) -> Probe:
        """Does the loop turn? Not whether the store answers: its outage is no reason to die."""
        if self._parts is None:
            return Probe(True, "starting")
        silent_s = self._parts[1].silent_s()
        return Probe(silent_s < STUCK_AFTER_S, f"the main loop turned {silent_s:.1f} s ago")

    def readiness(self) -> Probe:
        """Does this node train, or stand ready to?"""
        if self._parts is None:
            return Probe(False, "looking for the rendezvous store")
        snapshot = self._parts[0].snapshot
        world = snapshot.world
        if snapshot.undisturbed:
            return Probe(True, f"running generation {snapshot.undisturbed}")
        outside = world is not None and world.member(snapshot.incarnation) is None
        if world is not None and world.trains and outside and snapshot.lease_good(self._clock()):
            return Probe(True, f"standing by: generation {world.generation} is running")
        return Probe(False, f"waiting: {masked(snapshot.waiting_for, self._secrets)}")

    def introduction(self) -> str:
        """The answer to a peer that asks who this node is."""
        if self._parts is None:
            return self._before.to_json()
        return self._parts[0].snapshot.introduction(self._clock()).to_json()
