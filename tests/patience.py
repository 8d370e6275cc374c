"""What tests of stores do again and again: ask, and wait for something, but not for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from elastic_agent.rendezvous.errors import StoreError, StoreUnavailable
from elastic_agent.rendezvous.store.interface import Change, Put, Store, Watch

PATIENCE_S = 30.0


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def persist(call: Callable[[], object]) -> object:
    """Until it is answered."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except StoreUnavailable:
            assert time.monotonic() < deadline, f"no answer within {PATIENCE_S} s"
            time.sleep(0.02)


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Start it; the answer waits for what it returned or raised, but not for ever."""
    came: list[object] = []

    def run() -> None:
        try:
            came.append(work())
        except StoreError as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def outcome() -> object:
        thread.join(2 * PATIENCE_S)
        assert came, f"failed, or still blocked after {2 * PATIENCE_S} s"
        return came[0]

    return outcome


def put(store: Store, key: str, value: str = "", lease: int | None = None) -> int:
    """The revision."""
    return store.transact((), (Put(key, value, lease),)).revision


def next_changes(watch: Watch) -> list[Change]:
    """At least one, also where the watch is interrupted."""
    found: list[Change] = []
    deadline = time.monotonic() + PATIENCE_S
    while not found and time.monotonic() < deadline:
        with contextlib.suppress(StoreUnavailable):
            found.extend(watch.next(deadline - time.monotonic()))
    assert found, f"no change within {PATIENCE_S} s"
    return found
