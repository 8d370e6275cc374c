"""The store of one machine: an SQLite file in a folder of its user's own, which each process opens by itself.

No process hosts it, so nothing has to be taken over when one ends. SQLite's write-ahead log gives each transaction to
all others at once, whole or not at all, also when the process that wrote it is killed. What is to last (a key without a
lease, or a deletion) is written with synchronous=FULL: it is answered when the disk has it, and others write meanwhile
as little as in any transaction. Leases and keys under them are gone with the power anyway, and wait for no disk.

A lease is a row with the instant of its end, on the clock that all processes of the machine share (CLOCK_MONOTONIC).
It ends when a `read` or a `Watch` of any process finds that it is due, and can write. Until then it can still be
confirmed, so that a disk that stood still, for which all writers wait, ends no lease by itself.

Who has changed something sets the file's time, of which the kernel tells all watches (inotify). Of a key that has
changed twice between two looks a watch tells the newest alone.

    no lock in time               StoreUnavailable, as while the disk stands still
    the disk is full              StoreUnavailable to what is to last; leases have the room that the log has come to
    file removed or damaged       StoreMismatch: leave
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from ...threads import Thread
from ..errors import Compacted, LeaseExpired, StoreClosed, StoreMismatch, StoreRefused, StoreUnavailable
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
    is_folder,
)
from ..store.kv_state import check_size
from ..store.store_kind import retry_connect

SCHEMA = 2
"""The file's `user_version`."""
HISTORY = 1024
"""Revisions for which a deletion is remembered. A watch that falls further behind reads again (`Compacted`)."""
REQUEST_TIMEOUT_S = 5.0
LOOK_S = 1.0
"""Between two looks of a watch that hears nothing, as of a lease that is due, or from a process that was killed."""
ROOM = 1024 * 1024
"""Bytes on the disk below which nothing is written that is to last."""
LONG, WRITE = 8 * 1024 * 1024, 8192
"""Bytes that a process writes before it brings the log into the file, so that it begins anew (which has the next writer
wait for the disk); and of one write, besides its values."""
SLACK_S = 1.0
"""Of the clock, between processes."""
BUSY_S = 2.0
"""A process that finds others writing ends no leases for so long: they may be about to confirm them. Longer than from
one look to the next, so that all have paused when a disk moves again."""

_TABLES = (
    "CREATE TABLE state (revision INTEGER NOT NULL)",
    "CREATE TABLE leases (lease INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s REAL NOT NULL, ends REAL NOT NULL)",
    "CREATE TABLE entries (key TEXT PRIMARY KEY, value TEXT, created INTEGER, revision INTEGER NOT NULL,"
    " lease INTEGER)",
    "CREATE INDEX by_revision ON entries (revision)",
    "CREATE INDEX deletions ON entries (revision) WHERE value IS NULL",
    "CREATE INDEX by_lease ON entries (lease) WHERE lease IS NOT NULL",
    "INSERT INTO state VALUES (0)",
    f"PRAGMA user_version = {SCHEMA}",
)
"""An entry without a value is a key that was deleted."""
_ENTRIES = "SELECT key, value, created, revision FROM entries"

_IN_ATTRIB = 0x4
_libc = ctypes.CDLL(None)

R = TypeVar("R")


def store_file(folder: Path, job: str) -> Path:
    """Of the pool of this name. Several pools may have the same folder."""
    return folder / f"{job}.db"


class LocalStore(Store):
    """One process' way into the file. Made by `connect`."""

    def __init__(self, file: Path, request_timeout_s: float, *, make: bool = False) -> None:
        """Raises StoreUnavailable, StoreRefused and StoreMismatch."""
        self.file = file
        self._timeout_s = request_timeout_s
        self._closed = False
        self._lock = threading.Lock()
        self._sweeps_after = 0.0
        self._written = 0
        if make:
            self._make_file()
        self._identity = _checked(file)
        with self._meaning():
            self._database = self._opened()
            self._database.execute("PRAGMA wal_autocheckpoint = 0")  # see `_checkpoint`
        try:
            with self._meaning():
                if make:
                    self._make_tables()
                (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if not version:
                raise StoreUnavailable(
                    f"{file} is empty: the daemon that makes the pool's store is about to start"
                )
            if version != SCHEMA:
                raise StoreMismatch(
                    f"{file} is of another version of elastic-agent (schema {version}, not {SCHEMA}): use the version"
                    " of its daemons, or let them end their jobs, stop them and remove it"
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(
        cls, file: Path, timeout_s: float, request_timeout_s: float = REQUEST_TIMEOUT_S, *, make: bool = False
    ) -> LocalStore:
        """The store that a daemon has made, or will make soon; a daemon has to `make` it where there is none. Raises
        StoreUnavailable when `timeout_s` seconds of trying were not enough, StoreRefused and StoreMismatch at once."""
        until = time.monotonic() + timeout_s
        return retry_connect(lambda: cls(file, request_timeout_s, make=make), until, random.Random())

    def _opened(self) -> sqlite3.Connection:
        place = f"file:{quote(str(self.file))}?mode=rw"
        return sqlite3.connect(
            place, self._timeout_s, isolation_level=None, check_same_thread=False, uri=True
        )

    def _make_file(self) -> None:
        try:
            with suppress(FileExistsError):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                # No process has it open yet: closing it releases no lock of SQLite's.
                os.close(os.open(self.file, flags, 0o600))
        except OSError as error:
            raise StoreUnavailable(
                f"cannot make the store of pool {self.file.stem} in {self.file.parent}: {error}; check the folder's "
                "permissions and the space there, or name another one (--rdzv-endpoint local:///FOLDER)"
            ) from error

    def _make_tables(self) -> None:
        def make(database: sqlite3.Connection) -> None:
            if not database.execute("PRAGMA user_version").fetchone()[0]:
                for words in _TABLES:
                    database.execute(words)

        self._database.execute("PRAGMA journal_mode = WAL")
        self._within(make, lasts=True)

    # ---------------------------------------------------------------- what a store does

    def grant(self, ttl_s: float) -> LeaseId:
        def insert(database: sqlite3.Connection) -> int:
            row = (ttl_s, time.monotonic() + ttl_s)
            return database.execute("INSERT INTO leases (ttl_s, ends) VALUES (?, ?)", row).lastrowid or 0

        return self._write(insert)

    def keep_alive(self, lease: LeaseId) -> None:
        def update(database: sqlite3.Connection) -> int:
            row = (time.monotonic(), lease)
            return database.execute("UPDATE leases SET ends = ? + ttl_s WHERE lease = ?", row).rowcount

        if not self._write(update):
            raise LeaseExpired(f"lease {lease} has expired")

    def revoke(self, lease: LeaseId) -> None:
        self._write(lambda database: _end_lease(database, lease))
        self.ring()

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        check_size(compares, writes)
        lasts = any(isinstance(write, Delete) or write.lease is None for write in writes)
        if lasts:
            self._check_room()
        size = sum(len(write.value) for write in writes if isinstance(write, Put))
        outcome = self._write(partial(_transact, compares=compares, writes=writes), size, lasts=lasts)
        if outcome.succeeded and writes:
            self.ring()
        return outcome

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        with self._reading() as database:
            (revision,) = database.execute("SELECT revision FROM state").fetchone()
            where, words = _in_scopes(scopes)
            standing = f"{_ENTRIES} WHERE value IS NOT NULL AND"
            found = database.execute(f"{standing} ({where})", words).fetchall()
            if oldest_under is not None:
                where, words = _in_scopes((oldest_under,))
                found += database.execute(
                    f"{standing} ({where}) ORDER BY created, key LIMIT 1", words
                ).fetchall()
        entries = {row[0]: Entry(*row) for row in found}
        return Snapshot(revision, tuple(entries[key] for key in sorted(entries)))

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        return _LocalWatch(self, scopes, after_revision)

    def close(self) -> None:
        """Gives up soon on a thread that waits for the disk. The last of all processes brings the log into the file."""
        self._closed = True
        self.ring()
        if self._lock.acquire(timeout=0.5):
            with suppress(sqlite3.Error):
                self._database.close()
            self._lock.release()

    def changes(self, scopes: tuple[str, ...], after: int) -> tuple[int, tuple[Change, ...]]:
        """The revision up to which these are all changes. Raises Compacted."""
        with self._reading() as database:
            (revision,) = database.execute("SELECT revision FROM state").fetchone()
            if revision == after:
                return revision, ()
            where, words = _in_scopes(scopes)
            newer = f"{_ENTRIES} WHERE revision > ? AND ({where}) ORDER BY revision, rowid"
            rows = database.execute(newer, (after, *words)).fetchall()
        if after < (forgotten := revision - HISTORY):
            raise Compacted(f"changes after revision {after} are gone; kept from {forgotten + 1} on")
        found = (Change(row[3], row[0], Entry(*row) if row[1] is not None else None) for row in rows)
        return revision, tuple(found)

    # ---------------------------------------------------------------- how it does it

    def _write(self, work: Callable[[sqlite3.Connection], R], size: int = 0, *, lasts: bool = False) -> R:
        """Where the disk is full, the log begins anew once it is in the file: it has the room that it had."""
        self._check()
        with self._meaning():
            try:
                result = self._within(work, lasts=lasts)
            except sqlite3.OperationalError as error:
                if "full" not in str(error):
                    raise
                self._checkpoint()
                result = self._within(work, lasts=lasts)
        self._written += WRITE + size
        if self._written >= LONG:
            self._written = 0
            # No caller waits for the disk: a lease may end meanwhile.
            Thread(self._checkpoint, "store-disk", lambda: None).start()
        return result

    def _within(self, work: Callable[[sqlite3.Connection], R], *, lasts: bool) -> R:
        """All of the work, or nothing; on disk if it `lasts`. Raises sqlite3.Error."""
        with self._alone() as database:
            database.execute(f"PRAGMA synchronous = {'FULL' if lasts else 'NORMAL'}")
            with database:
                database.execute("BEGIN IMMEDIATE")
                return work(database)

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time. Raises StoreUnavailable."""
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StoreUnavailable("another thread of this process waits for the store")
        try:
            yield self._database
        finally:
            self._lock.release()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self._check()
        with self._meaning(), self._alone() as database:
            self._end_due(database)
            with database:
                database.execute("BEGIN")
                yield database

    def _end_due(self, database: sqlite3.Connection) -> None:
        """End the leases that are due, if that can be done now without waiting for anything."""
        now = time.monotonic()
        if now < self._sweeps_after or not _due(database):
            return
        try:
            database.execute("PRAGMA busy_timeout = 0")
            database.execute("PRAGMA synchronous = NORMAL")
            with database:
                database.execute("BEGIN IMMEDIATE")
                for lease in _due(database):
                    _end_lease(database, lease)
            self.ring()
        except sqlite3.OperationalError:
            self._sweeps_after = now + BUSY_S
        finally:
            database.execute(f"PRAGMA busy_timeout = {int(self._timeout_s * 1000)}")

    def _checkpoint(self) -> None:
        """Bring the log into the file where that can be done, as far as no other process reads from it, unless one is
        doing so: two at once may damage the file (SQLite before 3.51.3). Its connection is its own: no caller waits."""
        # SQLite has no locks on the log: closing it here releases none.
        with suppress(sqlite3.Error, OSError), open(f"{self.file}-wal", "rb") as wal:
            fcntl.flock(wal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with closing(self._opened()) as database:
                database.execute("SELECT revision FROM state").fetchall()  # opens the log
                database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def ring(self) -> None:
        """Have all watches on this machine look."""
        with suppress(OSError):
            os.utime(self.file)

    def _check_room(self) -> None:
        """What is to last does not take the room of leases. Raises StoreUnavailable."""
        with suppress(OSError):
            disk = os.statvfs(self.file.parent)
            if disk.f_bavail * disk.f_frsize < ROOM:
                raise StoreUnavailable(f"the disk of {self.file} is full: make room there")

    def _check(self) -> None:
        if self._closed:
            raise StoreClosed(f"the store {self.file} was closed on this side")
        if _checked(self.file) != self._identity:
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
        except (sqlite3.OperationalError, OSError) as error:
            advice = "make room there" if "full" in str(error) else "see its disk and permissions"
            raise StoreUnavailable(f"the store {self.file} cannot be used now: {error}; {advice}") from error
        except sqlite3.DatabaseError as error:
            raise StoreMismatch(
                f"{self.file} cannot be read: {error}; stop the daemons, move it away, and submit its jobs again"
            ) from error


class _LocalWatch(Watch):
    def __init__(self, store: LocalStore, scopes: tuple[str, ...], after_revision: int) -> None:
        self._store, self._scopes, self._after = store, scopes, after_revision
        self._closed = False
        self._using = threading.Lock()
        bell = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._bell = FileIO(bell) if bell >= 0 else None
        self._poll = select.poll()
        if bell >= 0 and _libc.inotify_add_watch(bell, os.fsencode(store.file), _IN_ATTRIB) >= 0:
            self._poll.register(bell, select.POLLIN)

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        until = time.monotonic() + timeout_s
        with self._using:
            try:
                while not self._closed:
                    if self._bell is not None:
                        self._bell.read(4096)  # what has rung before this look
                    self._after, changes = self._store.changes(self._scopes, self._after)
                    left_s = until - time.monotonic()
                    if changes or left_s <= 0:
                        return changes
                    self._poll.poll(min(left_s, LOOK_S) * 1000 + 1)
                raise StoreClosed("the watch was closed")
            finally:
                if self._closed:
                    self._close_bell()

    def close(self) -> None:
        self._closed = True
        self._store.ring()
        if self._using.acquire(blocking=False):
            self._close_bell()
            self._using.release()

    def _close_bell(self) -> None:
        if self._bell is not None:
            self._bell.close()


def _checked(file: Path) -> tuple[int, int]:
    """Which file it is. Raises StoreUnavailable, and StoreRefused where it is not for this user, or may be a trap."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        raise StoreUnavailable(
            f"no daemon has made the store of pool {file.stem} in {file.parent}: start elastic-agent without a script "
            "on this machine, as the same user"
        ) from None
    except PermissionError as error:
        raise StoreRefused(f"cannot reach {file}: its folder is for its user, and for root") from error
    except OSError as error:
        raise StoreUnavailable(f"cannot reach {file}: {error}") from error
    me, owner = os.geteuid(), found.st_uid
    anybody = owner != me and file.parent.parent.stat().st_mode & stat.S_IWOTH
    if not stat.S_ISREG(found.st_mode) or anybody or me not in (0, owner):
        raise StoreRefused(
            f"user {owner} has made the store in {file.parent}: a pool of one machine is for the user that runs its "
            "daemon, and for root where no other can have put it there; remove that folder, or name another one"
        )
    return found.st_dev, found.st_ino


# ---------------------------------------------------------------- in a transaction


def _transact(
    database: sqlite3.Connection, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]
) -> Outcome:
    """Raises LeaseExpired."""

    def entry(key: str) -> Entry | None:
        row = database.execute(f"{_ENTRIES} WHERE key = ? AND value IS NOT NULL", (key,)).fetchone()
        return Entry(*row) if row is not None else None

    before = [entry(compare.key) for compare in compares]
    holds = all(
        (old.mod_revision if old is not None else 0) == compare.mod_revision
        for compare, old in zip(compares, before, strict=True)
    )
    if holds:
        for write in writes:
            if isinstance(write, Put) and write.lease is not None:
                known = database.execute("SELECT 1 FROM leases WHERE lease = ?", (write.lease,))
                if known.fetchone() is None:
                    raise LeaseExpired(f"lease {write.lease} has expired; {write.key!r} was not written")
        _apply(database, writes)
    (revision,) = database.execute("SELECT revision FROM state").fetchone()
    return Outcome(holds, revision, tuple(entry(compare.key) for compare in compares))


def _apply(database: sqlite3.Connection, writes: tuple[Put | Delete, ...]) -> None:
    """Under one new revision, if anything changes."""
    (revision,) = database.execute("SELECT revision + 1 FROM state").fetchone()
    changed = 0
    for write in writes:
        if isinstance(write, Delete):
            changed += database.execute(
                "UPDATE entries SET value = NULL, created = NULL, lease = NULL, revision = ?"
                " WHERE key = ? AND value IS NOT NULL",
                (revision, write.key),
            ).rowcount
        else:
            changed += database.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value,"
                " created = coalesce(created, excluded.created), revision = excluded.revision, lease = excluded.lease",
                (write.key, write.value, revision, revision, write.lease),
            ).rowcount
    if changed:
        database.execute("UPDATE state SET revision = ?", (revision,))
        database.execute("DELETE FROM entries WHERE revision <= ? AND value IS NULL", (revision - HISTORY,))


def _end_lease(database: sqlite3.Connection, lease: LeaseId) -> None:
    """And delete its keys."""
    database.execute("DELETE FROM leases WHERE lease = ?", (lease,))
    keys = database.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall()
    _apply(database, tuple(Delete(key) for (key,) in keys))


def _due(database: sqlite3.Connection) -> list[LeaseId]:
    """One that ends later than any lease could that was confirmed just now is of an earlier boot, whose clock had gone
    further."""
    now = time.monotonic()
    late = "SELECT lease FROM leases WHERE ends <= ? OR ends > ? + ttl_s ORDER BY ends"
    return [lease for (lease,) in database.execute(late, (now, now + SLACK_S))]


def _in_scopes(scopes: tuple[str, ...]) -> tuple[str, list[str]]:
    """A condition, and its words."""
    parts, words = ["0"], list[str]()
    for scope in scopes:
        if not scope:
            parts.append("1")
        elif is_folder(scope):
            parts.append("key >= ? AND key < ?")
            words += [scope, scope[:-1] + chr(ord("/") + 1)]
        else:
            parts.append("key = ?")
            words.append(scope)
    return " OR ".join(parts), words
