"""Copies of one version in the memory of this node and of others, opened for DCP's reads."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

from ..checkpointing.loading.shard_selection import CopyPlace, Places
from ..state.sharding.reading import OpenCopy
from ..state.sharding.table import Table
from ..storage.memory.slot_folders import SlotFolder
from ..storage.memory.slots import HeldSlot, Slots, sums_of
from ..storage.replication.client import MemoryClient
from ..storage.replication.key_file import read_key
from ..wire.environment import WorkerEnv

READ_S = 10.0
"""For a connection to another node's memory server, and for its next bytes."""


def best_of(places: Places, rank: int) -> CopyPlace:
    """The same on all ranks: that old rank's own copy, and a replica only where its node is gone."""
    return min(places, key=lambda one: (not one.is_of(rank), bool(folder_of(one).origin)))


def folder_of(place: CopyPlace) -> SlotFolder:
    """Raises ValueError."""
    folder = SlotFolder.parse(place.folder)
    if folder is None:
        raise ValueError(f"{place.folder!r} is no folder of slots")
    return folder


class MemoryCopies:
    """What it opens is kept as it is until this is closed. Its methods raise OSError and ValueError."""

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env
        self._stack = contextlib.ExitStack()
        self._clients: dict[str, MemoryClient] = {}
        self._held: dict[CopyPlace, tuple[Slots, HeldSlot]] = {}

    def __enter__(self) -> MemoryCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def table(self, place: CopyPlace) -> Table:
        assert place.header.shards is not None, "only shards are opened here"
        offset, length = place.header.shards.table
        if place.node == self._env.node:
            _, held = self._hold(place)
            return Table.from_bytes(os.pread(held.stream.fileno(), length, offset))
        raw = bytearray(length)
        version = place.header.version
        self._client(place).read(folder_of(place), place.slot, version, offset, memoryview(raw))
        return Table.from_bytes(bytes(raw))

    def verify(self, place: CopyPlace) -> None:
        """Of a copy on this node: all its bytes. One that has no checksums yet is believed."""
        slots, held = self._hold(place)
        if held.header.sums and sums_of(held.stream, held.header.size) != held.header.sums:
            slots.drop(lambda version: version == held.header.version)
            raise ValueError(f"{place.slot}.pt in {slots.folder} does not match its checksums")

    def open(self, place: CopyPlace, table: Table) -> OpenCopy:
        """One on this node is mapped. One elsewhere is read where it is, when it is read."""
        if place.node != self._env.node:
            return self._open_there(place, table)
        _, held = self._hold(place)
        view = memoryview(mmap.mmap(held.stream.fileno(), held.header.size, prot=mmap.PROT_READ))

        def read(offset: int, into: memoryview) -> None:
            into[:] = view[offset : offset + len(into)]

        return OpenCopy(table, read, view)

    def _open_there(self, place: CopyPlace, table: Table) -> OpenCopy:
        version, folder = place.header.version, folder_of(place)

        def read(offset: int, into: memoryview) -> None:
            self._client(place).read(folder, place.slot, version, offset, into)

        def read_many(ranges: Sequence[tuple[int, memoryview]]) -> None:
            self._client(place).read_many(folder, place.slot, version, ranges)

        return OpenCopy(table, read, None, read_many)

    def _client(self, place: CopyPlace) -> MemoryClient:
        client = self._clients.get(place.address)
        if client is None:
            client = MemoryClient(place.address, read_key(self._env.memory, READ_S), READ_S)
            self._clients[place.address] = self._stack.enter_context(client)
        return client

    def _hold(self, place: CopyPlace) -> tuple[Slots, HeldSlot]:
        if place not in self._held:
            slots = self._stack.enter_context(contextlib.closing(Slots(self._env.memory, folder_of(place))))
            held = self._stack.enter_context(slots.hold(place.slot))
            if not held.header.is_same_copy(place.header):
                raise ValueError(f"slot {place.slot} in {slots.folder} holds another copy by now")
            self._held[place] = slots, held
        return self._held[place]
