"""This node's copies in memory: two slots for a state, or for one worker's shards, and random states beside them.

The agent owns a folder in memory (`WorkerEnv.memory`), which outlives its workers and ends with it. Below it each
checkpoint directory has one for its state, or one for each worker's shards and each replica (`slot_folders`):

    a.pt, b.pt       the slots: the bytes of a data file on disk (`.distcp`)
    a.json, b.json   their headers: what the slot holds, and a checksum of the header itself
    rng-3-0, ...     see `random_states`

Invariant: a header that can be read tells the truth about its slot, whenever its writer is killed. For the writer
removes the header before it changes a byte of the slot, and renames the new one into place after the last. It takes
the slot that does not hold the newest state, so that a crash in the middle of a copy costs the older one only.

One process fills the slots of a folder: local rank 0 those of a state, each worker those of its shards, the memory
server those of a replica. Every rank writes its own random state. The reader of a
slot while workers train (the disk writer) holds a shared `flock` on it, and a slot that is held is not overwritten.
With one slot held the writer has the other one only: then a crash in the middle of a copy leaves the held one.

A header that is there changes in several processes: checksums come from the disk writer, another rank says that it is
partial, a load completes it. Each of them holds the slot, and a lock on the folder while it reads and replaces the
header.

A slot keeps its pages from one state to the next: memory that is there already costs one copy to fill, where new
memory costs five times that. No torch here: the disk writer imports this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedRandom, BufferedReader

from ...wire.files import (
    OWN_DIRECTORY,
    open_for_reading,
    open_own_directory,
    read_whole,
    remove,
    replace_file,
)
from ...wire.messages import SLOT_NAMES
from .copy_header import Header
from .random_states import RandomStates
from .slot_folders import SlotFolder

PIECE_BYTES = 16 << 20
"""What one checksum covers: pieces are summed by several threads at once."""

CHANGING_S = 10.0
"""For the change of a header by another process, which takes some system calls."""

_GRAIN = 64 << 10
_MAX_HEADER_BYTES = 4 << 20


def data_file(slot: str) -> str:
    return f"{slot}.pt"


def header_file(slot: str) -> str:
    return f"{slot}.json"


_DATA_FILES = tuple(map(data_file, SLOT_NAMES))


class NoRoom(RuntimeError):
    """The state does not fit into memory now; the text says what would help. Training goes on without a copy."""


class SlotsBusy(RuntimeError):
    """Each slot is being read, or holds the version that must stay."""


class CopyLost(RuntimeError):
    """A copy that a GPU was still making did not come into memory; the text says why not."""


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """A slot that cannot be overwritten while it is open; `stream` is at its beginning."""

    name: str
    header: Header
    stream: BufferedReader

    def __enter__(self) -> HeldSlot:
        return self

    def __exit__(self, *_: object) -> None:
        # A lock would outlive its descriptor wherever the file is mapped.
        fcntl.flock(self.stream.fileno(), fcntl.LOCK_UN)
        self.stream.close()


class Slots:
    """Two slots on this node: of a state that is the same on all ranks, or of one rank's shards."""

    def __init__(self, memory: str, directory: str | SlotFolder, *, create: bool = True) -> None:
        """`memory` is the agent's folder, `directory` the path by which the script knows the checkpoints.

        `create`: make their folder where there is none; readers do not. Raises OSError.
        """
        self.memory = memory
        folder = directory if isinstance(directory, SlotFolder) else SlotFolder.of(directory)
        self.folder = os.path.join(memory, folder.name)
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
        # All else is below what is open here, whatever takes its name later.
        self._dir_fd = os.open(self.folder, OWN_DIRECTORY)
        self.random_states = RandomStates(self._dir_fd)

    def close(self) -> None:
        os.close(self._dir_fd)

    # ---------------------------------------------------------------- reading

    def headers(self) -> dict[str, Header]:
        """By slot, those that can be believed; `problems` names what is wrong with the others."""
        found = {}
        for name in SLOT_NAMES:
            with contextlib.suppress(OSError, ValueError):
                found[name] = self._header(name)
        return found

    def problems(self) -> list[str]:
        """Of headers that are there and cannot be believed."""
        found = []
        for name in SLOT_NAMES:
            try:
                self._header(name)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                found.append(f"{self.folder}/{header_file(name)}: {error}")
        return found

    def newest_first(self) -> list[str]:
        headers = self.headers()
        return sorted(headers, key=lambda name: headers[name].version, reverse=True)

    def hold(self, name: str) -> HeldSlot:
        """Keep a slot as it is and open it. Raises OSError, ValueError when it does not hold what its header says."""
        stream = self._shared(name)
        try:
            header = self._header(name)  # only now: before the lock it could be about to go
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size != header.size:
                raise ValueError(f"{found.st_size} bytes long, the header says {header.size}")
        except BaseException:
            stream.close()
            raise
        return HeldSlot(name, header, stream)

    def is_free(self, name: str) -> bool:
        """Whether no process reads that slot now, or writes it."""
        try:
            with open_for_reading(self._dir_fd, data_file(name)) as stream:
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(stream.fileno(), fcntl.LOCK_UN)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _shared(self, name: str) -> BufferedReader:
        """The slot, which is not written while this is open. Raises OSError."""
        stream = open_for_reading(self._dir_fd, data_file(name))
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            stream.close()
            raise
        return stream

    def _header(self, name: str) -> Header:
        return Header.from_json(read_whole(self._dir_fd, header_file(name), _MAX_HEADER_BYTES))

    # ---------------------------------------------------------------- writing

    def begin(self, size: int, *, protected: tuple[int, int] | None = None) -> OpenSlot:
        """Open a slot for a state of `size` bytes. From here until `seal` that slot holds nothing.

        protected: the slot that holds this version is left as it is, even if the other one is being read.

        Raises SlotsBusy; OSError when there is not so much memory, and then the slot gives back what it had.
        """
        headers = self.headers()
        found = (headers.get(name) for name in SLOT_NAMES)
        for place in overwrite_order(
            [(one.version, not one.rng_holes) if one is not None else None for one in found]
        ):
            name = SLOT_NAMES[place]
            if protected is not None and name in headers and headers[name].version == protected:
                continue
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(data_file(name), flags, 0o600, dir_fd=self._dir_fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            try:
                remove(self._dir_fd, header_file(name))
                _reserve(fd, size)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
                os.close(fd)
                raise
            return OpenSlot(name, fd, size)
        raise SlotsBusy(
            f"no slot in {self.folder} is free: each is being read, or holds the version that must stay"
        )

    def seal(self, opened: OpenSlot, header: Header) -> None:
        """From here on the slot holds what `header` says, all of which was written; others may read it.

        Raises OSError when the header cannot be written: `opened` is still open then.
        """
        self.put_header(opened.name, header)
        opened.close()

    def put_header(self, name: str, header: Header) -> None:
        """Only for a caller that keeps all others from changing it. Raises OSError."""
        replace_file(self._dir_fd, header_file(name), header.to_json())

    def add_sums(self, held: HeldSlot, sums: tuple[int, ...]) -> None:
        """Unless that copy has changed meanwhile, or gone. Raises OSError."""
        with self._changing_headers():
            found = self.headers().get(held.name)
            if found is not None and found.is_same_copy(held.header):
                self.put_header(held.name, replace(found, sums=sums))

    def mark_partial(self, version: tuple[int, int]) -> bool:
        """Let the copy of that version count without the random states of some ranks. False: there is none."""
        for name in SLOT_NAMES:
            with contextlib.suppress(OSError, ValueError), self._changing_headers(), self._shared(name):
                header = self._header(name)
                if header.version == version:
                    if header.rng_holes and not header.partial:
                        self.put_header(name, replace(header, partial=True))
                    return True
        return False

    @contextlib.contextmanager
    def _changing_headers(self) -> Iterator[None]:
        """One of all threads and processes at a time, for a few system calls. Raises OSError."""
        ends_at = time.monotonic() + CHANGING_S
        with open_own_directory(".", self._dir_fd) as fd:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= ends_at:
                        raise TimeoutError(
                            f"another process of this node keeps {self.folder} locked, and stands still"
                        ) from None
                time.sleep(0.001)
            yield

    def shows(self, held: HeldSlot) -> bool:
        """Whether others still find that copy here: they do not when its header or the whole folder is gone."""
        found = self.headers().get(held.name)
        return found is not None and found.is_same_copy(held.header)

    def fill(self, held: HeldSlot, records: dict[int, bytes]) -> Header:
        """Put the random states of all ranks into the slot itself, as far as they fit; returns its new header."""
        header = held.header
        known = [records.get(rank, b"") for rank in range(header.world_size)]
        if not header.rng_holes or any(
            not 0 < len(raw) <= hole[1] for raw, hole in zip(known, header.rng_holes, strict=True)
        ):
            return header
        fd = os.open(data_file(held.name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir_fd)
        try:
            for raw, (offset, length) in zip(known, header.rng_holes, strict=True):
                os.pwrite(fd, raw.ljust(length, b"\0"), offset)
        finally:
            os.close(fd)
        filled = replace(header, rng_holes=(), partial=False, sums=())
        with self._changing_headers():
            self.put_header(held.name, filled)
        return filled

    def taken(self) -> int:
        """The memory in bytes that both slots have."""
        return taken_by_slots(self.folder)

    def claimed_by_others(self) -> int:
        """The memory in bytes of all else in the agent's folder: other Checkpointers' slots, random states.

        A Checkpointer that has filled one slot will fill another.
        """
        found = 0
        for folder, _, files in os.walk(self.memory):
            found += _taken(folder, set(files).difference(_DATA_FILES))
            if folder != self.folder:
                found += 2 * max(_taken(folder, [name]) for name in _DATA_FILES)
        return found

    def empty_unused(self, used: Collection[str]) -> bool:
        """Give back the slots of checkpoint directories without a folder that is `used`; whether there were any.

        An earlier generation of a script whose directory has another name each time left them.
        """
        emptied = False
        directories = {_directory_of(folder) for folder in used}
        with contextlib.suppress(OSError):
            for folder in (
                entry.path for entry in os.scandir(self.memory) if entry.is_dir(follow_symlinks=False)
            ):
                if _directory_of(folder) not in directories and taken_by_slots(folder):
                    with open_own_directory(folder) as dir_fd:
                        for name in SLOT_NAMES:
                            emptied |= _empty(dir_fd, name)
        return emptied

    def drop(self, unwanted: Callable[[tuple[int, int]], bool]) -> None:
        """Remove the headers of the copies whose version is `unwanted`. Raises OSError."""
        # A folder that is gone has none.
        with contextlib.suppress(FileNotFoundError), self._changing_headers():
            for name in SLOT_NAMES:
                try:
                    slot: contextlib.AbstractContextManager[object] = self._shared(name)
                except BlockingIOError:
                    continue  # it is being written, and has no header
                except OSError:
                    slot = contextlib.nullcontext()  # a header without a slot
                with slot, contextlib.suppress(OSError, ValueError):
                    if unwanted(self._header(name).version):
                        remove(self._dir_fd, header_file(name))

    def give_back(self) -> None:
        """Nothing here counts any more: neither copies nor what is noted beside them. A slot that is being read keeps
        its memory. Raises OSError."""
        with self._changing_headers():
            for name in set(os.listdir(self._dir_fd)).difference(_DATA_FILES):
                remove(self._dir_fd, name)
        for name in SLOT_NAMES:
            _empty(self._dir_fd, name)

    def drop_older(self) -> None:
        """Give back the memory of the slot that does not hold the newest state, unless it is being read."""
        for name in set(SLOT_NAMES) - set(self.newest_first()[:1]):
            _empty(self._dir_fd, name)


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A slot that is being written; no other process has it."""

    name: str
    fd: int
    size: int

    def trim(self) -> None:
        """To the very bytes of the state: what reads an archive looks for its end."""
        os.ftruncate(self.fd, self.size)

    def close(self) -> None:
        # A lock would outlive its descriptor, since the slot stays mapped.
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def room_for(size: int) -> int:
    """The bytes that a slot takes for a state of `size`: a little more, since the next may be a little larger."""
    return -(-size // _GRAIN) * _GRAIN + _GRAIN


def overwrite_order(contents: Sequence[tuple[tuple[int, int], bool] | None]) -> list[int]:
    """The places of slots in the order in which the next copy takes them. `contents`: the version of each, and whether
    it has all random states.

    One without a copy comes first, then the older: never the newest, unless the other is being read. Of a step that was
    remembered and then saved, the copy with holes.

    >>> overwrite_order([((1, 20), True), ((1, 10), True)])
    [1, 0]
    """
    return sorted(range(len(contents)), key=lambda place: contents[place] or ((-1, -1), False))


def sums_of(stream: BufferedReader | BufferedRandom, size: int) -> tuple[int, ...]:
    """The checksums of the pieces of a slot."""
    if not size:
        return ()
    with mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
        return sums_of_bytes(view)


def sums_of_bytes(view: memoryview) -> tuple[int, ...]:
    """The checksums of their pieces, as of a slot with these bytes."""

    def sum_from(offset: int) -> int:
        with view[offset : offset + PIECE_BYTES] as piece:
            return zlib.crc32(piece)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return tuple(threads.map(sum_from, range(0, len(view), PIECE_BYTES)))


def _reserve(fd: int, size: int) -> None:
    """Make all pages of the slot exist: a full memory is an error here, and SIGBUS where the pages are written."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"the slot is no file (mode {found.st_mode:o})")
    wanted = room_for(size)
    if found.st_size > wanted:
        os.ftruncate(fd, wanted)
    # What was written before is there, but for holes that a writer may have died over.
    there = found.st_size if found.st_blocks * 512 >= found.st_size else 0
    if there < wanted:
        os.posix_fallocate(fd, there, wanted - there)


def _directory_of(folder: str) -> str:
    """What all folders of one checkpoint directory have in common, those with shards and replicas included."""
    found = SlotFolder.parse(os.path.basename(folder))
    return found.directory if found is not None else folder


def taken_by_slots(folder: str) -> int:
    """The memory in bytes that both slots in the folder with this path have."""
    return _taken(folder, _DATA_FILES)


def _taken(folder: str, names: Iterable[str]) -> int:
    """Bytes."""
    blocks = 0
    for name in names:
        with contextlib.suppress(OSError):
            blocks += os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks
    return blocks * 512


def _empty(dir_fd: int, name: str) -> bool:
    """Give back a slot's memory; False when it is being read, or has none."""
    with contextlib.suppress(OSError):
        fd = os.open(data_file(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        with os.fdopen(fd, "rb+"):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(dir_fd, header_file(name))
            os.ftruncate(fd, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
            return True
    return False
