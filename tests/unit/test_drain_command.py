"""`elastic-agent drain`: what it writes, what it tells, and each way in which it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_agent.agent.commands import command, control
from elastic_agent.agent.commands.control import JobStore, drain
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.agent.configuration.rendezvous import RendezvousConfig
from elastic_agent.rendezvous.errors import StoreMismatch, StoreUnavailable
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    DrainRequest,
    NodeRecord,
    Phase,
    Result,
    World,
    assign_ranks,
    drain_key,
)
from elastic_agent.rendezvous.store.interface import Put, Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore

from .job_scene import WORLD, A, B, JobScene

LEAVE = Cause(CauseKind.LEAVE, "b", "node b was asked to stop")


class Scene(JobScene):
    @property
    def request(self) -> DrainRequest | None:
        entries = self.store.read((drain_key("b"),)).entries
        return next((DrainRequest.from_json(entry.key, entry.value) for entry in entries), None)

    def drain(self, node: str = "b", timeout_s: float = 60.0) -> None:
        JobStore(self.store, "job", lambda: self.now, self.sleep).drain(node, timeout_s)

    def fails(self, node: str = "b", timeout_s: float = 60.0) -> CannotDo:
        with pytest.raises(CannotDo) as caught:
            self.drain(node, timeout_s)
        return caught.value


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(WORLD, A, B)
    yield scene
    scene.store.close()


def test_it_waits_until_the_node_has_left(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    draining = replace(WORLD, phase=Phase.DRAINING, cause=LEAVE)
    scene.happens = iter(
        [
            lambda: (scene.delete(drain_key("b")), scene.put(replace(B, leaving=True))),
            lambda: scene.put(draining),
            lambda: scene.put(replace(WORLD, generation=5, members=assign_ranks((A,)), cause=LEAVE)),
            lambda: scene.delete("nodes/b"),
        ]
    )
    scene.drain()
    assert scene.now == pytest.approx(4 * control.LOOK_S)
    assert capsys.readouterr().out == "node b is asked to leave job job\nnode b has left\n"


def test_a_node_that_comes_back_at_once_has_left(scene: Scene) -> None:
    scene.happens = iter([lambda: scene.put(replace(B, incarnation="another.1"))])
    scene.drain()


def test_the_request_names_the_incarnation(scene: Scene) -> None:
    assert scene.fails(timeout_s=0.5).code is ExitCode.LATER
    assert scene.request == DrainRequest("life-b")
    assert 0.5 <= scene.now < 1.0


def test_an_older_request_is_replaced(scene: Scene) -> None:
    scene.store.transact((), (Put(drain_key("b"), DrainRequest("another").to_json()),))
    scene.fails(timeout_s=0.1)
    assert scene.request == DrainRequest("life-b")


@pytest.mark.parametrize(
    ("world", "nodes", "code", "text"),
    [
        (None, (), ExitCode.NO_JOB, "holds nothing of a job 'job'"),
        (WORLD, (A,), ExitCode.NOT_FOUND, "has no node 'b' now; its nodes: a"),
        (WORLD, (), ExitCode.NOT_FOUND, "its nodes: none"),
        (
            replace(
                WORLD,
                phase=Phase.ENDED,
                result=Result.SUCCEEDED,
                cause=Cause(CauseKind.SUCCESS, detail="all done"),
            ),
            (),
            ExitCode.NO_JOB,
            "job 'job' has ended: all done",
        ),
    ],
)
def test_who_cannot_leave(
    world: World | None, nodes: tuple[NodeRecord, ...], code: ExitCode, text: str
) -> None:
    scene = Scene(*([world] if world is not None else []), *nodes)
    error = scene.fails()
    assert error.code is code
    assert text in str(error)
    assert scene.request is None
    scene.store.close()


def test_another_jobs_store_is_left_alone(scene: Scene) -> None:
    scene.put(replace(WORLD, job="other"))
    with pytest.raises(StoreMismatch):
        scene.drain()
    assert scene.request is None


def test_a_store_that_is_away_for_a_while_is_waited_for(scene: Scene) -> None:
    class Away(MemoryStore):
        away = 0

        def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
            if self.away:
                self.away -= 1
                raise StoreUnavailable("cut off")
            return super().read(scopes, oldest_under)

    scene.store = store = Away()
    scene.put(WORLD, A, B)
    scene.happens = iter(
        [lambda: setattr(store, "away", 3), *[lambda: None] * 3, lambda: scene.delete("nodes/b")]
    )
    scene.drain()
    assert store.away == 0


C10D = {"rdzv-backend": "c10d", "rdzv-endpoint": "10.0.0.1:29400", "rdzv-id": "digits"}
ETCD = {
    "rdzv-backend": "etcd",
    "rdzv-endpoint": "etcd://127.0.0.1:2379/jobs",
    "rdzv-id": "words",
    "etcd-insecure": "true",
}


@pytest.mark.parametrize(
    ("words", "stores", "backend", "job"),
    [
        ((), [C10D], "c10d", "digits"),
        ((), [ETCD], "etcd", "words"),
        (("--rdzv-id=words",), [C10D, ETCD], "etcd", "words"),
    ],
)
def test_without_any_word_of_a_store_it_is_that_of_the_job_on_this_machine(
    words: tuple[str, ...],
    stores: list[dict[str, str]],
    backend: str,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def open_job(place: RendezvousConfig, timeout_s: float) -> MemoryStore:
        asked.append(place)
        return MemoryStore()

    monkeypatch.setattr(control, "stores_here", lambda *_: tuple(stores))
    monkeypatch.setattr(command, "open_to_look", open_job)
    assert drain(["b", *words]) == ExitCode.NO_JOB
    assert [(place.backend, place.job_id) for place in asked] == [(backend, job)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected NODE; write elastic-agent drain NODE"),
        (["--rdzv-endpoint=127.0.0.1:1"], "expected NODE"),
        (["no name!"], "the name of a node"),
        (["b"], "the address of the job's store"),
        (["b", "--timeout=soon"], "timeout"),
    ],
)
def test_words_that_cannot_be_meant_are_problems(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "stores_here", lambda *_: ())
    assert drain(words) == ExitCode.BAD_CONFIG
    assert text in capsys.readouterr().err
