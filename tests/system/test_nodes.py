"""Nodes are lost, come, wait and stand by: which worlds follow, and what the agents say meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from .harness import Agent, Job, without
from .processes import port_for_a_store

FAST_LEASE = "--lease-ttl=2"


def readyz(agent: Agent) -> tuple[int, str]:
    return agent.get("/readyz")


def test_a_lost_node_shrinks_the_world_and_a_new_one_fills_the_hole(job: Job) -> None:
    """From 3 nodes over 2 to 3 again: one survivor at most changes its place. No change is a restart."""
    options = ("--nnodes=1:3", "--max-restarts=0", FAST_LEASE)
    agents = {name: job.join(name, *options) for name in ("a", "b", "c")}
    three = job.wait_for_training(world=3)
    lost = next(node for node in three.nodes if node != "a")  # a hosts the store, at whichever rank

    agents[lost].kill()
    two = job.wait_for_training(world=2, after=three.number)
    assert two.nodes == without(three.nodes, lost)
    assert agents["a"].says(rf"node {lost} is gone: its lease ended")
    assert agents["a"].says(rf"generation {two.number} \(lost\): 2 nodes.* 0 failures so far")

    job.join("d", *options)
    again = job.wait_for_training(world=3, after=two.number)
    assert again.nodes == [*two.nodes, "d"], "who was there stays in front"
    assert agents["a"].says(rf"generation {again.number} \(join\): 3 nodes.* 0 failures so far")


def test_torchruns_static_form_is_a_job_that_survives(job: Job) -> None:
    """In the order of the node ranks, whoever comes first."""
    options = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port_for_a_store()}", FAST_LEASE)
    for name, rank in (("b", 1), ("a", 0)):
        job.start(name, *options, f"--node-rank={rank}", "--local-addr=127.0.0.1")
    first = job.wait_for_training(world=2)
    assert first.nodes == ["a", "b"]
    os.kill(first.pid(1), signal.SIGKILL)
    assert job.wait_for_training(world=2, after=first.number).nodes == ["a", "b"]


def test_below_min_nodes_the_rest_waits_says_for_whom_and_goes_on_when_a_node_comes(job: Job) -> None:
    options = ("--nnodes=2", FAST_LEASE)
    first, second = (job.join(name, *options) for name in ("a", "b"))
    old = job.wait_for_training(world=2)
    second.kill()
    job.wait_for_text(first, r"waiting: 1 more of at least 2 nodes \(here: a; last: node b is gone")
    job.wait_for(lambda: not job.workers(), "the lonely node's worker to stop")
    status, text = readyz(first)
    assert status == 503
    assert "waiting: 1 more" in text

    job.join("c", *options)
    new = job.wait_for_training(world=2, after=old.number)
    assert new.nodes == ["a", "c"]
    assert readyz(first)[0] == 200


@pytest.mark.long
def test_below_min_nodes_for_the_join_timeout_ends_with_its_own_code(job: Job) -> None:
    options = ("--nnodes=2", FAST_LEASE, "--join-timeout=20s")
    first, second = (job.join(name, *options) for name in ("a", "b"))
    job.wait_for_training(world=2)
    second.kill()
    assert first.exit_code() == 75
    assert first.says(r"no world within 20 s of --join-timeout, waiting: 1 more of at least 2 nodes")


@pytest.mark.usefixtures("in_etcd")
def test_a_node_beyond_max_nodes_stands_by_and_takes_the_first_free_place(job: Job) -> None:
    options = ("--nnodes=1:2", FAST_LEASE)
    agents = {name: job.join(name, *options) for name in ("a", "b")}
    old = job.wait_for_training(world=2)
    assert readyz(agents["a"]) == (200, f"running generation {old.number}\n")

    spare = job.join("c", *options)
    job.wait_for(
        lambda: "standing by" in readyz(spare)[1] if spare.says("at http") else False, "c to stand by"
    )
    assert readyz(spare) == (200, f"standing by: generation {old.number} is running\n")
    coordinator = next(agent for agent in agents.values() if agent.metric("elastic_agent_coordinator"))
    assert job.wait_for(lambda: coordinator.metric("elastic_agent_nodes", state="standby") == 1, "the count")
    assert not job.workers("c")
    assert [generation.number for generation in job.generations()][-1] == old.number, "nobody was disturbed"

    agents["b"].kill()
    new = job.wait_for_training(world=2, after=old.number)
    assert new.nodes == ["a", "c"]


@pytest.mark.long
@pytest.mark.usefixtures("in_etcd")
def test_a_node_beyond_a_multiple_stands_by_says_why_and_takes_the_place_of_a_lost_one(job: Job) -> None:
    options = ("--nodes-multiple-of=2", "--max-nodes=4", FAST_LEASE)
    agents = {name: job.join(name, *options) for name in ("a", "b")}
    old = job.wait_for_training(world=2)
    spare = job.join("c", *options)
    job.wait_for_text(spare, "at http")
    why = "it waits until 2 stand by, as worlds are multiples of 2 nodes (--nodes-multiple-of)"
    job.wait_for(lambda: why in spare.get("/status")[1], "c to say why it stands by")
    assert job.generations()[-1].number == old.number

    agents[old.nodes[1]].kill()
    new = job.wait_for_training(world=2, after=old.number)
    assert new.nodes == [old.nodes[0], "c"]


@pytest.mark.long
@pytest.mark.usefixtures("in_etcd")
def test_a_joining_node_and_a_dying_worker_at_once_end_in_one_world(job: Job) -> None:
    options = ("--nnodes=1:3", FAST_LEASE)
    for name in ("a", "b"):
        job.join(name, *options)
    two = job.wait_for_training(world=2)
    newcomer = job.join("c", *options)
    job.wait_for_text(newcomer, r"metrics, .* at http://")
    with contextlib.suppress(ProcessLookupError):  # the join was faster, and has stopped it already
        os.kill(two.pid(1), signal.SIGKILL)
    three = job.wait_for_training(world=3, after=two.number)
    assert three.nodes == [*two.nodes, "c"]
