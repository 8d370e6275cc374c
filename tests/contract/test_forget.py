"""`elastic-agent forget JOB` on a real etcd: what it deletes there, and what it leaves alone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from elastic_agent.agent.commands import control
from elastic_agent.agent.commands.control import KEYS_AT_ONCE
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.rendezvous.etcd.store import EtcdStore
from elastic_agent.rendezvous.records import (
    STOP_KEY,
    WORLD_KEY,
    Cause,
    CauseKind,
    DrainRequest,
    Endpoint,
    Member,
    NodeRecord,
    Phase,
    Result,
    StopAt,
    World,
    drain_key,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Put
from tests.etcd_servers import EtcdCluster, etcd_access

WISHES = 2 * KEYS_AT_ONCE + 1
"""More than one request of etcd may delete."""


class Job:
    def __init__(self, cluster: EtcdCluster, name: str) -> None:
        self.name = name
        access = etcd_access(cluster.endpoints, name)
        self.store = EtcdStore.connect(access)

    def put(self, *puts: Put) -> None:
        for begin in range(0, len(puts), KEYS_AT_ONCE):
            self.store.transact((), puts[begin : begin + KEYS_AT_ONCE])

    @property
    def keys(self) -> list[str]:
        return [entry.key for entry in self.store.read(("",)).entries]


@pytest.fixture
def ended(shared_etcd: EtcdCluster) -> Iterator[Job]:
    """A job that has ended, with all that one can leave behind."""
    job = Job(shared_etcd, f"job-{uuid.uuid4().hex[:8]}")
    world = World(
        job.name,
        3,
        Phase.ENDED,
        (Member("a", "a-1", 1, 0),),
        Endpoint("10.0.0.1", 1),
        Cause(CauseKind.SUCCESS),
        result=Result.SUCCEEDED,
    )
    wishes = [Put(drain_key(f"n{number}"), DrainRequest("n-1").to_json()) for number in range(WISHES)]
    job.put(Put(WORLD_KEY, world.to_json()), Put(STOP_KEY, StopAt(2, 7).to_json()), *wishes)
    yield job
    job.store.close()


def forget(cluster: EtcdCluster, job: str) -> int:
    [(host, port)] = cluster.endpoints
    return control.forget([job, f"--rdzv-endpoint=etcd://{host}:{port}"])


def test_all_that_an_ended_job_has_left_is_deleted_and_nothing_of_another(
    shared_etcd: EtcdCluster, ended: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    neighbour = Job(shared_etcd, f"{ended.name}-2")  # its keys begin like this job's
    neighbour.put(Put(WORLD_KEY, "{}"))
    assert forget(shared_etcd, ended.name) == ExitCode.SUCCESS
    assert f"job {ended.name} is forgotten: {WISHES + 2} keys deleted" in capsys.readouterr().out
    assert ended.keys == []
    assert neighbour.keys == [WORLD_KEY]
    neighbour.store.close()
    assert forget(shared_etcd, ended.name) == ExitCode.NO_JOB


def test_a_job_is_forgotten_only_when_the_leases_of_its_nodes_have_ended(
    shared_etcd: EtcdCluster, ended: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    lease, before = ended.store.grant(60.0), ended.keys
    node = NodeRecord("b", "b-1", "10.0.0.2", 4711, 1)
    ended.put(Put(node_key("b"), node.to_json(), lease))
    assert forget(shared_etcd, ended.name) == ExitCode.LATER
    assert "has 1 live nodes: b" in capsys.readouterr().err
    assert ended.keys == sorted([*before, node_key("b")])
    ended.store.revoke(lease)
    assert forget(shared_etcd, ended.name) == ExitCode.SUCCESS
    assert ended.keys == []


def test_what_another_version_left_is_forgotten_too(shared_etcd: EtcdCluster, ended: Job) -> None:
    ended.put(Put(WORLD_KEY, '{"v": 1}'))
    assert forget(shared_etcd, ended.name) == ExitCode.SUCCESS
    assert ended.keys == []
