"""Takes copies that other nodes bring into this node's memory.

Of a rank's shards it is a replica, which has two slots, like any state: the one that was acknowledged stays whole while
the next one comes. A state that is the same on all ranks, which a node that leaves hands over, comes into the slots of
this node's own workers, where the next ones find it. Where the connection breaks, what has come of a copy is lost.

Invariant: a replica is sealed, and acknowledged, after all its bytes are here and match the checksums of the sender's
header; where that has none, those that the sender has computed while it sent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ...worker.storage.memory.available_memory import Need, limiting_levels
from ...worker.storage.memory.copy_header import Header
from ...worker.storage.memory.slot_folders import SlotFolder, all_folders_of
from ...worker.storage.memory.slots import PIECE_BYTES, NoRoom, OpenSlot, Slots, SlotsBusy
from ...worker.storage.replication.copy_rule import Version
from ...worker.storage.replication.link import Damaged, Link
from ...worker.storage.replication.messages import (
    PUSHED,
    AbandonNewer,
    Acknowledged,
    Have,
    Piece,
    Push,
    Refused,
    Replicate,
    Send,
    Sent,
    Settled,
)
from ...worker.storage.replication.replica_rules import is_abandoned, is_superfluous, is_twin
from .copies import headers_in

TAKE_OVER_S = 5.0
"""How long a push waits for the end of another one of the same replica, whose connection it has ended."""

MOST_CHARS = 500

Sums = tuple[int, ...]
"""Checksums of pieces."""


class Overtaken(ConnectionError):
    """Another connection brings this replica now."""


@dataclass(slots=True)
class _Replica:
    """One worker's shards, or a whole state, from another node; `lock` is held by who brings or drops copies of it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None
    incoming: Version | None = None
    """Of the copy that is on its way here."""


class Receiver:
    """All that other nodes have brought here. For any thread."""

    def __init__(self, memory: str, limit: int) -> None:
        """`limit` is the most bytes that all copies here may take."""
        self._memory = memory
        self._limit = limit
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._orders: dict[str, Replicate] = {}
        """The newest of each directory, by its digest."""
        self._room = threading.Lock()
        """Held while memory is looked at and taken."""

    # ---------------------------------------------------------------- orders

    def replicate(self, order: Replicate) -> None:
        """From now on what the workers have abandoned is not taken; what was taken before is dropped."""
        self._orders[SlotFolder.of(order.directory).directory] = order
        self._drop(order.directory, lambda version: _is_abandoned(version, order))

    def settle(self, order: Settled) -> None:
        """Drop replicas whose node brings them here no more: an assigned one has brought that version."""
        settled = order.generation, order.step
        for folder in self._replica_folders(order.directory):
            replica = self._replica(folder)
            if not replica.lock.acquire(blocking=False):
                continue  # it is being brought
            try:
                versions = [header.version for header in headers_in(self._memory, folder).values()]
                if is_superfluous(versions, settled):
                    shutil.rmtree(os.path.join(self._memory, folder.name), ignore_errors=True)
            finally:
                replica.lock.release()

    def abandon(self, order: AbandonNewer) -> None:
        newest = order.generation, order.step
        self._drop(order.directory, lambda version: version > newest)

    def _drop(self, directory: str, unwanted: Callable[[Version], bool]) -> None:
        for folder in self._replica_folders(directory):
            incoming = self._replica(folder).incoming
            versions = [header.version for header in headers_in(self._memory, folder).values()]
            versions += [incoming] if incoming is not None else []
            if not any(map(unwanted, versions)):
                continue  # a push of it is not disturbed
            with (
                contextlib.suppress(Overtaken, FileNotFoundError),
                self._taken(folder),
                contextlib.closing(Slots(self._memory, folder, create=False)) as slots,
            ):
                slots.drop(unwanted)

    def _replica_folders(self, directory: str) -> list[SlotFolder]:
        found = all_folders_of(self._memory, SlotFolder.of(directory).directory)
        return [folder for folder in found if folder.origin]

    # ---------------------------------------------------------------- pushes

    def receive(self, link: Link, push: Push) -> None:
        """The copy that is offered. Raises OSError, and then the connection is of no more use."""
        folder = push.folder
        if (push.header.shards is None) != (folder.local_rank is None):
            raise Damaged(
                "what is offered is neither one rank's shards nor a state that is the same on all ranks"
            )
        if folder.local_rank is not None and not folder.origin:
            folder = folder.replica_of(push.node)
        try:
            with self._taken(folder, link) as replica:
                self._receive(link, push, folder, replica)
        except Overtaken as error:
            link.send(Refused("busy", str(error)))

    def _receive(self, link: Link, push: Push, folder: SlotFolder, replica: _Replica) -> None:
        header = push.header
        if self._is_abandoned(header, folder.directory):
            link.send(_abandoned(header))
            return
        if self._is_here(folder, header):
            link.send(Have())
            return
        replica.incoming = header.version
        try:
            with self._slot_for(folder, header) as (slots, opened):
                link.send(Send())
                sums = _pieces(link, opened, header)
                if sums is None:
                    return
                if self._is_abandoned(header, folder.directory):
                    link.send(_abandoned(header))
                    return
                slots.put_header(opened.name, replace(header, sums=sums))
            link.send(Acknowledged())
        except NoRoom as error:
            link.send(Refused("no_room", str(error)[:MOST_CHARS]))
        except SlotsBusy as error:
            link.send(Refused("busy", str(error)[:MOST_CHARS]))
        finally:
            replica.incoming = None

    def _is_abandoned(self, header: Header, directory: str) -> bool:
        order = self._orders.get(directory)
        return order is not None and _is_abandoned(header.version, order)

    def _is_here(self, replica: SlotFolder, header: Header) -> bool:
        """Its very bytes as a replica, or the same shards as a copy of this node's own workers; of a state that is the
        same on all ranks also a newer one."""
        if header.shards is None:
            return any(
                found.version >= header.version for found in headers_in(self._memory, replica).values()
            )
        return any(
            _is_same(found, header) if folder == replica else not folder.origin and is_twin(found, header)
            for folder in all_folders_of(self._memory, replica.directory)
            for found in headers_in(self._memory, folder).values()
        )

    @contextlib.contextmanager
    def _slot_for(self, folder: SlotFolder, header: Header) -> Iterator[tuple[Slots, OpenSlot]]:
        """A new one, which is lost unless it is sealed. Raises NoRoom, SlotsBusy."""
        with contextlib.ExitStack() as stack:
            try:
                slots = stack.enter_context(contextlib.closing(Slots(self._memory, folder)))
                with self._room:
                    self._check_room(slots, header.size)
                    opened = slots.begin(header.size, protected=header.shards.keep if header.shards else None)
                stack.callback(opened.close)
                opened.trim()
            except (OSError, ValueError) as error:
                raise NoRoom(f"no memory for a replica of {header.size} bytes: {error}") from error
            yield slots, opened

    def _check_room(self, slots: Slots, size: int) -> None:
        """Raises NoRoom."""
        need = Need.of(slots, size)
        if not need.grows:
            return
        others = slots.claimed_by_others()
        if need.both + others > self._limit:
            raise NoRoom(
                f"two copies of a replica take {need.both} bytes, what else is in memory here needs {others}, and "
                f"{self._limit} are allowed: raise --memory-checkpoints there, and the size of /dev/shm if need be"
            )
        for now in limiting_levels(self._memory):
            if not need.fits(now):
                raise NoRoom(
                    f"{now.of} has {now.available} bytes left of {now.total}, and a replica would take {need.grows} "
                    "more: give the job more memory, or lower --memory-replicas"
                )

    def _replica(self, folder: SlotFolder) -> _Replica:
        with self._lock:
            return self._replicas.setdefault(folder.name, _Replica())

    @contextlib.contextmanager
    def _taken(self, folder: SlotFolder, link: Link | None = None) -> Iterator[_Replica]:
        """Alone; a connection that brings this replica is ended. Raises Overtaken when it does not end."""
        replica = self._replica(folder)
        bringing = replica.link
        if bringing is not None:
            with contextlib.suppress(OSError):
                bringing.connection.shutdown(socket.SHUT_RDWR)
        if not replica.lock.acquire(timeout=TAKE_OVER_S):
            raise Overtaken(f"{folder.name} is brought over another connection")
        try:
            replica.link = link
            yield replica
        finally:
            replica.link = None
            replica.lock.release()


def _pieces(link: Link, opened: OpenSlot, header: Header) -> Sums | None:
    """Take all pieces of the copy into the slot; their checksums. None: the rest does not come, or was refused.

    Raises OSError.
    """
    sums: list[int] = []
    with mmap.mmap(opened.fd, header.size) as mapping, memoryview(mapping) as view:
        while isinstance(message := link.receive(PUSHED), Piece):
            begin = len(sums) * PIECE_BYTES
            if message.index != len(sums) or begin >= header.size:
                raise Damaged(f"piece {message.index} came, {len(sums)} was to come")
            with view[begin : min(begin + PIECE_BYTES, header.size)] as room:
                sums.append(link.receive_payload(room))
    if not isinstance(message, Sent):
        return None
    found = tuple(sums)
    whole = len(found) == -(-header.size // PIECE_BYTES)
    if not whole or found != message.sums or (header.sums and header.sums != found):
        link.send(Refused("damaged", f"version {header.version} does not match its checksums"))
        return None
    return found


def _is_abandoned(version: Version, order: Replicate) -> bool:
    return is_abandoned(version, generation=order.generation, resumed=order.resumed)


def _abandoned(header: Header) -> Refused:
    return Refused("abandoned", f"the job has gone on without version {header.version}")


def _is_same(found: Header, header: Header) -> bool:
    known = found.sums and header.sums
    return found.is_same_copy(header) and (not known or found.sums == header.sums)
