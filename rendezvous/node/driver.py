"""The one loop that drives a `Participant`: for the agent, for the torchrun plug-in and for the simulator.

`turn` asks the participant for all that can be done now and has it carried out, until nothing changes any more:

1. The request to the store comes first, because the answer to "what next?" may itself be that a fresh port is needed.
2. Probes of peers come before the port, because to bind a port may take a while, and a probe is worth a lease.
3. The port comes before any action, because the participant writes nothing to the store while it wants one.
4. What is due on this node comes before its action, because workers that are gone bring another one.

At the end of the turn, and only once, the lease to keep alive and the watch to keep open are set, as any of these may
have replaced them, and so is the participant's `NodeSnapshot`, which is all that other threads read. All of it runs in
one thread, and must not wait for the store, for peers or for workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..liveness import Peer
from ..store.interface import LeaseId, Request, Subscription
from .node_actions import Action
from .participant import Participant


class StoreChannel(Protocol):
    """The way to the store. What comes back is delivered to the participant later, before another turn."""

    def ask(self, request: Request) -> None:
        """Carry out one request; `answered` or `failed` follows."""

    def keep(self, lease: LeaseId | None) -> None:
        """Keep this lease alive from now on, and no other; `lease_confirmed` and `lease_gone` follow."""

    def follow(self, subscription: Subscription | None) -> None:
        """Watch this from now on, and nothing else; `changed` and `lost_track` follow."""


class Effects(Protocol):
    """What the participant's actions mean on this node. A method returns True when it has given the
    participant an event that may bring another request or action at once."""

    @property
    def undisturbed(self) -> int:
        """The generation whose workers run here and have not been asked to stop; 0 when there is none."""

    @property
    def start_waits_for(self) -> str:
        """What keeps the workers of the present world from being started here; empty where nothing does."""

    def new_port(self) -> int | None:
        """A port that listens at this node's address and was never offered before; None when there is none."""

    def advance(self, now: float) -> bool:
        """Do what is due, whatever the action."""

    def carry_out(self, action: Action, now: float) -> bool:
        """Carry out the action, which is repeated until that is done."""


class Driver:
    """Carries out what one participant asks for. Owned by the thread that owns the participant."""

    def __init__(
        self, participant: Participant, store: StoreChannel, probe: Callable[[Peer], None], effects: Effects
    ) -> None:
        """`probe` asks a peer for its introduction; `probed` follows."""
        self._participant = participant
        self._store = store
        self._probe = probe
        self._effects = effects

    def turn(self, now: float) -> float | None:
        """Do all that can be done now. The instant at which there is more to do without any event."""
        participant, store, effects = self._participant, self._store, self._effects
        while True:
            request = participant.request(now)
            if request is not None:
                store.ask(request)
            for peer in participant.probes(now):
                self._probe(peer)
            if participant.wants_port and (port := effects.new_port()) is not None:
                participant.offer_port(port)
            elif not effects.advance(now) and not effects.carry_out(participant.action(now), now):
                break
        store.keep(participant.lease)
        store.follow(participant.subscription)
        participant.take_snapshot(effects.undisturbed, effects.start_waits_for, now)
        return participant.wake_at(now)
