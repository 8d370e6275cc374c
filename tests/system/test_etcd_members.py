"""Members of an etcd cluster die or stand still under a job: one of three costs nothing, two cost what they must.

The cluster elects with etcd's own defaults, so that the loss of a leader takes as long as it does for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import Agent, Generation, Job, connected_ports

NODES = ("a", "b", "c")
LEASE_S = 5.0
"""The default of --lease-ttl."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with etcd_cluster(3, heartbeat_ms=100, election_ms=1000) as cluster:
        yield cluster


@pytest.fixture
def etcd3(cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members, all well; whatever the test did to them is undone."""
    yield cluster
    cluster.heal()


def start(job: Job, etcd3: EtcdCluster, *options: str) -> Generation:
    job.use_etcd(etcd3)
    for name in NODES:
        job.join(name, "--nnodes=1:3", *options)
    return job.wait_for_training(world=3)


def member_of(agent: Agent, etcd3: EtcdCluster) -> int:
    """The one that this agent talks to."""
    ports = connected_ports(agent.pid)
    return next(number for number, member in enumerate(etcd3.members) if member.port in ports)


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("which", ["connected", "leader"])
def test_the_loss_of_one_member_does_not_interrupt_training(
    job: Job, etcd3: EtcdCluster, note_gap: Callable[[str, Job], float], which: str, how: str
) -> None:
    old = start(job, etcd3)
    lost = etcd3.leader() if which == "leader" else member_of(job.agents[0], etcd3)
    getattr(etcd3, how)(lost)
    job.wait_for_steps(old, LEASE_S + 1.0)
    etcd3.heal()
    assert job.wait_for_convergence(*NODES).number == old.number
    note_gap(f"1 of 3 members, {which}: {how}", job)
