"""Brings the newest copies of this node's workers to the partners that the workers have named.

One thread for each partner: it waits until a copy is sealed that the partner does not have, newest first, and sends it
piece by piece. Before each piece it looks whether a newer copy was sealed, and gives up the older one for that. Where
the connection breaks it makes another, and begins anew.

A partner that does not take copies for `UNREACHABLE_AFTER_S` is *unreachable* until it does: the acks beside the slots
say so, and workers do not wait for it any more. One that has no room, or has gone on without the copy, is so at once:
another try soon would not help.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from ...rendezvous.node.transactions import RetryPolicy
from ...threads import Thread
from ...worker.storage.memory.copy_header import FoundCopy
from ...worker.storage.memory.slot_folders import SlotFolder
from ...worker.storage.memory.slots import PIECE_BYTES
from ...worker.storage.replication.acks import Acks, read_acks, write_acks
from ...worker.storage.replication.client import CopyGone
from ...worker.storage.replication.key_file import read_key
from ...worker.storage.replication.link import Link, connect
from ...worker.storage.replication.messages import (
    PUSH_ANSWERS,
    PUSH_ENDS,
    Acknowledged,
    Have,
    Partner,
    Piece,
    Push,
    Refused,
    Replicate,
    Sent,
    Superseded,
)
from ...worker.storage.replication.replica_rules import is_abandoned
from ...worker.wire.messages import ReplicationReport
from ..workers.processes.proc import say
from .copies import MOST_ORDERS, CopyReader, copies_of

SILENCE_S = 10.0
CONNECT_S = 5.0
KEY_WITHIN_S = 5.0
UNREACHABLE_AFTER_S = 10.0

# A partner that is away for good costs one try in these seconds, until the workers name others.
RETRY = RetryPolicy(first_wait_s=0.1, max_wait_s=5.0)

Key = tuple[str, str]
"""Folder and slot."""


class Replicator:
    """All orders that this node's workers have given. For any thread."""

    def __init__(
        self, memory: str, node: str, report: Callable[[ReplicationReport], None], rng: random.Random
    ) -> None:
        """`node` is this one's name; `report` is called in any thread."""
        self.memory = memory
        self.node = node
        self.rng = rng
        self._report = report
        self._orders: dict[str, _Order] = {}

    def replicate(self, order: Replicate) -> None:
        digest = SlotFolder.of(order.directory).directory
        before = self._orders.pop(digest, None)
        if before is not None:
            before.end()
        self._orders[digest] = _Order(self, digest, order, self._report)
        if len(self._orders) > MOST_ORDERS:
            self._orders.pop(next(iter(self._orders))).end()
        self._orders[digest].start()

    def close(self) -> None:
        for order in self._orders.values():
            order.end()

    def look(self) -> None:
        """Some copy may have been sealed."""
        for order in list(self._orders.values()):
            order.look()


class _Order:
    """One checkpoint directory's."""

    def __init__(
        self, of: Replicator, digest: str, order: Replicate, report: Callable[[ReplicationReport], None]
    ) -> None:
        self._of = of
        self._digest = digest
        self._order = order
        self._report = report
        self._looking = threading.Lock()
        """Held for a look, so that an older one does not come after a newer one."""
        self._changed = threading.Condition()
        self._ended = False
        self._newest: dict[SlotFolder, FoundCopy] = {}
        self._seen: dict[Key, tuple[int, int]] = {}
        """The version of each copy."""
        self._acks: dict[Key, Acks] = {}
        self._failing_since: dict[str, float] = {}
        """By partner, monotonic."""
        self._unreachable: set[str] = set()
        self._reported: tuple[tuple[int, int], tuple[str, ...]] = (order.generation, 0), ()
        """The newest version that all partners have, and who was given up."""

    def start(self) -> None:
        self.look()
        for partner in self._order.partners:
            Thread(lambda partner=partner: self._serve(partner), f"push-{partner.node}").start()  # type: ignore[misc]

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def look(self) -> None:
        with self._looking:
            found: dict[SlotFolder, FoundCopy] = {}
            try:
                for copy in copies_of(self._of.memory, self._digest):
                    if self._is_wanted(copy):
                        newest = found.get(copy.folder)
                        if newest is None or newest.header.version < copy.header.version:
                            found[copy.folder] = copy
            except OSError:
                return  # the folder goes: the agent ends
            self._saw(found)

    def _saw(self, found: dict[SlotFolder, FoundCopy]) -> None:
        with self._changed:
            if self._ended:
                return
            self._newest = found
            for copy in found.values():
                key = copy.folder.name, copy.slot
                if self._seen.get(key) != copy.header.version:
                    self._seen[key] = copy.header.version
                    self._write(copy, self._known(copy))
            self._changed.notify_all()

    def _known(self, copy: FoundCopy) -> tuple[str, ...]:
        """Who has it, as far as a process before this one was told: a newer copy may leave no time to ask again."""
        folder = os.path.join(self._of.memory, copy.folder.name)
        return read_acks(folder, copy.slot, copy.header.version, self._order.generation).nodes

    def _is_wanted(self, copy: FoundCopy) -> bool:
        header, order = copy.header, self._order
        return (
            not copy.folder.origin
            and header.shards is not None
            and not header.rng_holes
            and not is_abandoned(header.version, generation=order.generation, resumed=order.resumed)
        )

    def _gets(self, partner: Partner, copy: FoundCopy) -> bool:
        loaded = copy.header.version <= self._order.resumed
        return copy.folder.local_rank in (partner.loaded_ranks if loaded else partner.local_ranks)

    # ---------------------------------------------------------------- one partner's thread

    def _serve(self, partner: Partner) -> None:
        link: Link | None = None
        attempt = 0
        while (copy := self._next(partner)) is not None:
            began = time.monotonic()
            try:
                if link is None:
                    key = read_key(self._of.memory, KEY_WITHIN_S)
                    link = connect(partner.address, key, CONNECT_S)
                    link.silence_s = SILENCE_S
                if self._push(link, copy):
                    self._acknowledged(partner, copy)
                attempt = 0
            except (OSError, RefusedCopy) as error:
                if isinstance(error, CopyGone):
                    self.look()
                    if self._is_superseded(copy):
                        continue  # else it is listed, and cannot be opened: a failure as any other
                elif not isinstance(error, RefusedCopy) and link is not None:
                    link.close()
                    link = None
                self._failed(partner, error, began)
                self._pause(RETRY.wait_s(attempt, self._of.rng))
                attempt += 1
        if link is not None:
            link.close()

    def _next(self, partner: Partner) -> FoundCopy | None:
        """The newest that the partner does not have, when there is one; None: the order has ended."""
        with self._changed:
            while not self._ended:
                missing = [
                    copy
                    for copy in self._newest.values()
                    if self._gets(partner, copy)
                    and partner.node not in self._acks[copy.folder.name, copy.slot].nodes
                ]
                if missing:
                    return max(
                        missing, key=lambda copy: (copy.header.version, -(copy.folder.local_rank or 0))
                    )
                self._changed.wait()
        return None

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            if not self._ended:
                self._changed.wait_for(lambda: self._ended, pause_s)

    def _push(self, link: Link, copy: FoundCopy) -> bool:
        """Whether the partner has acknowledged it; False: there is a newer one. Raises OSError, CopyGone,
        RefusedCopy."""

        def superseded() -> bool:
            if self._ended:
                raise ConnectionError("the workers have named other partners")
            return self._is_superseded(copy)

        sender = Sender(self._of.node, superseded=superseded)
        with CopyReader(self._of.memory, copy.folder, copy.slot, copy.header.version) as reader:
            return sender.push(link, reader)

    def _is_superseded(self, copy: FoundCopy) -> bool:
        with self._changed:
            newest = self._newest.get(copy.folder)
            return newest is None or newest.header.version != copy.header.version

    # ---------------------------------------------------------------- what came of it

    def _acknowledged(self, partner: Partner, copy: FoundCopy) -> None:
        with self._changed:
            self._failing_since.pop(partner.node, None)
            if partner.node in self._unreachable:
                self._unreachable.discard(partner.node)
                say(f"node {partner.node} takes replicas again")
            if self._ended or not self._has(copy):
                return
            key = copy.folder.name, copy.slot
            self._write(copy, (*self._acks[key].nodes, partner.node))
            self._report_progress()

    def _failed(self, partner: Partner, error: Exception, began: float) -> None:
        """`began`: when it was tried, monotonic."""
        with self._changed:
            if self._ended:
                return
            now = time.monotonic()
            since = self._failing_since.setdefault(partner.node, began)
            lasts = isinstance(error, RefusedCopy) and error.lasts
            if partner.node in self._unreachable or not (lasts or now - since >= UNREACHABLE_AFTER_S):
                return
            self._unreachable.add(partner.node)
            say(
                f"node {partner.node} at {partner.address} does not take replicas, and training goes on without them:"
                f" {error}. It is asked again and again; until it does, the loss of this node may cost the steps since"
                " the last checkpoint on disk"
            )
            for copy in self._newest.values():
                self._write(copy, self._acks[copy.folder.name, copy.slot].nodes)
            self._report_progress()

    def _has(self, copy: FoundCopy) -> bool:
        """Whether the slot is still seen with that copy."""
        return self._seen.get((copy.folder.name, copy.slot)) == copy.header.version

    def _write(self, copy: FoundCopy, nodes: tuple[str, ...]) -> None:
        """The lock is held."""
        generation, step = copy.header.version
        unreachable = tuple(sorted(self._unreachable))
        acks = Acks(generation, step, self._order.generation, tuple(sorted(nodes)), unreachable)
        self._acks[copy.folder.name, copy.slot] = acks
        with contextlib.suppress(OSError):  # the folder goes, or the memory is full
            write_acks(os.path.join(self._of.memory, copy.folder.name), copy.slot, acks)

    def _report_progress(self) -> None:
        """The lock is held."""
        newest = self._newest.values()
        whole = all(
            partner.node in self._acks[copy.folder.name, copy.slot].nodes
            for partner in self._order.partners
            for copy in newest
            if self._gets(partner, copy)
        )
        versions = {copy.header.version for copy in newest}
        unreachable = tuple(sorted(self._unreachable))
        if not (whole and len(versions) == 1):
            if self._reported[1] == unreachable:
                return
            version = self._reported[0]
        else:
            [version] = versions
        self._reported = version, unreachable
        self._report(ReplicationReport(*version, unreachable))


# ---------------------------------------------------------------- pushing

LASTING = ("no_room", "abandoned")
"""Refusals of which the next try would bring another."""


class RefusedCopy(Exception):
    """The other node does not take the copy now."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.reason)
        self.lasts = refusal.why in LASTING


@dataclass(frozen=True, slots=True)
class Sender:
    """`node` is the one whose copies are sent. `pause` is called before so many bytes go, `sent` after."""

    node: str
    pause: Callable[[int], None] = lambda count: None
    sent: Callable[[int], None] = lambda count: None
    superseded: Callable[[], bool] = lambda: False
    """There is a newer copy, which makes this one useless. Looked at before each piece."""

    def push(self, link: Link, reader: CopyReader) -> bool:
        """Whether the other node has acknowledged it; False: superseded.

        Raises OSError, CopyGone, RefusedCopy, and what `pause` and `superseded` raise.
        """
        header, sums = reader.header, list[int]()
        link.send(Push(self.node, reader.folder, header))
        answer = link.receive(PUSH_ANSWERS)
        if isinstance(answer, Have):
            return True
        if isinstance(answer, Refused):
            raise RefusedCopy(answer)
        with memoryview(bytearray(min(PIECE_BYTES, header.size))) as buffer:
            for begin in range(0, header.size, PIECE_BYTES):
                if self.superseded():
                    link.send(Superseded())
                    return False
                with buffer[: min(PIECE_BYTES, header.size - begin)] as piece:
                    try:
                        reader.read(begin, piece)
                    except CopyGone:
                        link.send(Superseded())
                        raise
                    sums.append(zlib.crc32(piece))
                    link.send(Piece(len(sums) - 1), piece, sums[-1], self.pause)
                    self.sent(len(piece))
        link.send(Sent(tuple(sums)))
        end = link.receive(PUSH_ENDS)
        if not isinstance(end, Acknowledged):
            raise RefusedCopy(end)
        with contextlib.suppress(OSError):  # no room for the sums: the copy goes without
            reader.add_sums(tuple(sums))
        return True
