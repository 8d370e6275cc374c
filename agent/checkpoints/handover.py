"""Brings what only this node has in memory to nodes that go on, before this node leaves.

It runs after this node's workers have ended and before that is written to the store: the next generation waits for it,
and finds what it brings as it finds any replica. It has a deadline. `report_lost` logs what no other node has taken by
then: shards that are not on disk either are an error. Of a state that is the same on all ranks it warns that no other
node took it: whether it is on disk is for the disk writer to say.

What goes to whom is decided by pure functions of the job's nodes and of the copies in this node's memory. A copy is
handed over to a node of the next world, as far as that is known: shards that come to one that stands by are not lost
either, as the others load from there. Each leaving node does so with the copies of its own workers, and with
replicas whose node does not: it is gone, or stands by in the next world. Of a state that is the same on all ranks
nothing needs to go anywhere when a member stays that has written that it keeps it.

That condition, `STATE_SAVED`, proves that the state outlives that node's workers: in the node's memory, or, where some
node has no room for a copy, on rank 0's disk. So one case is not handed over: rank 0's node leaves with a disk that no
other node sees, and the one that stays had no room. It would have none for what is handed over, either.

All nodes rank the takers of a copy in the same way (by a hash), so that two that have a replica of it choose one taker,
which takes it once. Those that are known to have it come first: asked to keep it, they answer that they do.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...rendezvous.coordinator.exclusions import left_out
from ...rendezvous.errors import RecordInvalid, StoreError, StoreUnavailable
from ...rendezvous.messages import fits
from ...rendezvous.node.transactions import RetryPolicy
from ...rendezvous.records import NODES_PREFIX, Condition, Endpoint, NodeRecord, World
from ...rendezvous.store.interface import Entry, Store
from ...rendezvous.text import shortened
from ...threads import Thread
from ...worker.storage.disk.checkpoint_files import CheckpointFiles
from ...worker.storage.memory.copy_header import FoundCopy, Header
from ...worker.storage.memory.slot_folders import SlotFolder
from ...worker.storage.memory.slots import Slots
from ...worker.storage.replication.acks import read_acks
from ...worker.storage.replication.client import CopyGone
from ...worker.storage.replication.key_file import read_key
from ...worker.storage.replication.link import Link, connect
from ...worker.wire.environment import Run
from ...worker.wire.shared_progress import clock
from .copies import CopyReader, copies_of, kept_orders
from .replicator import RefusedCopy, Sender

log = logging.getLogger(__name__)

CONNECT_S = 5.0
SILENCE_S = 10.0
TRIES = 4
"""Of one node, before the next one is asked."""
LOOK_S = 0.05
"""Between two looks whether the others' workers have ended."""
DISK_S = 2.0
"""For a look at the disk: it may not answer."""

_TIME_OVER = "the time for that was over, raise --stop-grace"
_NO_NODE = "no other node stays or comes, let one stay until another has joined"

# At most 0.7 s for the tries of one node.
RETRY = RetryPolicy(first_wait_s=0.1, max_wait_s=0.4)


class OutOfTime(Exception):
    """The time for it is over."""


@dataclass(frozen=True, slots=True)
class Left:
    """A copy that no other node has taken, and why."""

    copy: FoundCopy
    reason: str
    taker: bool
    """Some node goes on that could have taken it, as far as is known."""


class Handover:
    """Of one agent. `run` and `report_lost` are for one thread at a time, `cut` and `hurry` for any."""

    def __init__(self, memory: str, node: str, store: Store, clock: Callable[[], float] = clock) -> None:
        """`memory` is the agent's folder, `node` this one's name."""
        self._memory = memory
        self._node = node
        self._store = store
        self._clock = clock
        self._cut = threading.Event()
        self._deadline, self._latest = 0.0, math.inf
        self._links: dict[str, Link] = {}
        self._left: tuple[Left, ...] = ()
        self._sent_bytes = 0

    def begin(self, world: World, deadline: float, done: Callable[[], None], *, kept: bool) -> None:
        """`run` in a thread of its own; `done` is called in it at the end, whatever comes of it."""

        def work() -> None:
            self.run(world, deadline, kept=kept)
            done()

        Thread(work, "handover", done).start()

    def cut(self) -> None:
        """There is no more time."""
        self._cut.set()

    def hurry(self, deadline: float) -> None:
        """There is less time, if that deadline comes before: on the clock."""
        self._latest = deadline

    def run(self, world: World, deadline: float, *, kept: bool) -> None:
        """This node leaves `world`. Once. `deadline` is on the clock.

        `kept`: this node has the state after the last step that all have done.
        """
        self._deadline = deadline
        copies = tuple(self._copies())
        # Shards never wait until it is known who keeps a state that is the same on all ranks.
        shards = tuple(copy for copy in copies if copy.folder.local_rank is not None)
        states = tuple(copy for copy in copies if copy.folder.local_rank is None)
        try:
            self._left = tuple(
                left for some in (shards, states) if some for left in self._hand_over(world, some, kept=kept)
            )
        finally:
            for link in self._links.values():
                link.close()
            self._links.clear()

    def _hand_over(self, world: World, copies: Sequence[FoundCopy], *, kept: bool) -> Sequence[Left]:
        """Those of these copies that no other node has taken."""
        began, sent_before = self._clock(), self._sent_bytes
        try:
            seen = self._others(world, copies, kept=kept)
        except (StoreError, RecordInvalid, OutOfTime) as error:
            # A replica's own node hands over the same, or has it.
            own = [copy for copy in copies if not copy.folder.origin]
            return [Left(task.copy, str(error), True) for task in tasks(own, {}, Others(()), kept=kept)]
        todo = tasks(copies, self._acked(copies, world.generation), seen, kept=kept)
        reasons = [(task, self._bring(task)) for task in todo]
        if self._sent_bytes > sent_before:
            log.info(
                "handed over to other nodes: step=%d copies=%d bytes=%d took_s=%.2f",
                max(task.copy.header.step for task in todo),
                sum(not reason for _, reason in reasons),
                self._sent_bytes - sent_before,
                self._clock() - began,
            )
        return [Left(task.copy, reason, bool(task.takers)) for task, reason in reasons if reason]

    # ---------------------------------------------------------------- what there is

    def _copies(self) -> Iterator[FoundCopy]:
        """All on this node, with the random states that its ranks have written down beside them."""
        with contextlib.suppress(OSError):
            found = {SlotFolder.parse(name) for name in os.listdir(self._memory)}
            for directory in sorted({folder.directory for folder in found if folder is not None}):
                _complete(self._memory, directory)
                yield from copies_of(self._memory, directory)

    def _acked(self, copies: Sequence[FoundCopy], generation: int) -> dict[tuple[str, str], tuple[str, ...]]:
        return {
            (copy.folder.name, copy.slot): read_acks(
                os.path.join(self._memory, copy.folder.name), copy.slot, copy.header.version, generation
            ).nodes
            for copy in copies
            if copy.folder.local_rank is not None and not copy.folder.origin
        }

    def _others(self, world: World, copies: Sequence[FoundCopy], *, kept: bool) -> Others:
        """When those that `waits_for` names have ended their workers. Raises StoreError, RecordInvalid, OutOfTime."""
        attempt, rng = 0, random.Random()
        while True:
            try:
                entries = self._store.read((NODES_PREFIX,)).entries
            except StoreUnavailable as error:
                self._wait(RETRY.wait_s(attempt, rng), f"the store gives no answer, {error}")
                attempt += 1
                continue
            nodes = [NodeRecord.from_json(entry.key, entry.value) for entry in _oldest_first(entries)]
            found = others(world, self._node, nodes)
            busy = waits_for(copies, found, kept=kept)
            if not busy:
                return found
            self._wait(LOOK_S, f"the workers of {shortened(busy)} have not ended in time, raise --stop-grace")

    def _wait(self, wait_s: float, what_for: str) -> None:
        """Raises OutOfTime."""
        if self._cut.wait(min(wait_s, max(0.0, self._left_s()))) or self._is_over():
            raise OutOfTime(what_for)

    def _is_over(self) -> bool:
        return self._cut.is_set() or self._left_s() <= 0.0

    def _left_s(self) -> float:
        return min(self._deadline, self._latest) - self._clock()

    # ---------------------------------------------------------------- bringing it

    def _bring(self, task: Task) -> str:
        """Why it is nowhere else; empty: another node has it."""
        copy, reason, rng = task.copy, _NO_NODE, random.Random()
        sender = Sender(self._node, self._pause, self._count)
        for peer in task.takers:
            for attempt in range(TRIES):
                if self._is_over():
                    return f"{_TIME_OVER}; {reason}" if attempt else _TIME_OVER
                try:
                    with CopyReader(self._memory, copy.folder, copy.slot, copy.header.version) as reader:
                        sender.push(self._link(peer), reader)
                    return ""
                except CopyGone as error:
                    return str(error)
                except OutOfTime:
                    self._drop_link(peer)
                    return f"{_TIME_OVER}; it was on its way to node {peer.node}"
                except RefusedCopy as error:
                    reason = f"node {peer.node}: {error}"
                    if error.lasts:
                        break
                except OSError as error:
                    self._drop_link(peer)
                    reason = f"node {peer.node}: {error}"
                with contextlib.suppress(OutOfTime):
                    self._wait(RETRY.wait_s(attempt, rng), reason)
        return reason

    def _link(self, peer: Peer) -> Link:
        """Raises OSError."""
        link = self._links.get(peer.node)
        if link is None:
            left_s = max(0.1, self._left_s())
            link = connect(
                peer.address, read_key(self._memory, min(CONNECT_S, left_s)), min(CONNECT_S, left_s)
            )
            link.silence_s = min(SILENCE_S, left_s)
            self._links[peer.node] = link
        return link

    def _drop_link(self, peer: Peer) -> None:
        link = self._links.pop(peer.node, None)
        if link is not None:
            link.close()

    def _pause(self, count: int) -> None:
        """Before bytes go. Raises OutOfTime."""
        if self._is_over():
            raise OutOfTime

    def _count(self, count: int) -> None:
        self._sent_bytes += count

    # ---------------------------------------------------------------- what is lost

    def report_lost(self) -> None:
        """Where no node goes on, only the disk writer says what becomes of a state of all ranks."""
        paths = {
            SlotFolder.of(order.directory).directory: order.directory for order in kept_orders(self._memory)
        }
        shards: dict[tuple[str, tuple[int, int]], list[Left]] = {}
        for left in self._left:
            if left.copy.header.shards is not None:
                shards.setdefault((left.copy.folder.directory, left.copy.header.version), []).append(left)
            elif left.taker:
                _log_not_taken(left)
        for (directory, _), lost in shards.items():
            path = paths.get(directory, "")
            if not (path and _on_disk(path, lost[0].copy.header)):
                _log_lost(lost, path)


def _log_not_taken(left: Left) -> None:
    """A state that is the same on all ranks."""
    generation, step = left.copy.header.version
    log.warning(
        "the state after step %d of generation %d was handed over to no other node: %s. Nodes that go on begin with it "
        "where they have it, or find it in the checkpoint directory",
        step, generation, left.reason,
    )  # fmt: skip


def _log_lost(lost: Sequence[Left], path: str) -> None:
    """Shards of one version that are not on disk, as far as can be seen here."""
    generation, step = lost[0].copy.header.version
    headers = [left.copy.header for left in lost]
    ranks = sorted({header.shards.rank for header in headers if header.shards is not None})
    log.error(
        "the shards of rank%s %s after step %d of generation %d are only in the memory of this node, as far as it "
        "knows, and are lost with it: %s. Nodes that go on begin with an older step, or with what they find in the "
        "checkpoint directory%s",
        "s" * (len(ranks) > 1), ", ".join(map(str, ranks)), step, generation, lost[0].reason, path and f" {path}",
    )  # fmt: skip


def _oldest_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.create_revision)


def _complete(memory: str, directory: str) -> None:
    """Put the random states of all ranks into the copies of a state, where all ranks were on this node."""
    with (
        contextlib.suppress(OSError, ValueError),
        contextlib.closing(Slots(memory, SlotFolder(directory), create=False)) as slots,
    ):
        for slot, header in slots.headers().items():
            if header.rng_holes:
                with slots.hold(slot) as held:
                    slots.fill(held, slots.random_states.of(header.version, header.world_size))


def _on_disk(path: str, header: Header) -> bool:
    """Whether the checkpoint directory has that step, of this run. A disk that does not answer has nothing."""
    found: list[bool] = []

    def look() -> None:
        with contextlib.suppress(OSError):
            newest = CheckpointFiles(path, keep=1, run=Run(header.run)).newest_manifest()
            found.append(newest is not None and newest.run == header.run and newest.step >= header.step)

    thread = Thread(look, "handover-disk", lambda: None)
    thread.start()
    thread.join(DISK_S)
    return any(found)


# ---------------------------------------------------------------- what is handed over, and to whom


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that goes on. `address` is of its memory server, HOST:PORT; `ranks` are those that it had until now."""

    node: str
    address: str
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Others:
    """The job's other nodes, as one that leaves sees them."""

    go_on: tuple[Peer, ...]
    """Those of the next world, as far as it is known, that can take a copy: members first."""
    leaving: frozenset[str] = frozenset()
    """They hand over what is theirs."""
    member_keeps: bool = False
    """A member that stays has written that it keeps the state after the last step that all have done."""
    busy: tuple[str, ...] = ()
    """Members that stay and still have workers; none where this node is no member, but stands by: then they train."""
    need_nothing: bool = False
    """They have trained for more than a minute without this node."""


@dataclass(frozen=True, slots=True)
class Task:
    """`takers` are asked one after the other; none: no node goes on."""

    copy: FoundCopy
    takers: tuple[Peer, ...]


def others(world: World, node: str, nodes: Sequence[NodeRecord]) -> Others:
    """`node` leaves `world`, whose generation has ended there, or in which it stands by.

    `nodes` are all that have a lease, oldest first. Where the one that hosts the store leaves, the job ends, and no
    node goes on.
    """
    ranks = {one.incarnation: range(one.first_rank, one.first_rank + one.slots) for one in world.members}
    is_member = any(member.node == node for member in world.members)
    excluded = left_out(world.exclusions)
    stay = [one for one in nodes if one.incarnation in ranks and not one.leaving]
    stay.sort(key=lambda one: not one.has(Condition.STATE_SAVED, world.generation))
    come = [
        one
        for one in nodes
        if one.incarnation not in ranks
        and not one.leaving
        and fits(one.program, world.program)
        and one.node not in excluded
    ]
    come.sort(key=lambda one: not one.ready)
    if any(one.leaving and one.hosts_store for one in nodes):
        stay = come = []
    return Others(
        tuple(
            Peer(one.node, str(Endpoint(one.address, one.memory)), frozenset(ranks.get(one.incarnation, ())))
            for one in _next_world(world, [*stay, *come])
            if one.memory
        ),
        frozenset(one.node for one in nodes if one.leaving and one.memory and one.node != node),
        any(one.has(Condition.STATE_SAVED, world.generation) for one in stay),
        tuple(one.node for one in stay if is_member and not one.has_stopped(world.generation)),
        not is_member and bool(stay) and all(one.has(Condition.STABLE, world.generation) for one in stay),
    )


def _next_world(world: World, nodes: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
    """As the coordinator is going to choose; all, where they are too few for a world."""
    limits = world.limits
    if limits is None:
        return nodes
    most = min(len(nodes), limits.max_nodes)
    return nodes[: most // limits.nodes_multiple_of * limits.nodes_multiple_of] or nodes


def waits_for(copies: Sequence[FoundCopy], others: Others, *, kept: bool) -> tuple[str, ...]:
    """The nodes whose workers have to end first; `kept` as for `tasks`.

    Where this node has the state after the last step, they only matter to a state that is the same on all ranks: until
    one that stays has written that it keeps it.
    """
    if kept and (others.member_keeps or all(copy.folder.local_rank is not None for copy in copies)):
        return ()
    return others.busy


def tasks(
    copies: Sequence[FoundCopy],
    acked: Mapping[tuple[str, str], Collection[str]],
    others: Others,
    *,
    kept: bool,
) -> tuple[Task, ...]:
    """In this order; `copies` are all on this node, and `acked` has the nodes with a replica, by folder and slot.

    `kept`: this node has the state after the last step that all have done, and so no older one counts.
    """
    if others.need_nothing:
        return ()
    found: list[Task] = []
    by_folder = sorted(copies, key=lambda copy: copy.folder.name)
    for folder, of_folder in groupby(by_folder, key=lambda copy: copy.folder):
        newest_first = sorted(of_folder, key=lambda copy: copy.header.version, reverse=True)
        if folder.local_rank is None:
            if not (kept and others.member_keeps):
                found.append(Task(newest_first[0], others.go_on))
        elif not (folder.origin and _has_its_node(newest_first[0], others)):
            for copy in newest_first[:1] if kept else newest_first:
                holders = acked.get((folder.name, copy.slot), ())
                found.append(Task(copy, _ranked(copy, holders, others.go_on)))
    return tuple(sorted(found, key=lambda task: task.copy.header.version, reverse=True))


def _has_its_node(copy: FoundCopy, others: Others) -> bool:
    """A node that goes on, or hands it over itself, has this replica's own copy."""
    here = (*(peer.node for peer in others.go_on), *others.leaving)
    return any(copy.folder.replica_of(node) == copy.folder for node in here)


def _ranked(copy: FoundCopy, holders: Collection[str], peers: Sequence[Peer]) -> tuple[Peer, ...]:
    shards = copy.header.shards
    assert shards is not None, "only shards have a local rank"
    twins = frozenset(shards.twins)

    def rank(peer: Peer) -> tuple[bool, bytes]:
        has_it = peer.node in holders or not twins.isdisjoint(peer.ranks)
        # Of the shards' own name, which is the same wherever a replica of them lies.
        name = f"{copy.folder.directory} {shards.digest} {peer.node}"
        return not has_it, hashlib.sha256(name.encode()).digest()

    return tuple(sorted(peers, key=rank))
