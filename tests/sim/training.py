"""A model of synchronous training for the simulator: one process per node, in lockstep with those of the other nodes.

Nobody finishes step s + 1 before all have entered it, and then each does so in its own time. Every `INTERVAL` steps
each node remembers the state, which lasts as long as its agent, and rank 0 commits it to disk, fenced by the world and
by what it last saw there. After a step whose flag is up the process asks its agent, which asks the store by the very
functions that the real agent uses (`rendezvous.drain`). When the processes of a generation have all started, they
load the newest state that one of them can offer, and what must hold of it is checked there: I7 and I8.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic_agent.health.hang_report import RankActivity
from elastic_agent.rendezvous.node.drain import (
    WHAT_STANDS,
    Answer,
    Ask,
    Beyond,
    End,
    GoOn,
    concerns,
    judge,
    written,
)
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.node.transactions import WriteStop
from elastic_agent.rendezvous.records import WORLD_KEY, Phase, World
from elastic_agent.rendezvous.store.interface import Compare, Entry, Outcome, Snapshot

if TYPE_CHECKING:
    from .simulator import SimNode, Simulation

INTERVAL = 3
"""Steps between two checkpoints."""
CHECKPOINT_KEY = "checkpoint"
STRANDED_S = 1.0
"""Whoever has not asked for so long after a step does something else, or waits."""
PATIENCE_S = 5.0
"""How long a process waits for its agent's answer, before it goes on without one."""
GIVES_UP_S = 3.0
"""After so long the agent no longer writes for a question: its asker may be about to go on."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the job's training does. `evaluates`: no rank, all ranks or only rank 0, after every fifth step."""

    listens: bool
    step_s: float
    evaluates: str
    breaks: bool
    """A collective fails when a peer has gone; else it waits for ever."""

    @staticmethod
    def draw(rng: random.Random) -> Script:
        return Script(
            listens=rng.random() < 0.9,
            step_s=rng.choice((1.0, 1.0, 0.3)),
            evaluates=rng.choice(("no rank", "no rank", "all", "rank 0")),
            breaks=rng.random() < 0.5,
        )


class Team:
    """All processes of one generation."""

    def __init__(self, world: World, revision: int, past: Team | None) -> None:
        self.world = world
        self.revision = revision
        self.past = past
        self.workers: dict[str, Worker] = {}
        self.committed_revision = 0
        if past is not None:
            past.past = None

    @property
    def complete(self) -> bool:
        return len(self.workers) == len(self.world.members)

    @property
    def intact(self) -> bool:
        return self.complete and all(worker.alive for worker in self.workers.values())


class Worker:
    """The process of one generation on one node."""

    def __init__(self, node: SimNode, team: Team, place: int) -> None:
        self.sim: Simulation = node.sim
        self.node = node
        self.life = node.lives
        self.team = team
        self.place = place
        self.alive = True
        self.pending = False
        """Written by the agent, read by the process."""
        self.began = False
        self.step = -1
        self.stepped = False
        self.entered = -1
        self.stepped_at = 0.0
        self.asking = False
        self.ended_at: int | None = None
        """The step after which it ended by itself, as it was told."""
        self.hangs: RankActivity | None = None
        """What it does for ever, if it never finishes a step again."""
        self.hangs_since = 0.0
        self.comes_back = False
        team.workers[node.name] = self
        self.after(0.1, 2.0, self.begin)

    @property
    def generation(self) -> int:
        return self.team.world.generation

    def after(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if self.acts:
                action()

        self.sim.after(self.sim.rng.uniform(low_s, high_s), unless_dead)

    @property
    def busy(self) -> bool:
        """For a while it has neither finished a step nor asked about one."""
        return not self.asking and self.ended_at is None and self.sim.now > self.stepped_at + STRANDED_S

    @property
    def acts(self) -> bool:
        return self.alive and self.hangs is None

    @property
    def doing(self) -> RankActivity:
        """As the agent of its node can see it."""
        if not self.alive:
            return RankActivity.GONE
        if self.hangs is not None:
            return self.hangs
        waits = any(peer.entered < self.entered for peer in self.team.workers.values())
        return RankActivity.IN_COLLECTIVE if self.entered > self.step and waits else RankActivity.WORKS

    # ------------------------------------------------------------ load

    def begin(self) -> None:
        self.began = True
        team = self.team
        if not team.intact or not all(worker.began for worker in team.workers.values()):
            return
        on_disk, team.committed_revision = self.sim.newest_checkpoint()
        step = max(on_disk, *(worker.node.memory for worker in team.workers.values()))
        self.sim.check_load(team, step)
        for worker in team.workers.values():
            worker.step = step
            worker.remember()
            worker.enter()

    # ------------------------------------------------------------ step after step

    def enter(self) -> None:
        if not self.acts:
            return
        self.entered = self.step + 1
        if self.team.intact and all(worker.entered == self.entered for worker in self.team.workers.values()):
            pace_s = self.sim.script.step_s
            for worker in self.team.workers.values():
                worker.after(0.7 * pace_s, pace_s, worker.finish)

    def go_on(self) -> None:
        """It was at work all the time."""
        self.hangs = None
        if self.entered > self.step:
            self.finish()
        else:
            self.enter()

    def finish(self) -> None:
        self.step, self.stepped, self.stepped_at = self.entered, True, self.sim.now
        self.node.hear_step(self)
        if self.step % INTERVAL:
            self.end_step()
        else:
            self.save(self.end_step)

    def save(self, then: Callable[[], None]) -> None:
        """In memory on every node, and on disk by rank 0, which goes on when it knows what came of it."""
        self.remember()
        if self.place == 0:
            self.commit(then)
        else:
            then()

    def remember(self) -> None:
        if self.life == self.node.lives and self.node.running:
            self.node.memory = max(self.node.memory, self.step)

    def commit(self, then: Callable[[], None]) -> None:
        sim, team = self.sim, self.team
        latest, revision = self.node.agent.snapshot, team.revision
        if latest.world is not None and latest.world.generation == self.generation:
            revision = latest.world_revision  # the phase may have changed
        fence = [Compare(WORLD_KEY, revision), Compare(CHECKPOINT_KEY, team.committed_revision)]
        if sim.bug == "commit without the fence":
            fence = []
        elif sim.bug == "commit from an old generation":
            del fence[0]
        text = f"{self.generation} {self.step}"

        def done(_: object) -> None:
            _, team.committed_revision = sim.newest_checkpoint()
            if self.acts:
                then()

        sim.call(self.node, lambda: sim.commit(tuple(fence), text), done, done, guard=lambda action: action)

    def end_step(self) -> None:
        script = self.sim.script
        pauses = script.evaluates == "all" or (script.evaluates == "rank 0" and self.place == 0)
        turns = 3 if pauses and self.step % 5 == 0 else 0
        self.ask(lambda: self.pause(turns), pausing=False)

    def pause(self, turns: int) -> None:
        """Evaluation: so many times a while of work, and then a look at the flag."""
        if turns == 0:
            self.enter()
        else:
            self.after(0.4, 0.7, lambda: self.ask(lambda: self.pause(turns - 1), pausing=True))

    # ------------------------------------------------------------ the end of a step

    def ask(self, go_on: Callable[[], None], *, pausing: bool) -> None:
        if not (self.pending and self.sim.script.listens):
            go_on()
            return
        ask = Ask(self.generation, 0 if self.place == 0 else 2 * self.place, self.step, pausing)
        self.asking, answered = True, False

        def hear(answer: Answer) -> None:
            nonlocal answered
            if answered or not self.acts:
                return
            self.asking, answered = False, True
            if isinstance(answer, End):
                self.end()
            else:
                go_on()

        self.sim.after(PATIENCE_S, lambda: hear(GoOn()))
        Question(self.node, ask, hear)

    def end(self) -> None:
        """Keep the state, and then go."""
        self.sim.seen["told to end"] += 1
        self.ended_at = self.step
        self.remember()

        self.after(0.01, 0.3, self.exit)

    def exit(self) -> None:
        """Quietly: only those that wait in a collective notice."""
        self.alive = False
        if self.sim.script.breaks:
            for peer in self.team.workers.values():
                if peer.alive and peer.entered > self.step:
                    peer.after(0.02, 1.0, lambda peer=peer: peer.node.crash(peer))
        self.node.worker_ended(self)

    def die(self) -> None:
        """A broken collective soon ends its peers, too, as far as they can hear of it."""
        if not self.alive:
            return
        self.alive = False
        for peer in self.team.workers.values():
            if peer.ended_at is None and not self.node.apart_from(peer.node):
                peer.after(0.02, 1.0, lambda peer=peer: peer.node.crash(peer))


class Question:
    """One question at the agent's gate, until it is answered or given up."""

    def __init__(self, node: SimNode, ask: Ask, hear: Callable[[Answer], None]) -> None:
        self.node = node
        self.sim = node.sim
        self.ask = ask
        self.hear = hear
        self.asked_at = node.sim.now
        node.guarded(self.consider)()

    def consider(self) -> None:
        if not concerns(self.ask, self.latest):
            self.hear(GoOn())
        elif self.sim.now < self.asked_at + GIVES_UP_S:
            self.sim.call(
                self.node, lambda: self.sim.serve(WHAT_STANDS), self.read, lambda _: self.consider()
            )

    @property
    def latest(self) -> NodeSnapshot:
        snapshot = self.node.agent.snapshot
        world = snapshot.world
        early = self.sim.bug == "stop published before all acknowledged"
        if early and world is not None and world.phase is Phase.DRAINING:
            return replace(snapshot, world=replace(world, phase=Phase.LAST_STEP))
        return snapshot

    def read(self, snapshot: Snapshot) -> None:
        self.weigh(next(iter(snapshot.entries), None))

    def weigh(self, entry: Entry | None) -> None:
        verdict = judge(self.ask, self.latest, entry)
        if not isinstance(verdict, WriteStop):
            if isinstance(verdict, Beyond):
                self.node.beyond(self.ask.generation)
            self.hear(verdict)
        elif self.sim.bug == "stop published after going on" and not self.ask.pausing:
            self.hear(GoOn())
            self.sim.after(self.sim.rng.uniform(0.0, 1.5), lambda: self.write(verdict))
        elif self.sim.now < self.asked_at + GIVES_UP_S:
            self.write(verdict)

    def write(self, verdict: WriteStop) -> None:
        def outcome(outcome: Outcome) -> None:
            if outcome.succeeded:
                self.sim.seen["stop published" if not self.ask.pausing else "stop published in a pause"] += 1
                self.hear(written(self.ask, verdict))
            else:
                self.consider()

        self.sim.call(self.node, lambda: self.sim.serve(verdict), outcome, lambda _: self.consider())
