"""A whole job in one process, one thread and virtual time: N agents, their store, their network, their workers.

The code under test is the real one: every node drives a real `Participant`, the store is the real `Ledger`.
Simulated are the network (each request and each reply has its own delay, either may be lost, so a write may have
happened without its writer knowing), the clocks (own epoch and rate per node), the workers, and the nemesis that
kills, pauses, partitions, loses and fails. At `CALM_AT` everything is healed; at `END_AT` the job must have
converged (I11). The promises I1 to I5 and I7 are checked at the very event that would break one.

One `random.Random(seed)` feeds everything: the same seed gives the same run. `python tests/sim/simulator.py SEED`
replays one and prints its story.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic_agent.rendezvous.decide import Decision, Leave, Policy, Publish, Start, Stop, View, decide
from elastic_agent.rendezvous.errors import Compacted, LeaseExpired, StoreUnavailable
from elastic_agent.rendezvous.ledger import Ledger
from elastic_agent.rendezvous.participant import Participant
from elastic_agent.rendezvous.peers import Absence, Finding, Peer
from elastic_agent.rendezvous.records import WORLD_KEY, Endpoint, Failure, NodeRecord, Phase, World
from elastic_agent.rendezvous.requests import (
    Answer,
    Evict,
    Grant,
    Read,
    Request,
    Subscription,
    WriteRecord,
    WriteWorld,
)
from elastic_agent.rendezvous.restarts import RestartPolicy
from elastic_agent.rendezvous.store import Compare, LeaseId, Put

CALM_AT = 60.0
END_AT = 120.0
LEASE_TTL_S = 5.0
REQUEST_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 1.0
STOPS_IN_S = 1.0
"""The longest that workers take to end after they were told to."""
CHECKPOINT_KEY = "checkpoint"
BUGS = (
    "restart inside the generation",
    "commit without the fence",
    "start before the old workers are gone",
    "generation number reused",
    "incarnation reused after a crash",
    "world written without compare",
    "next world does not wait for settled members",
    "going on without proof of the lease",
)
"""Planted on purpose, one at a time: each must be caught, or the checkers prove nothing."""


class PromiseBroken(AssertionError):
    """A checker saw a promise broken; the message names it, the seed and the virtual time."""


@dataclass(slots=True)
class Workers:
    """The training processes of one generation on one node."""

    world: World
    world_revision: int
    rank0: bool
    step: int = 0
    checkpoint_revision: int = 0
    training: bool = False
    alive: bool = True


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
        self.running = False
        self.paused: list[Callable[[], None]] | None = None
        self.resumed_at = -1e9
        self.workers: Workers | None = None
        self.watched: Subscription | None = None
        self.watched_to: dict[str, int] = {}
        self.stopping = False
        self.boot()

    # ------------------------------------------------------------ the agent

    def boot(self) -> None:
        sim = self.sim
        self.lives += 1
        self.running, self.paused = True, None
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
        self.wakes_at = self.clock()
        self.guarded(self.keep_alive)()
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
        if isinstance(order, Stop) and not self.stopping:
            self.stopping = True
            generation = order.generation
            workers = self.workers
            if self.sim.bug == "start before the old workers are gone" and workers is not None:
                self.sim.after(self.sim.rng.uniform(0.01, 1.0), lambda: self.die(workers))
                self.gone(generation)
                return True
            self.sim.after(
                self.sim.rng.uniform(0.01, STOPS_IN_S), self.guarded(lambda: self.reap(generation))
            )
        assert not isinstance(order, Leave), f"the simulated job never ends, but: {order}"
        return False

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
        runs = self.workers is not None and not self.stopping
        return self.agent.introduction(
            self.clock(), self.workers.world.generation if self.workers is not None and runs else 0
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
        workers = self.workers
        if workers is not None:
            self.sim.after(self.sim.rng.uniform(0.01, 0.5), lambda: self.die(workers))

    def resume(self) -> None:
        waiting, self.paused = self.paused or [], None
        self.resumed_at = self.sim.now
        for action in waiting:
            self.guarded(action)()

    # ------------------------------------------------------------ its workers

    def start_workers(self, order: Start) -> None:
        sim, generation = self.sim, order.world.generation
        sim.check_start(self, order)
        self.agent.workers_started(order.world)
        self.stopping = False
        revision = sim.world_revisions[generation]
        workers = Workers(order.world, revision, rank0=order.member.first_rank == 0)
        self.workers = workers
        self.sim.after(sim.rng.uniform(0.1, 2.0), lambda: self.train(workers))

    def train(self, workers: Workers) -> None:
        """One second of training; rank 0 then commits a checkpoint, unless another world has taken over."""
        sim = self.sim
        if not workers.alive:
            return
        loading = not workers.training
        if loading:
            workers.training = True
            workers.step, workers.checkpoint_revision = sim.newest_checkpoint()
        else:
            workers.step += 1
            if self.workers is workers and self.running and self.paused is None:
                self.agent.workers_advanced(workers.step)
        if not workers.rank0 or loading:
            sim.after(sim.rng.uniform(0.8, 1.2), lambda: self.train(workers))
            return
        fence: tuple[Compare, ...] = (
            Compare(WORLD_KEY, workers.world_revision),
            Compare(CHECKPOINT_KEY, workers.checkpoint_revision),
        )
        if sim.bug == "commit without the fence":
            fence = ()

        def next_step(_: object) -> None:
            _, workers.checkpoint_revision = sim.newest_checkpoint()
            sim.after(sim.rng.uniform(0.8, 1.2), lambda: self.train(workers))

        text = f"{workers.world.generation} {workers.step}"
        sim.call(self, lambda: sim.commit(fence, text), next_step, next_step, guard=lambda action: action)

    def crash(self, workers: Workers) -> None:
        """A worker dies; the agent notices unless it is gone or paused itself."""
        if not workers.alive:
            return
        generation = workers.world.generation

        def notice() -> None:
            if self.workers is not workers or self.stopping:
                return
            if self.sim.bug == "restart inside the generation":
                member = workers.world.member(self.agent.incarnation)
                if member is not None:
                    self.reap(generation)
                    self.sim.check_start(self, Start(workers.world, member))
                    return
            self.stopping = True
            self.agent.workers_failed(Failure(generation, "crash", "crashed"))
            self.sim.after(
                self.sim.rng.uniform(0.01, STOPS_IN_S), self.guarded(lambda: self.reap(generation))
            )
            self.turn()

        self.sim.after(self.sim.rng.uniform(0.0, 0.1), self.guarded(notice))

    def reap(self, generation: int) -> None:
        workers = self.workers
        if workers is not None and workers.world.generation == generation:
            self.die(workers)
            self.gone(generation)
            self.turn()

    def gone(self, generation: int) -> None:
        self.stopping = False
        self.agent.workers_gone(generation, self.clock())

    def die(self, workers: Workers) -> None:
        """The processes end; a broken collective soon ends their peers of the same generation elsewhere."""
        if not workers.alive:
            return
        workers.alive = False
        if self.workers is workers:
            self.workers = None
        for node in self.sim.nodes:
            peers = node.workers
            if peers is not None and peers.world.generation == workers.world.generation:
                self.sim.after(
                    self.sim.rng.uniform(0.02, 1.0), lambda node=node, peers=peers: node.crash(peers)
                )


class Simulation:
    """See the module's docstring."""

    def __init__(self, seed: int, bug: str | None = None, size: int = 5, tell: bool = False) -> None:
        assert bug is None or bug in BUGS, bug
        self.seed = seed
        self.bug = bug
        self.tell = tell
        self.rng = random.Random(seed)
        self.now = 0.0
        self.store_down = False
        self.outage_until = -1e9
        self.seen: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=400)
        self.committed_step = 0
        self.worlds: dict[int, World] = {}
        self.world_revisions: dict[int, int] = {}
        self.starts: set[tuple[str, int]] = set()
        self.ports: dict[tuple[str, int], int] = {}
        self.ledger = Ledger(history=self.rng.choice((32, 4096)))
        self.policy = Policy(
            "sim",
            min_nodes=self.rng.choice((1, 2, 3)),
            max_nodes=self.rng.choice((3, size)),
            last_call_s=self.rng.choice((0.0, 1.0)),
            store_outage_grace_s=self.rng.choice((0.0, 8.0)),
            restarts=RestartPolicy(max_fruitless=10**6, max_backoff_s=1.0),
        )
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self.nodes: list[SimNode] = []
        for index in range(size):
            self.after(
                self.rng.uniform(0, 3) if self.rng.random() < 0.5 else 0.05, lambda i=index: self._boot(i)
            )

    def _boot(self, index: int) -> None:
        self.nodes.append(SimNode(self, f"n{index}"))

    # ------------------------------------------------------------ time and network

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._sequence), action))

    def delay(self) -> float:
        return self.rng.uniform(0.2, 0.9) if self.rng.random() < 0.02 else self.rng.uniform(0.001, 0.01)

    def call(
        self,
        node: SimNode,
        serve: Callable[[], object],
        reply: Callable[..., None],
        fail: Callable[..., None],
        guard: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        """A request and its reply, each with its own delay, each possibly lost; one of reply and fail is called.

        The answer waits while the agent is paused, and is dropped with its life: `guard`. Workers have their own.
        """
        settled = False
        guard = guard or node.guarded

        def settle(action: Callable[..., None], value: object) -> None:
            def once() -> None:
                nonlocal settled
                if not settled:
                    settled = True
                    action(value)

            guard(once)()

        def arrive() -> None:
            if node.link.cut or self.store_down or self.rng.random() < node.link.lose_requests:
                self.seen["request lost"] += 1
                return
            try:
                answer = serve()
            except LeaseExpired as error:
                self.after(self.delay(), lambda error=error: settle(fail, error))
                return
            finally:
                self.store_changed()
            self.after(self.delay(), lambda: depart(answer))

        def depart(answer: object) -> None:
            if node.link.cut or self.store_down or self.rng.random() < node.link.lose_replies:
                self.seen["reply lost"] += 1
                return
            settle(reply, answer)

        clogged_s = self.rng.uniform(0.0, node.link.clog_s)
        self.after(self.delay() + clogged_s, arrive)
        timeout = StoreUnavailable("no answer in time")
        self.after(REQUEST_TIMEOUT_S / node.rate, lambda: settle(fail, timeout))

    # ------------------------------------------------------------ the store

    def serve(self, request: Request) -> Answer:
        ledger = self.ledger
        if isinstance(request, Grant):
            return ledger.grant(request.ttl_s, self.now)
        if isinstance(request, Read):
            return ledger.read(request.scopes, self.now, request.oldest_under)
        compares = request.compares
        blind = isinstance(request, WriteWorld) and self.bug == "world written without compare"
        outcome = ledger.transact(compares[1:] if blind else compares, request.writes, self.now)
        if blind:
            outcome = replace(
                outcome, entries=(*ledger.read((WORLD_KEY,), self.now).entries, *outcome.entries)
            )
        if isinstance(request, WriteWorld):
            if outcome.succeeded:
                self.check_world(request.world, outcome.revision)
            else:
                self.seen["world race lost"] += 1
        if isinstance(request, Evict) or (isinstance(request, WriteWorld) and request.evicted):
            what = "coordinator" if isinstance(request, Evict) else "member"
            self.seen[f"{what} evicted" if outcome.succeeded else "eviction refused"] += 1
        if isinstance(request, WriteRecord) and not outcome.succeeded:
            self.seen["record refused"] += 1
        return outcome

    def newest_checkpoint(self) -> tuple[int, int]:
        """Step and mod_revision of the committed checkpoint, as a worker reads them when it loads."""
        for entry in self.ledger.read((CHECKPOINT_KEY,), self.now).entries:
            return int(entry.value.split()[1]), entry.mod_revision
        return 0, 0

    def commit(self, fence: tuple[Compare, ...], text: str) -> None:
        if not self.ledger.transact(fence, (Put(CHECKPOINT_KEY, text),), self.now).succeeded:
            self.seen["commit fenced"] += 1
            return
        generation, step = map(int, text.split())
        current = max(self.worlds)
        if generation != current:
            self.broken("I5", f"generation {generation} committed step {step} while {current} is current")
        if step <= self.committed_step:
            self.broken("I7", f"step {step} committed after step {self.committed_step}")
        self.committed_step = step
        self.seen["committed"] += 1

    def store_changed(self) -> None:
        """Wake the watches, and come back when the next lease is due."""
        for node in self.nodes:
            if node.running and node.watched is not None:
                node.pull_soon()
        due = self.ledger.next_expiry()
        if due is not None and due > self.now:
            self.after(due - self.now + 1e-6, self.expire)

    def expire(self) -> None:
        before = self.ledger.revision
        for lease in self.ledger.expire(self.now):
            self.check_stopped(lease)
        if self.ledger.revision != before:
            self.seen["lease expired"] += 1
            self.store_changed()

    # ------------------------------------------------------------ planted decisions

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        if self.bug == "next world does not wait for settled members":
            view = replace(view, nodes=tuple(replace(node, settled=10**9) for node in view.nodes))
            if view.world is not None and view.world.phase is Phase.RUNNING:
                view = replace(view, nodes=tuple(replace(node, settled=0) for node in view.nodes))
        decision = decide(view, policy, now)
        if (
            self.bug == "generation number reused"
            and isinstance(decision, Publish)
            and decision.world.phase is Phase.RUNNING
            and view.world is not None
        ):
            return replace(decision, world=replace(decision.world, generation=view.world.generation))
        return decision

    # ------------------------------------------------------------ checkers

    def broken(self, promise: str, what: str) -> None:
        raise PromiseBroken(
            f"{promise}: {what} (seed {self.seed}, t = {self.now:.3f} s; replay: "
            f"python tests/sim/simulator.py {self.seed}{f' --bug {self.bug!r}' if self.bug else ''})"
        )

    def note(self, what: str) -> None:
        line = f"{self.now:9.3f}  {what}"
        self.story.append(line)
        if self.tell:
            print(line)

    def check_world(self, world: World, revision: int) -> None:
        names = " ".join(member.node for member in world.members)
        self.note(f"world {world.generation} {world.phase.value} [{names}] {world.cause.kind.value}")
        newest = max(self.worlds, default=0)
        known = self.worlds.get(world.generation)
        if world.phase is Phase.RUNNING:
            if known is not None:
                self.broken("I2", f"generation {world.generation} was published twice")
            if world.generation != newest + 1:
                self.broken("I2", f"generation {world.generation} follows {newest}")
            endpoint = (world.master.address, world.master.port)
            if endpoint in self.ports:
                was = self.ports[endpoint]
                self.broken("I2", f"generation {world.generation} gets the endpoint of generation {was}")
            self.ports[endpoint] = world.generation
            self.worlds[world.generation] = world
            self.world_revisions[world.generation] = revision
            self.seen[f"world by {world.cause.kind.value}"] += 1
        elif known is None or world.generation != newest:
            self.broken("I2", f"generation {world.generation} is stopped, {newest} is the newest")

    def check_start(self, node: SimNode, order: Start) -> None:
        generation = order.world.generation
        self.note(f"{node.name} starts {generation}")
        if node.workers is not None and node.workers.alive:
            old = node.workers.world.generation
            self.broken("I1", f"{node.name} starts {generation} while workers of {old} are alive")
        if (node.name, generation) in self.starts:
            self.broken("I4", f"{node.name} starts generation {generation} twice")
        self.starts.add((node.name, generation))
        agreed = self.worlds[generation]
        if (order.world.members, order.world.master) != (agreed.members, agreed.master):
            self.broken("I3", f"{node.name} sees another generation {generation} than the others")
        ranks = [m.first_rank + local for m in order.world.members for local in range(m.slots)]
        if ranks != list(range(order.world.size)):
            self.broken("I3", f"ranks {ranks} of generation {generation}")

    def check_stopped(self, lease: LeaseId) -> None:
        """I10, for whoever was able to stop: not paused, and not going on with the others through an outage."""
        for node in self.nodes:
            awake = node.paused is None and self.now > node.resumed_at + 2 * STOPS_IN_S
            outage = self.policy.store_outage_grace_s and self.now < self.outage_until + 2 * LEASE_TTL_S
            if (
                node.running
                and node.agent.lease == lease
                and node.workers is not None
                and awake
                and not outage
            ):
                self.broken("I10", f"{node.name} still has workers, and its lease is gone")

    def check_converged(self) -> None:
        if not self.worlds:
            self.broken("I11", "no world was ever formed")
        world = self.worlds[max(self.worlds)]
        running = {
            node.name: node.workers.world.generation for node in self.nodes if node.workers is not None
        }
        want = min(len(self.nodes), self.policy.max_nodes)
        if len(world.members) != want or set(running) != {member.node for member in world.members}:
            self.broken(
                "I11", f"after the calm generation {world.generation} runs on {running}, wanted {want} nodes"
            )
        if set(running.values()) != {world.generation}:
            self.broken("I11", f"after the calm the nodes run {running}")

    # ------------------------------------------------------------ the nemesis

    def torment(self) -> None:
        """One fault, sometimes aimed at several nodes in the same instant; each heals by itself after a while."""
        if self.now >= CALM_AT - 10 or not self.nodes:
            return
        victims = self.rng.sample(self.nodes, k=min(len(self.nodes), self.rng.choice((1, 1, 2, 3))))
        fault = self.rng.choice(
            ("kill", "pause", "cut", "requests", "replies", "clog", "reject", "outage", "crash", "crash")
        )
        lasts_s = self.rng.choice((0.2, 2.0, 6.0, 12.0)) * self.rng.uniform(0.5, 1.0)
        self.seen[f"fault {fault}"] += 1
        self.note(f"{fault} {' '.join(node.name for node in victims)} for {lasts_s:.1f} s")
        if fault == "outage":
            self.store_down = True
            self.outage_until = self.now + lasts_s
            self.after(lasts_s, lambda: setattr(self, "store_down", False))
        for node in victims if fault != "outage" else ():
            if fault == "kill" and node.running:
                node.kill()
                self.after(1.0 + lasts_s, lambda node=node: node.running or node.boot())
            elif fault == "pause" and node.running and node.paused is None:
                node.paused = []
                self.after(lasts_s, lambda node=node, life=node.lives: life == node.lives and node.resume())
            elif fault == "cut":
                node.link.cut = True
            elif fault == "requests":
                node.link.lose_requests = self.rng.uniform(0.2, 1.0)
            elif fault == "replies":
                node.link.lose_replies = self.rng.uniform(0.2, 1.0)
            elif fault == "reject":
                node.link.rejects = True
            elif fault == "clog":
                node.link.clog_s = self.rng.uniform(1.0, 4.0)
            elif fault == "crash" and node.workers is not None:
                node.crash(node.workers)
            if fault in ("cut", "requests", "replies", "clog", "reject"):
                self.after(lasts_s, lambda node=node: setattr(node, "link", Link()))
        self.after(self.rng.choice((0.05, 1.0, 4.0)) * self.rng.uniform(0.5, 1.5), self.torment)

    def heal(self) -> None:
        self.note("calm")
        self.store_down = False
        for node in self.nodes:
            node.link = Link()
            if not node.running:
                node.boot()
            if node.paused is not None:
                node.resume()

    def run(self) -> Counter[str]:
        """Raises PromiseBroken; returns what happened how often."""
        self.after(self.rng.uniform(0, 8), self.torment)
        self.after(CALM_AT, self.heal)
        while self._queue and self._queue[0][0] <= END_AT:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.check_converged()
        self.seen["rejoined"] += sum("." in node.agent.incarnation for node in self.nodes)
        return self.seen


@dataclass(frozen=True, slots=True)
class Verdict:
    """One seed's run, in a form that crosses process borders."""

    seed: int
    broken: str | None
    seen: Counter[str] = field(default_factory=Counter)


def try_seed(seed: int, bug: str | None = None) -> Verdict:
    try:
        return Verdict(seed, None, Simulation(seed, bug).run())
    except AssertionError as error:
        return Verdict(seed, str(error) or f"an assertion failed in seed {seed}")


if __name__ == "__main__":
    planted = sys.argv[sys.argv.index("--bug") + 1] if "--bug" in sys.argv else None
    print(Simulation(int(sys.argv[1]), planted, tell=True).run())
