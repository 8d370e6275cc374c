"""The agent's side of a drain: workers' questions against a real store, one that is away, and one that is slow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.rendezvous_io import worker_answers
from elastic_agent.agent.rendezvous_io.worker_answers import WorkerAnswers
from elastic_agent.rendezvous.errors import StoreUnavailable
from elastic_agent.rendezvous.node.drain import Ask, Beyond, End, GoOn
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import (
    STOP_KEY,
    WORLD_KEY,
    Cause,
    CauseKind,
    Endpoint,
    Member,
    Phase,
    StopAt,
    World,
)
from elastic_agent.rendezvous.store.interface import Outcome, Put, Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore
from elastic_agent.worker.wire.messages import StepEnded, StepStatus, Verdict
from tests.recorder import Recorder

DRAINED = World(
    job="job",
    generation=7,
    phase=Phase.LAST_STEP,
    members=(Member("a", "life-a", 2, 0),),
    master=Endpoint("10.0.0.1", 29000),
    cause=Cause(CauseKind.JOIN),
)
ZERO, ONE = Ask(7, 0, 20), Ask(7, 1, 20)


class Scene:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.now = 100.0
        self.answers = WorkerAnswers(self.store, lambda: self.latest, self.events.put, lambda: self.now)
        self.recorder = Recorder()
        self.publish(DRAINED)

    def publish(self, world: World) -> None:
        outcome = self.store.transact((), (Put(WORLD_KEY, world.to_json()),))
        self.latest = NodeSnapshot("a", "life-a", world=world, world_revision=outcome.revision)

    @property
    def stop(self) -> StopAt | None:
        return next((StopAt.from_json(entry.value) for entry in self.store.read((STOP_KEY,)).entries), None)

    def heard(self) -> list[tuple[object, ...]]:
        found = []
        while not self.events.empty():
            found.append(self.recorder.next(self.events, 0.0))
        return found

    def report(self, status: StepStatus, rank: int, step: int) -> Verdict:
        return self.answers.step(StepEnded(7, rank, rank, step, status), self.recorder).verdict


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.store.close()


def test_all_ranks_end_after_the_step_that_rank_0_names(scene: Scene) -> None:
    assert scene.answers.judge(ONE) == GoOn()
    assert scene.stop is None
    assert scene.answers.judge(ZERO) == GoOn()
    assert scene.stop == StopAt(7, 21)
    assert scene.answers.judge(ONE) == GoOn()
    for rank in (0, 1):
        assert scene.answers.judge(Ask(7, rank, 21)) == End(21)
    assert scene.answers.judge(Ask(7, 1, 22)) == Beyond(21)


def test_a_world_that_has_changed_meanwhile_names_no_step(scene: Scene) -> None:
    """The node has not heard yet that the drain is over."""
    old = scene.latest
    plain = replace(DRAINED, phase=Phase.STOPPING)
    scene.publish(plain)
    heard = scene.latest
    scene.latest = old
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(scene.answers.judge(ZERO)))
    thread.start()
    scene.latest = heard
    thread.join(10)
    assert answers == [GoOn()]
    assert scene.stop is None


def test_an_end_is_posted_to_the_main_loop_before_it_is_sent_to_the_worker(scene: Scene) -> None:
    assert scene.report(StepStatus.FINISHED, 0, 20) is Verdict.GO_ON
    assert scene.heard() == []
    assert scene.report(StepStatus.FINISHED, 1, 21) is Verdict.END
    assert scene.heard() == [("worker_answered", 7, 1, 21, End(21))]
    assert scene.report(StepStatus.KEPT, 1, 21) is Verdict.GO_ON
    assert scene.heard() == [("worker_kept", 7, 1)]
    assert scene.report(StepStatus.FINISHED, 1, 30) is Verdict.GO_ON
    assert scene.heard() == [("worker_answered", 7, 1, 30, Beyond(21))]


@pytest.mark.parametrize("leaving", [True, False])
def test_a_worker_is_answered_whether_its_node_leaves(scene: Scene, leaving: bool) -> None:
    scene.latest = replace(scene.latest, leaving=leaving)
    assert scene.answers.step(StepEnded(7, 0, 0, 20, StepStatus.FINISHED), scene.recorder).leaves is leaving


def test_between_steps_rank_0_ends_at_once_and_others_need_not_come(scene: Scene) -> None:
    assert scene.report(StepStatus.PAUSING, 0, 20) is Verdict.END_ALONE
    assert scene.stop == StopAt(7, 20, paused=True)


class Away(MemoryStore):
    """Gives no answer so many times; a write may have been done nevertheless."""

    def __init__(self, times: int, does: bool) -> None:
        super().__init__()
        self.times = times
        self.does = does

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        if self.times and not self.does:
            self.times -= 1
            raise StoreUnavailable("cut off")
        return super().read(scopes, oldest_under)

    def transact(self, compares, writes) -> Outcome:  # type: ignore[no-untyped-def]
        outcome = super().transact(compares, writes)
        if self.times and self.does and compares:
            self.times -= 1
            raise StoreUnavailable("the reply was lost")
        return outcome


@pytest.mark.parametrize("does", [False, True], ids=["read lost", "reply to the write lost"])
def test_a_store_that_is_away_for_a_moment_is_asked_again(
    scene: Scene, does: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_answers, "PAUSE_S", 0.001)
    scene.store = scene.answers._store = Away(2 if not does else 1, does)
    scene.publish(DRAINED)
    assert scene.answers.judge(ZERO) == GoOn()
    assert scene.stop == StopAt(7, 21)


def test_without_the_store_the_worker_goes_on_and_nothing_is_written_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_answers, "PAUSE_S", 0.001)

    class Late(MemoryStore):
        def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
            scene.now += worker_answers.GIVES_UP_S
            return super().read(scopes, oldest_under)

    scene.store = scene.answers._store = Late()
    scene.publish(DRAINED)
    assert scene.answers.judge(ZERO) == GoOn()
    assert scene.stop is None


def test_the_stop_is_read_as_the_store_has_it_or_as_unknown(scene: Scene) -> None:
    scene.answers.read_stop(7, scene.recorder.stop_read)
    assert scene.recorder.next(scene.events, 10) == ("stop_read", 7, None)
    scene.answers.judge(ZERO)
    scene.answers.read_stop(7, scene.recorder.stop_read)
    assert scene.recorder.next(scene.events, 10) == ("stop_read", 7, StopAt(7, 21))
    scene.answers._store = Away(9, does=False)
    scene.answers.read_stop(7, scene.recorder.stop_read)
    assert scene.recorder.next(scene.events, 10) == ("stop_read", 7, None)
