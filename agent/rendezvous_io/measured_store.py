"""Store wrapper that measures how long the real store took, and counts how often it did not answer.

All requests count alike: the main loop's, keep-alives, commits. A watch has no duration, as it waits for changes.
An expired lease or a compacted history is no error. Failures after our own `close` are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...health.metrics import Metrics
from ...rendezvous.errors import Compacted, LeaseExpired, StoreClosed, StoreError
from ...rendezvous.store.interface import (
    Change,
    Compare,
    Delete,
    LeaseId,
    Outcome,
    Put,
    Snapshot,
    Store,
    Watch,
)

_T = TypeVar("_T")


class MeasuredStore(Store):
    def __init__(self, store: Store, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock

    def grant(self, ttl_s: float) -> LeaseId:
        return self._measured("grant", lambda: self._store.grant(ttl_s))

    def keep_alive(self, lease: LeaseId) -> None:
        try:
            self._measured("keep_alive", lambda: self._store.keep_alive(lease))
        except StoreClosed:
            raise
        except StoreError:
            self._metrics.lease_renewal_failures_total.inc()
            raise

    def revoke(self, lease: LeaseId) -> None:
        self._measured("revoke", lambda: self._store.revoke(lease))

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        return self._measured("transact", lambda: self._store.transact(compares, writes))

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        return self._measured("read", lambda: self._store.read(scopes, oldest_under))

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        return _MeasuredWatch(self._store.watch(scopes, after_revision), self._metrics)

    def close(self) -> None:
        self._store.close()

    def _measured(self, operation: str, ask: Callable[[], _T]) -> _T:
        asked_at = self._clock()
        try:
            answer = ask()
        except (LeaseExpired, StoreClosed):
            raise
        except StoreError:
            self._metrics.store_errors_total.inc(operation=operation)
            raise
        took_s = self._clock() - asked_at
        self._metrics.store_request_duration_seconds.observe(took_s, operation=operation)
        return answer


class _MeasuredWatch(Watch):
    def __init__(self, watch: Watch, metrics: Metrics) -> None:
        self._watch = watch
        self._metrics = metrics

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        try:
            return self._watch.next(timeout_s)
        except (Compacted, StoreClosed):
            raise
        except StoreError:
            self._metrics.store_errors_total.inc(operation="watch")
            raise

    def close(self) -> None:
        self._watch.close()
