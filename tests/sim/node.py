"""One machine of the simulator: an agent of several lives, its clock and its link, and the worker that it runs.

Every node drives a real `Participant` as the real main loop does. A store request, a watch and a probe each have their
own way through the simulated network; what the agent does with its worker takes its time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_agent.rendezvous.drain import WHAT_STANDS, stranded
from elastic_agent.rendezvous.errors import Compacted, LeaseExpired, StoreUnavailable
from elastic_agent.rendezvous.follow import Drain, Leave, Refusal, Start, Stop
from elastic_agent.rendezvous.participant import Participant
from elastic_agent.rendezvous.peers import Absence, Finding, Peer
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Endpoint,
    Failure,
    NodeRecord,
    StopAt,
)
from elastic_agent.rendezvous.requests import (
    Answer,
    Request,
    Subscription,
)
from elastic_agent.rendezvous.store import Compare, Snapshot

from .training import CHECKPOINT_KEY, STRANDED_S, Worker

if TYPE_CHECKING:
    from .simulator import Simulation

LEASE_TTL_S = 5.0
PROBE_TIMEOUT_S = 1.0
STOPS_IN_S = 1.0
"""The longest that workers take to end after they were told to."""


@dataclass(slots=True)
class Link:
    """A node's way to the store, as the nemesis left it."""

    cut: bool = False
    lose_requests: float = 0.0
    lose_replies: float = 0.0
    rejects: bool = False
    """Something between this node and its peers refuses connections, although its agent lives."""
    clog_s: float = 0.0
    """Requests hang in the network for so long, and then still arrive: long after their sender gave up."""


class SimNode:
    """One machine: an agent (of several lives), its clock, its link and its workers."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.lives = 0
        self.port = 0
        self.link = Link()
        self.disturbed_until = -1e9
        """Its link, or its agent."""
        self.running = False
        self.paused: list[Callable[[], None]] | None = None
        self.resumed_at = -1e9
        self.worker: Worker | None = None
        self.watched: Subscription | None = None
        self.watched_to: dict[str, int] = {}
        self.stopping = False
        self.looks = 0
        self.boot()

    # ------------------------------------------------------------ the agent

    def boot(self) -> None:
        sim = self.sim
        self.lives += 1
        self.running, self.paused = True, None
        self.leaving = self.rescuing = self.warm = False
        self.rescued = 0
        self.memory = 0
        """The newest step whose state this agent has in memory."""
        self.rate = sim.rng.uniform(0.8, 1.25)
        self.epoch = sim.rng.uniform(0, 1e6) - self.rate * sim.now
        life = 1 if sim.bug == "incarnation reused after a crash" else self.lives
        identity = NodeRecord(
            self.name,
            f"{self.name}-{life}",
            f"host-{self.name}",
            self.fresh_port(),
            slots=2,
            http=Endpoint(self.name, 80),
        )
        self.agent = Participant(
            identity,
            sim.policy,
            lease_ttl_s=LEASE_TTL_S,
            rng=random.Random(sim.rng.random()),
            now=self.clock(),
            decision=sim.decision,
        )
        self.watched, self.stopping = None, False
        self.drained_with = 0
        self.wakes_at = self.clock()
        self.guarded(self.keep_alive)()
        sim.after(sim.rng.uniform(0.0, 4.0), self.guarded(self.warm_up))
        self.turn()

    def warm_up(self) -> None:
        self.warm = True
        self.agent.warmed()
        self.turn()

    def clock(self) -> float:
        return self.epoch + self.rate * self.sim.now

    def fresh_port(self) -> int:
        self.port += 1
        return self.port

    def guarded(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action` for this life of the agent only, and not while it is paused."""
        life = self.lives

        def run() -> None:
            if not self.running or self.lives != life:
                return
            if self.paused is not None:
                self.paused.append(action)
            else:
                action()

        return run

    def plant(self) -> None:
        if self.sim.bug == "going on without proof of the lease":
            self.agent._session.proof.confirmed_at = 1e12

    def turn(self) -> None:
        """What the real main loop does after every event."""
        self.plant()
        while True:
            now = self.clock()
            request = self.agent.request(now)
            if request is not None:
                self.send(request)
            if self.agent.wants_port:
                self.agent.offer_port(self.fresh_port())
                continue
            for peer in self.agent.probes(now):
                self.probe(peer)
            if self.agent.subscription is not self.watched:
                self.watched = self.agent.subscription
                if self.watched is not None:
                    self.watched_to = dict.fromkeys(self.watched.scopes, self.watched.after_revision)
                    self.pull_soon()
            self.rescue()
            if not self.obey(now):
                break
        wake_at = self.agent.wake_at(now)
        if wake_at is not None and not now < self.wakes_at <= wake_at:
            self.wakes_at = wake_at
            self.sim.after((wake_at - now) / self.rate + 1e-6, self.guarded(self.turn))

    def obey(self, now: float) -> bool:
        """True when obeying changed something that may give another order at once."""
        order = self.agent.order(now)
        if isinstance(order, Start):
            self.start_workers(order)
            return True
        if isinstance(order, Drain):
            return self.drain(order)
        if isinstance(order, Stop) and not self.stopping:
            self.stopping = True
            if not self.agent.lease_good(now):
                self.sim.disturb()  # the network alone can do that
            generation = order.generation
            worker = self.worker
            if self.sim.bug == "start before the old workers are gone" and worker is not None:
                self.sim.after(self.sim.rng.uniform(0.01, 1.0), worker.die)
                self.gone(generation)
                return True
            self.sim.after(
                self.sim.rng.uniform(0.01, STOPS_IN_S), self.guarded(lambda: self.reap(generation))
            )
        if isinstance(order, Leave):
            assert order.why is Refusal.ASKED, f"the simulated job never ends, but: {order}"
            self.depart()
        return False

    def drain(self, order: Drain) -> bool:
        worker, generation = self.worker, order.generation
        assert worker is not None
        worker.pending = not (self.sim.bug == "a rank misses the pending flag" and worker.place == 1)
        news = self.agent.workers_told(generation)
        if worker.stepped and self.sim.script.listens:
            news |= self.agent.workers_listen(generation)
        if order.stopping and self.looks != generation:
            self.looks = generation
            self.sim.after(STRANDED_S, self.guarded(lambda: self.look(generation)))
        return news

    def look(self, generation: int, failed: Failure | None = None) -> None:
        """Where were the workers to end? Whoever has come so far and does not ask will never end by itself."""
        worker = self.worker
        if worker is None or worker.generation != generation or self.stopping:
            return

        def act(stop: StopAt | None) -> None:
            if self.worker is not worker or self.stopping:
                return
            if failed is not None and not stranded(worker.step, stop, generation):
                self.fail(failed)
            elif failed is not None or (stranded(worker.step, stop, generation) and worker.busy):
                self.sim.seen["stranded"] += 1
                worker.alive = False
                self.worker_gone(worker, drained=True)
            else:
                self.sim.after(STRANDED_S, self.guarded(lambda: self.look(generation)))

        def read(snapshot: Snapshot) -> None:
            act(next((StopAt.from_json(entry.value) for entry in snapshot.entries), None))

        self.sim.call(self, lambda: self.sim.serve(WHAT_STANDS), read, lambda _: act(None))

    def leave(self) -> None:
        """Somebody asks the agent to stop."""
        self.leaving = True
        self.agent.leave(self.clock())
        self.turn()

    def rescue(self) -> None:
        """Bring to disk what is in memory, once, if this node is the one to do it."""
        sim, world = self.sim, self.agent.world
        if world is None or world.rescuer != self.agent.incarnation or self.rescued == world.generation:
            return
        self.rescued = world.generation
        if self.memory <= sim.committed_step or sim.bug == "nobody rescues the state of who leaves":
            return
        sim.seen["rescued"] += 1
        self.rescuing = True
        fence = (
            Compare(WORLD_KEY, self.agent.world_revision),
            Compare(CHECKPOINT_KEY, sim.newest_checkpoint()[1]),
        )

        def done(_: object) -> None:
            self.rescuing = False
            self.turn()

        text = f"{world.generation} {self.memory}"
        sim.call(self, lambda: sim.commit(fence, text), done, done)

    def depart(self) -> None:
        """The agent ends, and gives up its lease."""
        sim, lease = self.sim, self.agent.lease
        if self.rescuing:
            return
        assert self.worker is None
        self.running = False
        sim.note(f"{self.name} leaves")
        sim.seen["left"] += 1
        if lease is not None:
            sim.call(self, lambda: sim.ledger.revoke(lease), lambda _: None, lambda _: None, lambda act: act)
        sim.after(sim.rng.uniform(1.0, 6.0), lambda life=self.lives: self.lives == life and self.boot())

    def send(self, request: Request) -> None:
        sim = self.sim

        def reply(answer: Answer) -> None:
            self.agent.answered(request, answer, self.clock())
            self.turn()

        def fail(error: LeaseExpired | StoreUnavailable) -> None:
            self.agent.failed(request, error, self.clock())
            self.turn()

        sim.call(self, lambda: sim.serve(request), reply, fail)

    def keep_alive(self) -> None:
        lease, asked_at = self.agent.lease, self.clock()
        if self.agent.lease_good(asked_at) and not self.agent._session.proof.lease_proven(asked_at):
            self.sim.seen["outage survived"] += 1
        if lease is not None:

            def confirmed(_: None) -> None:
                self.agent.lease_confirmed(lease, asked_at)
                self.turn()

            def refused(error: LeaseExpired | StoreUnavailable) -> None:
                if isinstance(error, LeaseExpired):
                    self.agent.lease_gone(lease)
                    self.turn()

            self.sim.call(self, lambda: self.sim.ledger.keep_alive(lease, self.sim.now), confirmed, refused)
        self.sim.after(LEASE_TTL_S / 5 / self.rate, self.guarded(self.keep_alive))

    def probe(self, peer: Peer) -> None:
        """Ask another node's agent directly, whatever the state of the store."""
        sim, asked_at = self.sim, self.clock()
        sim.seen["probe"] += 1

        def find() -> Finding:
            target = next(node for node in sim.nodes if node.name == peer.http.address)
            if self.link.cut or target.link.cut or target.paused is not None:
                return Absence.SILENT
            if not target.running or target.link.rejects:
                sim.seen["probe refused"] += 1
                return Absence.REFUSED
            return target.introduce()

        def hear(finding: Finding) -> None:
            self.agent.probed(peer, finding, asked_at, self.clock())
            self.turn()

        def arrive() -> None:
            finding = find()
            delay_s = PROBE_TIMEOUT_S if finding is Absence.SILENT else sim.delay()
            sim.after(delay_s, self.guarded(lambda: hear(finding)))

        sim.after(sim.delay(), arrive)

    def introduce(self) -> Finding:
        runs = self.worker is not None and not self.stopping
        return self.agent.introduction(
            self.clock(), self.worker.generation if self.worker is not None and runs else 0
        )

    def pull_soon(self) -> None:
        """Each scope comes with a delay of its own: their changes may overtake each other."""
        for scope in self.watched_to:
            if self.watched_to[scope] < self.sim.ledger.revision:
                late = self.sim.rng.random() < 0.1
                delay_s = self.sim.rng.uniform(0.0, 1.0) if late else self.sim.delay()
                self.sim.after(delay_s, self.guarded(lambda scope=scope: self.pull(scope)))

    def pull(self, scope: str) -> None:
        """The watch delivers what is in a scope in order and each change once; a cut link only delays it."""
        if self.watched is None or scope not in self.watched_to:
            return
        if self.link.cut or self.sim.store_down:
            self.sim.after(0.3, self.guarded(lambda: self.pull(scope)))
            return
        try:
            changes = self.sim.ledger.changes((scope,), self.watched_to[scope])
        except Compacted:
            self.sim.seen["compacted"] += 1
            self.agent.lost_track()
            self.turn()
            return
        self.watched_to[scope] = self.sim.ledger.revision
        if changes:
            self.agent.changed(changes, self.clock())
            self.turn()

    def kill(self) -> None:
        self.running = False
        self.paused = None
        if self.worker is not None:
            self.sim.after(self.sim.rng.uniform(0.01, 0.5), lambda worker=self.worker: self.end(worker))

    def resume(self) -> None:
        waiting, self.paused = self.paused or [], None
        self.resumed_at = self.sim.now
        for action in waiting:
            self.guarded(action)()

    # ------------------------------------------------------------ its workers

    def start_workers(self, order: Start) -> None:
        self.sim.check_start(self, order)
        self.agent.workers_started(order.world)
        self.stopping = False
        team = self.sim.team(order.world)
        self.worker = Worker(self, team, order.world.members.index(order.member))

    def hear_step(self, worker: Worker) -> None:
        """What the agent reads in the page that it shares with its worker."""
        if self.worker is worker and self.running and self.paused is None:
            self.agent.workers_advanced(worker.step)
            if worker.pending and self.sim.script.listens and self.agent.workers_listen(worker.generation):
                self.turn()

    def worker_ended(self, worker: Worker) -> None:
        """By itself, at the agreed step."""

        def notice() -> None:
            if self.worker is worker:
                self.worker_gone(worker, drained=True)

        self.sim.after(self.sim.rng.uniform(0.0, 0.1), self.guarded(notice))

    def worker_gone(self, worker: Worker, *, drained: bool) -> None:
        self.worker = None
        if drained:
            self.agent.workers_drained(worker.generation, kept=worker.ended_at is not None)
        self.gone(worker.generation)
        self.turn()

    def beyond(self, generation: int) -> None:
        """Its worker has passed the step at which the others end."""
        self.sim.seen["beyond"] += 1
        if self.worker is not None and self.worker.generation == generation and not self.stopping:
            self.stopping = True
            self.sim.after(
                self.sim.rng.uniform(0.01, STOPS_IN_S), self.guarded(lambda: self.reap(generation))
            )

    def crash(self, worker: Worker) -> None:
        """A worker dies; the agent notices unless it is gone or paused itself."""
        if not worker.alive:
            return
        generation = worker.generation

        def notice() -> None:
            if self.worker is not worker or self.stopping:
                return
            if self.sim.bug == "restart inside the generation":
                member = worker.team.world.member(self.agent.incarnation)
                if member is not None:
                    self.reap(generation)
                    self.sim.check_start(self, Start(worker.team.world, member))
                    return
            failure = Failure(generation, "crash", "crashed")
            if worker.pending:
                self.look(generation, failure)
            else:
                self.fail(failure)

        self.sim.after(self.sim.rng.uniform(0.0, 0.1), self.guarded(notice))

    def fail(self, failure: Failure) -> None:
        self.stopping = True
        self.agent.workers_failed(failure)
        self.sim.after(
            self.sim.rng.uniform(0.01, STOPS_IN_S), self.guarded(lambda: self.reap(failure.generation))
        )
        self.turn()

    def reap(self, generation: int) -> None:
        worker = self.worker
        if worker is not None and worker.generation == generation:
            worker.die()
            self.worker_gone(worker, drained=False)

    def end(self, worker: Worker) -> None:
        """The process ends with its agent."""
        worker.die()
        if self.worker is worker:
            self.worker = None

    def gone(self, generation: int) -> None:
        self.stopping = False
        self.agent.workers_gone(generation)
