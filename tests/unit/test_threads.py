"""Threads of the agent: none ends, or fails to begin, without being missed; and none is started in another way."""

from __future__ import annotations

import ast
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent import threads
from elastic_agent.agent.common.events import Event, ThreadFailed, unless_stopped
from elastic_agent.agent.common.exits import CannotStart, ExitCode
from elastic_agent.agent.main.process import thread_failed
from elastic_agent.agent.rendezvous_io.store_link import PeerLink, StoreLink
from elastic_agent.agent.rendezvous_io.worker_answers import WorkerAnswers
from elastic_agent.agent.rendezvous_io.worker_links import WorkerLinks, _LentLocks
from elastic_agent.agent.workers.processes import guard
from elastic_agent.codec import Invalid
from elastic_agent.rendezvous.etcd.access import Addresses
from elastic_agent.rendezvous.liveness import Peer, ProbeFailure
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.rendezvous.store.memory import MemoryStore
from elastic_agent.threads import Thread, listen
from elastic_agent.worker.wire.channel import ask
from elastic_agent.worker.wire.environment import WorkerEnv
from elastic_agent.worker.wire.messages import (
    COMMIT_ANSWERS,
    CommitAnswer,
    CommitQuestion,
    CommitRefused,
    LentLock,
)
from tests.io_threads import started_io
from tests.recorder import Recorder

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
FAILURES = ("dies", "cannot be started")


class Failed:
    """Every failure that the process' listener has heard of, by the thread's name."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[str, BaseException]] = queue.SimpleQueue()

    def __call__(self, name: str, error: BaseException) -> None:
        self._heard.put((name, error))

    def next(self) -> str:
        return self._heard.get(timeout=PATIENCE_S)[0]

    def has(self, name: str, how: str) -> bool:
        """Of a thread without which the process goes on: only its death is one."""
        return self.next() == name if how == "dies" else self._heard.empty()


@pytest.fixture
def failed() -> Iterator[Failed]:
    hook, failed = threading.excepthook, Failed()
    listen(failed)
    yield failed
    listen()
    threading.excepthook = hook


def fail(monkeypatch: pytest.MonkeyPatch, how: str, name: str) -> None:
    """From now on every thread of this name fails so."""
    start, run = threading.Thread.start, Thread.run

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def die(thread: Thread) -> None:
        if thread.name == name:
            thread._work = planted
        run(thread)

    def planted() -> None:
        raise MemoryError("planted")

    if how == "dies":
        monkeypatch.setattr(Thread, "run", die)
    else:
        monkeypatch.setattr(threads, "START_WITHIN_S", 0.0)
        monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_reported_and_then_answers_who_waits(
    monkeypatch: pytest.MonkeyPatch, failed: Failed, how: str
) -> None:
    fail(monkeypatch, how, "one")
    answered = threading.Event()
    thread = Thread(lambda: None, "one", answered.set)
    thread.start()
    assert answered.wait(PATIENCE_S)
    assert failed.has("one", how)
    thread.join(PATIENCE_S)


def test_what_the_process_cannot_be_without_fails_it_where_it_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, failed: Failed
) -> None:
    fail(monkeypatch, "cannot be started", "one")
    Thread(lambda: None, "one").start()
    name, error = failed._heard.get(timeout=PATIENCE_S)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    thread_failed(events, name, error)
    event = events.get()
    assert isinstance(event, ThreadFailed)
    assert event.code is ExitCode.NOT_HERE
    assert "pids.max" in event.reason


def test_a_thread_that_cannot_be_started_for_a_moment_is_started_after_it(
    monkeypatch: pytest.MonkeyPatch, failed: Failed
) -> None:
    start, refusals = threading.Thread.start, iter([RuntimeError("can't start new thread")] * 2)

    def refuse_twice(thread: threading.Thread) -> None:
        for refusal in refusals:
            raise refusal
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_twice)
    done = threading.Event()
    thread = Thread(done.set, "one", lambda: failed("otherwise", ValueError()))
    thread.start()
    thread.join(PATIENCE_S)
    assert done.is_set()
    assert failed._heard.empty()


def test_a_thread_that_another_library_started_is_missed_too(failed: Failed) -> None:
    def work() -> None:
        raise ValueError("a bug")

    threading.Thread(target=work, name="of a library").start()
    assert failed.next() == "of a library"


# --- Those who wait for an answer get one


def _peer(post: Callable[[Event], None], told: Recorder) -> None:
    PeerLink(told.probed, post, time.monotonic).ask(Peer("b-1", Endpoint("127.0.0.1", 9)))


def _drain_look(post: Callable[[Event], None], told: Recorder) -> None:
    answers = WorkerAnswers(MemoryStore(), lambda: NodeSnapshot("a", "a-1"), post, time.monotonic)
    answers.read_stop(3, told.stop_read)


@pytest.mark.parametrize("how", FAILURES)
def test_a_short_lived_thread_that_fails_has_answered(
    monkeypatch: pytest.MonkeyPatch, failed: Failed, how: str
) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    told = Recorder()
    for name, begin in (("peer", _peer), ("drain-look", _drain_look)):
        with monkeypatch.context() as patch:
            fail(patch, how, name)
            begin(events.put, told)
            answer = told.next(events, PATIENCE_S)
        assert failed.has(name, how)
        if name == "peer":
            assert answer[2] is ProbeFailure.SILENT
        else:
            assert answer == ("stop_read", 3, None)


@pytest.mark.parametrize("how", FAILURES)
def test_a_worker_whose_answering_thread_fails_loses_its_connection_and_the_next_is_answered(
    monkeypatch: pytest.MonkeyPatch, failed: Failed, tmp_path: Path, how: str
) -> None:
    env, store = WorkerEnv(socket=str(tmp_path / "socket"), reports=str(tmp_path / "reports")), MemoryStore()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    latest = NodeSnapshot("a", "a-1")
    answers = WorkerAnswers(store, lambda: latest, events.put, time.monotonic)
    links = WorkerLinks(env, answers, started_io(), events.put, time.monotonic, lambda: None)
    links.start(Recorder())

    def asked() -> CommitAnswer:
        return ask(env.socket, CommitQuestion(1), COMMIT_ANSWERS, PATIENCE_S)

    with monkeypatch.context() as patch:
        fail(patch, how, "worker-answer")
        for _ in range(2):
            with pytest.raises(Invalid, match="ended the connection after 0 bytes"):
                asked()
            assert failed.has("worker-answer", how)
    assert asked() == CommitRefused("the rendezvous store holds no world")
    links.close()


def test_the_thread_that_keeps_lent_locks_is_missed(monkeypatch: pytest.MonkeyPatch, failed: Failed) -> None:
    """Nothing is posted: its failure ends the agent."""
    fail(monkeypatch, "dies", "directory-locks")
    locks = _LentLocks()
    for _ in range(2):
        locks.put(LentLock(1, 0, "run"), [])
    assert failed.next() == "directory-locks"


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("name", ["store-requests", "store-lease", "store-watch"])
def test_a_failed_thread_at_the_store_is_posted(
    monkeypatch: pytest.MonkeyPatch, failed: Failed, name: str, how: str
) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    fail(monkeypatch, how, name)
    link = StoreLink(MemoryStore(), Recorder(), 5.0, events.put, time.monotonic, random.Random(1))
    link.start()
    gone = events.get(timeout=PATIENCE_S)
    assert isinstance(gone, ThreadFailed)
    assert gone.code is ExitCode.NOT_HERE
    assert failed.has(name, how)
    link.close()


@pytest.mark.parametrize("how", FAILURES)
def test_names_are_asked_again_after_a_thread_for_them_has_failed(
    monkeypatch: pytest.MonkeyPatch, failed: Failed, how: str
) -> None:
    now = [0.0]
    addresses = Addresses([("etcd", 1)], lambda host, port: ("10.0.0.1",), lambda: now[0])
    with monkeypatch.context() as patch:
        fail(patch, how, "etcd-names")
        addresses.refresh(PATIENCE_S)
        assert failed.has("etcd-names", how)
    now[0] = 10.0
    addresses.refresh(PATIENCE_S)
    assert [address.ip for address in addresses.ring] == ["10.0.0.1"]


def test_a_start_ends_at_once_when_a_thread_fails_or_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, failed: Failed
) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    events.put(ThreadFailed("reports", "MemoryError()"))
    with pytest.raises(CannotStart, match="reports") as refusal:
        unless_stopped(lambda: threading.Event().wait(PATIENCE_S), events, "looking")
    assert refusal.value.code is ExitCode.AGENT_FAILED
    fail(monkeypatch, "cannot be started", "looking-again")
    with pytest.raises(CannotStart) as refusal:
        unless_stopped(lambda: None, events, "looking again")
    assert refusal.value.code is ExitCode.NOT_HERE


# --- No other way


def test_threads_are_started_in_one_way_only() -> None:
    others = []
    for folder in ("agent", "pool", "rendezvous", "health"):
        for file in (ROOT / folder).rglob("*.py"):
            if file in (Path(threads.__file__).resolve(), Path(guard.__file__).resolve()):
                continue  # the guard is a process of its own, on the standard library alone
            for node in ast.walk(ast.parse(file.read_text())):
                made = isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    "threading.Thread",
                    "threading.Timer",
                    "_thread.start_new_thread",
                )
                derived = isinstance(node, ast.ClassDef) and "threading.Thread" in map(
                    ast.unparse, node.bases
                )
                imported = isinstance(node, ast.ImportFrom) and node.module == "threading"
                if made or derived or imported:
                    others.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not others, "use elastic_agent.threads.Thread, whose failures are heard"
