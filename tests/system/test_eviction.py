"""A node whose processes are gone is out of the world long before its lease ends, whichever node it was."""

from __future__ import annotations

import os
import signal

import pytest

from tests.etcd_servers import EtcdCluster

from .harness import Generation, Job, without

LONG_LEASE = "--lease-ttl=60"
"""No test here waits for so long: a node that is lost was evicted."""


@pytest.fixture
def three(job: Job, etcd: EtcdCluster) -> Generation:
    job.use_etcd(etcd)
    for name in ("a", "b", "c"):
        job.join(name, "--nnodes=1:3", LONG_LEASE)
    return job.wait_for_training(world=3)


def lose(job: Job, three: Generation, lost: str) -> None:
    """The node's agent is killed, and its guard ends the worker; a collective breaks on all others."""
    agents = {agent.name: agent for agent in job.agents}
    agents[lost].kill()
    for node in three.nodes:
        if node != lost:
            os.kill(three.pid(three.rank_on(node)), signal.SIGKILL)


def test_a_lost_member_is_evicted(job: Job, three: Generation) -> None:
    lost = three.nodes[-1]
    lose(job, three, lost)
    two = job.wait_for_training(world=2, after=three.number)
    assert two.nodes == three.nodes[:-1]
    said = "".join(agent.text for agent in job.agents)
    assert f"node {lost} is gone: its agent has ended" in said


def test_a_lost_coordinator_is_evicted_by_a_member(job: Job, three: Generation) -> None:
    lost = three.nodes[0]
    lose(job, three, lost)
    two = job.wait_for_training(world=2, after=three.number)
    assert two.nodes == without(three.nodes, lost)
    assert f"node {lost} is gone: its agent has ended" in "".join(agent.text for agent in job.agents)


@pytest.mark.long
def test_a_node_that_comes_back_under_its_name_need_not_wait_for_its_old_lease(
    job: Job, three: Generation
) -> None:
    lost = three.nodes[1]
    lose(job, three, lost)
    two = job.wait_for_training(world=2, after=three.number)
    job.join(lost, "--nnodes=1:3", LONG_LEASE)
    again = job.wait_for_training(world=3, after=two.number)
    assert again.nodes == [*two.nodes, lost]


def test_a_frozen_member_is_not_taken_for_gone(job: Job, etcd: EtcdCluster) -> None:
    """It is silent, and silence proves nothing."""
    job.use_etcd(etcd)
    agents = {name: job.join(name, "--nnodes=1:3", LONG_LEASE) for name in ("a", "b", "c")}
    three = job.wait_for_training(world=3)
    frozen = agents[three.nodes[-1]]
    frozen.signal(signal.SIGSTOP)
    os.kill(three.pid(three.rank_on(three.nodes[1])), signal.SIGKILL)
    waits = rf"waiting: {frozen.name} to stop generation {three.number}"
    job.wait_for(lambda: any(agent.says(waits) for agent in agents.values()), "the others to wait")
    frozen.signal(signal.SIGCONT)
    again = job.wait_for_training(world=3, after=three.number)
    assert again.nodes == three.nodes
