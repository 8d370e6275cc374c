"""Histories that the nemesis does not find by chance: a rack is lost at once, one node is sick, all fail alike.

Each runs the same nodes, network, store and checkers as `Simulation`, with one thing that happens at a known instant.
`python -c` of a seed replays one: `Rack(SEED, tell=True).run()`.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_agent.agent.commands.control import JobStore
from elastic_agent.rendezvous.coordinator.exclusions import MOST_IN_A_ROW
from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Decision, Policy, Publish, View
from elastic_agent.rendezvous.messages import Recheck
from elastic_agent.rendezvous.node.node_actions import Start
from elastic_agent.rendezvous.records import (
    NODES_PREFIX,
    CauseKind,
    Failure,
    NodeRecord,
    Phase,
    World,
    life_of,
    node_key,
)
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.policies import PLAIN_POLICY

from .node import SimNode
from .simulator import Simulation
from .training import Script

QUIET = Script(listens=True, step_s=1.0, evaluates="no rank", breaks=False)


class Scenario(Simulation):
    """No nemesis, and every node like the others."""

    ends_at = 40.0

    def __init__(
        self, seed: int, size: int, policy: Policy, *, breaks: bool, tell: bool, late: int = 0
    ) -> None:
        """`late`: so many of the nodes come when the others train."""
        super().__init__(seed, None, size=0, tell=tell)
        self.policy, self.script, self.odd = policy, replace(QUIET, breaks=breaks), None
        for index in range(size):
            at = self.rng.uniform(0.0, 0.5) + (4.0 if index >= size - late else 0.0)
            self.after(at, lambda i=index: self._boot(i))

    def play(self) -> None:
        """Run it to its end. Raises PromiseBroken."""
        self.run_until_end()

    def newest(self) -> World:
        return self.worlds[max(self.worlds)]


class Rack(Scenario):
    """A part of many nodes loses its power in the same instant: by default all but the first four."""

    LOST_AT, BACK_WITHIN_S = 14.0, 3.6
    """Shorter than a lease lives: the others do not wait for a hundred leases to end."""
    LOST = 100
    """At most."""

    def __init__(self, seed: int, left: slice = slice(4), *, tell: bool = False) -> None:
        """`left` are those who stay, in the order of ranks."""
        size, self.who_stays = self.LOST + 4, left
        super().__init__(seed, size, replace(PLAIN_POLICY, job="sim", max_nodes=size), breaks=True, tell=tell)
        self.ends_at = self.LOST_AT + self.BACK_WITHIN_S
        self.after(self.LOST_AT, self.lose)
        self.after(self.ends_at - 0.01, self.check)

    def lose(self) -> None:
        self.before = self.newest()
        if len(self.before.members) != self.LOST + 4:
            self.broken("I11", f"only {len(self.before.members)} nodes train when the rack is lost")
        self.left = {member.node for member in self.before.members[self.who_stays]}
        for node in self.nodes:
            if node.name not in self.left:
                node.kill()

    def check(self) -> None:
        world, records = self.newest(), self.kv.read((NODES_PREFIX,), self.now).entries
        if world.generation != self.before.generation + 1 or {m.node for m in world.members} != self.left:
            self.broken("I11", f"generation {world.generation} has {len(world.members)} members")
        if len(records) != len(self.left):
            self.broken("I11", f"{len(records)} records are left of {len(self.left)} nodes")


PATIENT = RestartPolicy(max_without_progress=10**6, max_backoff_s=1.0)
COOL_DOWN_S = 6.0
"""The first, in simulated time."""


class Faulty(Scenario):
    """Workers of one node end some time after each of their starts, until the node is mended; others stand by."""

    BAD = "n1"
    LASTS_S = 5.0
    MENDED_AT = 32.0
    LESS_THAN_S = 2.5
    """From the failure that is one too many to the next world."""

    def __init__(
        self,
        seed: int,
        size: int = 3,
        *,
        most: int = 3,
        least: int = 1,
        multiple: int = 1,
        lasts_s: float = LASTS_S,
        bug: str = "",
        tell: bool = False,
    ) -> None:
        self.plant, self.lasts_s = bug, lasts_s
        policy = replace(
            PLAIN_POLICY,
            job="sim",
            min_nodes=least,
            max_nodes=most,
            nodes_multiple_of=multiple,
            cool_down_s=COOL_DOWN_S,
        )
        super().__init__(seed, size, policy, breaks=False, tell=tell, late=max(0, size - most))
        self.ends_at = 70.0
        self.failures: list[int] = []
        """The generations that its failures have ended, in a row until it was excluded."""
        self.failed_at = 0.0
        self.out_at: float | None = None
        self.back_at: float | None = None

    # ------------------------------------------------------------ what goes wrong

    def sick(self, node: SimNode) -> bool:
        return node.name == self.BAD and self.now < self.MENDED_AT

    def check_start(self, node: SimNode, order: Start) -> None:
        super().check_start(node, order)
        if self.sick(node):
            life = node.lives
            self.after(self.lasts_s, lambda: self.strike(node, life, order.world.generation))

    def strike(self, node: SimNode, life: int, generation: int) -> None:
        worker = node.worker
        if node.lives == life and worker is not None and worker.generation == generation:
            self.failures.append(generation)
            self.failed_at = self.now
            node.crash(worker)

    def recheck(self, node: SimNode) -> tuple[bool, str]:
        """What the check of an excluded node finds."""
        if self.plant == "the check finds nothing":
            return True, ""
        return not self.sick(node), "a matrix product is wrong"

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        world = view.world
        if world is not None and self.plant == "no node is blamed":
            view = replace(view, world=replace(world, restarts=replace(world.restarts, culprit="", blamed=0)))
        if world is not None and self.plant == "a check is not waited for":
            passed = (replace(node, recheck=self.passes(world, node)) for node in view.nodes)
            view = replace(view, nodes=tuple(passed))
        if self.plant == "those that stand by are not invited":
            inside = {member.incarnation for member in world.members} if world is not None else set()
            nodes = (
                node if node.incarnation in inside or world is None else replace(node, leaving=True)
                for node in view.nodes
            )
            view = replace(view, nodes=tuple(nodes))
        return super().decision(view, policy, now)

    @staticmethod
    def passes(world: World, node: NodeRecord) -> Recheck | None:
        row = world.exclusion(node.node)
        return Recheck(row.times, True) if row is not None else None

    # ------------------------------------------------------------ what must hold

    def check_world(self, world: World, revision: int) -> None:
        super().check_world(world, revision)
        if world.phase is Phase.ENDED:
            self.broken("I12", f"one sick node has ended the job: {world.cause.detail}")
        if world.phase is not Phase.RUNNING:
            return
        inside, row = {member.node for member in world.members}, world.exclusion(self.BAD)
        if row is not None and self.BAD in inside:
            self.broken("I13", f"generation {world.generation} has the node that it excludes")
        if any(one.node != self.BAD for one in world.exclusions):
            self.broken("I13", f"nodes that are well are excluded: {world.exclusions}")
        if row is None and self.BAD in inside and len(self.failures) >= 3:
            self.broken("I13", f"the sick node trains in generation {world.generation} after {self.failures}")
        if row is not None and self.out_at is None:
            self.out_at = self.now
            if self.now > self.failed_at + self.LESS_THAN_S:
                self.broken(
                    "I13", f"the sick node is out {self.now - self.failed_at:.1f} s after its failure"
                )
            want = min(self.policy.max_nodes, len(self.nodes) - 1)
            if len(inside) != want - want % self.policy.nodes_multiple_of:
                self.broken("I13", f"no node takes the place of the sick one: {sorted(inside)}")
        if row is not None:
            self.failures.clear()
        if self.out_at is not None and row is None and self.BAD in inside and self.back_at is None:
            self.back_at = self.now
            if self.now < self.MENDED_AT:
                self.broken("I13", f"the node is back at {self.now:.1f} s, before it is mended")

    def play(self) -> None:
        super().play()
        if self.out_at is None:
            self.broken("I13", "the sick node was never excluded")
        row = next((one for one in self.newest().exclusions if one.node == self.BAD), None)
        if row is None or not row.readmitted:
            self.broken("I13", f"the node that was mended is not readmitted: {row}")
        if len(self.nodes) <= self.policy.max_nodes and self.back_at is None:
            self.broken("I13", "the node that was mended is not back")


class Needed(Faulty):
    """The others are fewer than the job may have: it fails as it would without exclusions."""

    def __init__(self, seed: int, *, bug: str = "", tell: bool = False) -> None:
        super().__init__(seed, 3, least=3, lasts_s=3.0, bug=bug, tell=tell)
        self.policy = replace(self.policy, restarts=PATIENT)

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        if self.plant != "the least number is not looked at" or view.world is None:
            return super().decision(view, policy, now)
        world = view.world
        limits = replace(world.limits, min_nodes=1) if world.limits is not None else None
        decision = super().decision(replace(view, world=replace(world, limits=limits)), policy, now)
        if isinstance(decision, Publish):
            decision = replace(decision, world=replace(decision.world, limits=world.limits))
        return decision

    def check_world(self, world: World, revision: int) -> None:
        Scenario.check_world(self, world, revision)
        assert world.limits is not None
        if len(world.members) < world.limits.min_nodes or world.exclusions:
            self.broken("I13", f"{len(world.members)} nodes train, with {world.exclusions}")

    def play(self) -> None:
        Scenario.play(self)
        if len(self.failures) < 3:
            self.broken("I13", f"too little has failed: {self.failures}")


class KeptOut(Scenario):
    """An operator excludes a node while its agent is away, and readmits it when it has been back for a while."""

    AWAY, KILLED_AT, EXCLUDED_AT, BACK_AT, READMITTED_AT = "n1", 10.0, 16.0, 22.0, 40.0

    def __init__(self, seed: int, *, least: int = 1, bug: str = "", tell: bool = False) -> None:
        self.plant = bug
        policy = replace(PLAIN_POLICY, job="sim", min_nodes=least, max_nodes=3, cool_down_s=COOL_DOWN_S)
        super().__init__(seed, 3, policy, breaks=False, tell=tell)
        self.ends_at = 60.0
        self.after(self.KILLED_AT, self.kill)
        self.after(self.EXCLUDED_AT, self.exclude)
        self.after(self.READMITTED_AT, lambda: JobStore(self.store, "sim").readmit(self.AWAY))

    @property
    def store(self) -> MemoryStore:
        return MemoryStore(lambda: self.now, self.kv)

    def kill(self) -> None:
        node = next(node for node in self.nodes if node.name == self.AWAY)
        self.restart(node, self.BACK_AT - self.KILLED_AT)

    def exclude(self) -> None:
        if any(entry.key == node_key(self.AWAY) for entry in self.kv.read((NODES_PREFIX,), self.now).entries):
            self.broken("I13", "the node to exclude is not away")
        JobStore(self.store, "sim").exclude(self.AWAY, "it reboots", 0.0)
        self.store_changed()

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        world = view.world
        if self.plant == "an exclusion is of one life" and world is not None:
            lives = {life_of(node.incarnation) for node in view.nodes}
            kept = tuple(one for one in world.exclusions if one.life in lives)
            view = replace(view, world=replace(world, exclusions=kept))
        if self.plant == "the least number is not looked at":
            policy = replace(policy, min_nodes=1)
            if world is not None and world.limits is not None:
                view = replace(view, world=replace(world, limits=replace(world.limits, min_nodes=1)))
        return super().decision(view, policy, now)

    def check_world(self, world: World, revision: int) -> None:
        super().check_world(world, revision)
        inside = {member.node for member in world.members}
        if world.phase is not Phase.RUNNING:
            return
        if self.EXCLUDED_AT < self.now < self.READMITTED_AT and self.AWAY in inside:
            self.broken("I13", f"generation {world.generation} has the node that an operator keeps out")
        if len(inside) < self.policy.min_nodes:
            self.broken("I13", f"{len(inside)} nodes train, and the job wants {self.policy.min_nodes}")

    def play(self) -> None:
        super().play()
        if self.AWAY not in {member.node for member in self.newest().members}:
            self.broken("I13", "the node that was readmitted is not back")


class Alike(Scenario):
    """Workers fail, and no node is to blame: on all nodes at once, on one after the other, or wherever rank 0 is."""

    def __init__(self, seed: int, how: str, *, bug: str = "", tell: bool = False) -> None:
        """`how`: "at once", "in turn" or "rank 0"."""
        self.how, self.plant = how, bug
        policy = replace(PLAIN_POLICY, job="sim", max_nodes=4, cool_down_s=COOL_DOWN_S, restarts=PATIENT)
        super().__init__(seed, 4, policy, breaks=False, tell=tell)
        self.struck: set[int] = set()
        self.order = [f"n{index}" for index in range(4)]
        self.rng.shuffle(self.order)

    def check_start(self, node: SimNode, order: Start) -> None:
        super().check_start(node, order)
        generation = order.world.generation
        if generation not in self.struck:
            self.struck.add(generation)
            self.after(3.0, lambda: self.strike(generation))

    def strike(self, generation: int) -> None:
        first, turn = self.worlds[generation].members[0].node, self.order[generation % len(self.order)]
        only = {"rank 0": first, "in turn": turn}.get(self.how)
        for node in self.nodes:
            if only in (None, node.name):  # an agent learns of it before another one can tell it
                self.after(self.rng.uniform(0.0, 0.002), lambda node=node: self.fail(node, generation))

    @staticmethod
    def fail(node: SimNode, generation: int) -> None:
        worker = node.worker
        if worker is not None and worker.generation == generation and not node.stopping:
            worker.alive = False
            node.fail(Failure(generation, "crash", "crashed"))

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        world = view.world
        if world is not None and self.plant == "the last that failed is blamed":
            failed = next((node for node in view.nodes if node.node == world.cause.node), None)
            life = life_of(failed.incarnation) if failed is not None else ""
            blamed = replace(world.restarts, culprit=life, blamed=1, same_fingerprint=0)
            nodes = (
                node if node is failed or world.phase is not Phase.STOPPING else replace(node, failure=None)
                for node in view.nodes
            )
            view = replace(view, world=replace(world, restarts=blamed), nodes=tuple(nodes))
        return super().decision(view, policy, now)

    def check_world(self, world: World, revision: int) -> None:
        super().check_world(world, revision)
        if len(world.exclusions) > (self.how == "rank 0"):
            self.broken("I13", f"all fail alike, and nodes are excluded: {world.exclusions}")

    def play(self) -> None:
        super().play()
        if len(self.struck) < 4:
            self.broken("I13", f"too little has failed: {self.struck}")
        if not all(one.readmitted for one in self.newest().exclusions):
            self.broken("I13", f"what failed there fails elsewhere, too: {self.newest().exclusions}")


class Cascade(Scenario):
    """A worker crashes, and the collectives of all others break: any of these failures may be heard of first."""

    FAILS_AT = 15.0

    def __init__(self, seed: int, *, bug: str = "", tell: bool = False) -> None:
        self.plant = bug
        policy = replace(PLAIN_POLICY, job="sim", max_nodes=4, restarts=PATIENT)
        super().__init__(seed, 4, policy, breaks=False, tell=tell)
        self.heard_first = ""
        self.after(self.FAILS_AT, self.fall)

    def fall(self) -> None:
        generation, guilty = self.newest().generation, self.rng.choice(self.nodes)
        root = Failure(generation, "signal 11", "killed by SIGSEGV", cause="segfault")
        marked = self.plant != "collateral is not marked"
        broken = Failure(generation, "gloo", "a peer is gone", cause="connection_lost", collateral=marked)
        for node in self.nodes:
            failure = root if node is guilty else broken
            self.after(
                self.rng.uniform(0.0, 0.02), lambda node=node, failure=failure: self.fail(node, failure)
            )

    def fail(self, node: SimNode, failure: Failure) -> None:
        """Also on a node whose workers are already asked to end."""
        worker = node.worker
        if worker is None or worker.generation != failure.generation:
            return
        worker.alive = False
        if node.stopping:
            node.agent.workers_failed(failure)
            node.turn()
        else:
            node.fail(failure)

    def check_world(self, world: World, revision: int) -> None:
        super().check_world(world, revision)
        if world.phase is Phase.STOPPING and world.cause.failure is not None:
            self.heard_first = world.cause.failure.cause

    def play(self) -> None:
        super().play()
        world = self.newest()
        if world.cause.failure is None or world.cause.failure.cause != "segfault":
            self.broken("I12", f"what crashed is not the cause, but {world.cause.detail}")


class Sick(Scenario):
    """Four nodes train well; then one joins whose workers all end as they begin."""

    JOINS_AT = 15.0

    def __init__(self, seed: int, *, blame: bool = True, tell: bool = False) -> None:
        """Without `blame` the mechanism is taken out."""
        self.blame = blame
        super().__init__(seed, 4, replace(PLAIN_POLICY, job="sim", max_nodes=5), breaks=False, tell=tell)
        self.after(self.JOINS_AT, lambda: self._boot(4))

    def check_start(self, node: SimNode, order: Start) -> None:
        super().check_start(node, order)
        if node.name == "n4":
            self.after(0.05, lambda: node.worker is not None and node.crash(node.worker))

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        world = view.world
        if not self.blame and world is not None:
            view = replace(
                view, world=replace(world, restarts=replace(world.restarts, exclusions=MOST_IN_A_ROW))
            )
        return super().decision(view, policy, now)

    def check_world(self, world: World, revision: int) -> None:
        super().check_world(world, revision)
        if world.phase is Phase.ENDED:
            self.broken("I12", f"one sick newcomer has ended the job: {world.cause.detail}")

    def play(self) -> None:
        super().play()
        world = self.newest()
        if world.member("n4-1") is not None or [one.node for one in world.exclusions] != ["n4"]:
            self.broken("I12", f"generation {world.generation} still has the sick node")
        failures = sum(w.cause.kind is CauseKind.FAILURE for w in self.worlds.values())
        if failures > 3:  # one of them may have been heard from another node first
            self.broken("I12", f"the sick node has cost {failures} generations")
