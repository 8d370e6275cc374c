"""The stages of a check of several nodes: the oldest node leads, and all nodes carry out the stage that it publishes.

The leader waits for the nodes, lets each try to reach the others, lets pairs measure each other in two rounds, of which
the second follows from the first, and writes the report. A node that ends is left out from then on. When the leader
ends, the others say so: nothing of theirs is lost but time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from ....health.checks.pairs.evidence import all_well
from ....health.checks.pairs.facts import NodeFacts, between_machines, near_pairs
from ....health.checks.pairs.report import CheckResults, PairsReport, make_report
from ....health.checks.pairs.results import NodeResults
from ....health.checks.pairs.rounds import Pair, first_round, ring, second_round, spread, turns
from ....rendezvous.text import counted
from .check_store import CheckStore, Member, Stage

MOST_ALL_PAIRS = 64
"""Up to so many nodes each tries to reach each other one; of more only two neighbours, the one that leads, and those
that it meets."""
MOST_MEASURED = 256
"""Measurements in a report; of more nodes it has the findings alone."""
STAGE_S = 90.0
"""No stage takes longer where all processes are bounded; a later node is left out."""
SILENT_S = 120.0
"""More than a stage takes: a node that leads and does nothing for so long keeps its lease, and hangs."""
LEAVE_S = 10.0
LOOK_S = 0.1
LOOK_PER_NODE_S = 0.001
"""Thousands ask one store."""


class LeaderGone(Exception):
    """The node that led the check has ended or hangs; the text names it."""


class StageRunner(Protocol):
    """Carries out this node's part of a stage."""

    facts: NodeFacts

    def carry_out(self, stage: Stage, others: dict[str, NodeFacts]) -> NodeResults:
        """Its part of the stage. `others` are the nodes that it has to do with. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class JoinWait:
    """How many nodes the check is for, and how long to wait for them."""

    wanted: int
    wait_s: float


class StageDriver:
    """Takes one node through the stages; if it is the oldest one, it leads."""

    def __init__(
        self,
        store: CheckStore,
        runner: StageRunner,
        join_wait: JoinWait,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._runner, self._join_wait = store, runner, join_wait
        self._show, self._clock, self._sleep = show, clock, sleep
        self._me = runner.facts.node
        self._look_s = LOOK_S + LOOK_PER_NODE_S * join_wait.wanted

    def run(self) -> PairsReport:
        """This node has joined. Raises LeaderGone, and what a `CheckStore` does."""
        done, leader, busy = 0, "", False
        patient_s = self._join_wait.wait_s + SILENT_S
        until = self._clock() + patient_s
        while True:
            stage = self._store.stage()
            if self._clock() >= until:
                raise LeaderGone(
                    f"nothing new for {patient_s:g} s: node {leader or 'that leads the other check'} hangs, and has to"
                    " be ended"
                )
            if stage is None:
                if done:
                    raise LeaderGone(
                        f"node {leader} led this check and ended in the middle of it: look there first"
                    )
                leader = self._store.oldest() or ""
                if leader == self._me:
                    return self._lead()
            elif not self._takes_part(stage):
                if not busy:
                    self._show(
                        "another check is under way with this store and --rdzv-id: waiting for its end"
                    )
                busy = True
            elif stage.what == "report":
                report = self._store.report()
                if report is not None:
                    return report
            elif stage.number > done:
                leader, done = stage.members[0].node, stage.number
                self._carry_out(stage)
                until = self._clock() + patient_s
            self._sleep(self._look_s)

    def await_others(self) -> None:
        """Waits until the others have left, at most `LEAVE_S`: they still need the store that this node hosts, or the
        report. A host that does not lead has left by then, so that it and the leader do not wait for each other."""
        until = self._clock() + LEAVE_S
        while self._clock() < until and set(self._store.present()) - {self._me}:
            self._sleep(self._look_s)

    def _takes_part(self, stage: Stage) -> bool:
        return Member(self._me, self._runner.facts.life) in stage.members

    def _carry_out(self, stage: Stage) -> None:
        results = self._runner.carry_out(stage, self._store.facts_of(_others(stage, self._me)))
        self._store.put_results(stage, self._me, results)

    # --- The leader

    def _lead(self) -> PairsReport:
        nodes = self._gather()
        progress = _Progress(nodes)
        if len(nodes) > 1:
            many = len(nodes) > MOST_ALL_PAIRS
            self._show(f"{len(nodes)} nodes are here; each tries to reach {'some' if many else 'all'} others")
            self._stage(
                progress,
                Stage(0, "reach", pairs=ring(progress.there) if many else ()),
                "as they tried to reach each other",
            )
            self._round(progress, 1, first_round(progress.there))
            self._round(
                progress, 2, second_round(progress.there, progress.well(), near_pairs(nodes.values()))
            )
        by_name = tuple(nodes[name] for name in sorted(nodes))
        found = CheckResults(
            self._join_wait.wanted, self._join_wait.wait_s, by_name, progress.results, progress.gone
        )
        report = make_report(found)
        if len(report.measured) > MOST_MEASURED:
            report = replace(report, measured=())
        self._store.publish_report(report)
        self._store.publish_stage(replace(progress.last, number=progress.last.number + 1, what="report"))
        self.await_others()
        return report

    def _gather(self) -> dict[str, NodeFacts]:
        """This node first, the others by name, but for neighbours on one machine."""
        wanted, until = self._join_wait.wanted, self._clock() + self._join_wait.wait_s
        shown: set[str] = set()
        while True:
            nodes = self._store.present()
            if set(nodes) != shown:
                shown = set(nodes)
                names = ", ".join(sorted(nodes)[:16])
                self._show(f"{len(nodes)} of {wanted} nodes are here: {names}")
            if len(nodes) >= wanted or self._clock() >= until:
                found = {self._me: self._runner.facts, **dict(sorted(nodes.items()))}
                order = spread({name: one.machine or name for name, one in found.items()})
                return {name: found[name] for name in order}
            self._sleep(self._look_s)

    def _round(self, progress: _Progress, number: int, pairs: Iterable[Pair]) -> None:
        for turn in turns(pairs):
            now = tuple(pair for pair in turn if set(pair) <= set(progress.there))
            if now:
                self._show(f"round {number}: {counted(len(now), 'pair')} measuring")
                self._stage(progress, Stage(0, "pairs", number, pairs=now), f"in round {number} of pairs")

    def _stage(self, progress: _Progress, stage: Stage, when: str) -> None:
        """All do it, and this one gathers what they find."""
        members = tuple(Member(name, progress.nodes[name].life) for name in progress.there)
        stage = replace(stage, number=progress.last.number + 1, members=members)
        progress.last = stage
        until = self._clock() + STAGE_S
        self._store.publish_stage(stage)
        self._carry_out(stage)
        while True:
            given, present = self._store.results(stage), self._store.present()
            late = self._clock() >= until
            for name in set(progress.there) - set(given):
                life = present[name].life if name in present else ""
                if life != progress.nodes[name].life:
                    progress.gone[name] = when
                elif late:
                    progress.gone[name] = f"or hangs: it gave no answer within {STAGE_S:g} s {when}"
            if set(progress.there) <= set(given):
                break
            self._sleep(self._look_s)
        for name, results in given.items():
            progress.add(name, results)


class _Progress:
    """What the leader knows of the check so far. `nodes` begin with the leader."""

    def __init__(self, nodes: dict[str, NodeFacts]) -> None:
        self.nodes = nodes
        self.gone: dict[str, str] = {}
        self.results: dict[str, NodeResults] = {}
        self.last = Stage(0, "reach", members=tuple(Member(one.node, one.life) for one in nodes.values()))

    @property
    def there(self) -> list[str]:
        return [name for name in self.nodes if name not in self.gone]

    def add(self, name: str, results: NodeResults) -> None:
        """Takes only what a node can know: its own tries and measurements, with nodes that are there."""
        known = self.results.get(name, NodeResults())
        reached = tuple(one for one in results.reached if one.source == name and one.target in self.nodes)
        measured = tuple(one for one in results.measured if one.first == name and one.second in self.nodes)
        self.results[name] = NodeResults(
            known.reached + reached, known.measured + measured, known.seen + results.seen
        )

    def well(self) -> dict[Pair, bool]:
        """Of the first round's pairs, but for those with a node that has ended."""
        there = set(self.there)
        reached = [one for results in self.results.values() for one in results.reached]
        measured = [one for results in self.results.values() for one in results.measured]
        found = all_well(reached, measured, between_machines(self.nodes.values(), measured))
        return {pair: well for pair, well in found.items() if there.issuperset(pair)}


def _others(stage: Stage, me: str) -> list[str]:
    """With whom node `me` has to do in it. Where not all try all, each tries the one that leads, too: so it shows what
    all have in common, as a checkpoint directory."""
    if not stage.pairs:
        return [member.node for member in stage.members if member.node != me]
    partners = [node for pair in stage.pairs if me in pair for node in pair]
    leader = [stage.members[0].node] if stage.what == "reach" else []
    return [node for node in dict.fromkeys((*partners, *leader)) if node != me]
