"""Brings what only this node has in memory to nodes that go on, before this node leaves.

It runs after this node's workers have ended and before that is written to the store: the next generation waits for it,
and finds what it brings as it finds any replica. It has a deadline. What no other node has taken by then, and is not on
disk either, is an error in the log: `report_lost`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ....rendezvous.errors import RecordInvalid, StoreError, StoreUnavailable
from ....rendezvous.records import NODES_PREFIX, NodeRecord, World
from ....rendezvous.store.interface import Entry, Store
from ....rendezvous.store.requests import RetryPolicy
from ....rendezvous.text import shortened
from ....threads import Thread
from ....worker.storage.disk.checkpoint_files import CheckpointFiles
from ....worker.storage.memory.copy_header import Header
from ....worker.storage.memory.slot_folders import SlotFolder
from ....worker.storage.memory.slots import Slots
from ....worker.storage.replication.acks import read_acks
from ....worker.storage.replication.client import CopyGone, FoundCopy
from ....worker.storage.replication.key_file import read_key
from ....worker.storage.replication.link import Link, connect
from ....worker.wire.run import Run
from .handover_plan import Others, Peer, Task, others, tasks
from .server.copies import CopyReader, copies_of
from .server.orders import kept_orders
from .server.pushing import RefusedCopy, Sender

log = logging.getLogger(__name__)

CONNECT_S = 5.0
SILENCE_S = 10.0
TRIES = 4
"""Of one node, before the next one is asked."""
LOOK_S = 0.05
"""Between two looks whether the others' workers have ended."""
DISK_S = 2.0
"""For a look at the disk: it may not answer."""

# At most 0.7 s for the tries of one node.
RETRY = RetryPolicy(first_wait_s=0.1, max_wait_s=0.4)


class OutOfTime(Exception):
    """The time for it is over."""


@dataclass(frozen=True, slots=True)
class Left:
    """A copy that no other node has taken, and why."""

    folder: SlotFolder
    header: Header
    reason: str
    taker: bool
    """Some node goes on that could have taken it."""


class Handover:
    """Of one agent. `run` and `report_lost` are for one thread at a time, `cut` and `hurry` for any."""

    def __init__(
        self, memory: str, node: str, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        """This node leaves `world`; it may run again, and sends nothing twice. `deadline` is on the clock.

        `kept`: this node has the state after the last step that all have done.
        """
        self._deadline, self._sent_bytes, began = deadline, 0, self._clock()
        copies = tuple(self._copies())
        self._left = ()
        if not copies:
            return
        try:
            seen = self._others(world, kept=kept)
        except (StoreError, RecordInvalid, OutOfTime) as error:
            self._left = tuple(_left(copy, f"the job's nodes are not known: {error}") for copy in copies)
            return
        todo = tasks(copies, self._acked(copies, world.generation), seen, kept=kept)
        try:
            reasons = [(task, self._bring(task)) for task in todo]
        finally:
            for link in self._links.values():
                link.close()
            self._links.clear()
        self._left = tuple(
            _left(task.copy, reason, taker=bool(task.takers)) for task, reason in reasons if reason
        )
        if self._sent_bytes:
            log.info(
                "handed over to other nodes: step=%d copies=%d bytes=%d took_s=%.2f",
                max(task.copy.header.step for task in todo),
                sum(not reason for _, reason in reasons),
                self._sent_bytes,
                self._clock() - began,
            )

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

    def _others(self, world: World, *, kept: bool) -> Others:
        """Without a common last step: when they have ended their workers, too. Raises StoreError, RecordInvalid, and
        OutOfTime."""
        attempt, rng = 0, random.Random()
        while True:
            try:
                entries = self._store.read((NODES_PREFIX,)).entries
            except StoreUnavailable as error:
                self._wait(RETRY.wait_s(attempt, rng), str(error))
                attempt += 1
                continue
            nodes = [NodeRecord.from_json(entry.key, entry.value) for entry in _oldest_first(entries)]
            found = others(world, self._node, nodes)
            if kept or not found.busy:
                return found
            self._wait(LOOK_S, f"the workers of {shortened(found.busy)} have not ended")

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
        copy, reason, rng = task.copy, "no other node stays or comes", random.Random()
        sender = Sender(self._node, self._pause, self._count)
        for peer in task.takers:
            for attempt in range(TRIES):
                if self._is_over():
                    return (
                        f"the time for that was over; {reason}" if attempt else "the time for that was over"
                    )
                try:
                    with CopyReader(self._memory, copy.folder, copy.slot, copy.header.version) as reader:
                        sender.push(self._link(peer), reader)
                    return ""
                except CopyGone as error:
                    return str(error)
                except OutOfTime:
                    self._drop_link(peer)
                    return f"the time for that was over while it went to node {peer.node}"
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
        """Of the last `run`. Where no node goes on, only the disk writer can save a state that is on all nodes."""
        paths = {
            SlotFolder.of(order.directory).directory: order.directory for order in kept_orders(self._memory)
        }
        by_version: dict[tuple[str, tuple[int, int]], list[Left]] = {}
        for left in self._left:
            if left.taker or left.header.shards is not None:
                by_version.setdefault((left.folder.directory, left.header.version), []).append(left)
        for (directory, (generation, step)), lost in by_version.items():
            path = paths.get(directory, "")
            if path and _on_disk(path, lost[0].header):
                continue
            ranks = sorted({left.header.shards.rank for left in lost if left.header.shards is not None})
            what = f"the shards of ranks {', '.join(map(str, ranks))}" if ranks else "the state"
            log.error(
                "%s after step %d of generation %d is only in the memory of this node, and is lost with it: %s. Nodes "
                "that go on begin with an older step, or with what they find in the checkpoint directory%s",
                what, step, generation, lost[0].reason, path and f" {path}",
            )  # fmt: skip


def _oldest_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.create_revision)


def _left(copy: FoundCopy, reason: str, *, taker: bool = True) -> Left:
    return Left(copy.folder, copy.header, reason, taker)


def _complete(memory: str, directory: str) -> None:
    """Put the random states of all ranks into the copies of a state, where all ranks were on this node."""
    folder = SlotFolder(directory)
    if not os.path.isdir(os.path.join(memory, folder.name)):
        return
    with contextlib.suppress(OSError, ValueError), contextlib.closing(Slots(memory, folder)) as slots:
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

    thread = Thread(look, "handover-disk")
    thread.start()
    thread.join(DISK_S)
    return any(found)
