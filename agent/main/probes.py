"""What the HTTP server answers of this node, in its own thread: from the newest snapshot, once there is one."""

from __future__ import annotations

from collections.abc import Callable

from ...health.http import Probe
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Introduction
from ..machine.gpu_memory import GpuMemory
from .heartbeat import STUCK_AFTER_S, Heartbeat


class Probes:
    """All methods but `begin` are for any thread."""

    def __init__(self, before: Introduction, clock: Callable[[], float]) -> None:
        """`before` is the answer to a peer until `begin`."""
        self._before = before
        self._clock = clock
        self._parts: tuple[Participant, Heartbeat, GpuMemory] | None = None

    def begin(self, participant: Participant, heartbeat: Heartbeat, gpu_memory: GpuMemory) -> None:
        self._parts = participant, heartbeat, gpu_memory

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
        participant, _, gpu_memory = self._parts
        snapshot = participant.snapshot
        world = snapshot.world
        if snapshot.undisturbed:
            return Probe(True, f"running generation {snapshot.undisturbed}")
        if gpu_memory.waiting:
            return Probe(False, "waiting for the killed workers' GPU memory to be free")
        if world is not None and world.trains and snapshot.lease_good(self._clock()):
            return Probe(True, f"standing by: generation {world.generation} is running")
        return Probe(False, snapshot.wait)

    def introduction(self) -> str:
        """The answer to a peer that asks who this node is."""
        if self._parts is None:
            return self._before.to_json()
        return self._parts[0].snapshot.introduction(self._clock()).to_json()
