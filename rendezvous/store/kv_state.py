"""The store's rules as a plain object without threads, sockets or a clock of its own.

One `KvState` stands behind the memory store (with a lock around it), behind the c10d store (in the process that hosts
it) and behind the simulator (with a simulated network before it), so that all keep the same rules.
Instants are seconds of one monotonic clock, the caller's; leases are judged by nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ..errors import Compacted, LeaseExpired, StoreError
from .interface import (
    MOST_OPERATIONS,
    MOST_REQUEST_BYTES,
    Change,
    Compare,
    Delete,
    Entry,
    LeaseId,
    Outcome,
    Put,
    Snapshot,
    in_scopes,
)

HISTORY = 4096
"""Changes remembered for watches. A watch that falls further behind has to read again (`Compacted`)."""


def check_size(compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> None:
    """As etcd does, which would else be the first to refuse what works everywhere else."""
    operations = len(compares) + len(writes)
    if operations > MOST_OPERATIONS:
        raise StoreError(f"a transaction of {operations} operations, at most {MOST_OPERATIONS} are allowed")
    size = sum(len(write.value.encode(errors="replace")) for write in writes if isinstance(write, Put))
    if size > MOST_REQUEST_BYTES:
        raise StoreError(f"a transaction of {size} bytes, at most {MOST_REQUEST_BYTES} are allowed")


class KvState:
    """A revisioned key-value map with leases."""

    def __init__(self, history: int = HISTORY, *, base: int = 0) -> None:
        """Revisions and leases count from `base`: those of another state with another base mean nothing here."""
        self.revision = base
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, LeaseId] = {}
        self._ttl_s: dict[LeaseId, float] = {}
        self._expires_at: dict[LeaseId, float] = {}
        self._none_due_before = math.inf
        """Spares `expire`, which comes before everything else, a look at each lease."""
        self._next_lease: LeaseId = base + 1
        self._history: deque[Change] = deque(maxlen=history)

    def grant(self, ttl_s: float, now: float) -> LeaseId:
        lease = self._next_lease
        self._next_lease += 1
        self._ttl_s[lease] = ttl_s
        self._expires_at[lease] = now + ttl_s
        self._none_due_before = min(self._none_due_before, now + ttl_s)
        return lease

    def keep_alive(self, lease: LeaseId, now: float) -> None:
        """Raises LeaseExpired, also for a lease that is due but not yet removed: it is removed here."""
        self.expire(now)
        if lease not in self._ttl_s:
            raise LeaseExpired(f"lease {lease} has expired")
        self._expires_at[lease] = now + self._ttl_s[lease]

    def revoke(self, lease: LeaseId) -> None:
        self._ttl_s.pop(lease, None)
        self._expires_at.pop(lease, None)
        orphans = sorted(key for key, owner in self._lease_of.items() if owner == lease)
        if orphans:
            self._write(tuple(Delete(key) for key in orphans))

    def expire(self, now: float) -> list[LeaseId]:
        """Drop every lease that is due, with its keys; returns them."""
        if now < self._none_due_before:
            return []
        due = sorted(lease for lease, due in self._expires_at.items() if due <= now)
        for lease in due:
            self.revoke(lease)
        self._none_due_before = min(self._expires_at.values(), default=math.inf)
        return due

    def next_expiry(self) -> float | None:
        """The instant at which `expire` next has something to do; None when there is no lease."""
        return min(self._expires_at.values(), default=None)

    def transact(self, compares: Iterable[Compare], writes: Iterable[Put | Delete], now: float) -> Outcome:
        self.expire(now)
        compares, writes = tuple(compares), tuple(writes)
        check_size(compares, writes)
        holds = self.holds(compares)
        if holds:
            for write in writes:
                if isinstance(write, Put) and write.lease is not None and write.lease not in self._ttl_s:
                    raise LeaseExpired(f"lease {write.lease} has expired; {write.key!r} was not written")
            self._write(writes)
        return Outcome(holds, self.revision, tuple(self._entries.get(compare.key) for compare in compares))

    def holds(self, compares: Iterable[Compare]) -> bool:
        return all(self._mod_revision(compare.key) == compare.mod_revision for compare in compares)

    def read(self, scopes: tuple[str, ...], now: float, oldest_under: str | None = None) -> Snapshot:
        self.expire(now)
        found = {key for key in self._entries if in_scopes(key, scopes)}
        if oldest_under is not None:
            under = (entry for key, entry in self._entries.items() if in_scopes(key, (oldest_under,)))
            oldest = min(under, key=lambda entry: (entry.create_revision, entry.key), default=None)
            found |= {oldest.key} if oldest is not None else set()
        return Snapshot(self.revision, tuple(self._entries[key] for key in sorted(found)))

    def changes(self, scopes: tuple[str, ...], after_revision: int) -> tuple[Change, ...]:
        """What a watch after `after_revision` has to deliver now. Raises Compacted."""
        # The oldest revision kept may have lost some of its changes, so a full history starts just after it.
        forgotten = self._history[0].revision if len(self._history) == self._history.maxlen else 0
        if after_revision < forgotten:
            raise Compacted(f"changes after revision {after_revision} are gone; kept from {forgotten + 1} on")
        newest_first = []
        for change in reversed(self._history):
            if change.revision <= after_revision:
                break
            if in_scopes(change.key, scopes):
                newest_first.append(change)
        return tuple(reversed(newest_first))

    def _mod_revision(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.mod_revision if entry is not None else 0

    def _write(self, writes: tuple[Put | Delete, ...]) -> None:
        writes = tuple(write for write in writes if isinstance(write, Put) or write.key in self._entries)
        if not writes:
            return
        self.revision += 1
        for write in writes:
            old = self._entries.get(write.key)
            self._lease_of.pop(write.key, None)
            entry: Entry | None = None
            if isinstance(write, Delete):
                del self._entries[write.key]
            else:
                created = old.create_revision if old is not None else self.revision
                entry = Entry(write.key, write.value, created, self.revision)
                self._entries[write.key] = entry
                if write.lease is not None:
                    self._lease_of[write.key] = write.lease
            self._history.append(Change(self.revision, write.key, entry))
