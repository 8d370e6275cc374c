"""A whole job in one process, one thread and virtual time: N agents, their store, their network, their workers.

The code under test is the real one: every node drives a real `Participant`, the store is the real `Ledger`.
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

from elastic_agent.rendezvous.decide import Decision, Policy, Publish, View, decide
from elastic_agent.rendezvous.errors import LeaseExpired, StoreUnavailable
from elastic_agent.rendezvous.ledger import Ledger
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Phase,
    World,
)
from elastic_agent.rendezvous.requests import (
    Answer,
    Evict,
    Grant,
    Read,
    Request,
    WriteRecord,
    WriteWorld,
)
from elastic_agent.rendezvous.restarts import RestartPolicy
from elastic_agent.rendezvous.store import Compare, Put

from .checks import AFTERMATH_S, Checks
from .node import LEASE_TTL_S, Link, SimNode
from .training import CHECKPOINT_KEY, Script, Team

CALM_AT = 60.0
PLANS_UNTIL = 95.0
END_AT = 120.0
REQUEST_TIMEOUT_S = 1.0
DRAIN_TIMEOUT_S = 8.0
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
    "nobody rescues the state of who leaves",
    "a joiner that is not warm is invited",
)
"""Planted on purpose, one at a time: each must be caught, or the checkers prove nothing."""


class Simulation(Checks):
    """See the module's docstring."""

    def __init__(self, seed: int, bug: str | None = None, size: int = 5, tell: bool = False) -> None:
        assert bug is None or bug in BUGS, bug
        rng = random.Random(seed)
        policy = Policy(
            "sim",
            min_nodes=rng.choice((1, 2, 3)),
            max_nodes=rng.choice((3, size)),
            last_call_s=rng.choice((0.0, 1.0)),
            drain_timeout_s=DRAIN_TIMEOUT_S,
            store_outage_grace_s=rng.choice((0.0, 8.0)),
            restarts=RestartPolicy(max_fruitless=10**6, max_backoff_s=1.0),
        )
        super().__init__(seed, bug, policy, Script.draw(rng), tell)
        self.rng = rng
        self.store_down = False
        self.ledger = Ledger(history=rng.choice((32, 4096)))
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
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

    def team(self, world: World) -> Team:
        """Everybody's of this generation."""
        team = self.teams.get(world.generation)
        if team is None:
            past = self.teams.get(world.generation - 1)
            team = self.teams[world.generation] = Team(world, self.world_revisions[world.generation], past)
        return team

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
        if self.bug == "a joiner that is not warm is invited":
            nodes = tuple(replace(node, warm=True) for node in view.nodes)
            view = replace(view, nodes=nodes, warm_since=view.arrivals)
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
                    "crash",
                    "crash",
                ),
                *("leave", "leave"),
            )
        )
        lasts_s = self.rng.choice((0.2, 2.0, 6.0, 12.0)) * self.rng.uniform(0.5, 1.0)
        self.seen[f"fault {fault}"] += 1
        self.note(f"{fault} {' '.join(node.name for node in victims)} for {lasts_s:.1f} s")
        if fault != "leave":
            self.disturb(lasts_s)
        if fault == "outage":
            self.store_down = True
            self.outage_until = self.now + lasts_s
            self.after(lasts_s, lambda: setattr(self, "store_down", False))
        for node in victims if fault != "outage" else ():
            node.disturbed_until = max(node.disturbed_until, self.now + lasts_s)
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
            elif fault == "crash" and node.worker is not None:
                node.crash(node.worker)
            elif fault == "leave" and node.running and node.paused is None and not node.leaving:
                node.leave()
            if fault in ("cut", "requests", "replies", "clog", "reject"):
                self.after(lasts_s, lambda node=node: setattr(node, "link", Link()))
        self.after(self.rng.choice((0.05, 1.0, 4.0)) * self.rng.uniform(0.5, 1.5), self.torment)

    def plan(self) -> None:
        """Nodes leave, and come back, with nothing else going on."""
        if self.now >= PLANS_UNTIL:
            return
        there = [node for node in self.nodes if node.running and not node.leaving]
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

    def run(self) -> Counter[str]:
        """Raises PromiseBroken; returns what happened how often."""
        self.after(self.rng.uniform(0, 8), self.torment)
        self.after(CALM_AT, self.heal)
        self.after(CALM_AT + AFTERMATH_S, self.plan)
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
