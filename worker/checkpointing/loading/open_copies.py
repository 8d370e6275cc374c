"""Opens the copies of one version wherever they are: in this node's memory, in that of others, or on disk.

What a rank needs whole (its own shards, in a world of the same size) is brought into its own slot and mapped there. Of
all else it reads the ranges that it needs, and no more.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Sequence

from ...errors import CheckpointError
from ...state.sharding.reading import OpenCopy
from ...state.sharding.table import Table
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.manifests import Manifest
from ...storage.disk.shard_files import DiskCopy
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...storage.memory.slots import PIECE_BYTES, NoRoom, Slots, SlotsBusy, sums_of, sums_of_bytes
from ...storage.replication.client import MemoryClient
from ...storage.replication.key_file import read_key
from ...wire.environment import WorkerEnv
from .node_sharing import SharedBytes
from .selection import CopyPlace, Source

logger = logging.getLogger(__name__)

READ_S = 10.0
"""For a connection to another node's memory server, and for its next bytes."""

FETCH_BYTES = 16 << 20


class CopiesUnusable(CheckpointError):
    """None of these can be read: another version is to be chosen, without them."""

    def __init__(self, places: Sequence[CopyPlace], reason: str) -> None:
        super().__init__(f"a copy that was here a moment ago cannot be read: {reason}")
        self.places = tuple(places)
        self.reason = reason


class MemoryReader:
    """The copies of one version in the memory of this node and of others. What it opens is closed with `stack`."""

    def __init__(
        self, memory: str, node: str, memory_of_rank: SlotMemory | None, stack: contextlib.ExitStack
    ) -> None:
        """`memory` is the agent's folder; `memory_of_rank` has this rank's own slots, into which it fetches."""
        self._memory = memory
        self._node = node
        self._own = memory_of_rank
        self._stack = stack
        self._clients: dict[str, MemoryClient] = {}

    def open(self, places: Sequence[CopyPlace], rank: int) -> tuple[CopyPlace, OpenCopy]:
        """The first copy of that old rank's shards that can be opened, and where it is.

        The rank's own copies come before those of twins, which lack what it has for itself; of these the ones on this
        node. Raises CopiesUnusable where none can be opened.
        """
        reasons: list[str] = []
        for place in sorted(places, key=lambda one: (not one.is_of(rank), one.node != self._node)):
            try:
                return place, self.open_at(place)
            except CopiesUnusable as error:
                reasons.append(error.reason)
        raise CopiesUnusable(places, "; ".join(reasons))

    def open_at(self, place: CopyPlace, table: Table | None = None, *, verify: bool = True) -> OpenCopy:
        """One on this node is mapped, one elsewhere is read where it is. Raises CopiesUnusable.

        `table`: it is known already. `verify`: here all of the copy now, elsewhere what is read of it.
        """
        open_it = self._open_here if place.node == self._node else self._open_there
        try:
            return open_it(place, table, verify)
        except (OSError, ValueError) as error:
            raise CopiesUnusable([place], f"{place.node}: {error}") from error

    def verify_there(self, place: CopyPlace) -> None:
        """All of a copy on another node, by its server: a byte of each piece is read. Raises CopiesUnusable."""
        begins = range(0, place.header.size, PIECE_BYTES)
        self._read_there(place, [(begin, memoryview(bytearray(1))) for begin in begins], verify=True)

    def nearest(self, places: Sequence[CopyPlace]) -> CopyPlace:
        """On this node, if there is one."""
        return min(places, key=lambda one: one.node != self._node)

    def bring(self, places: Sequence[CopyPlace], rank: int) -> tuple[CopyPlace, OpenCopy]:
        """As `open`, for what this rank needs whole: mapped where it is, or fetched into its own slot and mapped there.

        Without room for it, it is read where it is. Raises CopiesUnusable, also where what came does not match the
        checksums of the copy.
        """
        place, there = self.open(places, rank)
        if there.mapped is not None or self._own is None:
            return place, there
        header = place.header
        if any(own.version == header.version for own in self._own.headers().values()):
            # Another rank's part of this version, from when the worker here was that rank. It must stay until the next
            # version has its replicas, and a second slot that must stay would leave none for that.
            return place, there
        try:
            opened = self._own.open_slot(header.size)
        except (NoRoom, SlotsBusy) as refusal:
            logger.warning("the shards are read from afar, and not kept here: reason=%s", refusal)
            return place, there
        try:
            mapped = self._own.map(opened)
            self._fetch(place, mapped)
            if header.sums and sums_of_bytes(mapped) != header.sums:
                raise CopiesUnusable([place], f"{place.node}: what it has sent does not match the checksums")
            self._own.keep(opened, header)
        except BaseException:
            opened.close()
            raise
        return place, OpenCopy(there.table, _reader_of(mapped), mapped)

    def _open_here(self, place: CopyPlace, table: Table | None, verify: bool) -> OpenCopy:
        """Raises OSError, ValueError when it is not what was offered."""
        slots = self._stack.enter_context(contextlib.closing(Slots(self._memory, place.folder, create=False)))
        held = self._stack.enter_context(slots.hold(place.slot))
        if not held.header.is_same_copy(place.header):
            raise ValueError(f"slot {place.slot} in {slots.folder} holds another copy by now")
        header = held.header
        if verify and header.sums and sums_of(held.stream, header.size) != header.sums:
            slots.drop(lambda version: version == header.version)
            raise ValueError(f"{place.slot}.pt in {slots.folder} does not match its checksums")
        mapping = mmap.mmap(held.stream.fileno(), header.size, prot=mmap.PROT_READ)
        view = memoryview(mapping)
        return OpenCopy(table or _table(header, _reader_of(view)), _reader_of(view), view)

    def _fetch(self, place: CopyPlace, mapped: memoryview) -> None:
        """All of it. Its checksums are compared when it is here: if none were offered, the server may have some now."""
        size, verify = place.header.size, not place.header.sums
        for begin in range(0, size, FETCH_BYTES):
            with mapped[begin : min(begin + FETCH_BYTES, size)] as stretch:
                self._read_there(place, [(begin, stretch)], verify=verify)

    def _open_there(self, place: CopyPlace, table: Table | None, verify: bool) -> OpenCopy:
        """What is to be verified is verified by the server.

        The server has the whole pieces in its memory, reads each once for all who ask, and only those that are asked
        for. Here whole pieces would have to come over the network for each range. On the way the frames' CRC-32, which
        their HMAC covers, finds what changes; and a copy that the server finds damaged is left aside by all ranks.
        """

        def read(offset: int, into: memoryview) -> None:
            read_many([(offset, into)])

        def read_many(ranges: Sequence[tuple[int, memoryview]]) -> None:
            self._read_there(place, ranges, verify=verify)

        return OpenCopy(table or _table(place.header, read), read, None, read_many)

    def _read_there(
        self, place: CopyPlace, ranges: Sequence[tuple[int, memoryview]], *, verify: bool
    ) -> None:
        """Raises CopiesUnusable."""
        try:
            client = self._clients.get(place.address)
            if client is None:
                client = MemoryClient(place.address, read_key(self._memory, READ_S), READ_S)
                self._clients[place.address] = self._stack.enter_context(client)
            client.read_many(place.folder, place.slot, place.header.version, ranges, verify=verify)
        except (OSError, ValueError) as error:
            raise CopiesUnusable([place], f"{place.node}: {error}") from error


def _reader_of(view: memoryview) -> Callable[[int, memoryview], None]:
    def read(offset: int, into: memoryview) -> None:
        into[:] = view[offset : offset + len(into)]

    return read


def _table(header: Header, read: Callable[[int, memoryview], None]) -> Table:
    offset, length = header.table
    raw = bytearray(length)
    read(offset, memoryview(raw))
    return Table.from_bytes(bytes(raw))


class CopiesInMemory:
    """Of one version."""

    def __init__(
        self, env: WorkerEnv, memory: SlotMemory | None, source: Source, stack: contextlib.ExitStack
    ) -> None:
        self._reader = MemoryReader(env.memory, env.node, memory, stack)
        self._source = source

    def of_rank(self, rank: int) -> dict[int, OpenCopy]:
        """What that rank had, and what all had alike. Raises CheckpointError, OSError."""
        source = self._source
        own, copy = self._reader.bring(source.places[rank], rank)
        found = {rank: copy}
        if not own.common:
            place = self._reader.nearest(source.common)
            assert place.header.shards is not None
            of = place.header.shards.rank
            _, found[of] = self._reader.open([place, *source.common], of)
        return found

    def of_all(self) -> dict[int, OpenCopy]:
        """Raises CheckpointError."""
        return {rank: self._reader.open(places, rank)[1] for rank, places in enumerate(self._source.places)}


class CopiesOnDisk:
    """Of one checkpoint."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest, stack: contextlib.ExitStack) -> None:
        self._files = files
        self._manifest = manifest
        self._stack = stack

    def of_rank(self, rank: int) -> dict[int, OpenCopy]:
        """What that rank had, and what all had alike. Raises BadCheckpoint."""
        found = {}
        for one in (rank, 0) if self._manifest.parts > 1 else (0,):
            copy = self._open(one)
            found[one] = _open_copy(copy)
            if copy.twin_of is not None:
                found[copy.twin_of] = _open_copy(self._open(copy.twin_of))
        return found

    def of_all(self) -> dict[int, OpenCopy]:
        """Raises BadCheckpoint."""
        return {rank: _open_copy(self._open(rank)) for rank in range(self._manifest.parts)}

    def _open(self, rank: int) -> DiskCopy:
        return self._stack.enter_context(self._files.open_rank(self._manifest, rank))


def _open_copy(copy: DiskCopy) -> OpenCopy:
    return OpenCopy(copy.table, copy.read, None)


class CopyHere:
    """The one copy that has all of a state: every rank has it, mapped."""

    def __init__(self, brought: SharedBytes) -> None:
        self._brought = brought

    def of_rank(self, _: int) -> dict[int, OpenCopy]:
        """Raises Invalid, OSError."""
        return self.of_all()

    def of_all(self) -> dict[int, OpenCopy]:
        """As `of_rank`."""
        stream, (offset, length), _ = self._brought
        try:
            view = memoryview(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ))
        except OSError:  # a file system that cannot map
            stream.seek(0)
            view = memoryview(stream.read())
        return {0: OpenCopy(Table.from_bytes(bytes(view[offset : offset + length])), _reader_of(view), view)}
