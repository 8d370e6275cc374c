"""The store inside one process: for tests, and for a job that no second node can ever join."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import StoreClosed
from .interface import Change, Compare, Delete, LeaseId, Outcome, Put, Snapshot, Store, Watch
from .kv_state import KvState
from .store_kind import StoreKind


class MemoryStore(Store):
    """A `KvState` behind a condition variable. Leases expire when a method is called: no other caller could see it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, state: KvState | None = None) -> None:
        self._clock = clock
        self._state = state or KvState()
        self._changed = threading.Condition()
        self._closed = False

    def grant(self, ttl_s: float) -> LeaseId:
        with self._changed:
            return self._open().grant(ttl_s, self._clock())

    def keep_alive(self, lease: LeaseId) -> None:
        with self._changed:
            try:
                self._open().keep_alive(lease, self._clock())
            finally:
                self._changed.notify_all()

    def revoke(self, lease: LeaseId) -> None:
        with self._changed:
            self._open().revoke(lease)
            self._changed.notify_all()

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        with self._changed:
            try:
                return self._open().transact(compares, writes, self._clock())
            finally:
                self._changed.notify_all()

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        with self._changed:
            return self._open().read(scopes, self._clock(), oldest_under)

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        return _MemoryWatch(self, scopes, after_revision)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _open(self) -> KvState:
        if self._closed:
            raise StoreClosed("the memory store was closed")
        return self._state


class _MemoryWatch(Watch):
    def __init__(self, store: MemoryStore, scopes: tuple[str, ...], after_revision: int) -> None:
        self._store = store
        self._scopes = scopes
        self._after = after_revision
        self._closed = False

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        store = self._store
        with store._changed:
            deadline = store._clock() + timeout_s
            while True:
                if self._closed:
                    raise StoreClosed("the watch was closed")
                kv = store._open()
                now = store._clock()
                kv.expire(now)
                changes = kv.changes(self._scopes, self._after)
                self._after = kv.revision
                if changes or now >= deadline:
                    return changes
                expiry = kv.next_expiry()
                wake_at = deadline if expiry is None else min(deadline, expiry)
                store._changed.wait(max(0.0, wake_at - now))

    def close(self) -> None:
        with self._store._changed:
            self._closed = True
            self._store._changed.notify_all()


MEMORY = StoreKind("memory", "no other node can ever join", lambda access: MemoryStore())
