"""What the nodes of a check have in the job's store: keys of their own under `check/`, all of them leased.

    check/nodes/NODE            what a node says about itself (`NodeFacts`); the oldest one leads
    check/stage                 what all do now, written by the one that leads
    check/results/STAGE/NODE    what a node has found out in that stage
    check/report                what all print in the end

Everything goes with the leases, also of nodes that are killed. A job that meets in the same store does not see it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from ....codec import AtMost, Checked, Count, Document, Invalid
from ....health.checks.pairs.facts import NodeFacts
from ....health.checks.pairs.report import PairsReport
from ....health.checks.pairs.results import MOST_NODES, Node, NodeResults
from ....rendezvous.errors import LeaseExpired, RecordInvalid, StoreError, StoreUnavailable
from ....rendezvous.store.interface import Compare, Entry, Put, Store
from ....rendezvous.store.scoped import ScopedStore
from ....threads import Thread

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

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = ScopedStore(store, PREFIX)
        self._ttl_s, self._clock, self._sleep = ttl_s, clock, sleep
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
        until = self._clock() + OUTAGE_S
        while True:
            if self._lost is not None:
                raise LeaseExpired(f"this node did not keep its place in the store: {self._lost}")
            try:
                return question()
            except StoreUnavailable:
                if self._clock() >= until:
                    raise
                self._sleep(PAUSE_S)

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
