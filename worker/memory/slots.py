"""This node's copies in memory: two slots for the state, and each rank's random state beside them.

The agent owns a folder in memory (`WorkerEnv.memory`), which outlives its workers and ends with it. Below it each
checkpoint directory has one:

    a.pt, b.pt       the slots: the bytes of a checkpoint file, which `torch.load` reads
    a.json, b.json   their headers: what the slot holds, and a checksum of the header itself
    rng-3-0, ...     the random state of rank 3 after each of its last two remembered steps

Invariant: a header that can be read tells the truth about its slot, whenever who writes it is killed. For the writer
removes the header before it changes a byte of the slot, and renames the new one into place after the last. It takes
the slot that does not hold the newest state, so that a crash in the middle of a copy costs the older one only.

One process of a node writes: the worker with local rank 0; every rank writes its own random state. The reader of a
slot while workers train (the disk writer) holds a shared `flock` on it, and a slot that is held is not overwritten.
With one slot held the writer has the other one only: then a crash in the middle of a copy leaves the held one.

A header that is there changes in several processes: checksums come from a thread or the disk writer, another rank says
that it was taken in haste, a load completes it. Each of them holds the slot, and a lock on the folder for the time of
reading and replacing the header.

A slot keeps its pages from one state to the next: memory that is there already costs one copy to fill, where new
memory costs five times that. No torch here: the disk writer imports this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedReader

from ...codec import Checked, Count, Invalid, Positive, from_plain
from ..wire.messages import RunNameOrNone
from ..wire.sealed import seal, unseal

SCHEMA = 1
NAMES = ("a", "b")
PIECE_BYTES = 16 << 20
"""What one checksum covers: pieces are summed by several threads at once."""

_SLOT_FILES = tuple(f"{name}.pt" for name in NAMES)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GRAIN = 64 << 10
_RECORD = struct.Struct("<8sIqqq")
_RECORD_MAGIC = b"e-rng" + SCHEMA.to_bytes(3, "little")
_RECORD_NAME = re.compile(r"rng-(\d{1,9})-[01]")
_MAX_HEADER_BYTES = 4 << 20
_MAX_RECORD_BYTES = 1 << 20


class NoRoom(RuntimeError):
    """The state does not fit into memory now; the text says what would help. Training goes on without a copy."""


class SlotsBusy(RuntimeError):
    """Both slots are being read."""


class CopyLost(RuntimeError):
    """A copy that a GPU was still making did not come into memory; the text says why not."""


@dataclass(frozen=True, slots=True)
class Header(Checked):
    """What a slot holds.

    `base` is the step from which the generation went on, so that it can be told which older steps it has abandoned.
    `gaps` are the places, as offset and length, at which the random state of each rank is still to be filled in. A
    copy with gaps counts once every rank has written its own down, but for one that was taken in `haste`, when some
    rank had failed already.
    `sums` are the checksums of its pieces; empty: not computed yet, see `summing`. `run` is the job's, see
    `ownership`.
    """

    step: Count
    generation: Count
    base: Count
    world_size: Positive
    size: Positive
    gaps: tuple[tuple[Count, Count], ...] = ()
    haste: bool = False
    sums: tuple[Count, ...] = ()
    run: RunNameOrNone = ""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for gap in self.gaps:
            if sum(gap) > self.size:
                raise Invalid(f"header: the gap {gap!r} lies outside the {self.size} bytes of the state")
        if self.gaps and len(self.gaps) != self.world_size:
            raise Invalid(f"header: {len(self.gaps)} gaps for {self.world_size} ranks")

    @property
    def version(self) -> tuple[int, int]:
        """The greater is the newer: a generation goes on from what was before, or abandons what of it was later."""
        return self.generation, self.step

    def is_same_copy(self, other: Header) -> bool:
        """Whether both are of the same bytes: a copy may get checksums, or begin to count without some ranks."""
        return replace(self, sums=(), haste=False) == replace(other, sums=(), haste=False)

    def to_json(self) -> bytes:
        return seal(SCHEMA, self)

    @classmethod
    def from_json(cls, raw: bytes) -> Header:
        """Raises Invalid."""
        return from_plain(cls, unseal(raw, "header", SCHEMA)[1])


@dataclass(frozen=True, slots=True)
class Copy:
    """A state in one node's memory, and which ranks' random states after it were written down there."""

    header: Header
    ranks: frozenset[Count] = frozenset()


@dataclass(frozen=True, slots=True)
class Record:
    """The random state of one rank after a step."""

    version: tuple[int, int]
    """Of the state that belongs to it: generation and step."""
    world_size: int
    state: bytes

    def to_bytes(self) -> bytes:
        head = _RECORD.pack(_RECORD_MAGIC, zlib.crc32(self.state), *self.version, self.world_size)
        return head + self.state

    @classmethod
    def from_bytes(cls, raw: bytes) -> Record:
        """Raises ValueError."""
        try:
            magic, crc, generation, step, world_size = _RECORD.unpack_from(raw)
        except struct.error as error:
            raise ValueError(f"record of {len(raw)} bytes") from error
        state = raw[_RECORD.size :]
        if magic != _RECORD_MAGIC or crc != zlib.crc32(state):
            raise ValueError("record of another version, or it does not match its own checksum")
        return cls((generation, step), world_size, state)


@dataclass(frozen=True, slots=True)
class Held:
    """A slot that cannot be overwritten while it is open; `stream` is at its beginning."""

    name: str
    header: Header
    stream: BufferedReader

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        # A lock would outlive its descriptor wherever the file is mapped.
        fcntl.flock(self.stream.fileno(), fcntl.LOCK_UN)
        self.stream.close()

    @property
    def path(self) -> str:
        """The very file that is open, by a name for those who open files themselves."""
        return f"/proc/self/fd/{self.stream.fileno()}"


class Slots:
    """The two slots of one checkpoint directory on this node."""

    def __init__(self, memory: str, directory: str) -> None:
        """`memory` is the agent's folder, `directory` the path by which the script knows the checkpoints."""
        self.memory = memory
        self.folder = os.path.join(memory, hashlib.sha256(os.fsencode(directory)).hexdigest()[:16])
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        # All else is below what is open here, whatever takes its name later.
        self._dir_fd = os.open(self.folder, _DIRECTORY)

    def close(self) -> None:
        os.close(self._dir_fd)

    # ---------------------------------------------------------------- reading

    def headers(self) -> dict[str, Header]:
        """By slot, those that can be believed; what is wrong with the others is told by `problems`."""
        found = {}
        for name in NAMES:
            with contextlib.suppress(OSError, ValueError):
                found[name] = self._header(name)
        return found

    def problems(self) -> list[str]:
        """Of headers that are there and cannot be believed."""
        found = []
        for name in NAMES:
            try:
                self._header(name)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                found.append(f"{self.folder}/{name}.json: {error}")
        return found

    def newest_first(self) -> list[str]:
        headers = self.headers()
        return sorted(headers, key=lambda name: headers[name].version, reverse=True)

    def hold(self, name: str) -> Held:
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
        return Held(name, header, stream)

    def _shared(self, name: str) -> BufferedReader:
        """The slot, which is not written while this is open. Raises OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        stream = os.fdopen(os.open(f"{name}.pt", flags, dir_fd=self._dir_fd), "rb")
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            stream.close()
            raise
        return stream

    def _header(self, name: str) -> Header:
        return Header.from_json(self._read(f"{name}.json", _MAX_HEADER_BYTES))

    # ---------------------------------------------------------------- writing

    def begin(self, size: int) -> Opened:
        """Open a slot for a state of `size` bytes. From here until `seal` that slot holds nothing.

        Raises SlotsBusy; OSError when there is not so much memory, and then the slot gives back what it had.
        """
        headers = self.headers()
        # The one without a header first, then the older: never the newest, unless the other is being read. Of a step
        # that was remembered and then saved, the copy with gaps.
        order = sorted(
            NAMES,
            key=lambda name: (
                (headers[name].version, not headers[name].gaps) if name in headers else ((-1, -1), False)
            ),
        )
        for name in order:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(f"{name}.pt", flags, 0o600, dir_fd=self._dir_fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            try:
                self._remove(f"{name}.json")
                _reserve(fd, size)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
                os.close(fd)
                raise
            return Opened(name, fd, size)
        raise SlotsBusy(f"both slots in {self.folder} are being read")

    def seal(self, opened: Opened, header: Header) -> None:
        """From here on the slot holds what `header` says, all of which was written; others may read it.

        Raises OSError when the header cannot be written: `opened` is still open then.
        """
        self.put_header(opened.name, header)
        opened.close()

    def put_header(self, name: str, header: Header) -> None:
        """Only for a caller that keeps all others from changing it. Raises OSError."""
        self._replace(f"{name}.json", header.to_json())

    def add_sums(self, held: Held, sums: tuple[int, ...]) -> None:
        """Unless that copy has changed meanwhile, or gone. Raises OSError."""
        with self._changing_headers():
            found = self.headers().get(held.name)
            if found is not None and found.is_same_copy(held.header):
                self.put_header(held.name, replace(found, sums=sums))

    def hurry(self, version: tuple[int, int]) -> bool:
        """Let the copy of that version count without the random states of some ranks. False: there is none."""
        for name in NAMES:
            with contextlib.suppress(OSError, ValueError), self._changing_headers(), self._shared(name):
                header = self._header(name)
                if header.version == version:
                    if header.gaps and not header.haste:
                        self.put_header(name, replace(header, haste=True))
                    return True
        return False

    @contextlib.contextmanager
    def _changing_headers(self) -> Iterator[None]:
        """One of all threads and processes at a time, for a few system calls. Raises OSError."""
        fd = os.open(".", _DIRECTORY, dir_fd=self._dir_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def shows(self, held: Held) -> bool:
        """Whether others still find that copy here: they do not when its header or the whole folder is gone."""
        found = self.headers().get(held.name)
        return found is not None and found.is_same_copy(held.header)

    def fill(self, held: Held, records: dict[int, bytes]) -> Header:
        """Put the random states of all ranks into the slot itself, as far as they fit; returns its new header."""
        header = held.header
        known = [records.get(rank, b"") for rank in range(header.world_size)]
        if not header.gaps or any(
            not 0 < len(raw) <= gap[1] for raw, gap in zip(known, header.gaps, strict=True)
        ):
            return header
        fd = os.open(f"{held.name}.pt", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir_fd)
        try:
            for raw, (offset, length) in zip(known, header.gaps, strict=True):
                os.pwrite(fd, raw.ljust(length, b"\0"), offset)
        finally:
            os.close(fd)
        filled = replace(header, gaps=(), haste=False, sums=())
        with self._changing_headers():
            self.put_header(held.name, filled)
        return filled

    def taken(self) -> int:
        """The memory in bytes that both slots have."""
        return _taken(self.folder, _SLOT_FILES)

    def claimed_by_others(self) -> int:
        """The memory in bytes of all else in the agent's folder: other Checkpointers' slots, records, journals.

        A Checkpointer that has filled one slot will fill another.
        """
        found = 0
        for folder, _, files in os.walk(self.memory):
            found += _taken(folder, set(files).difference(_SLOT_FILES))
            if folder != self.folder:
                found += 2 * max(_taken(folder, [name]) for name in _SLOT_FILES)
        return found

    def empty_unused(self, used: Collection[str]) -> bool:
        """Give back the slots of folders that are not `used`; whether there were any.

        An earlier generation of a script whose directory has another name each time left them.
        """
        emptied = False
        with contextlib.suppress(OSError):
            for folder in (
                entry.path for entry in os.scandir(self.memory) if entry.is_dir(follow_symlinks=False)
            ):
                if folder not in used and _taken(folder, _SLOT_FILES):
                    dir_fd = os.open(folder, _DIRECTORY)
                    for name in NAMES:
                        emptied |= _empty(dir_fd, name)
                    os.close(dir_fd)
        return emptied

    def drop(self, unwanted: Callable[[tuple[int, int]], bool]) -> None:
        """Remove the headers of the copies whose version is `unwanted`. Raises OSError."""
        # A folder that is gone has none.
        with contextlib.suppress(FileNotFoundError), self._changing_headers():
            for name in NAMES:
                try:
                    slot: contextlib.AbstractContextManager[object] = self._shared(name)
                except BlockingIOError:
                    continue  # it is being written, and has no header
                except OSError:
                    slot = contextlib.nullcontext()  # a header without a slot
                with slot, contextlib.suppress(OSError, ValueError):
                    if unwanted(self._header(name).version):
                        self._remove(f"{name}.json")

    def drop_older(self) -> None:
        """Give back the memory of the slot that does not hold the newest state, unless it is being read."""
        for name in set(NAMES) - set(self.newest_first()[:1]):
            _empty(self._dir_fd, name)

    # ---------------------------------------------------------------- random states

    def put_record(self, rank: int, record: Record) -> None:
        """Write down `rank`'s random state beside that of its step before."""
        versions = {name: self._record_version(name) for name in (f"rng-{rank}-0", f"rng-{rank}-1")}
        same = [name for name, version in versions.items() if version == record.version]
        self._replace(same[0] if same else min(versions, key=lambda name: versions[name]), record.to_bytes())

    def records(self, version: tuple[int, int], world_size: int) -> dict[int, bytes]:
        """By rank, the random states that were written down here for that state of that world."""
        found: dict[int, bytes] = {}
        try:
            names = os.listdir(self._dir_fd)
        except OSError:
            return found
        for name in names:
            if match := _RECORD_NAME.fullmatch(name):
                with contextlib.suppress(OSError, ValueError):
                    record = self._record(name)
                    if (record.version, record.world_size) == (version, world_size):
                        found[int(match[1])] = record.state
        return found

    def _record_version(self, name: str) -> tuple[int, int]:
        try:
            return self._record(name).version
        except (OSError, ValueError):
            return (-1, -1)

    def _record(self, name: str) -> Record:
        return Record.from_bytes(self._read(name, _MAX_RECORD_BYTES))

    # ---------------------------------------------------------------- files

    def _read(self, name: str, most: int) -> bytes:
        # O_NONBLOCK: a named pipe in the place of a file must fail to verify, not hang the load.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._dir_fd)
        with os.fdopen(fd, "rb") as stream:
            raw = stream.read(most + 1)
        if len(raw) > most:
            raise ValueError(f"{name} is longer than {most} bytes")
        return raw

    def _replace(self, name: str, content: bytes) -> None:
        temporary = f"tmp-{name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._dir_fd)
        try:
            with os.fdopen(fd, "wb") as stream:
                stream.write(content)
            os.rename(temporary, name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except OSError:
            with contextlib.suppress(OSError):  # what it has taken of a full memory is given back
                os.unlink(temporary, dir_fd=self._dir_fd)
            raise

    def _remove(self, name: str) -> None:
        _remove(self._dir_fd, name)


@dataclass(frozen=True, slots=True)
class Opened:
    """A slot that is being written; no other process has it."""

    name: str
    fd: int
    size: int

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

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


def sums_of(stream: BufferedReader, size: int) -> tuple[int, ...]:
    """The checksums of the pieces of a slot."""
    if not size:
        return ()
    with (
        mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads,
    ):

        def sum_from(offset: int) -> int:
            with view[offset : offset + PIECE_BYTES] as piece:
                return zlib.crc32(piece)

        return tuple(threads.map(sum_from, range(0, size, PIECE_BYTES)))


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
        fd = os.open(f"{name}.pt", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        with os.fdopen(fd, "rb+"):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(dir_fd, f"{name}.json")
            os.ftruncate(fd, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
            return True
    return False


def _remove(dir_fd: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)
