"""The agent's side of a commit: which generation may, and what is no proof of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_agent.agent.rendezvous_io.worker_answers import LONGEST_GRANT_S, WorkerAnswers, judge_commit
from elastic_agent.rendezvous.errors import StoreUnavailable
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Cause,
    CauseKind,
    Endpoint,
    Member,
    Phase,
    Result,
    World,
)
from elastic_agent.rendezvous.store.interface import Delete, Put, Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore
from elastic_agent.worker.wire.messages import (
    CommitAnswer,
    CommitGranted,
    CommitQuestion,
    CommitRefused,
    CommitUndecided,
)

PATIENCE_S = 20.0

WORLD = World(
    job="job",
    generation=7,
    phase=Phase.RUNNING,
    members=(Member("a", "life-a", 1, 0), Member("b", "life-b", 1, 1)),
    master=Endpoint("10.0.0.1", 29000),
    cause=Cause(CauseKind.START),
)


def leased(incarnation: str, proven_until: float) -> NodeSnapshot:
    return NodeSnapshot("a", incarnation, proven_until=proven_until)


HERE = leased("life-a", 103.0)
UNPROVEN = CommitUndecided("the rendezvous store does not confirm this node's lease")


@pytest.mark.parametrize(
    ("world", "latest", "answer"),
    [
        (WORLD, HERE, CommitGranted(3.0)),
        (WORLD, leased("life-b", 100.5), CommitGranted(0.5)),
        (replace(WORLD, phase=Phase.STOPPING, cause=Cause(CauseKind.LEAVE, "b")), HERE, CommitGranted(3.0)),
        # The host of the store leaves: the job ends, and its workers save within their grace.
        (replace(WORLD, phase=Phase.ENDED, result=Result.STORE_HOST_LEFT), HERE, CommitGranted(3.0)),
        # A lease without end is no leave for ever.
        (WORLD, leased("life-a", math.inf), CommitGranted(LONGEST_GRANT_S)),
        (WORLD, leased("life-a", 100.0), UNPROVEN),
        (WORLD, leased("life-a", -math.inf), UNPROVEN),
        (None, HERE, CommitRefused("the rendezvous store holds no world")),
        (replace(WORLD, generation=8), HERE, CommitRefused("generation 8 has replaced it")),
        (replace(WORLD, generation=8, phase=Phase.STOPPING), HERE, CommitRefused("generation 8 has replaced it")),
        (replace(WORLD, generation=6), HERE, CommitRefused("the rendezvous store has fallen back to generation 6")),
        (WORLD, leased("life-a.1", 103.0), CommitRefused("this node, which joined anew, is no member of it")),
        # However the lease stands, what is over is over.
        (replace(WORLD, generation=8), leased("life-a", 0.0), CommitRefused("generation 8 has replaced it")),
    ],
)  # fmt: skip
def test_who_may_commit(world: World | None, latest: NodeSnapshot, answer: CommitAnswer) -> None:
    assert judge_commit(CommitQuestion(7), world, latest, 100.0) == answer


class Scene:
    """A fence over a store in memory."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.now = 100.0
        self.latest = HERE
        self.answers = WorkerAnswers(store, lambda: self.latest, lambda event: None, lambda: self.now)
        self.publish(WORLD)

    def publish(self, world: World) -> None:
        self.store.transact((), (Put(WORLD_KEY, world.to_json()),))

    def asks(self) -> CommitAnswer:
        return self.answers.commit(CommitQuestion(7))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def scene(store: MemoryStore) -> Scene:
    return Scene(store)


def test_the_present_generation_may_commit(scene: Scene) -> None:
    assert scene.asks() == CommitGranted(3.0)


def test_the_store_is_asked_each_time(scene: Scene) -> None:
    scene.asks()
    scene.publish(replace(WORLD, generation=8))
    assert scene.asks() == CommitRefused("generation 8 has replaced it")


def test_a_world_that_is_gone_is_over(scene: Scene) -> None:
    scene.store.transact((), (Delete(WORLD_KEY),))
    assert scene.asks() == CommitRefused("the rendezvous store holds no world")


def test_another_key_that_begins_alike_is_not_the_world(scene: Scene) -> None:
    scene.store.transact((), (Delete(WORLD_KEY), Put("world2", WORLD.to_json())))
    assert scene.asks() == CommitRefused("the rendezvous store holds no world")


def undecided(answer: CommitAnswer) -> str:
    assert isinstance(answer, CommitUndecided)
    return answer.reason


@pytest.mark.parametrize("value", ["", "{}", "[" * 10_000])
def test_a_world_that_cannot_be_read_leaves_it_undecided(scene: Scene, value: str) -> None:
    scene.store.transact((), (Put(WORLD_KEY, value),))
    assert "is not usable" in undecided(scene.asks())


def test_a_store_that_is_closed_leaves_it_undecided(scene: Scene) -> None:
    scene.store.close()
    assert "was closed" in undecided(scene.asks())


class Unavailable(MemoryStore):
    def read(self, scopes: tuple[str, ...]) -> Snapshot:
        raise StoreUnavailable("no answer " * 1000)


@pytest.mark.parametrize("store", [Unavailable()])
def test_a_store_that_does_not_answer_leaves_it_undecided(scene: Scene) -> None:
    assert undecided(scene.asks()).startswith("no answer no answer")


class Frozen(MemoryStore):
    """Between the read and its answer, the process stands still for longer than its lease."""

    def read(self, scopes: tuple[str, ...]) -> Snapshot:
        snapshot = super().read(scopes)
        self.meanwhile()
        return snapshot

    meanwhile: Callable[[], None] = staticmethod(lambda: None)


@pytest.mark.parametrize("store", [Frozen()])
def test_what_was_read_before_a_freeze_is_worth_nothing_after_it(scene: Scene, store: Frozen) -> None:
    """Not even when another lease has been confirmed by the time that the answer is here."""

    def freeze() -> None:
        scene.now += 60.0
        scene.latest = replace(HERE, proven_until=scene.now + 3.0)

    store.meanwhile = freeze  # type: ignore[method-assign]
    assert isinstance(scene.asks(), CommitUndecided)
