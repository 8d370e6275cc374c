"""A whole pool in one thread and virtual time: daemons, their store, the jobs that people submit and cancel.

The code under test is the real one: every daemon drives a real `PoolMember`, the store is the real `KvState`. Simulated
are the network (each request and reply has a delay, either may be lost), the jobs' agents on each node, the people, and
the nemesis that kills and cuts off daemons, and lets nodes leave. At `CALM_AT` everything is healed, and at `END_AT`
every job must have a result. The promises are checked at the very event that would break one:

    P1   no node has processes of two jobs, and none takes an allocation twice
    P2   a run begins with its least number of nodes, and has at most its most
    P3   no job that fits into the pool is overtaken by a younger one
    P4   every job gets one result, and a true one
    P5   an allocation is kept until its processes are gone, or its node is lost
    P6   what a run gives back leaves it its least
    P7   what a run gets beyond its least makes a larger multiple, where its nodes train in multiples

`python -m tests.sim.pool SEED` replays one run and prints its story.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic_agent.pool.daemon import TURN_S
from elastic_agent.pool.member import Assignment, PoolMember
from elastic_agent.pool.records import (
    JOBS_PREFIX,
    PLAN_KEY,
    AllocationEnd,
    Attempt,
    Job,
    JobResult,
    Outcome,
    Plan,
    Pool,
    PoolNode,
)
from elastic_agent.pool.schedule import MOST_ATTEMPTS, Decision, decide
from elastic_agent.rendezvous.errors import LeaseExpired, StoreError, StoreUnavailable
from elastic_agent.rendezvous.store.interface import (
    Answer,
    Compare,
    Grant,
    LeaseId,
    Put,
    Read,
    Request,
    Subscription,
)
from elastic_agent.rendezvous.store.kv_state import KvState

from .checks import PromiseBroken

LEASE_TTL_S = 3.0
SUBMITTED_BY, CALM_AT, END_AT = 80.0, 90.0, 900.0
REQUEST_TIMEOUT_S = 1.0
LATE_S = 8.0
"""A request may arrive so late."""
WALL = 1.0e9
CANCELLED_WITHIN_S = 15.0
"""A coordinator may have to be missed first."""

BUGS = (
    "processes that are left do not count",
    "an allocation is free as soon as it is to be left",
    "the plan is written without compare",
    "a run starts with fewer nodes",
    "a run has more nodes than it may",
    "a younger job overtakes",
    "a run gives back too much",
    "a run gets what makes no multiple",
    "an allocation is taken twice",
    "a job whose nodes were lost is forgotten",
    "a cancelled job runs on",
    "a second attempt gets no allocations",
    "the end of one node is a success",
    "a node that leaves is given an allocation",
)
"""Planted on purpose, one at a time: each must be caught, or the checks prove nothing."""


@dataclass
class Allocated:
    """The agent of a job on one node."""

    job: Job
    allocation_id: int
    life: int
    leaves: bool = False


@dataclass
class Truth:
    """What has really happened to one job."""

    fails: bool
    work_s: float
    done: bool = False
    failed: bool = False
    cancelled_at: float | None = None
    started: set[tuple[str, int]] = field(default_factory=set)
    result: JobResult | None = None


class Daemon:
    """One node: its daemon, and the processes of the allocation that it has taken."""

    def __init__(self, sim: PoolSimulation, name: str) -> None:
        self.sim, self.name = sim, name
        self.life = 0
        self.cut = False
        self.running = False
        self.leaves_since = math.inf
        self.children: list[Allocated] = []
        self.member: PoolMember
        self.boot()

    def boot(self) -> None:
        self.life += 1
        self.running, self.leaves_since = True, math.inf
        self.children.clear()  # they end with their daemon
        sim = self.sim
        record = PoolNode(self.name, f"{self.name}-{self.life}")
        self.member = PoolMember(
            record,
            lease_ttl_s=LEASE_TTL_S,
            rng=random.Random(sim.rng.random()),
            now=sim.now,
            wall=lambda: WALL + sim.now,
            decide=sim.decide,
        )
        self._subscription: Subscription | None = None
        self._kept: LeaseId | None = None
        self._tick()

    def _tick(self) -> None:
        self.turn()
        self.soon(TURN_S, self._tick)

    def kill(self) -> None:
        self.life += 1
        self.running = False
        self.children.clear()

    def soon(self, delay_s: float, action: Callable[[], None]) -> None:
        """Unless this life of the daemon has ended by then."""
        life = self.life
        self.sim.after(delay_s, lambda: action() if self.life == life and self.running else None)

    def turn(self) -> None:
        member, sim = self.member, self.sim
        if not self.running:
            return
        assert member.mismatch is None, member.mismatch
        if (request := member.request(sim.now)) is not None:
            sim.call(self, request)
        if (due := member.to_start) is not None:
            self._start(due)
        for child in self.children:
            if member.must_leave and not child.leaves:
                child.leaves = True
                self.soon(sim.rng.uniform(0.1, 1.5), lambda child=child: self.end(child, Outcome.UNABLE))
        if member.lease != self._kept:
            self._kept = member.lease
            self.soon(LEASE_TTL_S / 5, self._keep_alive)
        if member.subscription is not self._subscription:
            self._subscription = member.subscription
            if self._subscription is not None:
                self._watch(self._subscription, self._subscription.after_revision)
        if (at := member.wake_at(sim.now)) is not None:
            self.soon(max(0.0, at - sim.now) + 0.001, self.turn)

    def _start(self, due: Assignment) -> None:
        sim, truth, allocation_id = self.sim, self.sim.truths[due.job.job], due.allocation.id
        sim.require(
            not self.children, "P1", f"{self.name} has processes of {self.children} and starts {due.job.job}"
        )
        sim.require(
            (self.name, allocation_id) not in truth.started,
            "P1",
            f"{self.name} takes the allocation {allocation_id} twice",
        )
        truth.started.add((self.name, allocation_id))
        child = Allocated(due.job, allocation_id, self.life)
        self.children.append(child)
        self.member.started(allocation_id)
        sim.seen["started"] += 1
        if sim.rng.random() < 0.05 and sim.now < CALM_AT:
            self.soon(sim.rng.uniform(0.1, 1.0), lambda: self.end(child, Outcome.UNABLE))
        sim.work_on(due.job.job)

    def end(self, child: Allocated, outcome: Outcome) -> None:
        if child in self.children:
            self.children.remove(child)
            self.sim.seen["left" if child.leaves else f"allocation {outcome.value}"] += 1
            self.member.ended(AllocationEnd(child.job.job, child.allocation_id, outcome, 0, outcome.value))
            if self.sim.bug == "an allocation is taken twice":
                self.member.record = replace(self.member.record, ended=None)
            self.turn()

    def _keep_alive(self) -> None:
        lease, sim = self._kept, self.sim
        if lease is None or lease != self.member.lease:
            return
        if not self.cut:
            try:
                sim.kv.keep_alive(lease, sim.now)
            except LeaseExpired:
                sim.seen["lease expired"] += 1
                self.member.lease_gone(lease)
                self._kept = None
                self.turn()
                return
        self.soon(LEASE_TTL_S / 5, self._keep_alive)

    def _watch(self, subscription: Subscription, after: int) -> None:
        """Looks again as soon as the store has changed."""
        if self.member.subscription is not subscription:
            return
        changes = self.sim.kv.changes(subscription.scopes, after) if not self.cut else ()
        if changes:
            self.member.changed(changes, self.sim.now)
            after = changes[-1].revision
            self.turn()
        life = self.life
        self.sim.watchers.append(lambda: self._watch(subscription, after) if self.life == life else None)


class PoolSimulation:
    """One seeded run."""

    def __init__(self, seed: int, bug: str | None = None, tell: bool = False) -> None:
        assert bug is None or bug in BUGS, bug
        self.seed, self.bug, self.tell = seed, bug, tell
        self.rng = random.Random(seed)
        self.now = 0.0
        self.kv = KvState(100_000)
        self.seen: Counter[str] = Counter()
        self.truths: dict[str, Truth] = {}
        self.watchers: list[Callable[[], None]] = []
        """Called, and forgotten, when the store has changed."""
        self._shown = 0
        self._given_at: dict[int, int] = {}
        """By allocation_id: the store's revision."""
        self.plan = Plan()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._size = self.rng.randint(2, 6)
        self.daemons = [Daemon(self, f"n{index}") for index in range(self._size)]
        for number in range(self.rng.randint(3, 12)):
            self.after(self.rng.uniform(0, SUBMITTED_BY), lambda number=number: self._submit(f"j{number}"))
        for _ in range(self.rng.randint(0, 12)):
            self.after(self.rng.uniform(0, CALM_AT), self._fault)
        self.after(CALM_AT, self._heal)

    # ------------------------------------------------------------ time, network, people

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._sequence), action))

    def require(self, holds: bool, promise: str, problem: str) -> None:
        if not holds:
            raise PromiseBroken(f"{promise}: {problem} (pool seed {self.seed}, at {self.now:.3f})")

    def say(self, text: str) -> None:
        if self.tell:
            print(f"{self.now:8.3f} {text}")

    def call(self, daemon: Daemon, request: Request) -> None:
        settled = False
        member = daemon.member

        def settle(give: Callable[[], None]) -> None:
            nonlocal settled
            if not settled:
                settled = True
                give()
                daemon.turn()

        def fail(error: StoreError) -> None:
            settle(lambda: member.failed(request, error, self.now))

        def arrive() -> None:
            if self._lost(daemon, "request lost"):
                return
            try:
                answer = self._serve(request)
            except StoreError as error:
                daemon.soon(0.01, lambda error=error: fail(error))
                return
            if not self._lost(daemon, "reply lost"):
                daemon.soon(
                    self.rng.uniform(0.001, 0.01),
                    lambda: settle(lambda: member.answered(request, answer, self.now)),
                )

        # What is on its way arrives, whatever becomes of its sender, and sometimes long after it has given up.
        late = self.rng.random() < 0.03 and self.now < CALM_AT
        self.seen["request late"] += late
        self.after(self.rng.uniform(0.5, LATE_S) if late else self.rng.uniform(0.001, 0.01), arrive)
        daemon.soon(REQUEST_TIMEOUT_S, lambda: fail(StoreUnavailable("no answer in time")))

    def _lost(self, daemon: Daemon, event: str) -> bool:
        if daemon.cut or (self.rng.random() < 0.03 and self.now < CALM_AT):
            self.seen[event] += 1
            return True
        return False

    def _serve(self, request: Request) -> Answer:
        if isinstance(request, Grant):
            return self.kv.grant(request.ttl_s, self.now)
        if isinstance(request, Read):
            return self.kv.read(request.scopes, self.now)
        compares: tuple[Compare, ...] = request.compares
        if self.bug == "the plan is written without compare" and isinstance(request, Decision):
            compares = compares[1:]
        live = self._live()
        outcome = self.kv.transact(compares, request.writes, self.now)
        if isinstance(request, Decision) and outcome.succeeded:
            self._check_decision(request, live)
        return outcome

    def _submit(self, name: str) -> None:
        multiple = 2 if int(name[1:]) % 4 == 0 and self._size > 1 else 1
        least = max(multiple, self.rng.randint(1, self._size) // multiple * multiple)
        job = Job(
            job=name,
            name=name,
            options=(),
            command=("train.py",),
            environment={},
            directory="/",
            min_nodes=least,
            max_nodes=max(least, self.rng.randint(least, max(least, self._size + 1)) // multiple * multiple),
            submitted_at=WALL + self.now,
            submitted_by="user@host",
            nodes_multiple_of=multiple,
        )
        self.truths[name] = Truth(fails=self.rng.random() < 0.2, work_s=self.rng.uniform(0.5, 30.0))
        self.kv.transact((Compare(job.key, 0),), (Put(job.key, job.to_json()),), self.now)
        self.say(f"submitted {name}: {job.min_nodes} to {job.max_nodes} nodes")
        if self.rng.random() < 0.15:
            self.after(self.rng.uniform(0, 40), lambda: self._cancel(name))

    def _cancel(self, name: str) -> None:
        if self.truths[name].result is None:
            self.say(f"cancelled {name}")
            self.truths[name].cancelled_at = self.now
            job = next(job for job in self._jobs() if job.job == name)
            text = replace(job, cancelled_by="user@host").to_json()
            self.kv.transact((), (Put(job.key, text),), self.now)

    def _fault(self) -> None:
        daemon = self.rng.choice(self.daemons)
        kind = self.rng.choice(("kill", "cut", "leave"))
        if not daemon.running or daemon.cut:
            return
        self.say(f"fault {kind} {daemon.name}")
        self.seen[f"fault {kind}"] += 1
        back_s = self.rng.uniform(0.1, 15.0)
        if kind == "kill":
            daemon.kill()
            self.after(back_s, lambda: None if daemon.running else daemon.boot())
        elif kind == "cut":
            daemon.cut = True
            self.after(back_s, lambda: self._mend(daemon))
        else:
            daemon.leaves_since = self.now
            daemon.member.leave()
            daemon.turn()
            self.after(back_s + 5.0, lambda: self._replace(daemon))

    def _mend(self, daemon: Daemon) -> None:
        daemon.cut = False
        self._shown = 0
        daemon.turn()

    def _replace(self, daemon: Daemon) -> None:
        if daemon.running and daemon.leaves_since < math.inf:
            daemon.kill()
            self.after(LEASE_TTL_S, lambda: None if daemon.running else daemon.boot())

    def _heal(self) -> None:
        for daemon in self.daemons:
            self._mend(daemon)
            if daemon.leaves_since < math.inf:
                self._replace(daemon)
            elif not daemon.running:
                daemon.boot()

    # ------------------------------------------------------------ the jobs

    def work_on(self, name: str) -> None:
        """A job that has its least number of agents is done after its work, if it keeps them."""

        def team() -> list[tuple[Daemon, Allocated]]:
            return [
                (daemon, child)
                for daemon in self.daemons
                for child in daemon.children
                if child.job.job == name
            ]

        def done(team_then: set[int]) -> None:
            truth, left = self.truths[name], [one for one in team() if not one[1].leaves]
            if not left or len(left) < left[0][1].job.min_nodes:
                return
            if not (truth.done or truth.failed) and not team_then <= {
                child.allocation_id for _, child in left
            }:
                self.after(truth.work_s, lambda: done({child.allocation_id for _, child in left}))
                return
            truth.failed, truth.done = truth.fails, not truth.fails
            outcome = Outcome.FAILED if truth.fails else Outcome.SUCCEEDED
            for daemon, child in left:
                daemon.soon(
                    self.rng.uniform(0.0, 0.5), lambda daemon=daemon, child=child: daemon.end(child, outcome)
                )

        members = {child.allocation_id for _, child in team()}
        self.after(self.truths[name].work_s, lambda: done(members))

    # ------------------------------------------------------------ what is decided

    def decide(self, pool: Pool, now: float) -> Decision | None:
        """The real decision, with a bug if one is planted."""
        bug, seen = self.bug, pool
        if bug == "processes that are left do not count":
            seen = replace(pool, nodes=tuple(replace(node, running=0) for node in pool.nodes))
        elif bug == "a run starts with fewer nodes":
            seen = replace(pool, jobs=tuple(replace(job, min_nodes=1) for job in pool.jobs))
        elif bug == "a run has more nodes than it may":
            seen = replace(pool, jobs=tuple(replace(job, max_nodes=99) for job in pool.jobs))
        elif bug == "a run gets what makes no multiple":
            seen = replace(pool, jobs=tuple(replace(job, nodes_multiple_of=1) for job in pool.jobs))
        elif bug == "a run gives back too much":
            running = {run.job for run in pool.plan.runs}
            seen = replace(
                pool,
                jobs=tuple(replace(job, min_nodes=1) if job.job in running else job for job in pool.jobs),
            )
        elif bug == "a younger job overtakes":
            seen = replace(pool, jobs=tuple(sorted(pool.jobs, key=lambda job: job.min_nodes)))
        elif bug == "a cancelled job runs on":
            seen = replace(pool, jobs=tuple(replace(job, cancelled_by="") for job in pool.jobs))
        elif bug == "a node that leaves is given an allocation":
            seen = replace(pool, nodes=tuple(replace(node, leaving=False) for node in pool.nodes))
        decision = decide(seen, now)
        if decision is None:
            return None
        if bug == "an allocation is free as soon as it is to be left":
            runs = tuple(replace(run, allocations=run.staying) for run in decision.plan.attempts)
            decision = replace(decision, plan=replace(decision.plan, attempts=runs))
        elif bug == "a job whose nodes were lost is forgotten":
            lost = {run.job for run in decision.plan.attempts if run.is_over or run.attempt > 1}
            results = tuple(
                JobResult(one, Outcome.SUCCEEDED, "", 0, 1, None, now, ())
                for one in lost
                if one in self.truths
            )
            decision = replace(decision, results=results[:1] or decision.results)
        elif bug == "a second attempt gets no allocations":
            known = {run.job: run for run in pool.plan.attempts}
            runs = tuple(run if run.attempt == 1 else known[run.job] for run in decision.plan.attempts)
            allocation_ids = (
                pool.plan.allocation_ids if runs == pool.plan.attempts else decision.plan.allocation_ids
            )
            decision = replace(
                decision, plan=replace(decision.plan, attempts=runs, allocation_ids=allocation_ids)
            )
        elif bug == "the end of one node is a success":
            results = tuple(replace(result, outcome=Outcome.SUCCEEDED) for result in decision.results)
            decision = replace(decision, results=results)
        return decision if decision != Decision(pool.plan) else None

    def _live(self) -> dict[str, PoolNode]:
        entries = self.kv.read(("nodes/",), self.now).entries
        records = (PoolNode.read(entry.key, entry.value) for entry in entries)
        return {record.incarnation: record for record in records}

    def _created(self, node: PoolNode) -> int:
        (entry,) = self.kv.read((node.key,), self.now).entries
        return entry.create_revision

    def _jobs(self) -> list[Job]:
        entries = sorted(
            self.kv.read((JOBS_PREFIX,), self.now).entries, key=lambda entry: entry.create_revision
        )
        return [Job.read(entry.key, entry.value) for entry in entries]

    def _check_decision(self, decision: Decision, live: dict[str, PoolNode]) -> None:
        before, after = self.plan, decision.plan
        told = [(run.job, [one.node + "-" * one.leaving for one in run.allocations]) for run in after.runs]
        self.say(f"plan {told}")
        jobs = {job.job: job for job in self._jobs()}
        for result in decision.results:
            self._check_result(result)
        self._check_allocations(before, after, live)
        running = {run.job for run in before.runs}
        for run in after.runs:
            job = jobs[run.job]
            self.require(
                len({allocation.node for allocation in run.allocations}) == len(run.allocations),
                "P1",
                f"two allocations of {run.job} on one node",
            )
            self.require(
                len(run.staying) <= job.max_nodes, "P2", f"{run.job} has {len(run.staying)} allocations"
            )
            if run.job not in running:
                self.seen["attempt" if run.attempt == 1 else "another attempt"] += 1
                self.require(
                    len(run.allocations) >= job.min_nodes,
                    "P2",
                    f"{run.job} begins with {len(run.allocations)} allocations",
                )
                self._check_order(job, list(jobs.values()), after, live)
            elif (was := before.run_of(run.job)) is not None and run.ending is None:
                self._check_least(job, was, run, live)
                self._check_multiple(job, was, run)
        self.plan = after

    def _check_allocations(self, before: Plan, after: Plan, live: dict[str, PoolNode]) -> None:
        kept = {allocation.id for run in after.runs for allocation in run.allocations}
        places = [allocation.incarnation for run in after.runs for allocation in run.allocations]
        self.require(len(set(places)) == len(places), "P1", f"a node has two allocations: {after}")
        for allocation in (
            allocation for run in before.runs for allocation in run.allocations if allocation.id not in kept
        ):
            node = live.get(allocation.incarnation)
            back = node is not None and self._created(node) > self._given_at[allocation.id]
            gone = (
                node is None or back or (node.ended is not None and node.ended.allocation_id == allocation.id)
            )
            self.require(gone, "P5", f"{allocation} was dropped, and its node says {node}")
        known = {allocation.id for run in before.runs for allocation in run.allocations}
        for allocation in (
            allocation for run in after.runs for allocation in run.allocations if allocation.id not in known
        ):
            node = live.get(allocation.incarnation)
            self._given_at[allocation.id] = self.kv.revision
            self.require(
                allocation.id > before.allocation_ids,
                "P1",
                f"{allocation} has an old allocation_id",
            )
            self.require(
                node is None or not node.running, "P1", f"{allocation} was given, and its node says {node}"
            )
            leaves = next(one.leaves_since for one in self.daemons if one.name == allocation.node)
            self.require(
                self.now < leaves + LATE_S,
                "P1",
                f"{allocation} was given, and its node leaves since {leaves}",
            )

    def _check_order(self, job: Job, jobs: list[Job], after: Plan, live: dict[str, PoolNode]) -> None:
        for older in jobs[: jobs.index(job)]:
            truth = self.truths[older.job]
            if (
                truth.result is not None
                or truth.cancelled_at is not None
                or after.run_of(older.job) is not None
            ):
                continue
            refusals = after.refusals_of(older.job)
            usable = [
                node
                for node in live.values()
                if not node.leaving
                and not (node.node in refusals and refusals[node.node].until > WALL + self.now)
            ]
            self.require(
                len(usable) < older.min_nodes,
                "P3",
                f"{job.job} overtakes {older.job}, for which {usable} would do",
            )
            self.seen["too large a job was passed"] += 1

    def _check_least(self, job: Job, was: Attempt, run: Attempt, live: dict[str, PoolNode]) -> None:
        asked = {allocation.id for allocation in run.allocations if allocation.leaving} - {
            allocation.id for allocation in was.allocations if allocation.leaving
        }
        nodes = [live.get(allocation.incarnation) for allocation in run.allocations if allocation.id in asked]
        if any(node is not None and not node.leaving for node in nodes):
            self.seen["gave back"] += 1
            self.require(
                len(run.staying) >= job.min_nodes, "P6", f"{job.job} is left {len(run.staying)} allocations"
            )

    def _check_multiple(self, job: Job, was: Attempt, run: Attempt) -> None:
        if job.nodes_multiple_of > 1 and len(run.allocations) > len(was.allocations):
            self.seen["grew to a multiple"] += 1
            self.require(
                len(run.staying) <= job.min_nodes or len(run.staying) % job.nodes_multiple_of == 0,
                "P7",
                f"{job.job} gets some of {len(run.staying)} allocations in vain",
            )

    def _check_result(self, result: JobResult) -> None:
        truth = self.truths[result.job]
        self.seen[f"result {result.outcome.value}"] += 1
        self.require(truth.result is None, "P4", f"{result.job} has two results")
        true = {
            Outcome.SUCCEEDED: truth.done,
            Outcome.FAILED: truth.failed,
            Outcome.CANCELLED: truth.cancelled_at is not None,
            Outcome.UNABLE: result.attempts >= MOST_ATTEMPTS,
        }[result.outcome]
        self.require(true, "P4", f"{result} is not true: {truth}")
        in_time = truth.cancelled_at is None or self.now < truth.cancelled_at + CANCELLED_WITHIN_S
        self.require(in_time or result.outcome is Outcome.CANCELLED, "P4", f"{result} after it was cancelled")
        truth.result = result

    # ------------------------------------------------------------ the run

    def play(self) -> None:
        while self._queue and self._queue[0][0] <= END_AT:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.kv.expire(self.now)
            if self.kv.revision != self._shown:
                self._shown, watchers, self.watchers = self.kv.revision, self.watchers, []
                for look in watchers:
                    self.after(self.rng.uniform(0.01, 0.1), look)
            if (
                self.now > CALM_AT
                and len(self.truths)
                and all(truth.result for truth in self.truths.values())
            ):
                break
        for name, truth in self.truths.items():
            self.require(truth.result is not None, "P4", f"{name} has no result")
        plan = self.kv.read((PLAN_KEY,), self.now).entries
        self.say(f"ended: {plan[0].value if plan else 'nothing'}")


if __name__ == "__main__":
    PoolSimulation(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None, tell=True).play()
