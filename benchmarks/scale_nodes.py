"""Simulated nodes for the rendezvous benchmark: all that an agent does to join, and nothing that a worker does.

Ours: each node has the real `Participant` and the real `StoreLink` with its three threads; one loop takes the place of
the agents' main loops. Workers are there as soon as they are wanted and gone as soon as they are not, and whoever is
asked over HTTP answers at once. torchrun's: each node has the real `DynamicRendezvousHandler` with the c10d backend, on
a connection and a thread of its own.

This program is one of several processes that share the nodes of a run. It first says that its nodes are ready, then
does what it is told, all in lines of JSON. Instants are of the monotonic clock, one for all processes of a machine.

    (nothing)                            {}
    {"do": "join", ...}                  all nodes here run generation 1: `Joined`, and `Traffic` until then
    {"do": "rejoin", "fail": ...}        the same for generation 2, after a node (here, if `fail`) reported a failure

A real agent has a machine for itself. What N agents in one process would add to that is taken away: garbage is not
collected (each collection would look at what all of them know), and few requests of a process are under way at once.
Nothing that one agent does is left out.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_agent.agent.common.events import Event, ThreadFailed
from elastic_agent.agent.rendezvous_io.store_link import StoreLink
from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Policy
from elastic_agent.rendezvous.errors import StoreError
from elastic_agent.rendezvous.liveness import Peer
from elastic_agent.rendezvous.node.driver import Driver
from elastic_agent.rendezvous.node.node_actions import Action, Start, Stop
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.records import Endpoint, Failure, NodeRecord, PeerStatus
from elastic_agent.rendezvous.store.interface import (
    Answer,
    Change,
    Compare,
    Delete,
    Entry,
    LeaseId,
    Outcome,
    Put,
    Request,
    Snapshot,
    Store,
    Subscription,
    Watch,
)
from scale_stores import JOB

LEASE_TTL_S = 300.0
"""So long that keep-alives hardly count: a node confirms its lease every minute."""
CONNECT_S = 60.0
NODES_PER_CONNECTION = 50
"""A thousand connections from one process to itself are not what is measured."""
AT_ONCE = 4
"""Requests of a process under way: hundreds of threads that compete for one interpreter only slow it down."""
MONITOR_S = 0.1
"""torchrun's agents look so often whether somebody waits to join."""
FIRST_PORT = 20000


@dataclass
class Traffic:
    """What all nodes of this process have asked of the store so far."""

    requests: int = 0
    writes: int = 0
    """Those that were tried, also in vain."""
    revisions: int = 0
    """Those that changed the store."""
    received: int = 0
    """Bytes of keys and values, without what a protocol wraps around them."""


class Meter:
    def __init__(self) -> None:
        self._traffic = Traffic()
        self._lock = threading.Lock()

    def asked(self, received: int = 0) -> None:
        with self._lock:
            self._traffic.requests += 1
            self._traffic.received += received

    def wrote(self, received: int, *, succeeded: bool) -> None:
        self.asked(received)
        with self._lock:
            self._traffic.writes += 1
            self._traffic.revisions += succeeded

    def heard(self, received: int) -> None:
        with self._lock:
            self._traffic.received += received

    def read(self) -> Traffic:
        with self._lock:
            return Traffic(**asdict(self._traffic))


@dataclass(frozen=True)
class Joined:
    """All nodes of this process run a generation."""

    first_s: float
    """The instant at which the first of them set out."""
    last_s: float


# --- Ours


class MeteredStore(Store):
    """Counts what passes through it, and lets so many requests at once through as there is `room` for."""

    def __init__(self, store: Store, meter: Meter, room: threading.Semaphore) -> None:
        self._store = store
        self._meter = meter
        self._room = room

    def grant(self, ttl_s: float) -> LeaseId:
        with self._room:
            lease = self._store.grant(ttl_s)
        self._meter.asked()
        return lease

    def keep_alive(self, lease: LeaseId) -> None:
        with self._room:
            self._store.keep_alive(lease)
        self._meter.asked()

    def revoke(self, lease: LeaseId) -> None:
        with self._room:
            self._store.revoke(lease)
        self._meter.asked()

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        with self._room:
            outcome = self._store.transact(compares, writes)
        self._meter.wrote(_size(outcome.entries), succeeded=outcome.succeeded)
        return outcome

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        with self._room:
            snapshot = self._store.read(scopes, oldest_under)
        self._meter.asked(_size(snapshot.entries))
        return snapshot

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        self._meter.asked()
        return _MeteredWatch(self._store.watch(scopes, after_revision), self._meter)

    def close(self) -> None:
        self._store.close()


class _MeteredWatch(Watch):
    def __init__(self, watch: Watch, meter: Meter) -> None:
        self._watch = watch
        self._meter = meter

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        changes = self._watch.next(timeout_s)
        self._meter.heard(_size([change.entry for change in changes]))
        return changes

    def close(self) -> None:
        self._watch.close()


def _size(entries: Sequence[Entry | None]) -> int:
    return sum(len(entry.key) + len(entry.value) for entry in entries if entry is not None)


class _Node:
    """One agent without workers. Everything here happens in the loop's thread, but for what the link's threads do."""

    def __init__(self, participant: Participant, post: Callable[[Event], None]) -> None:
        self.participant = participant
        self.generation = 0
        """The one whose workers would run here; the last one if they were stopped."""
        self.started_at = 0.0
        self.asking = False
        self.link: StoreLink
        self._post = post
        self._driver = Driver(participant, self, self._probe, self)
        self._port = participant.identity.port

    def hear(self, event: Event) -> None:
        if isinstance(event, ThreadFailed):
            raise RuntimeError(event.reason)
        assert callable(event)
        event()

    # For the link: all goes to the participant.

    @property
    def subscription(self) -> Subscription | None:
        return self.participant.subscription

    def answered(self, request: Request, answer: Answer, now: float) -> None:
        self.asking = False
        self.participant.answered(request, answer, now)

    def failed(self, request: Request, error: StoreError, now: float) -> None:
        self.asking = False
        self.participant.failed(request, error, now)

    def changed(self, changes: tuple[Change, ...], now: float) -> None:
        self.participant.changed(changes, now)

    def lost_track(self) -> None:
        self.participant.lost_track()

    def lease_confirmed(self, lease: LeaseId, asked_at: float) -> None:
        self.participant.lease_confirmed(lease, asked_at)

    def lease_gone(self, lease: LeaseId | None) -> None:
        self.participant.lease_gone(lease)

    def store_mismatched(self, reason: str) -> None:
        self.participant.store_mismatched(reason)

    def fail(self, now: float) -> None:
        """A worker has failed here, after some progress, so that nobody backs off."""
        self.participant.workers_advanced(1)
        self.participant.workers_failed(Failure(self.generation, "benchmark", "a worker failed"))
        self.participant.workers_gone(self.generation)

    def turn(self, now: float) -> float | None:
        """As the agent's main loop does it; the instant of the next turn if nothing happens before."""
        return self._driver.turn(now)

    def ask(self, request: Request) -> None:
        self.asking = True
        self.link.ask(request)

    def keep(self, lease: LeaseId | None) -> None:
        self.link.keep(lease)

    def follow(self, subscription: Subscription | None) -> None:
        self.link.follow(subscription)

    start_waits_for = ""
    undisturbed = 0
    """Nobody asks a node for its introduction here."""

    def _probe(self, peer: Peer) -> None:
        now, alive = time.monotonic(), PeerStatus("alive", peer.incarnation, 0)
        self._post(lambda: self.participant.probed(peer, alive, now, time.monotonic()))

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def advance(self, now: float) -> bool:
        return False

    def carry_out(self, action: Action, now: float) -> bool:
        if isinstance(action, Start):
            self.participant.workers_started(action.world)
            self.generation, self.started_at = action.world.generation, now
            return True
        if isinstance(action, Stop):
            self.participant.workers_gone(action.generation)
            return True
        return False


class OurNodes:
    """Nodes `first` to `first + count - 1` of `total`. `connect` is called once for every few of them."""

    def __init__(self, connect: Callable[[], Store], first: int, count: int, total: int) -> None:
        self.meter = Meter()
        room = threading.Semaphore(AT_ONCE)
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._due: list[tuple[float, int]] = []
        self._nodes: list[_Node] = []
        policy = Policy(
            job=JOB,
            min_nodes=total,
            max_nodes=total,
            nodes_multiple_of=1,
            last_call_s=1.0,
            join_timeout_s=600.0,
            drain_timeout_s=20.0,
            store_outage_grace_s=0.0,
            unleased_s=0.0,
            store_outlives_job=False,
            runs_again=False,
            restarts=RestartPolicy(),
            cool_down_s=60.0,
        )
        store = None
        for number in range(count):
            if number % NODES_PER_CONNECTION == 0:
                store = MeteredStore(connect(), self.meter, room)
            assert store is not None
            self._nodes.append(self._node(number, _identity(first + number), policy, store))

    def _node(self, number: int, identity: NodeRecord, policy: Policy, store: Store) -> _Node:
        def post(event: Event) -> None:
            self._events.put((number, event))

        rng, clock = random.Random(identity.node), time.monotonic
        participant = Participant(identity, policy, lease_ttl_s=LEASE_TTL_S, rng=rng, now=clock())
        node = _Node(participant, post)
        node.link = StoreLink(store, node, LEASE_TTL_S, post, clock, rng)
        node.link.start()
        return node

    def join(self) -> Joined:
        began_s = time.monotonic()
        self._turn(range(len(self._nodes)))
        return Joined(began_s, self._run_until(1))

    def rejoin(self, *, fail: bool) -> Joined:
        """After a failure, here or on another process's node."""
        began_s = time.monotonic()
        if fail:
            self._nodes[-1].fail(began_s)
            self._turn([len(self._nodes) - 1])
        return Joined(began_s, self._run_until(2))

    def close(self) -> None:
        for node in self._nodes:
            node.link.close()

    def _run_until(self, generation: int) -> float:
        """The instant at which the last node started it."""
        while any(node.generation < generation or node.asking for node in self._nodes):
            wake_at = self._due[0][0] if self._due else None
            timeout_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            touched = dict.fromkeys(self._hear(timeout_s))
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                touched[heapq.heappop(self._due)[1]] = None
            self._turn(touched)
        return max(node.started_at for node in self._nodes)

    def _hear(self, timeout_s: float | None) -> Iterator[int]:
        """Everything that has happened, as the main loop does; to whom."""
        try:
            number, event = self._events.get(timeout=timeout_s)
            while True:
                self._nodes[number].hear(event)
                yield number
                number, event = self._events.get_nowait()
        except queue.Empty:
            return

    def _turn(self, numbers: Sequence[int] | dict[int, None] | range) -> None:
        for number in numbers:
            wake_at = self._nodes[number].turn(time.monotonic())
            if wake_at is not None:
                heapq.heappush(self._due, (wake_at, number))


def _identity(number: int) -> NodeRecord:
    """A record of about the size that real ones have."""
    address = f"10.0.{number // 256}.{number % 256}"
    incarnation = f"{random.Random(number).getrandbits(48):012x}"
    http = Endpoint(address, FIRST_PORT - 1)
    return NodeRecord(f"node-{number:04}", incarnation, address, FIRST_PORT, 8, http)


def connect_etcd(host: str, port: int) -> Store:
    from elastic_agent.rendezvous.etcd import PREFIX
    from elastic_agent.rendezvous.etcd.store import EtcdStore
    from elastic_agent.rendezvous.store.store_kind import Access

    return EtcdStore.connect(Access((Endpoint(host, port),), JOB, CONNECT_S, LEASE_TTL_S, prefix=PREFIX))


def connect_c10d(host: str, port: int) -> Store:
    from elastic_agent.rendezvous.c10d.store import C10dStore

    return C10dStore.connect(host, port, JOB, CONNECT_S, request_timeout_s=LEASE_TTL_S / 5)


# --- torchrun's


class TorchrunNodes:
    def __init__(self, host: str, port: int, count: int, total: int) -> None:
        from torch.distributed import TCPStore
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        self.meter = Meter()
        self._handlers = []
        for _ in range(count):
            store = TCPStore(host, port, is_master=False, wait_for_workers=False)
            backend = metered_backend(C10dRendezvousBackend(store, JOB), self.meter)
            parameters = RendezvousParameters(
                "c10d", f"{host}:{port}", JOB, total, total, local_addr=host, join_timeout=3600
            )
            self._handlers.append(create_handler(store, backend, parameters))

    def join(self) -> Joined:
        return self._each(lambda _number, handler: handler.next_rendezvous())

    def rejoin(self, *, fail: bool) -> Joined:
        """The agent whose worker failed comes back at once; the others see in their monitoring that it waits."""

        def work(number: int, handler: Any) -> None:
            if not fail or number != len(self._handlers) - 1:
                while not handler.num_nodes_waiting():
                    time.sleep(MONITOR_S)
            handler.next_rendezvous()

        return self._each(work)

    def close(self) -> None:
        pass

    def _each(self, work: Callable[[int, Any], None]) -> Joined:
        ended: queue.SimpleQueue[float | Exception] = queue.SimpleQueue()

        def run(number: int, handler: Any) -> None:
            try:
                work(number, handler)
                ended.put(time.monotonic())
            except Exception as error:
                ended.put(error)

        began_s = time.monotonic()
        for number, handler in enumerate(self._handlers):
            threading.Thread(target=run, args=(number, handler), daemon=True).start()
        instants = []
        for _ in self._handlers:
            result = ended.get()
            if isinstance(result, Exception):
                raise result
            instants.append(result)
        return Joined(began_s, max(instants))


def metered_backend(backend: Any, meter: Meter) -> Any:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    class Metered(RendezvousBackend):
        @property
        def name(self) -> str:
            return str(backend.name)

        def get_state(self) -> Any:
            result = backend.get_state()
            meter.asked(len(result[0]) if result else 0)
            return result

        def set_state(self, state: bytes, token: Any = None) -> Any:
            result = backend.set_state(state, token)
            meter.wrote(len(result[0]) if result else 0, succeeded=bool(result and result[2]))
            return result

    return Metered()


# --- The process


def main() -> None:
    parser = argparse.ArgumentParser(description="Some of the simulated nodes of rendezvous_scale.py.")
    parser.add_argument("system", choices=["etcd", "c10d", "torchrun"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("first", type=int, help="number of the first node here")
    parser.add_argument("count", type=int, help="nodes here")
    parser.add_argument("total", type=int, help="nodes in all processes")
    args = parser.parse_args()
    gc.disable()
    nodes: OurNodes | TorchrunNodes
    if args.system == "torchrun":
        nodes = TorchrunNodes(args.host, args.port, args.count, args.total)
    else:
        connect = connect_etcd if args.system == "etcd" else connect_c10d
        nodes = OurNodes(lambda: connect(args.host, args.port), args.first, args.count, args.total)
    tell({})
    for line in sys.stdin:
        order = json.loads(line)
        joined = nodes.join() if order["do"] == "join" else nodes.rejoin(fail=order["fail"])
        tell({**asdict(joined), **asdict(nodes.meter.read())})
    # Hundreds of threads wait for a store that is about to end: nothing is to be gained by asking each to stop.
    os._exit(0)


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
