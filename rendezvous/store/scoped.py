"""A part of another store: all keys that begin with a prefix, as a store of their own.

A pool's store holds the keys of each run of a job beside its own. Revisions and leases are those of the whole store.
"""

from __future__ import annotations

from dataclasses import replace

from .interface import Change, Compare, Delete, Entry, LeaseId, Outcome, Put, Snapshot, Store, Watch

RUNS_PREFIX = "runs/"


def run_prefix(job: str) -> str:
    """Of the keys that the agents of a job have in the pool's store: those of a rendezvous of its own."""
    return f"{RUNS_PREFIX}{job}/"


class ScopedStore(Store):
    """`store` is closed with it."""

    def __init__(self, store: Store, prefix: str) -> None:
        """`prefix` ends in a slash."""
        self._store, self._prefix = store, prefix

    def grant(self, ttl_s: float) -> LeaseId:
        return self._store.grant(ttl_s)

    def keep_alive(self, lease: LeaseId) -> None:
        self._store.keep_alive(lease)

    def revoke(self, lease: LeaseId) -> None:
        self._store.revoke(lease)

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        outcome = self._store.transact(
            tuple(replace(one, key=self._prefix + one.key) for one in compares),
            tuple(replace(one, key=self._prefix + one.key) for one in writes),
        )
        return replace(outcome, entries=tuple(one and self._own(one) for one in outcome.entries))

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        under = None if oldest_under is None else self._prefix + oldest_under
        snapshot = self._store.read(self._whole(scopes), under)
        return replace(snapshot, entries=tuple(map(self._own, snapshot.entries)))

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        return _ScopedWatch(self._store.watch(self._whole(scopes), after_revision), self._prefix)

    def close(self) -> None:
        self._store.close()

    def _whole(self, scopes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._prefix + scope for scope in scopes)

    def _own(self, entry: Entry) -> Entry:
        return replace(entry, key=entry.key.removeprefix(self._prefix))


class _ScopedWatch(Watch):
    def __init__(self, watch: Watch, prefix: str) -> None:
        self._watch, self._prefix = watch, prefix

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        return tuple(map(self._own, self._watch.next(timeout_s)))

    def close(self) -> None:
        self._watch.close()

    def _own(self, change: Change) -> Change:
        key = change.key.removeprefix(self._prefix)
        return replace(change, key=key, entry=change.entry and replace(change.entry, key=key))
