"""The checkers of the simulator: what has happened, and which promise it breaks, at the very event that breaks it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from elastic_agent.agent.main.heartbeat import STUCK_AFTER_S
from elastic_agent.health.diagnosis import LONG_WAIT_S
from elastic_agent.health.hang_report import HANG, RankActivity
from elastic_agent.rendezvous.coordinator.view import Policy
from elastic_agent.rendezvous.node.node_actions import Start
from elastic_agent.rendezvous.records import MAX_RECORD_BYTES, TRANSITIONS, Phase, World, life_of
from elastic_agent.rendezvous.store.interface import LeaseId

from .node import LEASE_TTL_S, STOPS_IN_S, SimNode
from .training import INTERVAL, Script, Team

AFTERMATH_S = 15.0
"""What a fault still does after it has healed: leases end, nodes join again."""


OVERLAP_S = 4.0
"""A world that goes on through an outage learns so late that another one has begun."""
OVERLAP_HOSTED_S = 0.5
"""And one that does not: what a change takes to be heard."""


class PromiseBroken(AssertionError):
    """A checker saw a promise broken; the message names it, the seed and the virtual time."""


class Checks:
    """What a simulation remembers of its run, for those who judge it."""

    def __init__(self, seed: int, bug: str | None, policy: Policy, script: Script, tell: bool) -> None:
        self.seed = seed
        self.bug = bug
        self.policy = policy
        self.odd: str | None = None
        self.script = script
        self.tell = tell
        self.now = 0.0
        self.nodes: list[SimNode] = []
        self.seen: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=400)
        self.committed_step = 0
        self.outage_until = -1e9
        self.disturbed_until = 0.0
        """Faults and what follows from them; a promise about planned changes alone says nothing before."""
        self.teams: dict[int, Team] = {}
        self.phase: Phase | None = None
        """Of the newest world."""
        self.worlds: dict[int, World] = {}
        self.world_revisions: dict[int, int] = {}
        self.starts: set[tuple[str, int]] = set()
        self.ports: dict[tuple[str, int], int] = {}
        self.drain_began: dict[int, float] = {}
        self.drained: set[int] = set()
        self.all_stepped: set[int] = set()
        """Generations all of whose workers had finished a step when a planned change was announced."""

    def broken(self, promise: str, what: str) -> None:
        raise PromiseBroken(
            f"{promise}: {what} (seed {self.seed}, t = {self.now:.3f} s; replay: "
            f"python -m tests.sim.simulator {self.seed}{f' --bug {self.bug!r}' if self.bug else ''})"
        )

    def note(self, what: str) -> None:
        line = f"{self.now:9.3f}  {what}"
        self.story.append(line)
        if self.tell:
            print(line)

    def check_world(self, world: World, revision: int) -> None:
        names = " ".join(member.node for member in world.members)
        self.note(f"world {world.generation} {world.phase.value} [{names}] {world.cause.kind.value}")
        assert len(world.to_json()) <= MAX_RECORD_BYTES, "no node could read it, nor any world after it"
        newest = max(self.worlds, default=0)
        known = self.worlds.get(world.generation)
        if known is not None and self.phase is world.phase is Phase.RUNNING:
            if replace(known, exclusions=world.exclusions, inquiry=world.inquiry) != world:
                self.broken("I2", f"generation {world.generation} was published twice")
            self.check_inquiry(known, world)
            self.worlds[world.generation] = world
            return
        if world.phase not in TRANSITIONS[self.phase]:
            self.broken("I2", f"the world goes from {self.phase} to {world.phase}")
        before, self.phase = self.phase, world.phase
        if known is not None and before is Phase.RUNNING:
            self.check_blame(world)
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
            self.check_limits(world)
            self.check_warm(world)
            self.check_places(world)
            self.worlds[world.generation] = world
            self.world_revisions[world.generation] = revision
            self.seen[f"world by {world.cause.kind.value}"] += 1
            return
        if known is None or world.generation != newest:
            self.broken("I2", f"generation {world.generation} is stopped, {newest} is the newest")
        if world.phase is Phase.DRAINING:
            self.drain_began[world.generation] = self.now
            team = self.teams.get(world.generation)
            if team is not None and team.complete and all(worker.stepped for worker in team.workers.values()):
                self.all_stepped.add(world.generation)
        elif world.phase is Phase.LAST_STEP:
            self.drained.add(world.generation)
            self.seen["drained"] += 1

    def check_inquiry(self, known: World, world: World) -> None:
        """A world that runs may only be asked what its workers do, and learn what came of it (I13)."""
        was, now = known.inquiry, world.inquiry
        if now == was or now is None:
            return
        if was is None or was.finding is not None:
            fits = now.finding is None and now.number == (was.number + 1 if was is not None else 1)
        else:
            fits = now.finding is not None and now.number == was.number
        if not fits:
            self.broken("I13", f"inquiry {was} is followed by {now}")
        found = now.finding
        self.seen["inquiry" if found is None else f"inquiry found {found.value}"] += 1

    def check_blame(self, world: World) -> None:
        """A verdict names a node whose worker hangs, or has ended (I13)."""
        failure = world.cause.failure
        if failure is None or failure.fingerprint != HANG:
            return
        team = self.teams[world.generation]
        worker = team.workers.get(world.cause.node)
        goes_on = worker is None or worker.acts or worker.comes_back
        if goes_on:
            self.broken("I13", f"{world.cause.node or 'no node'} is blamed: {failure.summary}")
        if worker.hangs is RankActivity.WORKS and self.now < worker.hangs_since + LONG_WAIT_S:
            self.broken("I13", f"{world.cause.node} may only be slow: {failure.summary}")
        self.seen["hang ended"] += 1
        self.disturb()

    def check_start(self, node: SimNode, order: Start) -> None:
        generation = order.world.generation
        self.note(f"{node.name} starts {generation}")
        if node.worker is not None and node.worker.alive:
            old = node.worker.generation
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

    def check_limits(self, world: World) -> None:
        """Those that the job goes by stay as long as the agent of a member is known to live (I11)."""
        before = self.worlds.get(world.generation - 1)
        if before is None:
            return
        lives = {life_of(member.incarnation) for member in before.members}
        stay = [member.node for member in world.members if life_of(member.incarnation) in lives]
        if stay and world.limits != before.limits:
            self.broken("I11", f"with {stay} still there generation {world.generation} has {world.limits}")
        if world.limits != before.limits:
            self.seen["limits changed"] += 1
        if self.odd is not None and self.odd in stay[:1]:
            self.seen["another policy coordinates"] += 1

    def check_places(self, world: World) -> None:
        """No survivor has another place than before that could have kept it, and the first one is a survivor (I3)."""
        before, size = self.worlds.get(world.generation - 1), len(world.members)
        assert world.limits is not None
        if size % world.limits.nodes_multiple_of:
            self.broken("I3", f"generation {world.generation} has {size} nodes under {world.limits}")
        self.seen[f"world of a multiple of {world.limits.nodes_multiple_of}"] += 1
        if before is None:
            return
        was = {member.incarnation: place for place, member in enumerate(before.members)}
        stay = [(was[m.incarnation], place) for place, m in enumerate(world.members) if m.incarnation in was]
        if not stay:
            return
        moved = sum(old != new for old, new in stay)
        must = max(sum(old >= size for old, _ in stay), all(old != 0 for old, _ in stay))
        if moved > must or world.members[0].incarnation not in was:
            self.broken("I3", f"in generation {world.generation} survivors move needlessly: {stay}")
        self.seen["place taken over"] += len(stay) < size and stay[-1][1] >= len(stay)

    def check_warm(self, world: World) -> None:
        """Nodes that can go on wait for none that is not ready (I8)."""
        before = self.worlds.get(world.generation - 1)
        if before is None:
            return
        old = {member.incarnation for member in before.members}
        stay = [member for member in world.members if member.incarnation in old]
        nodes = {node.name: node for node in self.nodes}
        came = [(nodes[m.node], m.incarnation.split(".")[0]) for m in world.members if m not in stay]
        cold = [node.name for node, life in came if life == f"{node.name}-{node.lives}" and not node.warm]
        assert world.limits is not None
        if len(stay) >= world.limits.min_nodes and cold:
            self.broken("I8", f"generation {world.generation} waits for {cold}, not warm yet")

    def check_load(self, team: Team, step: int) -> None:
        """What a generation begins with: I7 of the one before, and I8 if its end was planned and undisturbed."""
        past, generation = team.past, team.world.generation
        self.note(f"generation {generation} loads step {step}")
        if step < self.committed_step:
            self.broken("I6", f"step {step} is loaded, {self.committed_step} was committed")
        if past is None or not past.complete:
            return
        old, new = past.workers.values(), team.workers
        everywhere = min(worker.step for worker in old)
        kept = any(w.node.name in new and w.life == new[w.node.name].life for w in old)
        if kept and step < everywhere - everywhere % INTERVAL:
            self.broken("I7", f"step {step} is loaded after all had finished {everywhere}")
        began = self.drain_began.get(past.world.generation)
        if began is None or began < self.disturbed_until or self.now < self.disturbed_until:
            return
        furthest = max(worker.step for worker in old)
        ends = {worker.ended_at for worker in old}
        was, drained = past.world.generation, past.world.generation in self.drained
        self.seen["planned change"] += 1
        if self.script.listens and was in self.all_stepped and not drained:
            self.broken("I8", f"the workers of generation {was} were not asked to end")
        if drained:
            if step != furthest or ends - {furthest, None}:
                self.broken("I8", f"step {step} is loaded; ended at {ends}, the furthest finished {furthest}")
            if None in ends and self.script.evaluates == "no rank":
                self.broken("I8", f"not all workers of generation {was} came to the same end")
            self.seen["planned change without loss"] += 1

    def disturb(self, for_s: float = 0.0) -> None:
        self.disturbed_until = max(self.disturbed_until, self.now + for_s + AFTERMATH_S)

    def check_stopped(self, lease: LeaseId) -> None:
        """I10, for nodes that were able to stop: not paused, and not going on with the others through an outage.

        A world none of whose members reaches the store cannot tell that from an outage, though others may reach it.
        """
        for node in self.nodes:
            awake = node.paused is None and self.now > node.resumed_at + 2 * STOPS_IN_S
            outage = self.now < self.outage_until + 2 * LEASE_TTL_S
            goes_on = self.policy.store_outage_grace_s and (outage or self.is_cut_off(node))
            if (
                node.running
                and node.agent.lease == lease
                and node.worker is not None
                and awake
                and not goes_on
            ):
                self.broken("I10", f"{node.name} still has workers, and its lease is gone")

    def check_alone(self, world: World) -> None:
        """I10, for nodes that are awake: none trains an older generation when this one has begun a while ago.

        Who was taken for dead because its connections were refused hears of it late, and is not looked at; whose main
        loop stands still besides hears of it never, and is ended for that.
        """
        for node in self.nodes:
            worker = node.worker
            awake = node.paused is None and self.now > node.resumed_at + 2 * STOPS_IN_S
            hears_s = 2 * LEASE_TTL_S + (STUCK_AFTER_S / node.rate if node.stuck_at is not None else 0.0)
            taken_for_dead = self.now < node.rejected_until + hears_s
            if not (node.running and awake) or worker is None or not worker.alive or taken_for_dead:
                continue
            if worker.generation < world.generation and not node.stopping:
                self.broken("I10", f"{node.name} trains {worker.generation} beside {world.generation}")

    def is_cut_off(self, node: SimNode) -> bool:
        """Something has lately stood between the store and every member of this node's world."""
        names = [member.node for member in node.worker.team.world.members] if node.worker is not None else []
        return all(
            other.disturbed_until + LEASE_TTL_S > self.now for other in self.nodes if other.name in names
        )

    @property
    def hanging(self) -> list[SimNode]:
        """Those whose workers do."""
        workers = ((node, node.worker) for node in self.nodes)
        return [node for node, one in workers if one is not None and one.alive and one.hangs is not None]

    def check_converged(self) -> None:
        for node in self.hanging:
            self.broken("I14", f"the worker on {node.name} still hangs")
        if not self.worlds:
            self.broken("I11", "no world was ever formed")
        world = self.worlds[max(self.worlds)]
        running = {node.name: node.worker.generation for node in self.nodes if node.worker is not None}
        assert world.limits is not None
        want, multiple = min(len(self.nodes), world.limits.max_nodes), world.limits.nodes_multiple_of
        want -= want % multiple
        if len(world.members) != want or set(running) != {member.node for member in world.members}:
            self.broken(
                "I11", f"after the calm generation {world.generation} runs on {running}, wanted {want} nodes"
            )
        if set(running.values()) != {world.generation}:
            self.broken("I11", f"after the calm the nodes run {running}")
