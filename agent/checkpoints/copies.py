"""The copies in this node's memory, as the memory server reads them.

A slot is held only while a stretch of it is read into a buffer: what sends it may wait for a network, and a worker that
is about to overwrite the slot never waits for that. So each stretch looks anew whether the slot still has the copy.

Beside them lie the orders to replicate, for the next memory server and for a handover. `Seals` tells when a copy was
sealed: the kernel (inotify) says when a header is renamed into place.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator

from ...worker.storage.memory.copy_header import FoundCopy, Header
from ...worker.storage.memory.slot_folders import SlotFolder, all_folders_of
from ...worker.storage.memory.slots import PIECE_BYTES, Slots, header_file
from ...worker.storage.replication.client import CopyGone
from ...worker.storage.replication.messages import MAX_ORDER_BYTES, ORDERS, Replicate, encode
from ...worker.wire.files import open_directory, read_whole, replace_file
from ...worker.wire.messages import SLOT_NAMES

_STRETCH_BYTES = 1 << 20


def copies_of(memory: str, directory: str) -> Iterator[FoundCopy]:
    """Those that are sealed, in the order of their folders' names. Raises OSError."""
    for folder in all_folders_of(memory, directory):
        for slot, header in headers_in(memory, folder).items():
            yield FoundCopy(folder, slot, header)


def headers_in(memory: str, folder: SlotFolder) -> dict[str, Header]:
    """By slot; of a folder that is not there, none. Raises OSError."""
    try:
        with contextlib.closing(Slots(memory, folder, create=False)) as slots:
            return slots.headers()
    except FileNotFoundError:
        return {}


class VerifiedPieces:
    """Which pieces of the copies here match their checksums: each is compared once, however many nodes ask for it.

    For any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], tuple[Header, set[int]]] = {}
        """By folder and slot."""

    def of(self, copy: CopyReader) -> set[int]:
        """The numbers of those that are verified, of this copy as it is now; the caller adds others."""
        key = copy.folder.name, copy.slot
        with self._lock:
            header, pieces = self._found.get(key, (None, set()))
            if header != copy.header:
                pieces = set()
                self._found[key] = copy.header, pieces
            return pieces


class CopyReader:
    """Reads one copy in stretches."""

    def __init__(self, memory: str, folder: SlotFolder, slot: str, version: tuple[int, int]) -> None:
        """Raises CopyGone."""
        try:
            self.slots = Slots(memory, folder, create=False)
        except FileNotFoundError as error:
            raise CopyGone(f"there is no folder {folder.name}") from error
        self.folder = folder
        self.slot = slot
        try:
            self._held = self.slots.hold(slot)
        except (OSError, ValueError) as error:
            self.slots.close()
            raise CopyGone(f"slot {slot} of {folder.name} has no copy now: {error}") from error
        self.header = self._held.header
        self._fd = self._held.stream.fileno()
        self._header_file = os.path.join(self.slots.folder, header_file(slot))
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

    def verify(self, offset: int, length: int, verified: set[int]) -> None:
        """Compare the pieces that have these bytes, but for those `verified`, with their checksums.

        A copy without checksums is believed. Raises CopyGone, and drops a copy that is damaged: no load finds it again.
        """
        if not self.header.sums:
            return
        for piece in range(offset // PIECE_BYTES, -(-(offset + length) // PIECE_BYTES)):
            if piece not in verified:
                self._verify(piece)
                verified.add(piece)

    def _verify(self, piece: int) -> None:
        crc, begin = 0, piece * PIECE_BYTES
        end = min(begin + PIECE_BYTES, self.header.size)
        with memoryview(bytearray(_STRETCH_BYTES)) as buffer:
            for offset in range(begin, end, _STRETCH_BYTES):
                with buffer[: end - offset] as stretch:
                    self.read(offset, stretch)
                    crc = zlib.crc32(stretch, crc)
        if self.header.sums[piece : piece + 1] != (crc,):
            with contextlib.suppress(OSError):
                self.slots.drop(lambda version: version == self.header.version)
            raise CopyGone(
                f"the bytes {begin} to {end} in slot {self.slot} of {self.folder.name} do not match their checksum"
            )

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


# ---------------------------------------------------------------- orders to replicate

MOST_ORDERS = 16
"""Checkpoint directories, of which the newest count."""

_KEPT = ".replicate"
"""The end of the name of a file with an order."""


def keep(memory: str, order: Replicate) -> None:
    """In the place of the one before for the same checkpoint directory."""
    name = SlotFolder.of(order.directory).directory + _KEPT
    with contextlib.suppress(OSError), open_directory(memory) as folder:
        replace_file(folder, name, encode(order))


def kept_orders(memory: str) -> list[Replicate]:
    """The oldest first."""
    found = []
    with contextlib.suppress(OSError), open_directory(memory) as folder:
        names = [name for name in os.listdir(folder) if name.endswith(_KEPT)]
        oldest_first = sorted(names, key=lambda name: os.stat(name, dir_fd=folder).st_mtime_ns)
        for name in oldest_first[-MOST_ORDERS:]:
            with contextlib.suppress(OSError, ValueError):
                order = ORDERS.decode(read_whole(folder, name, MAX_ORDER_BYTES))
                if isinstance(order, Replicate):
                    found.append(order)
    return found


# ---------------------------------------------------------------- seals

IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_ONLYDIR = 0x01000000
IN_ISDIR = 0x40000000

_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 65536
_HEADERS = {header_file(slot).encode() for slot in SLOT_NAMES}


class Seals:
    """Of the slots in all folders of the agent's folder in memory. For one thread.

    Where the kernel gives no more watches (fs.inotify.max_user_instances, max_user_watches), `blind` is true and the
    user looks now and then.
    """

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.readable: int = self._libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
        """A descriptor that can be read when something has happened; negative: there is none."""
        self.blind = self.readable < 0
        self._watch(memory, IN_CREATE | IN_ONLYDIR)
        self._watch_folders()

    def close(self) -> None:
        descriptor, self.readable = self.readable, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self) -> bool:
        """Whether some copy may have been sealed since the last look."""
        try:
            raw = os.read(self.readable, _BUFFER_BYTES)
        except BlockingIOError:
            return False
        sealed, offset = False, 0
        while offset < len(raw):
            _, mask, _, length = _EVENT.unpack_from(raw, offset)
            offset += _EVENT.size
            name = raw[offset : offset + length].rstrip(b"\0")
            offset += length
            if mask & IN_ISDIR or not name:  # a new folder, or events were lost
                self._watch_folders()
                sealed = True
            sealed |= name in _HEADERS
        return sealed

    def _watch_folders(self) -> None:
        """All that are there: a folder that is watched already stays so."""
        with contextlib.suppress(OSError), os.scandir(self._memory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._watch(entry.path, IN_MOVED_TO | IN_ONLYDIR)

    def _watch(self, path: str, events: int) -> None:
        if not self.blind:
            found = self._libc.inotify_add_watch(self.readable, os.fsencode(path), events)
            self.blind = found < 0 and os.path.isdir(path)
