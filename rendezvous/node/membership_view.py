"""What one incarnation of a node knows of its job, as far as it has read the store: the world and the nodes' records.

Who coordinates needs no election: the node with the oldest record does. The coordinator follows all records; the
others follow only its record and their own, and read again when its record goes.

Answers and watches overtake each other, and so do changes of `world` and of `nodes/`. So each of them comes with
the revision at which it was true, and what is known from a later one stands. Instants are seconds on this node's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...health.stragglers import PaceComparison, Watched, compare
from ..errors import RecordInvalid, StoreMismatch
from ..liveness import FailureDetector
from ..records import NODES_PREFIX, WORLD_KEY, Condition, NodeRecord, World, drain_key, node_key
from ..store.interface import Compare, Entry, Read, Snapshot, Subscription

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
        self.succeeded_since: dict[str, float] = {}
        """And at which it first saw its newest success."""
        self.detector = FailureDetector()
        self._job = job
        self._own_key = node_key(node)
        self._drain_key = drain_key(node)
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
            return Read((WORLD_KEY, self._drain_key, NODES_PREFIX))
        return Read((WORLD_KEY, self._drain_key, self._own_key), oldest_under=NODES_PREFIX)

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
        self.subscription = Subscription((WORLD_KEY, self._drain_key, *watched), snapshot.revision)

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
        before, done = known[1] if known is not None else None, Condition.SUCCEEDED
        if done in record.conditions and not (before and before.has(done, record.generation)):
            self.succeeded_since[record.incarnation] = now


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
