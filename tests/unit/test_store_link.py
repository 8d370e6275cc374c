"""The agent's threads at the store: how often they ask, and what they say when it is away."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_agent import threads
from elastic_agent.agent.common.events import Event
from elastic_agent.agent.rendezvous_io.store_link import KEEP_ALIVES_PER_TTL, StoreLink
from elastic_agent.rendezvous.errors import StoreError, StoreMismatch, StoreUnavailable
from elastic_agent.rendezvous.store.interface import LeaseId, Read, Snapshot, Subscription, Watch
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.recorder import Recorder

PATIENCE_S = 20.0
LEASE_S = 5.0


class Away(MemoryStore):
    """Refuses everything, each time in other words, until `back`."""

    def __init__(self, refusal: type[StoreError] = StoreUnavailable) -> None:
        super().__init__()
        self.back = False
        self.no_watch = False
        """Not even one that is refused later, as where there are too many files."""
        self.asked = threading.Semaphore(0)
        self._refusal = refusal

    def keep_alive(self, lease: LeaseId) -> None:
        self._refuse()

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        self._refuse()
        return super().read(scopes, oldest_under)

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        store = self
        if self.no_watch:
            self._refuse()

        class NoWatch(Watch):
            def next(self, timeout_s: float) -> tuple[()]:
                store._refuse()
                return ()

            def close(self) -> None:
                pass

        return NoWatch()

    def _refuse(self) -> None:
        self.asked.release()
        if not self.back:
            raise self._refusal(f"refused at {time.monotonic()}")


class Impatient(random.Random):
    """Draws no wait, and remembers how long it might have been."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.longest.append(b)
        return a


@pytest.fixture
def events() -> queue.SimpleQueue[Event]:
    return queue.SimpleQueue()


@pytest.fixture
def away() -> Away:
    return Away()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def rng() -> Impatient:
    return Impatient()


@pytest.fixture
def link(
    away: Away, recorder: Recorder, events: queue.SimpleQueue[Event], rng: Impatient
) -> Iterator[StoreLink]:
    link = StoreLink(away, recorder, LEASE_S, events.put, time.monotonic, rng)
    link.start()
    yield link
    link.close()


def ask_often(away: Away) -> None:
    for _ in range(10):
        assert away.asked.acquire(timeout=PATIENCE_S), "nobody asks any more"


def test_a_lease_that_is_not_confirmed_is_logged_once_and_so_is_its_return(
    away: Away,
    link: StoreLink,
    recorder: Recorder,
    events: queue.SimpleQueue[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    link.keep(7)
    ask_often(away)
    assert [record.msg for record in caplog.records] == ["lease not confirmed, trying on: %s"]
    away.back = True
    assert recorder.next(events, PATIENCE_S)[:2] == ("lease_confirmed", 7)
    assert [record.msg for record in caplog.records][1:] == ["lease confirmed again, after %d failed tries"]


@pytest.mark.parametrize("no_watch", [False, True])
def test_an_interrupted_watch_is_logged_once(
    no_watch: bool, away: Away, link: StoreLink, caplog: pytest.LogCaptureFixture
) -> None:
    away.no_watch = no_watch
    link.follow(Subscription(("",), 0))
    ask_often(away)
    assert [record.msg for record in caplog.records] == ["watch interrupted, trying on: %s"]


def test_a_lease_is_tried_again_soon_and_then_several_times_between_two_keep_alives(
    away: Away, link: StoreLink, rng: Impatient
) -> None:
    link.keep(7)
    ask_often(away)
    assert rng.longest[0] < 0.1
    assert max(rng.longest) == LEASE_S / KEEP_ALIVES_PER_TTL / 4


def test_a_lease_is_confirmed_again_and_again_but_not_when_it_is_new(
    recorder: Recorder, events: queue.SimpleQueue[Event], rng: Impatient
) -> None:
    ttl_s = 0.5
    store = MemoryStore()
    link = StoreLink(store, recorder, ttl_s, events.put, time.monotonic, rng)
    link.start()
    kept_at = time.monotonic()
    link.keep(store.grant(LEASE_S))
    first, second = (recorder.next(events, PATIENCE_S) for _ in range(2))
    link.close()
    assert first[0] == second[0] == "lease_confirmed"
    assert first[2] - kept_at >= ttl_s / KEEP_ALIVES_PER_TTL
    assert second[2] - first[2] >= ttl_s / KEEP_ALIVES_PER_TTL


@pytest.mark.parametrize("thread", ["requests", "lease", "watch"])
def test_each_thread_posts_that_the_store_is_another_jobs_and_none_fails(
    thread: str,
    recorder: Recorder,
    events: queue.SimpleQueue[Event],
    rng: Impatient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[str] = []
    monkeypatch.setattr(threads, "_listener", lambda name, error: failed.append(name))
    link = StoreLink(Away(StoreMismatch), recorder, LEASE_S, events.put, time.monotonic, rng)
    link.start()
    if thread == "requests":
        link.ask(Read(("",)))
    elif thread == "lease":
        link.keep(7)
    else:
        link.follow(Subscription(("",), 0))
    told = recorder.next(events, PATIENCE_S)
    link.close()
    assert told[0] == ("failed" if thread == "requests" else "store_mismatched")
    assert thread != "requests" or isinstance(told[2], StoreMismatch)
    assert failed == []


def test_none_of_the_threads_outlives_the_link() -> None:
    before = set(threading.enumerate())
    link = StoreLink(MemoryStore(), Recorder(), LEASE_S, lambda event: None, time.monotonic, random.Random(1))
    link.start()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"store-requests", "store-lease", "store-watch"}
    link.close()
    for thread in started:
        thread.join(1.0)
    assert not [thread.name for thread in started if thread.is_alive()]
