"""A whole job in one process, one thread and virtual time: N agents, their store, their network, their workers.

The code under test is the real one: every node drives a real `Participant`, the store is the real `KvState`.
Simulated are the network (each request and each reply has its own delay, either may be lost, so a write may have
happened without its writer knowing), the clocks (own epoch and rate per node), the workers (`training`), the people
who let nodes leave and come back, and the nemesis that kills, pauses, partitions, loses and fails. At `CALM_AT`
everything is healed, and only planned changes go on; at `END_AT` the job must have converged (I11). The promises I1 to
I5, I7 and I8 are checked at the very event that would break one.

One `random.Random(seed)` feeds everything: the same seed gives the same run. `python -m tests.sim.simulator SEED`
replays one and prints its story.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic_agent.health.hang_report import ANSWER_S, RankActivity
from elastic_agent.rendezvous.coordinator.decide import decide
from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Decision, Policy, Publish, View
from elastic_agent.rendezvous.errors import LeaseExpired, StoreError, StoreUnavailable
from elastic_agent.rendezvous.node.transactions import Evict, WriteRecord, WriteWorld
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Condition,
    Endpoint,
    Phase,
    World,
    assign_ranks,
)
from elastic_agent.rendezvous.store.interface import Answer, Compare, Grant, Put, Read, Request
from elastic_agent.rendezvous.store.kv_state import KvState
from tests.policies import PLAIN_POLICY

from .checks import AFTERMATH_S, OVERLAP_HOSTED_S, OVERLAP_S, Checks
from .node import LEASE_TTL_S, Link, SimNode
from .training import CHECKPOINT_KEY, Script, Team

GRACE_S = 12.0
CALM_AT = 60.0
PLANS_UNTIL = 95.0
END_AT = 120.0
END_WITH_HANG_AT = 260.0
"""What was slow among faults has made the limits long."""
LAST_LIMIT_S = 1800.0
"""A loop without end is left alone until then where little is known of the steps."""
SETTLES_S = 60.0
WORKS_S = 100.0
"""How long one rank is at work while the others wait for it."""
HANGS = (
    (RankActivity.STOPPED, False),
    (RankActivity.WAITS, False),
    (RankActivity.WORKS, True),
    (RankActivity.WORKS, False),
)
"""What a worker does, and whether it comes back."""
REQUEST_TIMEOUT_S = 1.0
DRAIN_TIMEOUT_S = 8.0
OF_AGENTS = ("a stuck loop is not missed", "a dead thread is not missed")
"""They show where agents themselves fail. Other bugs are looked for where none does: more faults hide the rare ones."""
OF_HANGS = (
    "the coordinator asks no node",
    "who waits is blamed",
    "no answer is waited for",
    "who computes is taken for asleep",
    "who waits is taken for at work",
)
"""In those runs a worker hangs early."""
BUGS = (
    "restart inside the generation",
    "commit without the fence",
    "start before the old workers are gone",
    "generation number reused",
    "incarnation reused after a crash",
    "world written without compare",
    "next world does not wait for settled members",
    "going on without proof of the lease",
    "commit from an old generation",
    "a rank misses the pending flag",
    "stop published after going on",
    "stop published before all acknowledged",
    "no node saves the state of one that leaves",
    "a joiner that is not warm is invited",
    "survivors close ranks",
    *OF_AGENTS,
    *OF_HANGS,
    "each coordinator applies its own limits",
    "an empty store knows nothing of the last world",
    "the first world of an empty store does not wait",
    "a world of others does not wait for one that may go on",
    "a member hides that it has the store",
    "silence of a member counts as a yes",
    "a refused connection is proof of an end",
)
"""Planted on purpose, one at a time: each must be caught, or the checkers prove nothing."""
OF_HOSTED_STORES = BUGS[-6:-4]
OF_THE_GRACE = BUGS[-4:]
"""They show in those runs alone, and so are looked for in no others."""


class Simulation(Checks):
    """One seeded run of a job: its nodes, their store, and all that may go wrong between them."""

    ends_at = END_AT

    def __init__(self, seed: int, bug: str | None = None, size: int = 5, tell: bool = False) -> None:
        assert bug is None or bug in BUGS, bug
        rng = random.Random(seed)
        policy = replace(
            PLAIN_POLICY,
            job="sim",
            min_nodes=rng.choice((1, 2, 3)),
            max_nodes=rng.choice((3, size)),
            last_call_s=rng.choice((0.0, 1.0)),
            drain_timeout_s=DRAIN_TIMEOUT_S,
            store_outage_grace_s=rng.choice((0.0, GRACE_S)),
            restarts=RestartPolicy(max_without_progress=10**6, max_backoff_s=1.0),
            cool_down_s=2.0,
        )
        if seed % 4 == 1:
            most = policy.max_nodes // 2 * 2
            policy = replace(policy, min_nodes=2, max_nodes=most, nodes_multiple_of=2)
        hosted = (rng.random() < 0.3 or bug in OF_HOSTED_STORES) and bug not in OF_THE_GRACE
        if hosted:
            policy = replace(policy, store_outage_grace_s=0.0)
        elif bug in OF_THE_GRACE:
            policy = replace(policy, store_outage_grace_s=GRACE_S)
        waits = bug not in (
            "the first world of an empty store does not wait",
            "a world of others does not wait for one that may go on",
        )
        if waits and (hosted or policy.store_outage_grace_s):
            policy = replace(policy, unleased_s=LEASE_TTL_S)
        super().__init__(seed, bug, policy, Script.draw(rng), tell)
        self.rng = rng
        self.walls = random.Random(f"walls of {seed}")
        """Of their own: other faults stay as they are without walls."""
        self.hangs = random.Random(f"hangs of {seed}")
        self.store_down = False
        self.history = rng.choice((32, 4096))
        self.kv = KvState(self.history)
        self.hosted = hosted
        """The store is c10d: the first node's agent hosts it, and it is lost with each life of that agent."""
        self.host: SimNode | None = None
        self.store_life = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self.odd = rng.choice((None, "n1", "n3"))
        """A node that was started with other limits than the job's."""
        self.agents_fail = bug in OF_AGENTS or (bug is None and rng.random() < 0.5)
        for index in range(size):
            self.after(
                self.rng.uniform(0, 3) if self.rng.random() < 0.5 else 0.05, lambda i=index: self._boot(i)
            )

    def policy_of(self, name: str) -> Policy:
        odd = replace(self.policy, min_nodes=1, max_nodes=1, nodes_multiple_of=1)
        return odd if name == self.odd else self.policy

    def _boot(self, index: int) -> None:
        self.nodes.append(SimNode(self, f"n{index}"))

    # ------------------------------------------------------------ time and network

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._sequence), action))

    def delay(self) -> float:
        """Several slow answers in a row cost a lease its proof: not shortly before all must have converged."""
        slow = self.rng.random() < 0.02 and self.now < END_AT - 2 * LEASE_TTL_S
        return self.rng.uniform(0.2, 0.9) if slow else self.rng.uniform(0.001, 0.01)

    def call(
        self,
        node: SimNode,
        serve: Callable[[], object],
        reply: Callable[..., None],
        fail: Callable[..., None],
        guard: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
        grants: bool = False,
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
            if not self.reaches_store(node) or self.rng.random() < node.link.lose_requests:
                self.seen["request lost"] += 1
                return
            try:
                if not grants and node.leased_in != self.store_life:
                    raise LeaseExpired("of a lost store")
                answer = serve()
            except StoreError as error:
                self.after(self.delay(), lambda error=error: settle(fail, error))
                return
            finally:
                self.store_changed()
            self.after(self.delay(), lambda life=self.store_life: depart(answer, life))

        def depart(answer: object, life: int) -> None:
            lost = not self.reaches_store(node) or life != self.store_life
            if lost or self.rng.random() < node.link.lose_replies:
                self.seen["reply lost"] += 1
                return
            if grants:
                node.leased_in = life
            settle(reply, answer)

        clogged_s = self.rng.uniform(0.0, node.link.clog_s)
        self.after(self.delay() + clogged_s, arrive)
        timeout = StoreUnavailable("no answer in time")
        self.after(REQUEST_TIMEOUT_S / node.rate, lambda: settle(fail, timeout))

    # ------------------------------------------------------------ the store

    def reaches_store(self, node: SimNode) -> bool:
        if self.store_down or not self.hosted:
            return not self.store_down and not node.link.cut and not node.link.storeless
        host = self.host
        if host is None or not host.running or host.paused is not None:
            return False
        return node is host or not (node.link.cut or node.link.storeless or host.link.cut)

    def begin_store(self, host: SimNode) -> None:
        """An agent that hosts the store begins: what the one before it held is gone, but for its newest world.

        That no call of the old store counts in this one is the client's and the host's doing, and tested there
        (`tests/contract/test_c10d.py`). Without it hardly a seed breaks a promise: a node whose old numbers mean
        something here mostly finds its own record missing at its next write, and joins anew.
        """
        self.host = host
        self.store_life += 1
        checkpoints = self.kv.read((CHECKPOINT_KEY,), self.now).entries
        self.kv = KvState(self.history, base=self.store_life * 10**6)
        self.kv.transact((), tuple(Put(entry.key, entry.value) for entry in checkpoints), self.now)
        if not self.worlds or self.bug == "an empty store knows nothing of the last world":
            return
        self.seen["store replaced"] += 1
        self.phase = Phase.STOPPING
        self.kv.transact(
            (), (Put(WORLD_KEY, self.worlds[max(self.worlds)].carried_over().to_json()),), self.now
        )

    def serve(self, request: Request) -> Answer:
        kv = self.kv
        if isinstance(request, Grant):
            return kv.grant(request.ttl_s, self.now)
        if isinstance(request, Read):
            return kv.read(request.scopes, self.now, request.oldest_under)
        compares = request.compares
        blind = isinstance(request, WriteWorld) and self.bug == "world written without compare"
        outcome = kv.transact(compares[1:] if blind else compares, request.writes, self.now)
        if blind:
            outcome = replace(outcome, entries=(*kv.read((WORLD_KEY,), self.now).entries, *outcome.entries))
        if isinstance(request, WriteWorld):
            if outcome.succeeded:
                self.check_world(request.world, outcome.revision)
                if request.world.phase is Phase.RUNNING:
                    late_s = OVERLAP_HOSTED_S if self.hosted else OVERLAP_S
                    self.after(late_s, lambda: self.check_alone(request.world))
            else:
                self.seen["world race lost"] += 1
        if isinstance(request, Evict) or (isinstance(request, WriteWorld) and request.evicted):
            what = "coordinator" if isinstance(request, Evict) else "member"
            self.seen[f"{what} evicted" if outcome.succeeded else "eviction refused"] += 1
        if isinstance(request, WriteRecord) and not outcome.succeeded:
            self.seen["record refused"] += 1
        return outcome

    def team(self, world: World) -> Team:
        """Everybody's of this generation."""
        team = self.teams.get(world.generation)
        if team is None:
            past = self.teams.get(world.generation - 1)
            team = self.teams[world.generation] = Team(world, self.world_revisions[world.generation], past)
        return team

    def newest_checkpoint(self) -> tuple[int, int]:
        """Step and mod_revision of the committed checkpoint, as a worker reads them when it loads."""
        for entry in self.kv.read((CHECKPOINT_KEY,), self.now).entries:
            return int(entry.value.split()[1]), entry.mod_revision
        return 0, 0

    def commit(self, fence: tuple[Compare, ...], text: str) -> None:
        if not self.kv.transact(fence, (Put(CHECKPOINT_KEY, text),), self.now).succeeded:
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
        due = self.kv.next_expiry()
        if due is not None and due > self.now:
            self.after(due - self.now + 1e-6, self.expire)

    def expire(self) -> None:
        before = self.kv.revision
        for lease in self.kv.expire(self.now):
            self.check_stopped(lease)
        if self.kv.revision != before:
            self.seen["lease expired"] += 1
            self.store_changed()

    def recheck(self, node: SimNode) -> tuple[bool, str]:
        """What the check of an excluded node finds: whether it is well, and else why not."""
        return True, ""

    # ------------------------------------------------------------ planted decisions

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        if self.bug == "each coordinator applies its own limits" and view.world is not None:
            view = replace(view, world=replace(view.world, limits=None))
        if self.bug in OF_HANGS:
            view = deceived(view, self.bug)
        if self.bug == "a joiner that is not warm is invited":
            nodes = tuple(replace(node, ready=True) for node in view.nodes)
            view = replace(view, nodes=nodes, ready_since=view.arrivals)
        if self.bug == "next world does not wait for settled members":
            over = view.world is not None and view.world.phase is not Phase.RUNNING
            generation = view.world.generation if view.world is not None else 0
            nodes = (
                node.having(generation, Condition.STOPPED)
                if over
                else replace(node, conditions=node.conditions - {Condition.STOPPED})
                for node in view.nodes
            )
            view = replace(view, nodes=tuple(nodes))
        members = view.world.members if view.world is not None else ()
        if self.bug == "a refused connection is proof of an end" and all(
            member.incarnation in view.evicted for member in members
        ):
            policy = replace(policy, unleased_s=0.0)
        decision = decide(view, policy, now)
        if (
            self.bug == "generation number reused"
            and isinstance(decision, Publish)
            and decision.world.phase is Phase.RUNNING
            and view.world is not None
        ):
            return replace(decision, world=replace(decision.world, generation=view.world.generation))
        if self.bug == "survivors close ranks" and isinstance(decision, Publish):
            return replace(decision, world=closed_ranks(decision.world, view))
        return decision

    # ------------------------------------------------------------ the nemesis

    def torment(self) -> None:
        """One fault, sometimes aimed at several nodes in the same instant; each heals by itself after a while."""
        if self.now >= CALM_AT - 10 or not self.nodes:
            return
        victims = self.rng.sample(self.nodes, k=min(len(self.nodes), self.rng.choice((1, 1, 2, 3))))
        fault = self.rng.choice(
            (
                *(
                    "kill",
                    "pause",
                    "cut",
                    "requests",
                    "replies",
                    "clog",
                    "reject",
                    "outage",
                    "island",
                    "crash",
                    "crash",
                ),
                *("leave", "leave"),
                *(("stuck", "thread") if self.agents_fail else ()),
            )
        )
        lasts_s = self.rng.choice((0.2, 2.0, 6.0, 12.0)) * self.rng.uniform(0.5, 1.0)
        if fault == "island" and self.worlds:
            members = {member.node for member in self.worlds[max(self.worlds)].members}
            victims = [node for node in self.nodes if node.name in members]
            lasts_s = self.rng.uniform(10.0, 18.0)
        island = fault == "island"
        walled = island and bool(self.worlds) and self.walls.random() < 0.3
        keeper = victims[-1] if island and not walled and self.rng.random() < 0.6 else None  # has the store
        self.seen[f"fault {fault}"] += 1
        self.note(f"{fault} {' '.join(node.name for node in victims)} for {lasts_s:.1f} s")
        if fault != "leave":
            self.disturb(lasts_s)
        if fault == "outage" and self.host is not None:
            self.restart(self.host, self.rng.choice((0.6, 1.0, 4.0)))
        elif fault == "outage":
            self.store_down = True
            self.outage_until = self.now + lasts_s
            self.after(lasts_s, lambda: setattr(self, "store_down", False))
        for node in victims if fault != "outage" else ():
            if fault not in ("crash", "leave") and node is not keeper:
                node.disturbed_until = max(node.disturbed_until, self.now + lasts_s)
            if fault == "kill":
                self.restart(node, 1.0 + lasts_s)
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
                node.rejected_until = max(node.rejected_until, self.now + lasts_s)
            elif node is keeper:
                node.link.peerless = self.rng.random() < 0.5
            elif fault == "island":
                node.link.storeless, node.link.walled = True, walled
            elif fault == "clog":
                node.link.clog_s = self.rng.uniform(1.0, 4.0)
            elif fault == "crash" and node.worker is not None:
                node.crash(node.worker)
            elif fault == "stuck" and node.running and node.paused is None and node.stuck_at is None:
                node.stick()
            elif fault == "thread" and node.running and node.paused is None and node.stuck_at is None:
                node.lose_thread()
            elif fault == "leave" and node.may_leave:
                node.guarded(node.leave)()
            if fault in ("cut", "requests", "replies", "clog", "reject", "island"):
                self.after(lasts_s, lambda node=node: setattr(node, "link", Link()))
        pause_s = lasts_s if fault == "island" else self.rng.choice((0.05, 1.0, 4.0))
        self.after(pause_s * self.rng.uniform(0.5, 1.5), self.torment)

    def hang_one(self) -> None:
        """A worker stands still for ever, or is at work for long. Its agent lives, and nothing else happens."""
        able = [
            node
            for node in self.nodes
            if node.may_leave
            and node.worker is not None
            and node.worker.team.intact
            and node.worker.stepped
            and not node.stopping
        ]
        if not able:
            self.after(1.0, self.hang_one)
            return
        node, (doing, comes_back) = self.hangs.choice(able), self.hangs.choice(HANGS)
        worker = node.worker
        assert worker is not None
        self.seen[f"fault hang {doing.value}"] += 1
        self.note(f"the worker on {node.name} does nothing but this: {doing.value}")
        worker.hangs, worker.hangs_since, worker.comes_back = doing, self.now, comes_back
        if comes_back:
            self.after(WORKS_S, worker.go_on)

    def restart(self, node: SimNode, after_s: float) -> None:
        if node.running:
            node.kill()
            self.after(after_s, lambda: node.running or node.boot())

    def plan(self) -> None:
        """Nodes leave, and come back, with nothing else going on."""
        if self.now >= PLANS_UNTIL:
            return
        there = [node for node in self.nodes if node.may_leave]
        most = self.rng.choice((1, 1, 1, 2, len(there)))
        for node in self.rng.sample(there, k=min(len(there), most)):
            self.after(self.rng.choice((0.0, 0.0, 0.5)), node.guarded(node.leave))
        self.after(self.rng.uniform(4.0, 10.0), self.plan)

    def heal(self) -> None:
        self.note("calm")
        self.store_down = False
        for node in self.nodes:
            node.link = Link()
            if not node.running:
                node.boot()
            if node.paused is not None:
                node.resume()

    def run_until_end(self) -> None:
        while self._queue and self._queue[0][0] <= self.ends_at:
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def run(self) -> Counter[str]:
        """Raises PromiseBroken; returns what happened how often."""
        self.after(self.rng.uniform(0, 8), self.torment)
        hangs = self.bug in OF_HANGS or (self.bug is None and self.hangs.random() < 0.3)
        self.after(CALM_AT, self.heal)
        self.after(CALM_AT + AFTERMATH_S, self.hang_one if hangs else self.plan)
        self.ends_at = END_WITH_HANG_AT if hangs else END_AT
        self.run_until_end()
        while self.hanging and self.ends_at < END_WITH_HANG_AT + LAST_LIMIT_S:
            self.ends_at += SETTLES_S
            self.run_until_end()
            if not self.hanging:
                self.ends_at += SETTLES_S
                self.run_until_end()
        self.check_converged()
        self.seen["rejoined"] += sum("." in node.agent.incarnation for node in self.nodes)
        return self.seen


SWAPPED = {
    "who waits is blamed": {
        RankActivity.IN_COLLECTIVE: RankActivity.STOPPED,
        RankActivity.STOPPED: RankActivity.IN_COLLECTIVE,
    },
    "who computes is taken for asleep": {RankActivity.WORKS: RankActivity.WAITS},
    "who waits is taken for at work": {RankActivity.IN_COLLECTIVE: RankActivity.WORKS},
}
"""What a coordinator with one of these bugs takes for what."""


def deceived(view: View, bug: str) -> View:
    """As a coordinator with one of `OF_HANGS` sees the nodes."""
    if bug == "no answer is waited for":
        return replace(view, inquiry_since=view.inquiry_since - ANSWER_S)
    if bug == "the coordinator asks no node":
        return replace(view, nodes=tuple(replace(node, suspicion=None) for node in view.nodes))
    swapped = SWAPPED[bug]
    nodes = []
    for node in view.nodes:
        if (said := node.hang_report) is not None:
            ranks = tuple(replace(one, doing=swapped.get(one.doing, one.doing), step=0) for one in said.ranks)
            node = replace(node, hang_report=replace(said, ranks=ranks))
        nodes.append(node)
    return replace(view, nodes=tuple(nodes))


def closed_ranks(world: World, view: View) -> World:
    """A world that begins, with its survivors in their old order and its newcomers behind them."""
    if view.world is None or world.generation == view.world.generation:
        return world
    was = {member.incarnation: place for place, member in enumerate(view.world.members)}
    records = {node.incarnation: node for node in view.nodes}
    chosen = [records[member.incarnation] for member in world.members]
    chosen.sort(key=lambda node: was.get(node.incarnation, len(was)))
    master = Endpoint(chosen[0].address, chosen[0].port)
    return replace(world, members=assign_ranks(tuple(chosen)), master=master, unproven=())


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
