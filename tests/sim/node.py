"""One machine of the simulator: an agent of several lives, its clock and its link, and the worker that it runs.

Every node drives a real `Participant` by the real `Driver`. A store request, a watch and a probe each have their
own way through the simulated network; what the agent does with its worker takes its time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic_agent.agent.main.heartbeat import Silence, Turned, why_stuck
from elastic_agent.agent.workers.hang_detector import Durations, HangDetector
from elastic_agent.health.hang_report import HangReport, HangSuspicion, RankActivity, RankReport, Urgency
from elastic_agent.rendezvous.errors import Compacted, LeaseExpired, StoreUnavailable
from elastic_agent.rendezvous.liveness import LEASE_MARGIN, Peer, ProbeFailure, ProbeResult
from elastic_agent.rendezvous.node.drain import WHAT_STANDS, stranded
from elastic_agent.rendezvous.node.driver import Driver
from elastic_agent.rendezvous.node.node_actions import (
    Action,
    Drain,
    Leave,
    Refusal,
    ReportHang,
    Start,
    Stop,
)
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Condition,
    Endpoint,
    Failure,
    NodeRecord,
    PeerStatus,
    StopAt,
)
from elastic_agent.rendezvous.store.interface import (
    Answer,
    Compare,
    Grant,
    LeaseId,
    Request,
    Snapshot,
    Subscription,
)

from .training import CHECKPOINT_KEY, STRANDED_S, Worker

if TYPE_CHECKING:
    from .simulator import Simulation

LEASE_TTL_S = 5.0
PROBE_TIMEOUT_S = 1.0
GUARD_KILLS_IN_S = 0.1
"""The longest that the guard takes when it is told to: it has nothing to notice first."""
LOOK_S = 0.25
"""Between two looks of the thread that watches the main loop."""
HANDS_OVER_IN_S = 1.0
"""A part of the time for which a node that leaves brings others what it has in memory."""
CHECKS_IN_S = 0.5
"""What the check of an excluded node takes."""
HANG_LOOK_S = 1.0
"""Between two looks whether the workers move."""
LOOKS_IN_S = 1.2
"""The longest that an agent takes to see what its workers do."""
STOPS_IN_S = 1.0
"""The longest that workers take to end after they were asked to."""


@dataclass(slots=True)
class Link:
    """A node's way to the store, as the nemesis left it."""

    cut: bool = False
    storeless: bool = False
    """It reaches its peers, but not the store."""
    peerless: bool = False
    """It reaches the store, but not its peers."""
    lose_requests: float = 0.0
    lose_replies: float = 0.0
    rejects: bool = False
    """Something between this node and its peers refuses connections, although its agent lives."""
    walled: bool = False
    """Something between those that are walled and all others refuses connections; they reach each other."""
    clog_s: float = 0.0
    """Requests hang in the network for so long, and then still arrive: long after their sender gave up."""


class SimNode:
    """One machine: an agent (of several lives), its clock, its link and its workers."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.lives = 0
        self.leased_in = 0
        """The life of the store that granted this node's lease."""
        self.port = 0
        self.link = Link()
        self.disturbed_until = -1e9
        """Its way to the store, or its agent: workers that crash and nodes that leave leave the store in sight."""
        self.rejected_until = -1e9
        """Its peers may have taken it for dead."""
        self.running = False
        self.paused: list[Callable[[], None]] | None = None
        self.resumed_at = -1e9
        self.worker: Worker | None = None
        self.watched: Subscription | None = None
        self.retries: set[str] = set()
        """Scopes whose changes wait until the store can be reached."""
        self.watched_to: dict[str, int] = {}
        self.stopping = False
        self.looks = 0
        self.looked_for = (0, 0)
        """The newest inquiry, with its generation, for which its workers are looked at."""
        self.boot()

    # ------------------------------------------------------------ the agent

    def boot(self) -> None:
        sim = self.sim
        self.lives += 1
        self.running, self.paused = True, None
        self.hosts = sim.hosted and self.name == "n0"
        if self.hosts:
            sim.begin_store(self)
        self.leased_in = sim.store_life
        self.stuck_at: float | None = None
        """Since when its main loop does not turn, on its own clock, and what the loop had said of itself."""
        self.stops_at: float | None = None
        self.confirmed_at = -1e9
        self.deaf = False
        """Its thread at the store is dead, and the agent does not know."""
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
            self.new_port(),
            slots=2,
            http=Endpoint(self.name, 80),
            limits=sim.policy_of(self.name).limits,
            hosts_store=self.hosts,
            memory=7000 if self.name == "n1" else 0,
        )
        self.agent = Participant(
            identity,
            sim.policy_of(self.name),
            lease_ttl_s=LEASE_TTL_S,
            rng=random.Random(sim.rng.random()),
            now=self.clock(),
            decision=sim.decision,
        )
        self.driver = Driver(self.agent, self, self.probe, self)
        self.kept: LeaseId | None = None
        """The lease that is kept alive."""
        self.watched, self.stopping = None, False
        self.learned = Durations()
        self.drained_with = 0
        self.wakes_at = self.clock()
        self.guarded(self.keep_alive)()
        sim.after(sim.rng.uniform(0.0, 4.0), self.guarded(self.warm_up))
        self.turn()

    def warm_up(self) -> None:
        self.warm = True
        self.agent.became_ready()
        self.turn()

    def clock(self) -> float:
        return self.epoch + self.rate * self.sim.now

    def guarded(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action` of the main loop: for this life of the agent only, not while it is paused, never while stuck."""
        return self.of_this_life(lambda: None if self.stuck_at is not None else action())

    def of_this_life(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action` of any thread of this agent."""
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
            self.agent._session.validity.confirmed_at = 1e12

    def turn(self) -> None:
        """What the real main loop does after every event, by the real driver."""
        self.plant()
        now = self.clock()
        wake_at = self.driver.turn(now)
        if wake_at is not None and not now < self.wakes_at <= wake_at:
            self.wakes_at = wake_at
            self.sim.after((wake_at - now) / self.rate + 1e-6, self.guarded(self.turn))
        if self.agent.recheck_due(now):
            self.agent.recheck_begins()
            self.sim.after(CHECKS_IN_S, self.guarded(self.recheck))

    def recheck(self) -> None:
        passed, summary = self.sim.recheck(self)
        self.sim.seen["recheck passed" if passed else "recheck failed"] += 1
        self.agent.rechecked(self.clock(), passed=passed, summary=summary)
        self.turn()

    # ------------------------------------------------------------ effects and store, for the driver

    @property
    def undisturbed(self) -> int:
        return self.worker.generation if self.worker is not None and not self.stopping else 0

    @property
    def start_waits_for(self) -> str:
        return ""

    def new_port(self) -> int:
        self.port += 1
        return self.port

    def advance(self, now: float) -> bool:
        self.rescue()
        return False

    def keep(self, lease: LeaseId | None) -> None:
        self.kept = lease

    def follow(self, subscription: Subscription | None) -> None:
        if subscription is self.watched:
            return
        self.watched, self.retries = subscription, set()
        if subscription is not None:
            self.watched_to = dict.fromkeys(subscription.scopes, subscription.after_revision)
            self.pull_soon()

    def carry_out(self, action: Action, now: float) -> bool:
        if isinstance(action, Start):
            self.start_workers(action)
            return True
        if isinstance(action, Drain):
            return self.drain(action)
        if isinstance(action, ReportHang):
            self.look_at_workers(action)
        if isinstance(action, Stop) and not self.stopping:
            self.stopping = True
            if not self.agent.lease_good(now):
                self.sim.disturb()  # the network alone can do that
            generation = action.generation
            worker = self.worker
            if self.sim.bug == "start before the old workers are gone" and worker is not None:
                self.sim.after(self.sim.rng.uniform(0.01, 1.0), worker.die)
                self.gone(generation)
                return True
            self.sim.after(
                self.sim.rng.uniform(0.01, STOPS_IN_S), self.guarded(lambda: self.reap(generation))
            )
        if isinstance(action, Leave):
            assert action.why is Refusal.ASKED, f"the simulated job never ends, but: {action}"
            self.depart()
        return False

    def drain(self, action: Drain) -> bool:
        worker, generation = self.worker, action.generation
        assert worker is not None
        worker.pending = not (self.sim.bug == "a rank misses the pending flag" and worker.place == 1)
        news = self.agent.workers_are(Condition.NOTIFIED, generation)
        if worker.stepped and self.sim.script.listens:
            news |= self.agent.workers_are(Condition.POLLING, generation)
        if action.stopping and self.looks != generation:
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

    @property
    def may_leave(self) -> bool:
        """The host's departure would end the job."""
        return self.running and self.paused is None and not self.leaving and not self.hosts

    def leave(self) -> None:
        """Somebody asks the agent to stop."""
        self.leaving = True
        self.agent.leave(self.clock())
        self.turn()

    def rescue(self) -> None:
        """Bring to disk what is in memory, once, if this node is the one to do it."""
        sim, world = self.sim, self.agent.world
        if world is None or world.final_saver != self.agent.incarnation or self.rescued == world.generation:
            return
        self.rescued = world.generation
        if self.memory <= sim.committed_step or sim.bug == "no node saves the state of one that leaves":
            return
        sim.seen["rescued"] += 1
        self.rescuing = True
        fence = (
            Compare(WORLD_KEY, self.agent._session.membership.world_revision),
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
            sim.call(self, lambda: sim.kv.revoke(lease), lambda _: None, lambda _: None, lambda act: act)
        sim.after(sim.rng.uniform(1.0, 6.0), lambda life=self.lives: self.lives == life and self.boot())

    def ask(self, request: Request) -> None:
        sim = self.sim
        if self.deaf:
            return

        def reply(answer: Answer) -> None:
            self.agent.answered(request, answer, self.clock())
            self.turn()

        def fail(error: LeaseExpired | StoreUnavailable) -> None:
            self.agent.failed(request, error, self.clock())
            self.turn()

        sim.call(self, lambda: sim.serve(request), reply, fail, grants=isinstance(request, Grant))

    def keep_alive(self) -> None:
        lease, asked_at = self.kept, self.clock()
        if self.agent.lease_good(asked_at) and not self.agent._session.validity.lease_proven(asked_at):
            self.sim.seen["outage survived"] += 1
        if lease is not None:

            def confirmed(_: None) -> None:
                self.confirmed_at = asked_at
                self.guarded(lambda: heard(lambda: self.agent.lease_confirmed(lease, asked_at)))()

            def refused(error: LeaseExpired | StoreUnavailable) -> None:
                if isinstance(error, LeaseExpired):
                    self.guarded(lambda: heard(lambda: self.agent.lease_gone(lease)))()

            def heard(what: Callable[[], None]) -> None:
                what()
                self.turn()

            self.sim.call(
                self,
                lambda: self.sim.kv.keep_alive(lease, self.sim.now),
                confirmed,
                refused,
                guard=self.of_this_life,
            )
        self.sim.after(LEASE_TTL_S / 5 / self.rate, self.of_this_life(self.keep_alive))

    # ------------------------------------------------------------ failures of the agent itself

    def stick(self) -> None:
        """The main loop stands still, and all other threads go on."""
        now = self.clock()
        self.stuck_at = now
        self.stops_at = self.agent.good_until(now) if self.worker is not None else None
        self.watch(Silence(Turned(now, self.stops_at), now))

    def watch(self, silence: Silence) -> None:
        """The thread that watches the main loop, by the real rule."""
        now = self.clock()
        proven_until = self.confirmed_at + LEASE_MARGIN * LEASE_TTL_S
        silence = silence.look(silence.since, proven_until, now, LOOK_S)
        if why_stuck(silence, LEASE_TTL_S) and self.sim.bug != "a stuck loop is not missed":
            self.sim.seen["stuck loop ended"] += 1
            self.sim.disturb()  # half a minute after it began, also in the calm
            self.fall(GUARD_KILLS_IN_S)
            return
        self.sim.after(LOOK_S / self.rate, self.of_this_life(lambda: self.watch(silence)))

    def lose_thread(self) -> None:
        """The one at the store dies: the agent ends its workers, gives up its lease and ends."""
        if self.sim.bug == "a dead thread is not missed":
            self.deaf = True
            return
        self.sim.seen["dead thread ended"] += 1
        lease, worker, life = self.agent.lease, self.worker, self.lives
        self.fall()

        def give_up() -> None:
            if lease is not None and self.leased_in == self.sim.store_life:
                self.sim.kv.revoke(lease)
                self.sim.store_changed()

        if self.worker is None or worker is None:
            give_up()
        else:
            self.sim.after(2 * STOPS_IN_S, lambda: give_up() if self.lives == life else None)

    def fall(self, workers_end_in_s: float = 0.5) -> None:
        """The process ends, and is started again."""
        self.kill(workers_end_in_s)
        self.sim.after(
            self.sim.rng.uniform(1.0, 6.0), lambda life=self.lives: life == self.lives and self.boot()
        )

    def probe(self, peer: Peer) -> None:
        """Ask another node's agent directly, whatever the state of the store."""
        sim, asked_at = self.sim, self.clock()
        sim.seen["probe"] += 1

        def find() -> ProbeResult:
            target = next(node for node in sim.nodes if node.name == peer.http.address)
            if self.apart_from(target) or target.paused is not None:
                return ProbeFailure.SILENT
            walled = target.link.walled is not self.link.walled
            if not target.running or target.link.rejects or walled:
                world = self.agent.world
                if walled and world is not None and world.member(self.agent.incarnation) is not None:
                    target.rejected_until = max(target.rejected_until, sim.now)  # the wall runs through it
                sim.seen["probe refused by a wall"] += walled
                sim.seen["probe refused"] += 1
                return ProbeFailure.REFUSED
            return target.introduce()

        def hear(finding: ProbeResult) -> None:
            said_at = asked_at
            if finding is ProbeFailure.SILENT and sim.bug == "silence of a member counts as a yes":
                generation = self.worker.generation if self.worker is not None else 0
                finding = PeerStatus(peer.http.address, peer.incarnation, generation, None, 0.0)
                said_at = self.clock()  # a yes as old as the question is too old before the next one
            self.agent.probed(peer, finding, said_at, self.clock())
            self.turn()

        def arrive() -> None:
            finding = find()
            delay_s = PROBE_TIMEOUT_S if finding is ProbeFailure.SILENT else sim.delay()
            sim.after(delay_s, self.guarded(lambda: hear(finding)))

        sim.after(sim.delay(), arrive)

    def apart_from(self, other: SimNode) -> bool:
        return any(node.link.cut or node.link.peerless for node in (self, other)) and other is not self

    def introduce(self) -> ProbeResult:
        says = self.agent.snapshot.introduction(self.clock())
        return (
            replace(says, confirmed_s=None)
            if self.sim.bug == "a member hides that it has the store"
            else says
        )

    def pull_soon(self) -> None:
        """Each scope comes with a delay of its own: their changes may overtake each other."""
        for scope in self.watched_to:
            if self.watched_to[scope] < self.sim.kv.revision:
                late = self.sim.rng.random() < 0.1
                delay_s = self.sim.rng.uniform(0.0, 1.0) if late else self.sim.delay()
                self.sim.after(delay_s, self.guarded(lambda scope=scope: self.pull(scope)))

    def retry(self, scope: str) -> None:
        self.retries.discard(scope)
        self.pull(scope)

    def pull(self, scope: str) -> None:
        """The watch delivers what is in a scope in order and each change once; a cut link only delays it."""
        if self.watched is None or scope not in self.watched_to or self.deaf:
            return
        if not self.sim.reaches_store(self):
            if scope not in self.retries:
                self.retries.add(scope)
                self.sim.after(0.3, self.guarded(lambda: self.retry(scope)))
            return
        try:
            if self.leased_in != self.sim.store_life:
                raise Compacted("of a lost store")
            changes = self.sim.kv.changes((scope,), self.watched_to[scope])
        except Compacted:
            self.sim.seen["compacted"] += 1
            self.agent.lost_track()
            self.turn()
            return
        self.watched_to[scope] = self.sim.kv.revision
        if changes:
            self.agent.changed(changes, self.clock())
            self.turn()

    def kill(self, workers_end_in_s: float = 0.5) -> None:
        self.running = False
        self.paused = None
        if self.worker is not None:
            end_s = self.sim.rng.uniform(0.01, workers_end_in_s)
            self.sim.after(end_s, lambda worker=self.worker: self.end(worker))

    def resume(self) -> None:
        waiting, self.paused = self.paused or [], None
        self.resumed_at = self.sim.now
        for action in waiting:
            self.of_this_life(action)()

    # ------------------------------------------------------------ its workers

    def start_workers(self, action: Start) -> None:
        self.sim.check_start(self, action)
        self.agent.workers_started(action.world)
        self.stopping = False
        team = self.sim.team(action.world)
        self.worker = Worker(self, team, action.world.members.index(action.member))
        self.detector = HangDetector("auto", self.learned, self.clock())
        self.suspected: Urgency | None = None
        self.watch_hangs(self.worker)

    def watch_hangs(self, worker: Worker) -> None:
        """What the real main loop does at every turn, by the real detector."""
        if self.worker is not worker or self.stopping:
            return
        stall = self.detector.stall((0,), self.clock())
        urgency = stall.urgency if stall is not None else None
        if urgency is not self.suspected:
            self.suspected = urgency
            self.agent.workers_suspected(
                HangSuspicion(worker.generation, stall.why, stall.urgency) if stall is not None else None
            )
            self.turn()
        self.sim.after(HANG_LOOK_S, self.guarded(lambda: self.watch_hangs(worker)))

    def look_at_workers(self, action: ReportHang) -> None:
        """They run on meanwhile."""
        worker, asked = self.worker, (action.generation, action.inquiry)
        if worker is None or self.looked_for == asked:
            return
        self.looked_for = asked

        def say() -> None:
            does = RankReport(
                2 * worker.place,
                worker.doing,
                max(worker.step, 0),
                self.detector.still_s(0, self.clock()),
            )
            waits = RankActivity.IN_COLLECTIVE if worker.hangs else does.doing  # one rank of two hangs
            other = replace(does, rank=does.rank + 1, doing=waits)
            self.agent.workers_looked_at(HangReport(*asked, (does, other)))
            self.turn()

        self.sim.after(self.sim.hangs.uniform(0.05, LOOKS_IN_S), self.guarded(say))

    def hear_step(self, worker: Worker) -> None:
        """What the agent reads in the page that it shares with its worker."""
        if self.worker is worker and self.running and self.paused is None and self.stuck_at is None:
            self.detector.stepped(0, worker.step, self.clock())
            self.agent.workers_advanced(worker.step)
            asks = self.sim.script.listens and worker.pending
            if asks and self.agent.workers_are(Condition.POLLING, worker.generation):
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
            self.turn()

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
        if self.agent.hands_over:
            self.sim.seen["handed over"] += 1
            longest = HANDS_OVER_IN_S * (generation % 4)  # no draw: other seeds show what they always did
            self.sim.after(longest, self.guarded(self.handed_over))

    def handed_over(self) -> None:
        self.agent.handed_over()
        self.turn()
