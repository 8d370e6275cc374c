"""Nodes' parts in the rendezvous, over a real kv, with a clock moved by hand and no thread.

A `Bench` holds the store and the instant, a `Peer` drives one participant as an agent would. A test breaks one thing
(a reply, a lease, a leader, a record) and looks at what the nodes do and write.
"""

from __future__ import annotations

import random
from dataclasses import replace

from elastic_agent.rendezvous.coordinator.view import Policy
from elastic_agent.rendezvous.errors import Compacted, LeaseExpired, StoreUnavailable
from elastic_agent.rendezvous.liveness import Peer as PeerAddress
from elastic_agent.rendezvous.messages import Program
from elastic_agent.rendezvous.node.node_actions import Action, Drain, Leave, Start, Stay, Stop
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.node.transactions import RetryPolicy
from elastic_agent.rendezvous.records import (
    NODES_PREFIX,
    WORLD_KEY,
    Condition,
    Endpoint,
    NodeRecord,
    Phase,
    World,
)
from elastic_agent.rendezvous.store.interface import (
    Answer,
    Delete,
    Entry,
    Grant,
    Put,
    Read,
    Request,
    Subscription,
)
from elastic_agent.rendezvous.store.kv_state import KvState
from tests.policies import PLAIN_POLICY

TTL_S = 5.0
POLICY = replace(PLAIN_POLICY, min_nodes=2, max_nodes=3, last_call_s=0.0, join_timeout_s=60.0)
ALONE = replace(POLICY, min_nodes=1)
TICK_S = 0.25


class Peer:
    """One node: its participant, its way to the store, and workers that obey at once."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        policy: Policy,
        life: int,
        slots: int,
        program: Program | None,
        held_back: str,
        hosts_store: bool,
        memory: int,
    ) -> None:
        self.bench = bench
        self.name = name
        self.ports = 1000 * life
        self.connected = True
        self.replies_to_lose: list[type[Request]] = []
        self.asked: list[Request] = []
        self.probes: list[PeerAddress] = []
        """The peers that this node wants to be asked directly; only the test asks them."""
        self.orders: list[Action] = []
        self.obedient = True
        self.listens = False
        """Its workers end by themselves when they are asked to."""
        http = Endpoint(f"host-{name}", 80)
        identity = NodeRecord(name, f"{name}-{life}", f"host-{name}", self.ports, slots, http)
        identity = replace(identity, limits=policy.limits, program=program, hosts_store=hosts_store)
        identity = replace(identity, memory=memory)
        self.part = Participant(
            identity,
            policy,
            lease_ttl_s=bench.lease_ttl_s,
            rng=random.Random(1),
            now=bench.now,
            retry=RetryPolicy(0.0, 1.0),
            held_back=held_back,
        )
        self.watched: Subscription | None = None
        self.seen_to = 0

    def keep_alive(self) -> None:
        lease = self.part.lease
        if lease is None or not self.connected:
            return
        try:
            self.bench.kv.keep_alive(lease, self.bench.now)
        except LeaseExpired:
            self.part.lease_gone(lease)
        else:
            self.part.lease_confirmed(lease, self.bench.now)

    @property
    def snapshot(self) -> NodeSnapshot:
        """As of now."""
        self.part.take_snapshot(0, "", self.bench.now)
        return self.part.snapshot

    def turn(self) -> bool:
        """One question, one look at the watch, one order; False when there was nothing to do."""
        now = self.bench.now
        busy = False
        request = self.part.request(now)
        self.probes += self.part.probes(now)
        if request is not None:
            busy = self.connected
            self.asked.append(request)
            self.serve(request)
        if self.part.wants_port:
            self.ports += 1
            self.part.offer_port(self.ports)
            busy = True
        busy |= self.watch() | self.obey()
        self.part.wake_at(now)
        return busy

    def serve(self, request: Request) -> None:
        now = self.bench.now
        try:
            if not self.connected:
                raise StoreUnavailable("no answer from store:2379")
            answer = self.bench.serve(request)
            if type(request) in self.replies_to_lose:
                self.replies_to_lose.remove(type(request))
                raise StoreUnavailable("the reply was lost")
        except (StoreUnavailable, LeaseExpired) as error:
            self.part.failed(request, error, now)
        else:
            self.part.answered(request, answer, now)

    def watch(self) -> bool:
        if self.part.subscription is not self.watched:
            self.watched = self.part.subscription
            self.seen_to = self.watched.after_revision if self.watched else 0
        if self.watched is None or not self.connected:
            return False
        try:
            changes = self.bench.kv.changes(self.watched.scopes, self.seen_to)
        except Compacted:
            self.part.lost_track()
            return True
        self.seen_to = self.bench.kv.revision
        self.part.changed(changes, self.bench.now)
        return bool(changes)

    def obey(self) -> bool:
        order = self.part.action(self.bench.now)
        if isinstance(order, Stay) or (self.orders and order == self.orders[-1] and not self.obedient):
            return False
        if isinstance(order, Leave):
            self.orders += [order] if order not in self.orders else []
            return False
        if isinstance(order, Drain) and self.obedient:
            return self.drain(order)
        self.orders.append(order)
        if self.obedient and isinstance(order, Start):
            self.part.workers_started(order.world)
        elif self.obedient and isinstance(order, Stop):
            self.part.workers_gone(order.generation)
        return True

    def drain(self, order: Drain) -> bool:
        news = self.part.workers_are(Condition.NOTIFIED, order.generation)
        if self.listens:
            news |= self.part.workers_are(Condition.POLLING, order.generation)
        if self.listens and order.stopping:
            self.part.workers_drained(order.generation, kept=True)
            self.part.workers_gone(order.generation)
        elif not news:
            return False
        self.orders.append(order)
        return True

    # ------------------------------------------------------------ what a test looks at

    @property
    def generation(self) -> int:
        """The generation whose workers run here."""
        return self.part._generation

    @property
    def record(self) -> NodeRecord | None:
        return self.bench.records().get(self.name)

    @property
    def order(self) -> Action:
        return self.part.action(self.bench.now)

    def left(self) -> Leave:
        order = self.order
        assert isinstance(order, Leave), order
        return order

    def stops(self) -> list[Stop]:
        return [order for order in self.orders if isinstance(order, Stop)]

    def count(self, kind: type[Request]) -> int:
        return sum(isinstance(request, kind) for request in self.asked)


class Bench:
    """The store, the instant, and every node that is still alive."""

    def __init__(self, history: int = 4096, lease_ttl_s: float = TTL_S) -> None:
        self.now = 1000.0
        self.lease_ttl_s = lease_ttl_s
        self.kv = KvState(history)
        self.peers: list[Peer] = []

    def join(
        self,
        name: str,
        policy: Policy = POLICY,
        life: int = 1,
        slots: int = 2,
        *,
        ready: bool = True,
        program: Program | None = None,
        held_back: str = "",
        hosts_store: bool = False,
        memory: int = 0,
    ) -> Peer:
        peer = Peer(self, name, policy, life, slots, program, held_back, hosts_store, memory)
        if ready:
            peer.part.became_ready()
        self.peers.append(peer)
        return peer

    def joined(self, *names: str, policy: Policy = POLICY) -> list[Peer]:
        """These nodes, one after the other, and the world they form together."""
        peers = []
        for name in names:
            peers.append(self.join(name, policy))
            self.settle()
        self.settle()
        assert {peer.generation for peer in peers} != {0}, "no world was formed"
        return peers

    def kill(self, peer: Peer) -> None:
        """The agent is gone; its record stays until the lease ends."""
        self.peers.remove(peer)

    def settle(self) -> None:
        """Let everybody work until nothing is left to do at this instant."""
        for _ in range(1000):
            turns = [peer.turn() for peer in self.peers]
            if not any(turns):
                return
        raise AssertionError("the nodes never come to rest")

    def after(self, seconds: float) -> None:
        """Time passes for all, and those with a connection keep their leases alive."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_S)
            for peer in self.peers:
                peer.keep_alive()
            self.kv.expire(self.now)
            self.settle()

    def serve(self, request: Request) -> Answer:
        if isinstance(request, Grant):
            return self.kv.grant(request.ttl_s, self.now)
        if isinstance(request, Read):
            return self.kv.read(request.scopes, self.now, request.oldest_under)
        return self.kv.transact(request.compares, request.writes, self.now)

    # ------------------------------------------------------------ what a test looks at, and writes behind all backs

    def entry(self, key: str) -> Entry | None:
        return next(iter(self.kv.read((key,), self.now).entries), None)

    def records(self) -> dict[str, NodeRecord]:
        entries = self.kv.read((NODES_PREFIX,), self.now).entries
        records = [NodeRecord.from_json(entry.key, entry.value) for entry in entries]
        return {record.node: record for record in records}

    def world(self) -> World | None:
        entry = self.entry(WORLD_KEY)
        return World.from_json(entry.value) if entry is not None else None

    def phase(self) -> Phase | None:
        world = self.world()
        return world.phase if world is not None else None

    def members(self) -> list[str]:
        world = self.world()
        assert world is not None
        return [member.node for member in world.members]

    def put(self, key: str, value: str) -> None:
        self.kv.transact((), (Put(key, value),), self.now)

    def delete(self, key: str) -> None:
        self.kv.transact((), (Delete(key),), self.now)
