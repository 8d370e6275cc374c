"""Histories that the nemesis does not find by chance: a rack is lost at once, and one newcomer is sick.

Each runs the same nodes, network, store and checkers as `Simulation`, with one thing that happens at a known instant.
`python -c` of a seed replays one: `Rack(SEED, tell=True).run()`.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_agent.rendezvous.coordinator.view import Decision, Policy, View
from elastic_agent.rendezvous.records import NODES_PREFIX, CauseKind, Phase, World
from tests.policies import PLAIN_POLICY

from .node import SimNode
from .simulator import Simulation
from .training import Script

QUIET = Script(listens=True, step_s=1.0, evaluates="no rank", breaks=False)


class Scenario(Simulation):
    """No nemesis, and every node like the others."""

    ends_at = 40.0

    def __init__(self, seed: int, size: int, policy: Policy, *, breaks: bool, tell: bool) -> None:
        super().__init__(seed, None, size=0, tell=tell)
        self.policy, self.script, self.odd = policy, replace(QUIET, breaks=breaks), None
        for index in range(size):
            self.after(self.rng.uniform(0.0, 0.5), lambda i=index: self._boot(i))

    def play(self) -> None:
        """Run it to its end. Raises PromiseBroken."""
        self.run_until(self.ends_at)

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


class Sick(Scenario):
    """Four nodes train well; then one joins whose workers all end as they begin."""

    JOINS_AT = 15.0

    def __init__(self, seed: int, *, blame: bool = True, tell: bool = False) -> None:
        """Without `blame` the mechanism is taken out."""
        self.blame = blame
        super().__init__(seed, 4, replace(PLAIN_POLICY, job="sim", max_nodes=5), breaks=False, tell=tell)
        self.after(self.JOINS_AT, lambda: self._boot(4))

    def check_start(self, node: SimNode, order: object) -> None:
        super().check_start(node, order)  # type: ignore[arg-type]
        if node.name == "n4":
            self.after(0.05, lambda: node.worker is not None and node.crash(node.worker))

    def decision(self, view: View, policy: Policy, now: float) -> Decision:
        if not self.blame and view.world is not None:
            view = replace(view, world=replace(view.world, unproven=tuple(range(len(view.world.members)))))
        return super().decision(view, policy, now)

    def check_world(self, world: World, revision: int) -> None:
        super().check_world(world, revision)
        if world.phase is Phase.ENDED:
            self.broken("I12", f"one sick newcomer has ended the job: {world.cause.detail}")

    def play(self) -> None:
        super().play()
        world = self.newest()
        if world.member("n4-1") is not None or [one.node for one in world.aside] != ["n4"]:
            self.broken("I12", f"generation {world.generation} still has the sick node")
        failures = sum(w.cause.kind is CauseKind.FAILURE for w in self.worlds.values())
        if failures > 3:  # one of them may have been heard from another node first
            self.broken("I12", f"the sick node has cost {failures} generations")
