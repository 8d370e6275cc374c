"""The stages of a check of several nodes, and its keys in the job's store: all of them leased.

    check/nodes/NODE            what a node says about itself (`NodeFacts`); the oldest one leads
    check/stage                 what all do now, written by the one that leads
    check/results/STAGE/NODE    what a node has found out in that stage
    check/report                what all print in the end

Everything goes with the leases, also of nodes that are killed. A job that meets in the same store does not see it.

The leader waits for the nodes, lets each try to reach the others, lets pairs measure each other in two rounds, of which
the second follows from the first, and writes the report. A node that ends is left out from then on. When the leader
ends, the others say so: nothing of theirs is lost but time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, TypeVar

from ...codec import AtMost, Checked, Count, Document, Invalid
from ...health.checks.pair_findings import NodeFacts, between_machines, near_pairs
from ...health.checks.pair_report import CheckResults, PairsReport, make_report
from ...health.checks.pairs import (
    MOST_NODES,
    Node,
    NodeResults,
    Pair,
    all_well,
    first_round,
    ring,
    second_round,
    spread,
    turns,
)
from ...rendezvous.errors import LeaseExpired, RecordInvalid, StoreError, StoreUnavailable
from ...rendezvous.store.interface import Compare, Entry, Put, Store
from ...rendezvous.store.scoped import ScopedStore
from ...rendezvous.text import counted
from ...threads import Thread

PREFIX = "check/"
NODES, RESULTS, STAGE, REPORT = "nodes/", "results/", "stage", "report"
SCHEMA = 1
MOST_CHARS = 1 << 20
"""Less than a store takes in one request."""

OUTAGE_S = 20.0
"""For how long a store that does not answer is asked again."""
PAUSE_S = 0.25
CONFIRMS_PER_TTL = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Member(Checked):
    node: Node
    life: Node


@dataclass(frozen=True, slots=True)
class Stage(Checked):
    """What all members do now. `reach`: try the others, all of them or with `pairs` those. `pairs`: measure, the first
    of each pair the second. `report`: read it, and leave."""

    number: Count
    what: Literal["reach", "pairs", "report"]
    round: Annotated[int, Count] = 0
    members: Annotated[tuple[Member, ...], AtMost(MOST_NODES)] = ()
    pairs: Annotated[tuple[tuple[Node, Node], ...], AtMost(MOST_NODES)] = ()


_FACTS = Document(NodeFacts, SCHEMA, MOST_CHARS)
_STAGE = Document(Stage, SCHEMA, MOST_CHARS)
_RESULTS = Document(NodeResults, SCHEMA, MOST_CHARS)
_REPORT = Document(PairsReport, SCHEMA, MOST_CHARS)


class CheckStore:
    """The keys of a check, as one node reads and writes them. All methods raise StoreError, LeaseExpired when this node
    was too slow to keep its place, and RecordInvalid for what no node of this version has written."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store, self._ttl_s = ScopedStore(store, PREFIX), ttl_s
        self._lease: int | None = None
        self._over = threading.Event()
        self._lost: Exception | None = None

    def join(self, facts: NodeFacts) -> bool:
        """False when another one of this name is there."""
        if self._lease is None:
            self._lease = self._asked(lambda: self._store.grant(self._ttl_s))
            Thread(self._keep, "check-lease").start()
        key = NODES + facts.node
        put = Put(key, _FACTS.encode(facts), self._lease)

        def once() -> bool:
            outcome = self._store.transact((Compare(key, 0),), (put,))
            (entry,) = outcome.entries
            return outcome.succeeded or (entry is not None and entry.value == put.value)

        return self._asked(once)

    def leave(self) -> None:
        """With all that this node has written."""
        self._over.set()
        if self._lease is not None:
            lease = self._lease
            self._store.revoke(lease)

    def oldest(self) -> str | None:
        """The name of the node that leads, as long as it lives."""
        entries = self._asked(lambda: self._store.read((), NODES)).entries
        return entries[0].key.removeprefix(NODES) if entries else None

    def present(self) -> dict[str, NodeFacts]:
        """All nodes that are here now, by name."""
        return self._nodes(self._asked(lambda: self._store.read((NODES,))).entries)

    def facts_of(self, names: Iterable[str]) -> dict[str, NodeFacts]:
        """Of those among them that are here."""
        scopes = tuple(NODES + name for name in names)
        return self._nodes(self._asked(lambda: self._store.read(scopes)).entries) if scopes else {}

    def stage(self) -> Stage | None:
        entries = self._asked(lambda: self._store.read((STAGE,))).entries
        return _read(_STAGE, entries[0]) if entries else None

    def publish_stage(self, stage: Stage) -> None:
        self._put(STAGE, _STAGE.encode(stage))

    def put_results(self, stage: Stage, node: str, results: NodeResults) -> None:
        self._put(f"{RESULTS}{stage.number}/{node}", _RESULTS.encode(results))

    def results(self, stage: Stage) -> dict[str, NodeResults]:
        """By node."""
        under = f"{RESULTS}{stage.number}/"
        entries = self._asked(lambda: self._store.read((under,))).entries
        return {entry.key.removeprefix(under): _read(_RESULTS, entry) for entry in entries}

    def publish_report(self, report: PairsReport) -> None:
        self._put(REPORT, _REPORT.encode(report))

    def report(self) -> PairsReport | None:
        entries = self._asked(lambda: self._store.read((REPORT,))).entries
        return _read(_REPORT, entries[0]) if entries else None

    def _put(self, key: str, value: str) -> None:
        assert self._lease is not None, "only a node that has joined writes"
        put = Put(key, value, self._lease)
        self._asked(lambda: self._store.transact((), (put,)))

    def _nodes(self, entries: Iterable[Entry]) -> dict[str, NodeFacts]:
        found = (_read(_FACTS, entry) for entry in entries)
        return {facts.node: facts for facts in found}

    def _asked(self, question: Callable[[], _T]) -> _T:
        """All questions may be asked twice."""
        until = time.monotonic() + OUTAGE_S
        while True:
            if self._lost is not None:
                raise LeaseExpired(f"this node did not keep its place in the store: {self._lost}")
            try:
                return question()
            except StoreUnavailable:
                if time.monotonic() >= until:
                    raise
                time.sleep(PAUSE_S)

    def _keep(self) -> None:
        assert self._lease is not None
        while not self._over.wait(self._ttl_s / CONFIRMS_PER_TTL):
            try:
                self._store.keep_alive(self._lease)
            except StoreUnavailable:
                continue
            except StoreError as error:
                self._lost = error
                return


def _read(document: Document[_T], entry: Entry) -> _T:
    try:
        return document.decode(entry.value)
    except Invalid as error:
        raise RecordInvalid(PREFIX + entry.key, str(error)) from error


# --- The stages

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
    ) -> None:
        self._store, self._runner, self._join_wait, self._show = store, runner, join_wait, show
        self._me = runner.facts.node
        self._number = 0
        """Of the newest stage, where this node leads."""
        self._look_s = LOOK_S + LOOK_PER_NODE_S * join_wait.wanted

    def run(self) -> PairsReport:
        """This node has joined. Raises LeaderGone, and what a `CheckStore` does."""
        done, leader, busy = 0, "", False
        patient_s = self._join_wait.wait_s + SILENT_S
        until = time.monotonic() + patient_s
        while True:
            stage = self._store.stage()
            if time.monotonic() >= until:
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
                until = time.monotonic() + patient_s
            time.sleep(self._look_s)

    def await_others(self) -> None:
        """Waits until the others have left, at most `LEAVE_S`: they still need the store that this node hosts, or the
        report. A host that does not lead has left by then, so that it and the leader do not wait for each other."""
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and set(self._store.present()) - {self._me}:
            time.sleep(self._look_s)

    def _takes_part(self, stage: Stage) -> bool:
        return Member(self._me, self._runner.facts.life) in stage.members

    def _carry_out(self, stage: Stage) -> None:
        results = self._runner.carry_out(stage, self._store.facts_of(_others(stage, self._me)))
        self._store.put_results(stage, self._me, results)

    # --- The leader

    def _lead(self) -> PairsReport:
        found = CheckResults(self._join_wait.wanted, self._join_wait.wait_s, self._gather())
        if len(found.nodes) > 1:
            many = len(found.nodes) > MOST_ALL_PAIRS
            self._show(
                f"{len(found.nodes)} nodes are here; each tries to reach {'some' if many else 'all'} others"
            )
            stage = Stage(0, "reach", pairs=ring(found.names) if many else ())
            self._stage(found, stage, "as they tried to reach each other")
            self._round(found, 1, first_round(found.names))
            compared = between_machines(found.nodes, found.measured)
            well = all_well(found.reached, found.measured, compared)
            self._round(found, 2, second_round(found.names, well, near_pairs(found.nodes)))
        report = make_report(replace(found, nodes=tuple(sorted(found.nodes, key=lambda one: one.node))))
        if len(report.measured) > MOST_MEASURED:
            report = replace(report, measured=())
        self._store.publish_report(report)
        members = tuple(Member(one.node, one.life) for one in found.nodes)
        self._store.publish_stage(Stage(self._number + 1, "report", members=members))
        self.await_others()
        return report

    def _gather(self) -> tuple[NodeFacts, ...]:
        """This node first, the others by name, but for neighbours on one machine."""
        wanted, until = self._join_wait.wanted, time.monotonic() + self._join_wait.wait_s
        shown: set[str] = set()
        while True:
            nodes = self._store.present()
            if set(nodes) != shown:
                shown = set(nodes)
                names = ", ".join(sorted(nodes)[:16])
                self._show(f"{len(nodes)} of {wanted} nodes are here: {names}")
            if len(nodes) >= wanted or time.monotonic() >= until:
                found = {self._me: self._runner.facts, **dict(sorted(nodes.items()))}
                order = spread({name: one.machine or name for name, one in found.items()})
                return tuple(found[name] for name in order)
            time.sleep(self._look_s)

    def _round(self, found: CheckResults, number: int, pairs: Iterable[Pair]) -> None:
        for turn in turns(pairs):
            now = tuple(pair for pair in turn if set(pair) <= set(found.names))
            if now:
                self._show(f"round {number}: {counted(len(now), 'pair')} measuring")
                self._stage(found, Stage(0, "pairs", number, pairs=now), f"in round {number} of pairs")

    def _stage(self, found: CheckResults, stage: Stage, when: str) -> None:
        """All do it, and this one gathers what they find."""
        self._number += 1
        lives = {one.node: one.life for one in found.nodes}
        members = tuple(Member(name, lives[name]) for name in found.names)
        stage = replace(stage, number=self._number, members=members)
        until = time.monotonic() + STAGE_S
        self._store.publish_stage(stage)
        self._carry_out(stage)
        while True:
            given, present = self._store.results(stage), self._store.present()
            late = time.monotonic() >= until
            for name in set(found.names) - set(given):
                if name not in present or present[name].life != lives[name]:
                    found.gone[name] = when
                elif late:
                    found.gone[name] = f"or hangs: it gave no answer within {STAGE_S:g} s {when}"
            if set(found.names) <= set(given):
                break
            time.sleep(self._look_s)
        for name, results in given.items():
            _take(found, name, results)


def _take(found: CheckResults, name: str, results: NodeResults) -> None:
    """Only what a node can know: its own tries and measurements, with nodes that are there."""
    nodes = {one.node for one in found.nodes}
    known = found.results.get(name, NodeResults())
    reached = tuple(one for one in results.reached if one.source == name and one.target in nodes)
    measured = tuple(one for one in results.measured if one.first == name and one.second in nodes)
    found.results[name] = NodeResults(
        known.reached + reached, known.measured + measured, known.seen + results.seen
    )


def _others(stage: Stage, me: str) -> list[str]:
    """With whom node `me` has to do in it. Where not all try all, each tries the one that leads, too: so it shows what
    all have in common, as a checkpoint directory."""
    if not stage.pairs:
        return [member.node for member in stage.members if member.node != me]
    partners = [node for pair in stage.pairs if me in pair for node in pair]
    leader = [stage.members[0].node] if stage.what == "reach" else []
    return [node for node in dict.fromkeys((*partners, *leader)) if node != me]
