"""What the metrics learn of the store: how long it took to answer, and how often it did not."""

from __future__ import annotations

import pytest

from elastic_agent.agent.rendezvous_io.measured_store import MeasuredStore
from elastic_agent.health.metrics import STORE_OPERATIONS, STORE_REQUESTS
from elastic_agent.rendezvous.errors import (
    Compacted,
    LeaseExpired,
    StoreClosed,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
)
from elastic_agent.rendezvous.store.interface import (
    Change,
    Compare,
    LeaseId,
    Outcome,
    Put,
    Snapshot,
    Store,
    Watch,
)
from elastic_agent.rendezvous.store.memory import MemoryStore

from .test_metrics import new_metrics, value


class Slow(Store):
    """A store that takes a quarter of a second for everything, and raises what the test wants."""

    def __init__(self) -> None:
        self.now = 100.0
        self.error: StoreError | None = None
        self._store = MemoryStore()

    def _take_time(self) -> None:
        self.now += 0.25
        if self.error is not None:
            raise self.error

    def grant(self, ttl_s: float) -> LeaseId:
        self._take_time()
        return self._store.grant(ttl_s)

    def keep_alive(self, lease: LeaseId) -> None:
        self._take_time()
        self._store.keep_alive(lease)

    def revoke(self, lease: LeaseId) -> None:
        self._take_time()
        self._store.revoke(lease)

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put, ...]) -> Outcome:  # type: ignore[override]
        self._take_time()
        return self._store.transact(compares, writes)

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        self._take_time()
        return self._store.read(scopes, oldest_under)

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        slow, watch = self, self._store.watch(scopes, after_revision)

        class SlowWatch(Watch):
            def next(self, timeout_s: float) -> tuple[Change, ...]:
                slow._take_time()
                return watch.next(0.0)

            def close(self) -> None:
                watch.close()

        return SlowWatch()

    def close(self) -> None:
        self._store.close()


class Asked:
    """Asks a measured store for each operation once."""

    def __init__(self) -> None:
        self.slow = Slow()
        self.metrics = new_metrics()
        self.store = MeasuredStore(self.slow, self.metrics, lambda: self.slow.now)
        self.lease = self.store.grant(5.0)

    def ask(self, operation: str) -> object:
        asking = {
            "grant": lambda: self.store.grant(5.0),
            "keep_alive": lambda: self.store.keep_alive(self.lease),
            "revoke": lambda: self.store.revoke(12345),
            "transact": lambda: self.store.transact((), (Put("a", "b", self.lease),)),
            "read": lambda: self.store.read(("",)),
            "watch": lambda: self.store.watch(("",), 0).next(0.0),
        }
        return asking[operation]()

    def answers(self, operation: str) -> tuple[float | None, float | None]:
        """How many, and the seconds they took together."""
        name = "store_request_duration_seconds"
        return (
            value(self.metrics, f"{name}_count", operation=operation),
            value(self.metrics, f"{name}_sum", operation=operation),
        )

    def errors(self) -> dict[str, float]:
        counted = {
            each: value(self.metrics, "store_errors_total", operation=each) for each in STORE_OPERATIONS
        }
        return {operation: number for operation, number in counted.items() if number}


@pytest.mark.parametrize("operation", STORE_REQUESTS)
def test_each_answer_is_counted_with_the_time_it_took(operation: str) -> None:
    asked = Asked()
    before = 1 if operation == "grant" else 0
    asked.ask(operation)
    asked.ask(operation)
    assert asked.answers(operation) == (before + 2, (before + 2) * 0.25)
    others = [each for each in STORE_REQUESTS if each not in (operation, "grant")]
    assert [asked.answers(each) for each in others] == [(0, 0)] * len(others)
    assert asked.errors() == {}


def test_a_watch_delivers_what_the_store_does() -> None:
    asked = Asked()
    asked.ask("transact")
    [change] = asked.store.watch(("",), 0).next(0.0)
    assert (change.key, asked.errors()) == ("a", {})


@pytest.mark.parametrize("operation", STORE_OPERATIONS)
@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), StoreMismatch("another's")])
def test_a_request_without_an_answer_is_an_error_and_has_no_duration(
    operation: str, error: StoreError
) -> None:
    asked = Asked()
    granted = asked.answers("grant")
    asked.slow.error = error
    with pytest.raises(type(error)):
        asked.ask(operation)
    assert asked.errors() == {operation: 1}
    assert asked.answers("grant") == granted
    assert value(asked.metrics, "lease_renewal_failures_total") == (operation == "keep_alive")


@pytest.mark.parametrize(
    ("operation", "error", "unconfirmed"),
    [
        pytest.param("keep_alive", LeaseExpired("expired"), 1, id="an expired lease is an answer"),
        pytest.param("transact", LeaseExpired("expired"), 0, id="also to a write under it"),
        pytest.param("keep_alive", StoreClosed("closed"), 0, id="we closed it ourselves"),
        pytest.param("watch", StoreClosed("closed"), 0, id="we closed the watch ourselves"),
        pytest.param("watch", Compacted("compacted"), 0, id="a history that is gone is an answer"),
    ],
)
def test_what_is_no_error_of_the_store(operation: str, error: StoreError, unconfirmed: int) -> None:
    asked = Asked()
    asked.slow.error = error
    with pytest.raises(type(error)):
        asked.ask(operation)
    assert asked.errors() == {}
    assert value(asked.metrics, "lease_renewal_failures_total") == unconfirmed
