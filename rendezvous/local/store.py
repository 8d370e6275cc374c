"""The store of one machine: an SQLite file in a folder of its user's own, which each process opens by itself.

No process hosts it, so nothing has to be taken over when one ends. SQLite's write-ahead log gives each transaction to
all others at once, whole or not at all, also when the process that wrote it is killed. What is to last (a key without a
lease, or a deletion) is answered when the disk has it. Only its author waits for that: nothing that has seen a change
survives the loss of power that could undo it. Leases and keys under them are gone with the power anyway; what confirms
them waits for the disk only where the log begins anew, after some MiB (`LONG`).

A lease is a row with the instant of its end, on the clock that all processes of the machine share (CLOCK_MONOTONIC). It
ends when a `read` or a `Watch` of any process finds that it is due, and can write. Until then it can still be
confirmed, so that a disk that stood still ends no lease by itself. What cannot be written now, as on a full disk, makes
no read fail.

A change rings a bell, see `_Bell`: no watch polls.

    no lock or no disk in time    StoreUnavailable; a durable write may happen still, but not after a later one
    the disk is full              StoreUnavailable to what takes room; what confirms leases has some of its own (`ROOM`)
    file removed or damaged       StoreMismatch: leave
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import (
    Compacted,
    LeaseExpired,
    StoreClosed,
    StoreMismatch,
    StoreUnavailable,
)
from ..store.interface import (
    Change,
    Compare,
    Delete,
    Entry,
    LeaseId,
    Outcome,
    Put,
    Snapshot,
    Store,
    Watch,
)
from ..store.kv_state import check_size
from ..store.retry_connect import retry_connect
from .database import (
    ENTRIES,
    ROOM,
    SCHEMA,
    TIDY_EVERY,
    Connection,
    Disk,
    NotHosted,
    checked,
    end_lease,
    in_scopes,
    make,
    transact,
)

REQUEST_TIMEOUT_S = 5.0
LOOK_S = 1.0
"""A watch that hears no bell looks this often: a process may be killed before it rings."""
POLL_S = 0.05
"""The same, where this machine gives no bell."""
FULL_PAUSE_S = 0.005
"""Between two tries on a full disk."""
SLACK_S = 1.0
"""Of the clock, between processes."""
BUSY_S = 1.0
"""A process that finds others writing ends no leases for so long: they may be about to confirm them."""

_IN_ATTRIB = 0x4
_libc = ctypes.CDLL(None, use_errno=True)

R = TypeVar("R")


class LocalStore(Store):
    """One process' way into the file. Made by `connect` and `offer`."""

    def __init__(self, file: Path, request_timeout_s: float) -> None:
        """Raises StoreUnavailable, StoreRefused and StoreMismatch."""
        self.file = file
        self._timeout_s = request_timeout_s
        self._closed = False
        self._identity = checked(file)
        self._watches: weakref.WeakSet[_LocalWatch] = weakref.WeakSet()
        self._sweeps_after = 0.0
        self._written = 0
        self._folder = -1
        with self._meaning():
            self._reads = Connection(file, request_timeout_s)
            self._leases = Connection(file, request_timeout_s)
            self._disk = Disk(Connection(file, request_timeout_s))
            (version,) = self._reads.database.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA:
            self.close()
            if not version:
                raise NotHosted(
                    f"{file} is empty: the daemon that makes the pool's store is about to start, or has failed"
                )
            raise StoreMismatch(
                f"{file} is of another version of elastic-agent (schema {version}, not {SCHEMA}): use the version of "
                "its daemons, or let them end their jobs, stop them and remove it"
            )

    @classmethod
    def connect(
        cls, file: Path, timeout_s: float, request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> LocalStore:
        """The store that a daemon has made, or will make soon. Raises StoreUnavailable when `timeout_s` seconds of
        trying were not enough, StoreRefused and StoreMismatch at once."""
        return _retried(lambda: cls(file, request_timeout_s), timeout_s)

    @classmethod
    def offer(cls, file: Path, timeout_s: float, request_timeout_s: float = REQUEST_TIMEOUT_S) -> LocalStore:
        """The same for a daemon, which makes the store where there is none."""

        def make_and_open() -> LocalStore:
            make(file, request_timeout_s)
            store = cls(file, request_timeout_s)
            store._disk.tidy()
            store._hold_folder()
            return store

        return _retried(make_and_open, timeout_s)

    def grant(self, ttl_s: float) -> LeaseId:
        def insert(database: sqlite3.Connection) -> int:
            row = (ttl_s, time.monotonic() + ttl_s)
            return database.execute("INSERT INTO leases (ttl_s, ends) VALUES (?, ?)", row).lastrowid or 0

        return self._at_once(insert)

    def keep_alive(self, lease: LeaseId) -> None:
        def update(database: sqlite3.Connection) -> int:
            row = (time.monotonic(), lease)
            return database.execute("UPDATE leases SET ends = ? + ttl_s WHERE lease = ?", row).rowcount

        if not self._at_once(update):
            raise LeaseExpired(f"lease {lease} has expired")

    def revoke(self, lease: LeaseId) -> None:
        if self._at_once(lambda database: end_lease(database, lease)):
            self._ring()

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        check_size(compares, writes)
        work = partial(transact, compares=compares, writes=writes)
        if any(isinstance(write, Delete) or write.lease is None for write in writes):
            self._check()
            self._check_room()
            with self._meaning():
                outcome = self._disk.do(work, self._timeout_s)
            self._count()
        else:
            outcome = self._at_once(work)
        if outcome.succeeded and writes:
            self._ring()
        return outcome

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        with self._reading() as database:
            self._sweep_if_due(database)
            database.execute("BEGIN")
            (revision,) = database.execute("SELECT revision FROM state").fetchone()
            where, words = in_scopes("e.key", scopes)
            found = database.execute(f"{ENTRIES} WHERE {where}", words).fetchall()
            if oldest_under is not None:
                where, words = in_scopes("e.key", (oldest_under,))
                first = f"{ENTRIES} WHERE {where} ORDER BY v.created, e.key LIMIT 1"
                found += database.execute(first, words).fetchall()
            database.execute("COMMIT")
        entries = {row[0]: Entry(*row) for row in found}
        return Snapshot(revision, tuple(entries[key] for key in sorted(entries)))

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        try:
            watch = _LocalWatch(self, scopes, after_revision)
        except OSError as error:
            raise StoreUnavailable(f"cannot watch the store {self.file}: {error}") from error
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """Gives up soon on a thread that waits for the disk. The last of all processes brings the log into the file."""
        self._closed = True
        for watch in list(self._watches):
            watch.close()
        self._disk.close()
        for connection in (self._reads, self._leases):
            connection.close()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def changes(self, scopes: tuple[str, ...], after: int) -> tuple[int, tuple[Change, ...], float]:
        """The revision up to which these are all changes, and the instant at which a lease is due next. Raises
        Compacted."""
        with self._reading() as database:
            self._sweep_if_due(database)
            database.execute("BEGIN")
            revision, forgotten = database.execute("SELECT revision, forgotten FROM state").fetchone()
            rows, due_at = [], None
            if after >= forgotten:
                where, words = in_scopes("key", scopes)
                rows = database.execute(
                    "SELECT key, value, created, revision FROM versions"
                    f" WHERE revision > ? AND ({where}) ORDER BY number",
                    (after, *words),
                ).fetchall()
                (due_at,) = database.execute("SELECT min(ends) FROM leases").fetchone()
            database.execute("COMMIT")
        if after < forgotten:
            raise Compacted(f"changes after revision {after} are gone; kept from {forgotten + 1} on")
        found = tuple(Change(row[3], row[0], Entry(*row) if row[1] is not None else None) for row in rows)
        return revision, found, due_at if due_at is not None else float("inf")

    def _sweep_if_due(self, database: sqlite3.Connection) -> None:
        """End the leases that are due, if that can be done now without waiting for anything."""
        now = time.monotonic()
        if now < self._sweeps_after:
            return
        if not _due(database):
            return

        def end_due(database: sqlite3.Connection) -> bool:
            ended = [end_lease(database, lease) for lease in _due(database)]
            return any(ended)

        try:
            if self._leases.within(end_due, waits=False):
                self._ring()
        except (sqlite3.Error, StoreUnavailable):
            self._sweeps_after = now + BUSY_S

    def _at_once(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """A write that waits for the disk only where it begins the log anew."""
        self._check()
        with self._meaning():
            result = self._within_room(work)
        self._count()
        return result

    def _within_room(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """On a full disk the log begins anew, where it has its room, once it is in the file: that of `Disk`, too, may
        be bringing it there."""
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._leases.within(work)
            except sqlite3.OperationalError as error:
                if "full" not in str(error) or time.monotonic() >= until:
                    raise
            self._leases.checkpoint()
            time.sleep(FULL_PAUSE_S)

    def _count(self) -> None:
        self._written += 1
        if self._written % TIDY_EVERY == 0:
            self._disk.tidy()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self._check()
        with self._meaning(), self._reads.used() as database:
            try:
                yield database
            finally:
                if database.in_transaction:
                    database.execute("ROLLBACK")

    def _ring(self) -> None:
        """Tell all watches on this machine that something has changed."""
        with suppress(OSError):
            os.utime(self.file)

    def _hold_folder(self) -> None:
        """systemd-tmpfiles leaves one alone while someone has a lock on it."""
        with suppress(OSError):
            self._folder = os.open(self.file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _check_room(self) -> None:
        """What is to last does not take the room of leases. Raises StoreUnavailable."""
        with suppress(OSError):
            disk = os.statvfs(self.file.parent)
            if disk.f_bavail * disk.f_frsize < ROOM:
                raise StoreUnavailable(f"the disk of {self.file} is full: make room there")

    def _check(self) -> None:
        if self._closed:
            raise StoreClosed(f"the store {self.file} was closed on this side")
        if checked(self.file) != self._identity:
            raise StoreMismatch(
                f"{self.file} was replaced while it was in use: start the daemons of the pool again"
            )

    @contextmanager
    def _meaning(self) -> Iterator[None]:
        """Of SQLite's errors."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise StoreClosed(f"the store {self.file} was closed on this side") from error
        except sqlite3.OperationalError as error:
            full, locked = "full" in str(error), "locked" in str(error)
            advice = (
                "make room there"
                if full
                else "another process holds it"
                if locked
                else "see its disk and permissions"
            )
            raise StoreUnavailable(f"the store {self.file} cannot be used now: {error}; {advice}") from error
        except OSError as error:
            raise StoreUnavailable(f"{self.file} cannot be brought to its disk: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreMismatch(
                f"{self.file} cannot be read: {error}; stop the daemons, move it away, and submit its jobs again"
            ) from error


class _LocalWatch(Watch):
    def __init__(self, store: LocalStore, scopes: tuple[str, ...], after_revision: int) -> None:
        self._store, self._scopes, self._after = store, scopes, after_revision
        self._bell = _Bell(store.file)
        self._closed = False
        self._using = threading.Lock()

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        until = time.monotonic() + timeout_s
        with self._using:
            try:
                while True:
                    if self._closed:
                        raise StoreClosed("the watch was closed")
                    self._bell.hush()
                    self._after, changes, due_at = self._store.changes(self._scopes, self._after)
                    now = time.monotonic()
                    if changes or now >= until:
                        return changes
                    self._bell.wait(min(until, now + LOOK_S, max(due_at, now + POLL_S)) - now)
            finally:
                if self._closed:
                    self._bell.close()

    def close(self) -> None:
        self._closed = True
        self._bell.ring()
        if self._using.acquire(blocking=False):
            try:
                self._bell.close()
            finally:
                self._using.release()


class _Bell:
    """Rings for each change of the store: its author sets the file's time, of which the kernel tells (inotify)."""

    def __init__(self, file: Path) -> None:
        """Raises OSError."""
        self._closing = threading.Lock()
        self._own = self._kernel = -1
        self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._kernel = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)
        if self._kernel >= 0:
            if _libc.inotify_add_watch(self._kernel, os.fsencode(file), _IN_ATTRIB) < 0:
                os.close(self._kernel)
                self._kernel = -1
            else:
                self._poll.register(self._kernel, select.POLLIN)

    def hush(self) -> None:
        if self._kernel >= 0:
            with suppress(BlockingIOError):
                os.read(self._kernel, 4096)

    def wait(self, timeout_s: float) -> None:
        most_s = timeout_s if self._kernel >= 0 else min(timeout_s, POLL_S)
        self._poll.poll(max(0, int(most_s * 1000) + 1))

    def ring(self) -> None:
        """For this watch alone, from any thread."""
        with self._closing:
            if self._own >= 0:
                os.eventfd_write(self._own, 1)

    def close(self) -> None:
        with self._closing:
            for descriptor in (self._own, self._kernel):
                if descriptor >= 0:
                    os.close(descriptor)
            self._own = self._kernel = -1

    def __del__(self) -> None:
        self.close()


def _due(database: sqlite3.Connection) -> list[LeaseId]:
    """One that ends later than any lease could that was confirmed just now is of an earlier boot, whose clock had gone
    further."""
    now = time.monotonic()
    late = "SELECT lease FROM leases WHERE ends <= ? OR ends > ? + ttl_s ORDER BY ends"
    return [lease for (lease,) in database.execute(late, (now, now + SLACK_S))]


def _retried(open_it: Callable[[], LocalStore], timeout_s: float) -> LocalStore:
    found = list[LocalStore]()
    retry_connect(lambda: found.append(open_it()), time.monotonic() + timeout_s, random.Random())
    return found[0]
