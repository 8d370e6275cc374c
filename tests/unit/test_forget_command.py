"""`elastic-agent forget`: what it deletes, what it leaves alone, and each way in which it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.commands import command
from elastic_agent.agent.commands.control import KEYS_AT_ONCE, JobStore, forget
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.rendezvous.errors import StoreMismatch, StoreUnavailable
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Cause,
    CauseKind,
    Endpoint,
    Member,
    Phase,
    World,
    drain_key,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Compare, Delete, Outcome, Put
from elastic_agent.rendezvous.store.memory import MemoryStore

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    for key in (WORLD_KEY, "stop", *(drain_key(f"n{number}") for number in range(2 * KEYS_AT_ONCE))):
        store.transact((), (Put(key, "{}"),))
    return store


def keys(store: MemoryStore) -> list[str]:
    return [entry.key for entry in store.read(("",)).entries]


def test_all_that_an_ended_job_has_left_is_deleted(store: MemoryStore) -> None:
    JobStore(store, "job").forget()
    assert keys(store) == []


def test_a_job_with_live_nodes_is_left_alone(store: MemoryStore) -> None:
    before = keys(store)
    store.transact((), (Put(node_key("b"), "{}"),))
    with pytest.raises(CannotDo, match="has 1 live nodes: b") as caught:
        JobStore(store, "job").forget()
    assert caught.value.code is ExitCode.LATER
    assert keys(store) == sorted([*before, node_key("b")])


def test_a_job_that_begins_meanwhile_keeps_its_world(store: MemoryStore) -> None:
    class Busy(MemoryStore):
        def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
            if Delete(WORLD_KEY) in writes:
                super().transact((), (Put(WORLD_KEY, "{new}"),))
            return super().transact(compares, writes)

    busy = Busy()
    busy.transact((), (Put(WORLD_KEY, "{}"),))
    with pytest.raises(StoreUnavailable, match="others write"):
        JobStore(busy, "job").forget()
    assert keys(busy) == [WORLD_KEY]


def test_the_world_of_another_job_is_left_alone() -> None:
    store = MemoryStore()
    other = World(
        "job", 1, Phase.RUNNING, (Member("a", "a-1", 1, 0),), Endpoint("a", 1), Cause(CauseKind.START)
    )
    store.transact((), (Put(WORLD_KEY, other.to_json()),))
    with pytest.raises(StoreMismatch, match="the store holds job 'job', not 'another'"):
        JobStore(store, "another").forget()
    assert keys(store) == [WORLD_KEY]
    JobStore(store, other.job).forget()
    assert keys(store) == []


def test_an_unknown_job_is_named() -> None:
    with pytest.raises(CannotDo, match="nothing of a job 'job'") as caught:
        JobStore(MemoryStore(), "job").forget()
    assert caught.value.code is ExitCode.NO_JOB


ETCD = "--rdzv-endpoint=etcd://127.0.0.1"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected JOB"),
        (["no name!", ETCD], "the name of a job"),
        (["job"], "the etcd that the job's nodes met in"),
        (["job", "--rdzv-endpoint=host:1"], "the etcd that the job's nodes met in"),
        (["job", ETCD, "--etcd-frob"], "--etcd-frob"),
    ],
)
def test_words_that_cannot_be_meant_are_problems(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forget(words) == ExitCode.BAD_CONFIG
    assert text in capsys.readouterr().err


def test_the_command_asks_the_etcd_of_that_job(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(command, "open_to_look", lambda place, timeout_s: asked.append(place) or store)
    assert forget(["digits", ETCD]) == ExitCode.SUCCESS
    assert [(place.backend, place.job_id) for place in asked] == [("etcd", "digits")]
    assert f"job digits is forgotten: {2 * KEYS_AT_ONCE + 2} keys deleted" in capsys.readouterr().out
