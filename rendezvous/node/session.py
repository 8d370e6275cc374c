"""What belongs to one incarnation of this node, and is forgotten with it; and a frozen picture of it for other threads.

Its lease, what it has learned of the job (`MembershipView`), why its workers may go on (`LeaseValidity`), and its
record: what it reports, and what of that stands in the store as far as is known.

Who coordinates needs no election: the node with the oldest record does. The coordinator follows all records; the
others follow only its record and their own, and read again when its record goes. Answers and watches overtake each
other, and so do changes of `world` and of `nodes/`. So each of them comes with the revision at which it was true, and
what is known from a later one stands.

One thread owns the `Participant` and changes it as events come. All others (the HTTP server, the links that answer for
checkpoints and planned changes, torchrun's agent) read the newest `NodeSnapshot`, which is replaced as a whole. So a
reader takes it once, and never sees half of a change. Instants are seconds on this node's monotonic clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from ...health.stragglers import PaceComparison, Paces, Watched, compare
from ..coordinator.next_world import why_refused
from ..coordinator.view import Decision, Policy, View, Wait
from ..errors import RecordInvalid, StoreMismatch
from ..liveness import (
    FailureDetector,
    LeaseValidity,
    Suspects,
    may_still_train,
    out_of_sight,
    slow_to_go_on,
    slow_to_stop,
)
from ..records import (
    MAX_SEEN,
    NODES_PREFIX,
    TRANSITIONS,
    WORLD_KEY,
    Condition,
    Failure,
    GenerationProgress,
    NodeRecord,
    PeerStatus,
    Phase,
    Result,
    World,
    life_of,
    node_key,
)
from ..store.interface import Compare, Entry, LeaseId, Read, Request, Snapshot, Subscription
from .deadlines import Deadlines
from .node_actions import LocalState
from .transactions import MOST_EVICTED, Evict, WriteWorld

log = logging.getLogger(__name__)


class MembershipView:
    """The world and the nodes as the store showed them. What reads a value raises RecordInvalid and StoreMismatch."""

    def __init__(self, job: str, node: str) -> None:
        self.world: World | None = None
        self.world_revision = 0
        self.world_since = 0.0
        """Instant at which this node first saw the world in its present phase."""
        self.inquiry_since = 0.0
        """And at which the inquiry in it last changed."""
        self.subscription: Subscription | None = None
        """The watch that keeps this up to date; None until everything has been read."""
        self.arrivals: dict[str, float] = {}
        """Instant at which this node first saw each incarnation."""
        self.ready_since: dict[str, float] = {}
        """And at which it first saw it ready."""
        self.detector = FailureDetector()
        self._job = job
        self._own_key = node_key(node)
        self._leader: Entry | None = None
        """The coordinator's record as found; another record under its key later is another, younger agent's."""
        self._nodes: dict[str, tuple[Entry, NodeRecord]] = {}
        """By key: all of them on the coordinator, else only some."""
        self._oldest_first: tuple[NodeRecord, ...] | None = None
        """Their records, until one changes: they are looked at more often than that."""
        self._nodes_as_of = 0
        self._compared: tuple[World | None, tuple[NodeRecord, ...]] = (None, ())
        """The world and the records from which `_watched` was computed."""
        self._watched = Watched()

    @property
    def leader(self) -> str | None:
        """The node that coordinates, as far as known."""
        return self._leader.key.removeprefix(NODES_PREFIX) if self._leader is not None else None

    @property
    def coordinates(self) -> bool:
        """This node does."""
        return self._leader is not None and self._leader.key == self._own_key

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """Oldest first; complete only on the coordinator."""
        if self._oldest_first is None:
            seen = sorted(self._nodes.values(), key=lambda seen: seen[0].create_revision)
            self._oldest_first = tuple(record for _, record in seen)
        return self._oldest_first

    @property
    def leader_record(self) -> NodeRecord | None:
        seen = self._nodes.get(self._leader.key) if self._leader is not None else None
        return seen[1] if seen is not None else None

    @property
    def comparison(self) -> PaceComparison | None:
        """The coordinator's comparison of all ranks, for the generation that trains."""
        return self.world.comparison_of(self.leader_record) if self.world is not None else None

    @property
    def nodes_are_behind(self) -> bool:
        """The nodes are not known as far as the world: a member that is missing may only be news."""
        return self._nodes_as_of < self.world_revision

    @property
    def records_of_gone(self) -> tuple[Compare, ...]:
        """The records of nodes whose agents were found to have ended."""
        gone = self.detector.gone
        return tuple(
            Compare(key, entry.mod_revision)
            for key, (entry, record) in self._nodes.items()
            if record.incarnation in gone
        )

    @property
    def leader_gone(self) -> Compare | None:
        """The coordinator's record, if it is one of those."""
        leader = self._leader
        return next((gone for gone in self.records_of_gone if leader and gone.key == leader.key), None)

    @property
    def question(self) -> Read:
        """What the coordinator has to know; for the others also who that is."""
        if self.coordinates:
            return Read((WORLD_KEY, NODES_PREFIX))
        return Read((WORLD_KEY, self._own_key), oldest_under=NODES_PREFIX)

    def compare_ranks(self) -> None:
        """If this node coordinates, look for stragglers: see `own_comparison`."""
        if self.coordinates and self._compared != (self.world, self.nodes):
            self._compared = self.world, self.nodes
            self._watched = compared(self._watched, *self._compared)

    @property
    def own_comparison(self) -> PaceComparison | None:
        """The newest comparison of all ranks by this node; None unless it coordinates."""
        return self._watched.comparison if self.coordinates else None

    # ---------------------------------------------------------------- what the store answers

    def read(self, question: Read, snapshot: Snapshot, now: float) -> None:
        """The answer to `question`. It holds our own record."""
        entries = {entry.key: entry for entry in snapshot.entries}
        nodes = [entry for key, entry in entries.items() if key.startswith(NODES_PREFIX)]
        self._leader = min(nodes, key=lambda entry: entry.create_revision)
        # A writer of something unreadable that came first would coordinate for ever, and never answer.
        NodeRecord.from_json(self._leader.key, self._leader.value)
        if self.coordinates and NODES_PREFIX not in question.scopes:
            return
        for key in set(self._nodes) - set(entries):
            self.see_node(key, None, snapshot.revision, now)
        for entry in nodes:
            self.see_node(entry.key, entry, snapshot.revision, now)
        self.see_world(entries.get(WORLD_KEY), now)
        self._nodes_as_of = snapshot.revision
        watched = (NODES_PREFIX,) if self.coordinates else (self._leader.key, self._own_key)
        self.subscription = Subscription((WORLD_KEY, *watched), snapshot.revision)

    def see_world(self, entry: Entry | None, now: float) -> None:
        """`entry` is what was under the world's key, if anything. No agent deletes it: if it is gone, so is the job."""
        if entry is None:
            if self.world is not None:
                self.world, self.world_since = None, now
            self.world_revision = 0
            return
        if entry.mod_revision <= self.world_revision:
            return
        world, before = world_of(entry, self._job), self.world
        if before is None or (before.generation, before.phase) != (world.generation, world.phase):
            self.world_since = self.inquiry_since = now
        elif before.inquiry != world.inquiry:
            self.inquiry_since = now
        self.world, self.world_revision = world, entry.mod_revision

    def see_change_of_node(self, key: str, entry: Entry | None, revision: int, now: float) -> None:
        """As `see_node`, from the watch: all changes of nodes before this one have been seen."""
        self._nodes_as_of = revision
        self.see_node(key, entry, revision, now)

    def see_node(self, key: str, entry: Entry | None, revision: int, now: float) -> None:
        """`entry` is what was under a node's key at `revision`, if anything. One that cannot be read is ignored."""
        known = self._nodes.get(key)
        if known is not None and known[0].mod_revision > revision:
            return
        if self._leader is not None and self._leader.key == key and not _same_key_life(self._leader, entry):
            self._leader = self.subscription = None
        self._oldest_first = None
        if entry is None:
            self._nodes.pop(key, None)
            return
        try:
            record = NodeRecord.from_json(key, entry.value)
        except RecordInvalid as error:
            log.warning("ignoring a node: %s", error)
            self._nodes.pop(key, None)
            return
        if known is not None and known[0].mod_revision == entry.mod_revision:
            return
        # A node that writes is not gone; if its agent ended right after, it will be asked again.
        self.detector.gone.discard(record.incarnation)
        self._nodes[key] = (entry, record)
        self.arrivals.setdefault(record.incarnation, now)
        if record.ready:
            self.ready_since.setdefault(record.incarnation, now)


def compared(before: Watched, world: World | None, nodes: Sequence[NodeRecord]) -> Watched:
    if world is None or not world.trains:
        return Watched()
    members = {member.incarnation: member for member in world.members}
    reports = [
        (node.incarnation, member.first_rank, node.paces)
        for node in nodes
        if node.paces is not None
        and node.paces.generation == world.generation
        and (member := members.get(node.incarnation)) is not None
        and len(node.paces.own_us) == member.slots
    ]
    return compare(before, world.generation, world.node_of_ranks, reports)


def _same_key_life(old: Entry, new: Entry | None) -> bool:
    """The key has not been deleted in between."""
    return new is not None and new.create_revision == old.create_revision


def world_of(entry: Entry, job: str) -> World:
    """What is under the world's key. Raises RecordInvalid, and StoreMismatch where it is another job's."""
    world = World.from_json(entry.value)
    if world.job != job:
        raise StoreMismatch(
            f"the store holds job {world.job!r}, not {job!r}: check --rdzv-endpoint and --rdzv-id"
        )
    return world


_NEWS = attrgetter(*(one.name for one in fields(NodeRecord) if one.name not in ("step", "progress")))
"""All of a record but the steps."""


@dataclass(slots=True)
class Session:
    """The state of one incarnation. Changed by `Participant` alone."""

    record: NodeRecord
    """This node's record as it should be."""
    validity: LeaseValidity
    membership: MembershipView
    lease: LeaseId | None = None
    written: NodeRecord | None = None
    """The record as this incarnation last knew it to be in the store; None before the first."""
    own_revision: int | None = 0
    """mod_revision of our record; None after a write whose outcome is unknown."""
    created_revision: int = 0
    started: int = 0
    """The highest generation that was started here, or will not be any more."""

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    @property
    def news(self) -> NodeRecord | None:
        """What to write, if anything. Steps alone are not worth it: the newest travels with the next change."""
        written = self.written
        return None if written is not None and _NEWS(written) == _NEWS(self.record) else self.record

    def wrote(self, record: NodeRecord, entry: Entry) -> None:
        """`record` is ours, and stands in the store as `entry`."""
        self.written = record
        self.own_revision, self.created_revision = entry.mod_revision, entry.create_revision

    def came_after_world(self, policy: Policy) -> bool:
        """The world in the store has not changed since this agent came. One that joins again was there before."""
        joined_once = life_of(self.incarnation) == self.incarnation
        newer = self.created_revision > self.membership.world_revision
        return policy.store_outlives_job and joined_once and newer

    def came_after_end(self, policy: Policy) -> bool:
        """The job in the store had ended before this agent came."""
        world = self.membership.world
        return world is not None and world.phase is Phase.ENDED and self.came_after_world(policy)

    def runs_again(self, policy: Policy) -> bool:
        """This agent is of a new run of the job."""
        world = self.membership.world
        succeeded = world is not None and world.result is Result.SUCCEEDED
        return self.came_after_end(policy) and (policy.runs_again or not succeeded)

    def lease_good(self, now: float) -> bool:
        """No other node can have been given this node's place (I10)."""
        return self.lease is not None and self.validity.holds(now)

    def local(self, generation: int, policy: Policy, deadlines: Deadlines, now: float) -> LocalState:
        """What its next action follows from; `generation` of workers exists here."""
        said = self.record.hang_report
        return LocalState(
            incarnation=self.incarnation,
            generation=generation,
            started=self.started,
            lease_good=self.lease_good(now),
            came_after_end=self.came_after_end(policy),
            runs_again=self.runs_again(policy),
            hosts_store=self.record.hosts_store,
            leaving=self.record.leaving,
            leave_alone=now >= deadlines.leave_alone_at,
            drain_over=now >= deadlines.drain_over_at,
            wait_over=now >= deadlines.wait_over_at,
            answered=said.inquiry if said is not None and said.generation == generation else 0,
        )

    def carried_out(self, decision: Decision) -> Request | None:
        """What the coordinator asks of the store, that has decided so."""
        membership = self.membership
        world, gone = membership.world, membership.records_of_gone[:MOST_EVICTED]
        if isinstance(decision, Wait):
            # It may be waiting for the next agent of just that node, who cannot come before the name is free.
            free = decision.short_of_nodes or (world is not None and world.trains)
            return Evict(gone) if gone and free else None
        if membership.nodes_are_behind:
            return membership.question
        before, after = world.phase if world is not None else None, decision.world.phase
        assert after in TRANSITIONS[before], f"no world goes from {before} to {after}"
        return WriteWorld(Compare(WORLD_KEY, membership.world_revision), decision.world, gone)

    def compare_ranks(self) -> None:
        """If this node coordinates, look for stragglers. The result is published when it names other ranks, and else
        with this node's next paces."""
        self.membership.compare_ranks()
        told, found = self.record.comparison, self.membership.own_comparison
        if found is not None and (told is None or found.names != told.names):
            self.report(comparison=found)

    def why_refused(self, policy: Policy) -> str | None:
        """A node with another script or other times than the job's is in no world: it leaves, and says why."""
        leader, joins_anew = self.membership.leader_record, self.came_after_end(policy)
        world = None if joins_anew else self.membership.world
        return why_refused(world, leader, self.record) if leader is not None else None

    def again(self, identity: NodeRecord, joins: int, seen: int) -> NodeRecord:
        """The record of the node's next incarnation; the job had come to generation `seen`."""
        was, incarnation = self.record, f"{identity.incarnation}.{joins}"
        again = replace(identity, incarnation=incarnation, seen=min(seen, MAX_SEEN))
        return replace(again, leaving=was.leaving, ready=was.ready, step=was.step, recheck=was.recheck)

    def view(self, policy: Policy) -> View:
        """What the coordinator decides from."""
        membership, gone = self.membership, self.membership.detector.gone
        return View(
            tuple(node for node in membership.nodes if node.incarnation not in gone),
            membership.world,
            membership.world_since,
            membership.arrivals,
            membership.ready_since,
            gone,
            self.runs_again(policy),
            self.came_after_world(policy),
            membership.inquiry_since,
        )

    def report(self, **fields: Any) -> None:
        """These fields of the record."""
        self.record = replace(self.record, **fields)

    def mark(self, generation: int, condition: Condition) -> bool:
        """The condition holds for this node's workers of the generation. True when that is news."""
        before = self.record
        self.record = before.having(generation, condition)
        return not before.has(condition, generation)

    def advanced(self, generation: int, step: int) -> None:
        progress = self._progress(generation)
        reached = step if progress.reached is None else max(progress.reached, step)
        step = max(self.record.step, step)
        self.record = replace(self.record, step=step, progress=replace(progress, reached=reached))

    def loaded(self, generation: int, step: int | None) -> None:
        self.record = replace(self.record, progress=replace(self._progress(generation), loaded=step))

    def failed(self, failure: Failure) -> None:
        """The first failure of a generation counts, as the others follow from it; but no collateral before a root."""
        first = self.record.failure
        root = first is not None and first.collateral and not failure.collateral
        if first is None or first.generation < failure.generation or root:
            self.record = replace(self.record, failure=failure)

    def _progress(self, generation: int) -> GenerationProgress:
        known = self.record.progress
        return known if known and known.generation == generation else GenerationProgress(generation)

    def suspects(self, *, may_be_unleased: bool, now: float) -> Suspects:
        """The peers to ask who they are. `may_be_unleased`: members may train whose leases the store has lost."""
        membership = self.membership
        world = membership.world
        cut_off = self.validity.suspects(now)
        if cut_off or world is None:
            return cut_off
        if membership.coordinates:
            missing = may_still_train(world, membership.nodes) if may_be_unleased else ()
            return slow_to_stop(world, membership.nodes, self.incarnation) or out_of_sight(missing)
        leader = membership.leader_record
        if leader is None or self.written is None:
            return {}
        return slow_to_go_on(world, leader, self.written, membership.detector.gone)


def newest(one: World | None, other: World | None) -> World | None:
    """The one of the higher generation; of one generation `other`."""
    if one is None or (other is not None and other.generation >= one.generation):
        return other
    return one


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node's state after a turn."""

    node: str
    incarnation: str
    undisturbed: int = 0
    """The generation whose workers run here and have not been asked to stop; 0 when there is none."""
    lease: LeaseId | None = None
    confirmed_at: float | None = None
    """When the newest confirmed keep-alive of the lease was sent; None without a lease."""
    proven_until: float = -math.inf
    """Until then the lease cannot have ended."""
    good_until: float = -math.inf
    """Until then no other node can have been given this node's place, if nothing more is known (I10)."""
    whole_at: float = -math.inf
    """The newest instant at which every member of the world that runs here was known to run it."""
    world: World | None = None
    world_revision: int = 0
    world_since: float = 0.0
    """When this node first saw the world in its present phase."""
    known_nodes: tuple[NodeRecord, ...] = ()
    """Oldest first; complete only on the coordinator."""
    leaving: bool = False
    """It was asked to leave its job."""
    coordinates: bool = False
    coordinator: str | None = None
    waiting_for: str = ""
    """A noun phrase or a sentence, which follows "waiting: "."""
    backoff_s: float = 0.0
    """The coordinator's pause before the next generation; 0 on other nodes, and when there is none."""

    paces: Paces | None = None
    """How fast this node's workers are."""
    comparison: PaceComparison | None = None
    """The coordinator's comparison of the paces of all nodes, for the present generation."""

    def lease_good(self, now: float) -> bool:
        return now < self.good_until

    def introduction(self, now: float) -> PeerStatus:
        """What this node answers a peer."""
        known_whole = self.undisturbed and self.whole_at > -math.inf
        return PeerStatus(
            self.node,
            self.incarnation,
            self.undisturbed,
            confirmed_s=now - self.confirmed_at if self.confirmed_at is not None else None,
            whole_s=now - self.whole_at if known_whole else None,
        )


def snapshot_of(
    session: Session, undisturbed: int, waiting_for: str, backoff_s: float, now: float
) -> NodeSnapshot:
    membership, validity, leased = session.membership, session.validity, session.lease is not None
    return NodeSnapshot(
        node=session.record.node,
        incarnation=session.incarnation,
        undisturbed=undisturbed,
        lease=session.lease,
        confirmed_at=validity.confirmed_at if leased else None,
        proven_until=validity.proven_until if leased else -math.inf,
        good_until=validity.good_until(now) if leased else -math.inf,
        whole_at=validity.whole_at,
        world=membership.world,
        world_revision=membership.world_revision,
        world_since=membership.world_since,
        known_nodes=membership.nodes,
        leaving=session.record.leaving,
        coordinates=membership.coordinates,
        coordinator=membership.leader,
        waiting_for=waiting_for,
        backoff_s=backoff_s,
        paces=session.record.paces,
        comparison=membership.comparison,
    )
