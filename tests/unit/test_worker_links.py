"""The agent's server for its workers: each is heard and answered, and none can hold up another, or end the agent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import resource
import select
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.rendezvous_io import worker_links as server
from elastic_agent.agent.rendezvous_io.worker_answers import WorkerAnswers
from elastic_agent.agent.rendezvous_io.worker_links import WorkerLinks
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import WORLD_KEY, Cause, CauseKind, Endpoint, Member, Phase, World
from elastic_agent.rendezvous.store.interface import Put, Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore
from elastic_agent.worker.errors import Fenced, SaveFailed
from elastic_agent.worker.storage.disk.commit_permission import CommitPermission
from elastic_agent.worker.wire.channel import Lines, Reporter, ask
from elastic_agent.worker.wire.environment import WorkerEnv
from elastic_agent.worker.wire.messages import (
    COMMIT_ANSWERS,
    STEP_ANSWERS,
    TO_GUARDS,
    Broken,
    CommitGranted,
    CommitQuestion,
    Go,
    Guarding,
    Held,
    Hold,
    Keep,
    LentLock,
    LoadReport,
    StepAnswer,
    StepEnded,
    StepStatus,
    Verdict,
    encode,
)
from tests.io_threads import settle_io, started_io
from tests.recorder import Recorder
from tests.waiting import wait_for

PATIENCE_S = 20.0
WORLD = World(
    job="job",
    generation=7,
    phase=Phase.RUNNING,
    members=(Member("a", "life-a", 2, 0),),
    master=Endpoint("10.0.0.1", 29000),
    cause=Cause(CauseKind.START),
)
LOADED = LoadReport(7, 3, 1, "ok", 0.5)


class SlowStore(MemoryStore):
    """Answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        assert self.open.wait(PATIENCE_S)
        return super().read(scopes, oldest_under)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.env = WorkerEnv(
            generation=7, local_rank=3, socket=str(folder / "socket"), reports=str(folder / "reports")
        )
        self.store = SlowStore()
        self.store.transact((), (Put(WORLD_KEY, WORLD.to_json()),))
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.dropped = threading.Semaphore(0)
        latest = NodeSnapshot("a", "life-a", proven_until=103.0)
        answers = WorkerAnswers(self.store, lambda: latest, self.events.put, lambda: 100.0)
        io, dropped = started_io(), self.dropped.release
        self.links = WorkerLinks(self.env, answers, io, self.events.put, lambda: 12.5, dropped)
        self.reporter = Reporter(self.env.variables())
        self.recorder = Recorder()
        self.links.start(self.recorder)

    def connect(self, *said: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE_S)
        connection.connect(self.env.socket)
        for words in said:
            connection.sendall(words)
        return connection

    def guard(self, local_rank: int, *more: bytes) -> socket.socket:
        connection = self.connect(encode(Guarding(7, local_rank)), *more)
        self.expect(("guard_sent", 7, local_rank, Guarding(7, local_rank)))
        return connection

    def expect(self, *told: tuple[object, ...]) -> None:
        assert [self.recorder.next(self.events, PATIENCE_S) for _ in told] == list(told)

    def expect_report(self) -> None:
        """`LOADED`, which wakes nobody."""
        eventually(lambda: bool(self.links._waiting))
        assert [*self.links.reports()] == [(LOADED, 12.5)]
        assert self.events.empty()

    def may_commit(self) -> None:
        CommitPermission(self.env.socket, 7, answer_s=PATIENCE_S).check()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.store.open.set()
    scene.links.close()
    settle_io()  # the next test may count descriptors


eventually = partial(wait_for, what="the links to do so", within_s=PATIENCE_S)


# --- Questions


def test_questions_are_answered_by_what_the_store_holds(scene: Scene) -> None:
    scene.may_commit()
    assert ask(scene.env.socket, CommitQuestion(7), COMMIT_ANSWERS, PATIENCE_S) == CommitGranted(3.0)
    with pytest.raises(Fenced, match="fallen back to generation 7"):
        CommitPermission(scene.env.socket, 8, answer_s=PATIENCE_S).check()
    kept = StepEnded(7, 0, 0, 20, StepStatus.KEPT)
    assert ask(scene.env.socket, kept, STEP_ANSWERS, PATIENCE_S) == StepAnswer(Verdict.GO_ON, leaves=False)
    scene.expect(("worker_kept", 7, 0))


def test_all_workers_may_ask_at_once_while_the_store_is_slow(scene: Scene) -> None:
    """A commit waits for no other answer."""
    scene.store.open.clear()
    asking = [scene.connect(encode(CommitQuestion(7))) for _ in range(100)]
    kept = StepEnded(7, 0, 0, 20, StepStatus.KEPT)
    assert ask(scene.env.socket, kept, STEP_ANSWERS, PATIENCE_S) == StepAnswer(Verdict.GO_ON, leaves=False)
    scene.store.open.set()
    assert [COMMIT_ANSWERS.decode(one.recv(1000)) for one in asking] == [CommitGranted(3.0)] * 100


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def test_without_descriptors_guards_and_reports_are_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "ACCEPT_PAUSE_S", 3600.0)
    reporting = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with scene.guard(1) as guard, reporting, waiting, no_descriptor_left():
        waiting.connect(scene.env.socket)
        eventually(lambda: "cannot accept a worker's connection" in caplog.text)
        for _ in range(3):
            reporting.sendto(encode(LOADED), scene.env.reports)
            scene.expect_report()
        guard.sendall(encode(Broken()))
        scene.expect(("guard_sent", 7, 1, Broken()))


GARBAGE = [
    b"",
    b"\n",
    b"hello\n",
    b"x" * 100_000,
    b"\xff" * 10,
    encode(Go()),
    encode(Held(1)),
    encode(LOADED),
]


@pytest.mark.parametrize(
    "garbage", GARBAGE, ids=["silence", "empty", "text", "flood", "bytes", "ours", "unnamed", "report"]
)
def test_broken_clients_delay_no_other(scene: Scene, garbage: bytes) -> None:
    with scene.guard(1) as guard:
        clients = [scene.connect() for _ in range(8)]
        for client in clients:
            try:
                client.sendall(garbage)
            except OSError:
                pass  # hung up on
        scene.may_commit()
        scene.links.send(7, 1, Hold(1.0))
        assert Lines(TO_GUARDS).add(guard.recv(4096)) == [Hold(1.0)], "one that guards keeps its place"
        for client in clients:
            client.close()


def test_places_are_given_back(scene: Scene) -> None:
    """Also by clients that hang up without a question, ask nonsense, or do not wait for the answer."""
    for what in (b"", b"hello\n", encode(CommitQuestion(7)), encode(Guarding(7, 1))):
        for _ in range(6):
            scene.connect(what).close()
    scene.may_commit()
    eventually(lambda: not scene.links._clients)


def test_closed_it_leaves_commits_undecided(scene: Scene) -> None:
    scene.links.close()
    settle_io()
    with pytest.raises(SaveFailed, match="refused"):
        scene.may_commit()


# --- Guards


def test_messages_of_guards_are_posted_and_each_is_sent_its_own(scene: Scene) -> None:
    guards = [scene.guard(number) for number in range(2)]
    guards[1].sendall(encode(Broken()) + encode(Held(3)))
    scene.expect(("guard_sent", 7, 1, Broken()), ("guard_sent", 7, 1, Held(3)))
    scene.links.send(7, 1, Keep())
    scene.links.send(7, 0, Go())
    scene.links.send(8, 0, Hold(1.0))  # no worker of that generation is here
    assert Lines(TO_GUARDS).add(guards[1].recv(4096)) == [Keep()]
    assert Lines(TO_GUARDS).add(guards[0].recv(4096)) == [Go()]
    guards[0].close()
    scene.expect(("guard_sent", 7, 0, None))
    scene.links.send(7, 0, Go())
    guards[1].close()


@pytest.mark.parametrize("data", [b"nonsense\n", encode(Broken()), encode(Guarding(7, 0)) + encode(Go())])
def test_a_connection_of_another_language_is_ended(scene: Scene, data: bytes) -> None:
    with scene.connect(data) as connection:
        assert connection.recv(4096) == b""
    other = scene.connect(encode(Guarding(7, 5)))
    heard: list[tuple[object, ...]] = []
    while not heard or heard[-1] != ("guard_sent", 7, 5, Guarding(7, 5)):
        heard.append(scene.recorder.next(scene.events, PATIENCE_S))
    assert len(heard) <= 3
    other.close()


def test_a_guard_that_names_itself_again_is_hung_up_on_and_nothing_of_it_is_left(scene: Scene) -> None:
    with scene.guard(0) as guard:
        guard.sendall(encode(Guarding(7, 1)))
        assert guard.recv(4096) == b""
        scene.expect(("guard_sent", 7, 0, None))
        settle_io()
        assert scene.links._guards == {}


# --- Reports


def test_what_cannot_be_read_or_has_no_room_is_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.reporter.send(lambda g, r: LOADED)
    scene.expect_report()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for garbage in (b"not a report", b"", b"[" * 4000, encode(CommitQuestion(7)), b"x" * 20_000):
            stranger.sendto(garbage, scene.env.reports)
            assert scene.dropped.acquire(timeout=PATIENCE_S)
    monkeypatch.setattr(server, "MAX_WAITING_REPORTS", 0)
    scene.reporter.send(lambda g, r: LOADED)
    assert scene.dropped.acquire(timeout=PATIENCE_S)
    assert scene.events.empty()


def test_a_lock_that_was_lent_is_held_until_the_agent_ends_and_once(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "owner.lock"

    def opened() -> list[int]:
        numbers = [int(one) for one in os.listdir("/proc/self/fd")]
        real = os.path.realpath(path)
        return [number for number in numbers if os.path.realpath(f"/proc/self/fd/{number}") == real]

    for _ in range(3):
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            assert scene.reporter.send(lambda g, r: LentLock(g, r, "a"), lock.fileno())
            assert scene.reporter.send(lambda g, r: LOADED, lock.fileno()), "which does not keep it"
            scene.expect_report()
    eventually(lambda: len(opened()) == 1)
    assert not os.get_inheritable(opened()[0])
    with open(path) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert scene.reporter.send(lambda g, r: LentLock(g - 1, r, "past"))
    assert scene.reporter.send(lambda g, r: LentLock(g, r, "b"))
    eventually(lambda: opened() == [])


def test_locks_that_are_lent_do_not_take_all_descriptors(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script saves to a new directory now and then."""
    monkeypatch.setattr("elastic_agent.agent.rendezvous_io.worker_links.MAX_LOCKS", 3)
    for directory in range(3):
        with open(tmp_path / str(directory), "w") as lock:
            assert scene.reporter.send(lambda g, r: LentLock(g, r, "a"), lock.fileno())
    reading, lent = os.pipe()
    assert scene.reporter.send(lambda g, r: LentLock(g, r, "a"), lent)
    os.close(lent)
    closed = select.poll()
    closed.register(reading, select.POLLIN)
    assert closed.poll(5000), "the agent has closed what is beyond the bound"
    os.close(reading)
