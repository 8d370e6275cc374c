"""The copies in this node's memory, as the memory server reads them.

A slot is held only while a stretch of it is read into a buffer: what sends it may wait for a network, and a worker that
is about to overwrite the slot never waits for that. So each stretch looks anew whether the slot still has the copy.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

from .....worker.storage.memory.copy_header import Header
from .....worker.storage.memory.slot_folders import SlotFolder
from .....worker.storage.memory.slots import Slots
from .....worker.storage.replication.client import CopyGone, FoundCopy


def folders(memory: str, directory: str) -> list[SlotFolder]:
    """Of a checkpoint directory, by its digest. Raises OSError."""
    found = [SlotFolder.parse(name) for name in sorted(os.listdir(memory))]
    return [one for one in found if one is not None and one.directory == directory]


def copies_of(memory: str, directory: str) -> Iterator[FoundCopy]:
    """Those that are sealed, in the order of their folders' names. Raises OSError."""
    for folder in folders(memory, directory):
        for slot, header in headers_in(memory, folder).items():
            yield FoundCopy(folder, slot, header)


def headers_in(memory: str, folder: SlotFolder) -> dict[str, Header]:
    """By slot; of a folder that is not there, none. Raises OSError."""
    if not os.path.isdir(os.path.join(memory, folder.name)):
        return {}
    slots = Slots(memory, folder)
    try:
        return slots.headers()
    finally:
        slots.close()


class CopyReader:
    """Reads one copy in stretches."""

    def __init__(self, memory: str, folder: SlotFolder, slot: str, version: tuple[int, int]) -> None:
        """Raises CopyGone."""
        if not os.path.isdir(os.path.join(memory, folder.name)):
            raise CopyGone(f"there is no folder {folder.name}")
        self.slots = Slots(memory, folder)
        self.folder = folder
        self.slot = slot
        try:
            self._held = self.slots.hold(slot)
        except (OSError, ValueError) as error:
            self.slots.close()
            raise CopyGone(f"slot {slot} of {folder.name} has no copy now: {error}") from error
        self.header = self._held.header
        self._fd = self._held.stream.fileno()
        self._header_file = os.path.join(self.slots.folder, f"{slot}.json")
        self._seen = self._look()
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        if self.header.version != version:
            found = self.header.version
            self.close()
            raise CopyGone(f"slot {slot} of {folder.name} has version {found}, not {version}")

    def __enter__(self) -> CopyReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._held.stream.close()
        self.slots.close()

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from there on. Raises CopyGone, also where the copy has fewer."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CopyGone(f"slot {self.slot} is being overwritten") from None
        try:
            self._check()
            if os.preadv(self._fd, [into], offset) != len(into):
                raise CopyGone(f"slot {self.slot} has fewer than {offset + len(into)} bytes")
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def add_sums(self, sums: tuple[int, ...]) -> None:
        """To the copy's header, if it has none. Raises OSError."""
        if not self.header.sums:
            self.slots.add_sums(self._held, sums)

    def _check(self) -> None:
        seen = self._look()
        if seen == self._seen and seen:
            return
        found = self.slots.headers().get(self.slot)
        if found is None or not found.is_same_copy(self.header):
            raise CopyGone(f"slot {self.slot} no longer has version {self.header.version}")
        self._seen = seen

    def _look(self) -> tuple[int, int]:
        """What changes with the header."""
        try:
            found = os.stat(self._header_file)
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns
