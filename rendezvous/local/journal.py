"""What the local store keeps for its next host: a file that a line is added to with each change.

    CHECKSUM DURABLE {"v": 1, "kind": "begun", "job": "pool", "base": 21474836480}
    CHECKSUM DURABLE {"v": 1, "kind": "leased", "lease": 21474836481, "ttl_s": 5.0, "pid": 4711, "started": 90210}
    CHECKSUM DURABLE {"v": 1, "kind": "written", "entries": [...], "deleted": [...], "lease_of": {...}}
    CHECKSUM DURABLE {"v": 1, "kind": "ended", "lease": 21474836481}

DURABLE is how many bytes of the file were known to be on disk when the line was written. By that a reader tells the
torn end of a host that lost its power (nothing in it was ever answered: it is dropped) from damage to what was on disk
(`Damaged`: it is never guessed what the file has held).

The file is written anew when the lines that were added outweigh what they have left, and when one could not be added:
to a new file, which takes the place of the old one once it is on disk. One thread, local-disk, does both this and what
brings lines to the disk; those that wait for it meanwhile share the next turn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

from ...codec import Codec, Count, Invalid, Text, Within
from ...threads import Thread
from ..store.interface import Entry, LeaseId

SCHEMA = 1
SPARE_BYTES = 1024 * 1024
"""By so much the file may always outgrow twice its content."""

OnDisk: TypeAlias = Callable[[OSError | None], None]
"""Called in the thread local-disk: with None all that was added before is on disk."""

_LINE_START = re.compile(rb"[0-9a-f]{8} [0-9]+ \{")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """The first line."""

    job: Annotated[str, Text(128)]
    base: Count
    """All revisions and leases of the host that has written the file are above it, but for those that it has found."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease, and the process that has asked for it: one with its number that began at another time is another."""

    lease: LeaseId
    ttl_s: Annotated[float, Within(0, 86400)]
    pid: Count
    started: Count


@dataclass(frozen=True, slots=True)
class Ended:
    """All keys under this lease have gone with it."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Written:
    entries: tuple[Entry, ...]
    deleted: tuple[str, ...]
    lease_of: dict[str, LeaseId]
    """By key, for those of the entries that have one."""


Line: TypeAlias = Begun | Leased | Ended | Written


@dataclass(frozen=True, slots=True)
class Past:
    """What an earlier host has left."""

    job: str
    base: int
    entries: tuple[Entry, ...] = ()
    leases: tuple[Leased, ...] = ()
    lease_of: Mapping[str, LeaseId] = field(default_factory=dict)
    torn_bytes: int = 0
    """At the end of the file, which were dropped."""


class Damaged(ValueError):
    """The file has held what cannot be read any more."""


_LINES: Codec[Line] = Codec((Begun, Leased, Ended, Written), SCHEMA, 2**31)


def encode(line: Line, durable: int) -> bytes:
    said = b"%d %s" % (durable, _LINES.encode(line))
    return b"%08x %s" % (zlib.crc32(said), said)


def _decode(raw: bytes) -> tuple[int, Line]:
    """Raises ValueError."""
    checksum, _, said = raw.partition(b" ")
    if not raw.endswith(b"\n") or len(checksum) != 8 or int(checksum, 16) != zlib.crc32(said):
        raise ValueError("its checksum is wrong")
    durable, _, text = said.partition(b" ")
    return int(durable), _LINES.decode(text)


def _durable_within(text: bytes) -> int:
    """What a whole line says at the end of a text whose beginning cannot be read: the end of the line before it may be
    all that has changed. 0 when there is none."""
    for start in _LINE_START.finditer(text, 1):
        try:
            return _decode(text[start.start() :])[0]
        except ValueError:
            continue
    return 0


def parse(raw: bytes) -> Past:
    """Raises Damaged."""
    held, begun = _Held(), None
    offset = 0
    torn_at: int | None = None
    line: Line | None
    for number, text in enumerate(raw.splitlines(keepends=True), 1):
        try:
            durable, line = _decode(text)
        except Invalid as error:  # the checksum is right: another version has written it
            raise Damaged(f"line {number} is of another version: {error}") from error
        except ValueError as error:
            if begun is None:
                raise Damaged(f"its first line cannot be read: {error}") from error
            torn_at = offset if torn_at is None else torn_at
            durable, line = _durable_within(text), None
        if torn_at is not None and durable > torn_at:
            raise Damaged(f"the line at byte {torn_at} cannot be read, and it was on disk")
        if torn_at is None and isinstance(line, Begun):
            begun = line
        elif torn_at is None and line is not None:
            held.read(line)
        offset += len(text)
    if begun is None:
        raise Damaged("it is empty")
    torn_bytes = 0 if torn_at is None else len(raw) - torn_at
    entries, leases = tuple(held.entries.values()), tuple(held.leases.values())
    return Past(begun.job, begun.base, entries, leases, held.lease_of, torn_bytes)


class _Held:
    """After some lines."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.leases: dict[LeaseId, Leased] = {}
        self.lease_of: dict[str, LeaseId] = {}

    def read(self, line: Line) -> None:
        match line:
            case Leased():
                self.leases[line.lease] = line
            case Ended(lease):
                self.leases.pop(lease, None)
                self._delete([key for key, owner in self.lease_of.items() if owner == lease])
            case Written():
                self._delete([*line.deleted, *(entry.key for entry in line.entries)])
                self.entries |= {entry.key: entry for entry in line.entries}
                self.lease_of |= line.lease_of

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.entries.pop(key, None)
            self.lease_of.pop(key, None)


class Journal:
    """The file of a host that lives. `add` comes from under the host's lock, all else from any thread."""

    def __init__(
        self,
        path: Path,
        begun: Begun,
        content: Callable[[], Sequence[Line]],
        lock: contextlib.AbstractContextManager[object],
    ) -> None:
        """`content` is all that the file must hold, and is called under `lock`. Raises OSError."""
        self._path, self._begun, self._content, self._lock = path, begun, content, lock
        self._fd = -1
        self._size = self._durable = self._size_when_new = 0
        self._asked = False
        """The thread was woken to write the file anew."""
        self._behind = True
        """The file lacks what the host has: only a new one has it all."""
        self._since: list[bytes] | None = None
        """Lines for the file that is being written anew."""
        self._waiting: queue.SimpleQueue[OnDisk | None] = queue.SimpleQueue()
        self._write_anew()
        self._thread = Thread(self._work, "local-disk")
        self._thread.start()

    def add(self, line: Line) -> None:
        """It outlives this process from now on, and the machine's power when `when_on_disk` says so."""
        raw = encode(line, 0 if self._since is not None else self._durable)
        if self._since is not None:
            self._since.append(raw)
        if self._behind:
            return
        try:
            self._write(self._fd, raw)
        except OSError as error:
            self._fall_behind(error)
            return
        self._size += len(raw)
        if self._is_long and not self._asked:
            self._asked = True
            self.when_on_disk(lambda error: None)

    def when_on_disk(self, call: OnDisk) -> None:
        self._waiting.put(call)

    def close(self) -> None:
        """What was added before is on disk then, unless the disk hangs."""
        self._waiting.put(None)
        self._thread.join(5.0)

    # ---------------------------------------------------------------- local-disk

    def _work(self) -> None:
        over = False
        while not over:
            calls = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    calls.append(self._waiting.get_nowait())
            over = None in calls
            error: OSError | None = None
            try:
                self._bring_to_disk()
            except OSError as problem:
                error = problem
                with self._lock:
                    self._fall_behind(problem)
            for call in calls:
                if call is not None:
                    call(error)
        os.close(self._fd)

    def _bring_to_disk(self) -> None:
        with self._lock:
            size, behind = self._size, self._behind
            anew, self._asked = behind or self._is_long, False
        if anew:
            try:
                self._write_anew()
                return
            except OSError as error:
                if behind:
                    raise
                _log.warning("%s cannot be written anew, and grows on: %s", self._path, error)
                self._size_when_new = size
        if size > self._durable:
            os.fdatasync(self._fd)
            with self._lock:
                self._durable = size

    @property
    def _is_long(self) -> bool:
        return self._size > 2 * self._size_when_new + SPARE_BYTES

    def _write_anew(self) -> None:
        with self._lock:
            content = self._content()
            self._since = []
        new = self._path.with_name(f"{self._path.name}.new")
        fd = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            size = self._write(fd, encode(self._begun, 0))
            for line in content:
                size += self._write(fd, encode(line, size))
            os.fdatasync(fd)
            with self._lock:
                added = b"".join(self._since)
                self._write(fd, added)
                os.replace(new, self._path)
                self._fd, fd = fd, self._fd
                self._size_when_new, self._size, self._durable = size, size + len(added), 0
                self._behind = False
        finally:
            with self._lock:
                self._since = None
            if fd >= 0:
                os.close(fd)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        os.fdatasync(self._fd)
        with self._lock:
            self._durable = size + len(added)

    @staticmethod
    def _write(fd: int, content: bytes) -> int:
        """All of it. Raises OSError."""
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        return len(content)

    def _fall_behind(self, error: OSError) -> None:
        if not self._behind:
            _log.error(
                "the state of the pool cannot be kept in %s: %s; nothing that is to last is done until it can: "
                "make room, or correct the folder's permissions",
                self._path,
                error,
            )
        self._behind = True
