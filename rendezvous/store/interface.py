"""The store that nodes meet in: a small revisioned key-value interface, modelled on etcd v3.

Every change of any key gets the next *revision*, one counter for the whole store. A *lease* is a promise by
the store to delete the keys put under it once it has not been confirmed for its time to live; only the store's
own clock judges that. A *watch* delivers the changes after a revision, each once, and those of one scope in order; of a
key that has changed again meanwhile it may deliver the newest alone.

What is read and watched is named by *scopes*: a scope is one key, or, empty or ending in `/`, every key that begins
with it. So a question about `nodes/n1` does not include `nodes/n10`.

A store is used by several threads at once; each call blocks until it has an answer or raises
`StoreUnavailable` within the store's own request timeout. Watches block in a thread of their own.

What is asked is data, too (`Request`): the node's part of a protocol makes a request, its driver carries it out. One is
distinguished from a later equal one by identity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, TypeAlias

from ...codec import Count, Within

LeaseId: TypeAlias = Count
Revision: TypeAlias = Count

MOST_OPERATIONS = 128
"""In one transaction, writes and compares counted together. etcd bounds the longest of a request's three lists by
--max-txn-ops, 128 by default; that is `success`, which has each write and, for the `Outcome`, a read per compare."""
MOST_REQUEST_BYTES = 3 * 512 * 1024
"""Of one transaction: etcd's default (--max-request-bytes)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands: `create_revision` survives updates, so the lowest one names the oldest key."""

    key: str
    value: str
    create_revision: Revision
    mod_revision: Revision


@dataclass(frozen=True, slots=True)
class Change:
    """One key put or deleted (`entry` is None) at `revision`."""

    revision: Revision
    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds when the key's mod_revision is this one; 0 means the key must be absent."""

    key: str
    mod_revision: Revision


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: str
    lease: LeaseId | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a transaction did: the compared keys as they stand after it, in the order of the compares."""

    succeeded: bool
    revision: Revision
    entries: tuple[Entry | None, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries sorted by key, all as of one revision: watch after it to miss nothing."""

    revision: Revision
    entries: tuple[Entry, ...]


def in_scopes(key: str, scopes: tuple[str, ...]) -> bool:
    """The first test is there for speed: it turns down most keys at once."""
    return key.startswith(scopes) and any(
        key == scope or (is_folder(scope) and key.startswith(scope)) for scope in scopes
    )


def is_folder(scope: str) -> bool:
    """It stands for all keys that begin with it, not for one key."""
    return not scope or scope.endswith("/")


class Watch(ABC):
    """The changes in some scopes: in revision order for each scope, while one may run ahead of another."""

    @abstractmethod
    def next(self, timeout_s: float) -> tuple[Change, ...]:
        """Block until something changed; empty after `timeout_s` without a change.

        Raises StoreUnavailable (call it again: nothing will be missed or repeated), Compacted (read everything,
        then make another watch), StoreMismatch and StoreClosed (give up).
        """

    @abstractmethod
    def close(self) -> None:
        """Stop watching; a blocked `next` returns or raises StoreClosed soon. Safe from any thread, twice."""


class Store(ABC):
    """A job's keys, with leases and watches. All methods may raise StoreUnavailable, StoreMismatch and StoreClosed."""

    @abstractmethod
    def grant(self, ttl_s: float) -> LeaseId:
        """A new lease that lives `ttl_s` seconds after its last confirmation."""

    @abstractmethod
    def keep_alive(self, lease: LeaseId) -> None:
        """Confirm the lease for another time to live. Raises LeaseExpired when the store has dropped it."""

    @abstractmethod
    def revoke(self, lease: LeaseId) -> None:
        """Delete the lease and every key under it now; an unknown lease is no error."""

    @abstractmethod
    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        """Do all `writes` under one new revision if every compare holds, else nothing.

        Raises LeaseExpired when a put names a lease that the store does not know, and StoreError when it is too large.
        """

    @abstractmethod
    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        """Every key in `scopes`; and of those in the scope `oldest_under` the one with the lowest create_revision:
        one entry, however many there are."""

    @abstractmethod
    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        """Every change in `scopes` with a revision above `after_revision`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; leases are not revoked. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class Grant:
    ttl_s: Annotated[float, Within(0, 86400, above=True)]
    """Infinite only in a store that no other process shares (`StoreKind.life_s`), and so never on a wire."""


@dataclass(frozen=True, slots=True)
class Read:
    scopes: tuple[str, ...]
    oldest_under: str | None = None


class Transaction(Protocol):
    """All `writes` if every compare holds, else nothing."""

    @property
    def compares(self) -> tuple[Compare, ...]: ...

    @property
    def writes(self) -> tuple[Put | Delete, ...]: ...


Request: TypeAlias = Grant | Read | Transaction
Answer: TypeAlias = LeaseId | Snapshot | Outcome


@dataclass(frozen=True, slots=True)
class Subscription:
    """The watch that this node needs now."""

    scopes: tuple[str, ...]
    after_revision: int


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
