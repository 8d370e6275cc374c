"""Brings the bytes of one state to every rank, once for each node: its ranks map what one of them has got.

A rank that has the bytes (a file that was verified, a copy in memory) maps them where they are. Of a node without them
the first rank receives them into the node's slot in memory, and the others map that. Where a node has no such memory,
or no room in it, each of its ranks receives them by itself, into memory that it maps as well: never a read and an
unpickled copy beside each other.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BufferedRandom, BufferedReader
from typing import NamedTuple

from ....codec import Count
from ...errors import CheckpointError
from ...ranks.group import Group, because, raise_together
from ...storage.disk.shard_files import Footer
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...storage.memory.slots import HeldSlot, NoRoom, OpenSlot, SlotsBusy, sums_of

logger = logging.getLogger(__name__)

_CRC = struct.Struct("!Q")
Bytes = BufferedReader | BufferedRandom


class SharedBytes(NamedTuple):
    """Those of a copy, and where its table lies in them: offset and length. `sums`: their checksums, if known."""

    stream: Bytes
    table: tuple[int, int] = (0, 0)
    sums: tuple[int, ...] = ()

    @classmethod
    def of_slot(cls, held: HeldSlot) -> SharedBytes:
        return cls(held.stream, held.header.table, held.header.sums)

    @classmethod
    def of_part(cls, stream: BufferedReader, footer: Footer) -> SharedBytes:
        return cls(stream, footer.table, footer.sums)


class Route(enum.Enum):
    """By which the bytes come to a rank."""

    HAS = "has them"
    FILLS = "receives them into its node's slot"
    MAPS = "maps its node's slot"
    RECEIVES = "receives them for itself alone"


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank has, as it is sent to the others."""

    has: str = ""
    """Names the bytes that it has; a rank that has not verified its own must have those of its node's first rank."""
    folder: str = ""
    """Of the node's slots; empty: no memory."""
    opened: bool = False
    """A slot there waits for the bytes."""
    table: tuple[Count, Count] = (0, 0)
    """Its place in the bytes that it has."""
    sums: tuple[Count, ...] = ()
    """The checksums of these bytes, if they are known."""


def first_ranks(places: Sequence[str]) -> list[int]:
    """By rank, the lowest rank in the same place; in an unknown one ("") each rank is alone."""
    return [places.index(place) if place else rank for rank, place in enumerate(places)]


def routes(ranks: Sequence[RankBytes], first: Sequence[int]) -> list[Route]:
    """By rank; `first` as of `first_ranks`."""
    found = []
    for rank, mine in enumerate(ranks):
        of_node = ranks[first[rank]]
        if mine.has and mine.has == of_node.has:
            found.append(Route.HAS)
        elif of_node.opened and mine.folder == of_node.folder:
            found.append(Route.FILLS if first[rank] == rank else Route.MAPS)
        else:
            found.append(Route.RECEIVES)
    return found


class NodeSharing:
    """One transfer, as one rank takes part in it. What it opens is closed with `stack`."""

    def __init__(
        self, group: Group, memory: SlotMemory | None, first: Sequence[int], stack: contextlib.ExitStack
    ) -> None:
        self._group = group
        self._memory = memory
        self._first = first
        self._stack = stack

    def transfer(
        self,
        owner: int,
        header: Header,
        mine: SharedBytes | None,
        name: str,
        check: Callable[[Bytes], None] = lambda _: None,
    ) -> SharedBytes:
        """An open file with the bytes, for this rank to map. `mine` are its own, called `name`.

        `header` is what a slot with them says, but for table and checksums: these are the owner's. `check` reads what
        was received, too, and raises CheckpointError when that cannot be believed. A rank that fails raises when all
        have come to the same point, and so do the others.
        """
        group, memory = self._group, self._memory
        first = self._first[group.rank] == group.rank
        opened = self._open_slot(header.size) if first and mine is None else None
        folder = memory.folder if memory is not None else ""
        stream = mine.stream if mine is not None else None
        own = RankBytes(folder=folder, opened=opened is not None)
        if mine is not None:
            own = replace(own, has=name, table=mine.table, sums=mine.sums)
        ranks = group.exchange(own)
        header = replace(header, table=ranks[owner].table, sums=ranks[owner].sums)
        found = routes(ranks, self._first)
        route = found[group.rank]
        received = self._receiver(opened) if route in (Route.FILLS, Route.RECEIVES) else None
        if {Route.FILLS, Route.RECEIVES}.intersection(found):
            error = self._send(owner, header, stream if group.rank == owner else received, received, check)
            if opened is not None and memory is not None:
                error = _keep(memory, opened, header, error)
            raise_together(group, error)
        if route is Route.MAPS:
            assert memory is not None
            held = self._stack.enter_context(memory.hold_verified(header.version))
            return SharedBytes.of_slot(held)
        if route is Route.HAS:
            assert mine is not None
            return mine
        assert received is not None
        return SharedBytes(received, header.table, header.sums)

    def _open_slot(self, size: int) -> OpenSlot | None:
        if self._memory is None or not self._memory.keeps_common:
            return None
        try:
            return self._memory.open_slot(size)
        except (NoRoom, SlotsBusy) as refusal:
            logger.warning("each rank of this node receives the state for itself: reason=%s", refusal)
            return None

    def _receiver(self, opened: OpenSlot | None) -> BufferedRandom:
        fd = (
            os.dup(opened.fd)
            if opened is not None
            else os.memfd_create("elastic-agent-state", os.MFD_CLOEXEC)
        )
        return self._stack.enter_context(os.fdopen(fd, "r+b"))

    def _send(
        self,
        owner: int,
        header: Header,
        stream: Bytes | None,
        received: BufferedRandom | None,
        check: Callable[[Bytes], None],
    ) -> CheckpointError | None:
        """Every rank: let the owner's bytes go round. What is wrong with what came here, or with reading them."""
        error: CheckpointError | None = None
        crc = b""
        try:
            crc = _CRC.pack(self._group.send(stream, header.size, source=owner))
        except OSError as failure:
            error = because(CheckpointError, f"step {header.step} cannot be read: {failure}", failure)
        crcs = self._group.gather(crc)
        if received is None or error is not None:
            return error
        try:
            received.flush()
            broken = crcs[self._group.rank] != crcs[owner]
            if broken or (header.sums and sums_of(received, header.size) != header.sums):
                raise CheckpointError(f"step {header.step} broke on its way from rank {owner}: start again")
            received.seek(0)
            check(received)
        except CheckpointError as refusal:
            return refusal
        except OSError as failure:
            return because(CheckpointError, f"step {header.step} cannot be received: {failure}", failure)
        return None


def _keep(
    memory: SlotMemory, opened: OpenSlot, header: Header, error: CheckpointError | None
) -> CheckpointError | None:
    try:
        if error is None:
            memory.keep(opened, header)
    except OSError as failure:
        error = because(CheckpointError, f"step {header.step} cannot be kept in memory: {failure}", failure)
    if error is not None:
        opened.close()
    return error
