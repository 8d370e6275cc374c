"""The file of a machine's store: its tables, what is done in one transaction, and who may open it."""

from __future__ import annotations

import fcntl
import os
import queue
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from ...threads import Thread
from ..errors import LeaseExpired, StoreMismatch, StoreRefused, StoreUnavailable
from ..store.interface import Compare, Delete, Entry, LeaseId, Outcome, Put, is_folder

SCHEMA = 1
"""The file's `user_version`."""
HISTORY = 1024
"""Changes that are kept for watches. A watch that falls further behind has to read again (`Compacted`)."""
ROOM = 1024 * 1024
"""Bytes that are kept free in the file and in its log: on a full disk leases are written there."""
LONG = 8 * ROOM
"""A log of so many bytes is brought into the file, by the thread that may wait for the disk. Seldom: the next
write begins the log anew, and SQLite waits for the disk then, with its lock."""
PAGE = 4096
TIDY_EVERY = 50
"""Writes after which that thread looks."""

_TABLES = """
CREATE TABLE state (revision INTEGER NOT NULL, forgotten INTEGER NOT NULL, trimmed INTEGER NOT NULL);
CREATE TABLE leases (
    lease INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s REAL NOT NULL, ends REAL NOT NULL
);
CREATE TABLE versions (
    number INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key TEXT NOT NULL, value TEXT, created INTEGER
);
CREATE INDEX by_revision ON versions (revision);
CREATE TABLE entries (key TEXT PRIMARY KEY, version INTEGER NOT NULL, lease INTEGER) WITHOUT ROWID;
CREATE INDEX by_lease ON entries (lease) WHERE lease IS NOT NULL;
CREATE TABLE room (bytes BLOB);
INSERT INTO state VALUES (0, 0, 0);
"""
"""`versions` has each change, of which a deletion has no value; `entries` which of them stand. Of those with a number
up to `trimmed` only the standing ones are kept, and no watch may begin before the revision `forgotten`."""
ENTRIES = (
    "SELECT e.key, v.value, v.created, v.revision FROM entries e JOIN versions v ON v.number = e.version"
)

R = TypeVar("R")


class NotHosted(StoreUnavailable):
    """No daemon has made the store yet."""


def store_file(folder: Path, job: str) -> Path:
    """Of the pool of this name. Several pools may have the same folder."""
    return folder / f"{job}.db"


# ---------------------------------------------------------------- the file


def checked(file: Path) -> tuple[int, int]:
    """Which file it is. Raises NotHosted, and StoreRefused where it is not for this user, or may be another's trap."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        raise NotHosted(
            f"no daemon has made the store of pool {file.stem} in {file.parent}: start elastic-agent without a script "
            "on this machine, as the same user"
        ) from None
    except PermissionError as error:
        raise _of_another_user(file) from error
    except OSError as error:
        raise StoreUnavailable(f"cannot reach {file}: {error}") from error
    me = os.geteuid()
    if not stat.S_ISREG(found.st_mode) or (found.st_uid != me and (me or _all_may_write(file.parent.parent))):
        if me and stat.S_ISREG(found.st_mode):
            raise _of_another_user(file)
        raise StoreRefused(
            f"user {found.st_uid} has made the store in {file.parent}: remove that folder, or name another one"
        )
    return found.st_dev, found.st_ino


def _all_may_write(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def _of_another_user(file: Path) -> StoreRefused:
    return StoreRefused(
        f"{file.parent} belongs to another user: a pool of one machine is for the user that runs its daemon, and for "
        "root"
    )


def make(file: Path, timeout_s: float) -> None:
    """Make the file and its tables where they are not there. Raises StoreError."""
    try:
        with suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            # No process has it open yet: closing it releases no lock of SQLite's.
            os.close(os.open(file, flags, 0o600))
        checked(file)
        made = Connection(file, timeout_s)
        try:
            database = made.database
            if not database.execute("PRAGMA user_version").fetchone()[0]:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("BEGIN IMMEDIATE")
                if not database.execute("PRAGMA user_version").fetchone()[0]:
                    for words in filter(None, map(str.strip, _TABLES.split(";"))):
                        database.execute(words)
                    database.execute(f"PRAGMA user_version = {SCHEMA}")
                database.execute("COMMIT")
        finally:
            made.close()
    except sqlite3.OperationalError as error:
        raise StoreUnavailable(
            f"cannot make the store {file}: {error}; check the folder's permissions and space"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StoreMismatch(
            f"{file} cannot be read: {error}; stop the daemons, move it away, and submit its jobs again"
        ) from error
    except OSError as error:
        raise StoreUnavailable(
            f"cannot make the store of pool {file.stem} in {file.parent}: {error}; check the folder's permissions and "
            "the space there, or name another one (--rdzv-endpoint local:///FOLDER)"
        ) from error


class Connection:
    """SQLite's, used by one thread at a time."""

    def __init__(self, file: Path, timeout_s: float) -> None:
        """Raises sqlite3.Error."""
        self._file, self._timeout_s = file, timeout_s
        self._lock = threading.Lock()
        self.database = sqlite3.connect(
            f"file:{quote(str(file))}?mode=rw",
            timeout_s,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        self.database.execute("PRAGMA synchronous = NORMAL")  # of what is to last, see `sync`
        self.database.execute("PRAGMA wal_autocheckpoint = 0")
        self.database.execute(f"PRAGMA journal_size_limit = {LONG // 2}")  # of a log that begins anew

    @contextmanager
    def used(self, *, waits: bool = True) -> Iterator[sqlite3.Connection]:
        """Raises StoreUnavailable."""
        if not self._lock.acquire(timeout=self._timeout_s if waits else 0.0):
            raise StoreUnavailable("another thread of this process waits for the store")
        try:
            yield self.database
        finally:
            self._lock.release()

    def within(self, work: Callable[[sqlite3.Connection], R], *, waits: bool = True) -> R:
        """All of the work, or nothing. Raises sqlite3.Error and StoreUnavailable."""
        with self.used(waits=waits) as database:
            if not waits:
                database.execute("PRAGMA busy_timeout = 0")
            try:
                database.execute("BEGIN IMMEDIATE")
                result = work(database)
                database.execute("COMMIT")
                return result
            finally:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                if not waits:
                    database.execute(f"PRAGMA busy_timeout = {int(self._timeout_s * 1000)}")

    def sync(self) -> None:
        """Returns when all that was done is on disk. As synchronous = FULL does it, but without SQLite's lock: no
        other writer waits for it. Raises OSError."""
        log = os.open(f"{self._file}-wal", os.O_RDONLY | os.O_CLOEXEC)  # no file on which SQLite has locks
        try:
            os.fdatasync(log)
        finally:
            os.close(log)

    def checkpoint(self) -> None:
        """Bring the log into the file, as far as no other process reads from it, unless one is doing so: two at once
        may damage the file (SQLite before 3.51.3). Raises sqlite3.Error, StoreUnavailable and OSError."""
        with self.used() as database:
            log = os.open(f"{self._file}-wal", os.O_RDONLY | os.O_CLOEXEC)  # as in `sync`
            try:
                with suppress(BlockingIOError):
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    fcntl.flock(log, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
            finally:
                os.close(log)

    def tidy(self) -> None:
        """Bring a log that is long into the file, and give both the room that they should have. On a full disk nothing
        is done."""
        with suppress(sqlite3.Error, StoreUnavailable, OSError):
            (free,) = self.database.execute("PRAGMA freelist_count").fetchone()
            length = os.stat(f"{self._file}-wal").st_size
            if lacks_room := free * PAGE < ROOM // 2 or length < ROOM:
                self.within(
                    lambda database: database.execute("INSERT INTO room VALUES (zeroblob(?))", (ROOM,))
                )
                self.within(lambda database: database.execute("DELETE FROM room"))
            if lacks_room or length > LONG:
                self.checkpoint()

    def close(self) -> None:
        """If no thread waits for the disk with it: such a one keeps it."""
        if self._lock.acquire(timeout=0.5):
            with suppress(sqlite3.Error):
                self.database.close()
            self._lock.release()


class Disk:
    """The thread that waits for the disk: a call that waits for it does so for a bounded time."""

    def __init__(self, connection: Connection) -> None:
        """The thread's, once there is one; closed with this."""
        self._connection = connection
        self._work: queue.SimpleQueue[Callable[[Connection], None] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: Thread | None = None

    def do(self, work: Callable[[sqlite3.Connection], R], timeout_s: float) -> R:
        """Raises StoreUnavailable, and what the work raises. What has not begun in time is never done."""
        future: Future[R] = Future()

        def begin(connection: Connection) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = connection.within(work)
                    connection.sync()
                    future.set_result(result)
                except Exception as error:
                    future.set_exception(error)

        self._put(begin)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            future.cancel()
            raise StoreUnavailable(
                f"the store's disk has not answered for {timeout_s:g} s; what was asked may have been done: read before"
                " asking again"
            ) from None

    def tidy(self) -> None:
        """Some time soon."""
        self._put(Connection.tidy)

    def close(self) -> None:
        self._work.put(None)
        if self._thread is None:
            self._connection.close()
        else:
            self._thread.join(0.5)

    def _put(self, work: Callable[[Connection], None]) -> None:
        self._work.put(work)
        with self._starting:
            if self._thread is None:
                self._thread = Thread(self._serve, "local-store")
                self._thread.start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work(self._connection)
        self._connection.close()


# ---------------------------------------------------------------- in a transaction


def transact(
    database: sqlite3.Connection, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]
) -> Outcome:
    """Raises LeaseExpired."""
    holds = all(_mod_revision(database, compare.key) == compare.mod_revision for compare in compares)
    if holds:
        for write in writes:
            if isinstance(write, Put) and write.lease is not None:
                known = database.execute("SELECT 1 FROM leases WHERE lease = ?", (write.lease,))
                if known.fetchone() is None:
                    raise LeaseExpired(f"lease {write.lease} has expired; {write.key!r} was not written")
        _write(database, writes)
    (revision,) = database.execute("SELECT revision FROM state").fetchone()
    return Outcome(holds, revision, tuple(_entry(database, compare.key) for compare in compares))


def _entry(database: sqlite3.Connection, key: str) -> Entry | None:
    row = database.execute(f"{ENTRIES} WHERE e.key = ?", (key,)).fetchone()
    return Entry(*row) if row is not None else None


def _mod_revision(database: sqlite3.Connection, key: str) -> int:
    entry = _entry(database, key)
    return entry.mod_revision if entry is not None else 0


def end_lease(database: sqlite3.Connection, lease: LeaseId) -> bool:
    """And delete its keys. Returns whether there were some."""
    database.execute("DELETE FROM leases WHERE lease = ?", (lease,))
    keys = database.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall()
    return _write(database, tuple(Delete(key) for (key,) in keys))


def _write(database: sqlite3.Connection, writes: tuple[Put | Delete, ...]) -> bool:
    """Under one new revision. Returns whether anything has changed."""
    revision, trimmed = database.execute("SELECT revision + 1, trimmed FROM state").fetchone()
    number = 0
    for write in writes:
        find = "SELECT e.version, v.created FROM entries e JOIN versions v ON v.number = e.version WHERE e.key = ?"
        old = database.execute(find, (write.key,)).fetchone()
        if isinstance(write, Delete) and old is None:
            continue
        value = write.value if isinstance(write, Put) else None
        created = None if value is None else old[1] if old is not None else revision
        row = (revision, write.key, value, created)
        insert = "INSERT INTO versions (revision, key, value, created) VALUES (?, ?, ?, ?)"
        number = database.execute(insert, row).lastrowid or 0
        if isinstance(write, Put):
            standing = (write.key, number, write.lease)
            database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", standing)
        else:
            database.execute("DELETE FROM entries WHERE key = ?", (write.key,))
        if old is not None and old[0] <= trimmed:
            database.execute("DELETE FROM versions WHERE number = ?", (old[0],))
    if not number:
        return False
    database.execute("UPDATE state SET revision = ?", (revision,))
    _trim(database, trimmed, number - HISTORY)
    return True


def _trim(database: sqlite3.Connection, after: int, upto: int) -> None:
    """Forget the changes with these numbers, but for what stands."""
    if upto <= after:
        return
    gone = "number > ? AND number <= ?"
    database.execute(
        "UPDATE state SET trimmed = ?, forgotten = max(forgotten,"
        f" (SELECT coalesce(max(revision), 0) FROM versions WHERE {gone}))",
        (upto, after, upto),
    )
    database.execute(
        f"DELETE FROM versions WHERE {gone}"
        " AND NOT EXISTS (SELECT 1 FROM entries e WHERE e.key = versions.key AND e.version = versions.number)",
        (after, upto),
    )


def in_scopes(column: str, scopes: tuple[str, ...]) -> tuple[str, list[str]]:
    """A condition, and its words."""
    parts, words = ["0"], list[str]()
    for scope in scopes:
        if not scope:
            parts.append("1")
        elif is_folder(scope):
            parts.append(f"{column} >= ? AND {column} < ?")
            words += [scope, scope[:-1] + chr(ord("/") + 1)]
        else:
            parts.append(f"{column} = ?")
            words.append(scope)
    return " OR ".join(parts), words
