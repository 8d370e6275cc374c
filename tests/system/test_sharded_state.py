"""Sharded state under real agents: killed workers and nodes, and planned changes, cost no step that all have copied."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .harness import TORCH_PRELOADED, Generation, Job

SCRIPT = Path(__file__).with_name("sharding.py")


def newest(job: Job, training: Generation) -> int:
    """The step that all its ranks have finished."""
    return min(
        max(one["step"] for one in job.history(what="step", generation=training.number, rank=rank))
        for rank in training.starts
    )


def some_steps(job: Job, training: Generation) -> None:
    job.wait_for(
        lambda: (
            newest(job, training) > 10 + job.history(what="loaded", generation=training.number)[0]["step"]
        ),
        "some steps",
    )


def expect_to_go_on(job: Job, before: Generation, after: Generation, least: int) -> None:
    """The whole state is what it was after that step, and so are the random numbers where the world is as large."""
    for rank in after.starts:
        (loaded,) = job.history(what="loaded", generation=after.number, rank=rank)
        assert loaded["step"] >= least, "a step was lost that all had copied"
        was = job.history(what="step", generation=before.number, step=loaded["step"])
        assert {one["whole"] for one in was} == {loaded["whole"]}
        if len(before.starts) == len(after.starts):
            assert loaded["randomness"] in {one["randomness"] for one in was if one["rank"] == rank}


def test_a_killed_worker_costs_no_step_and_not_one_bit(job: Job) -> None:
    agent = job.start("a", TORCH_PRELOADED, "--nproc-per-node=2", script=(SCRIPT, job.folder))
    training = job.wait_for_training(world=2)
    for rank in (0, 1):
        some_steps(job, training)
        done = newest(job, training)
        os.kill(training.pid(rank), signal.SIGKILL)
        again = job.wait_for_training(world=2, after=training.number)
        expect_to_go_on(job, training, again, done - 1)
        training = again
    (job.folder / "finish").touch()
    assert agent.exit_code() == 0


@pytest.fixture
def three(job: Job, in_etcd: None) -> Generation:
    for name in ("a", "b", "c"):
        job.join(name, TORCH_PRELOADED, "--nnodes=1:3", "--lease-ttl=60", script=(SCRIPT, job.folder))
    return job.wait_for_training(world=3)


def test_a_lost_node_costs_no_step_that_its_partner_had(job: Job, three: Generation) -> None:
    """Nothing is on disk: two ranks take what three had out of their memory, and the replica of the lost one's."""
    some_steps(job, three)
    lost = three.nodes[1]
    done = newest(job, three)
    agents = {agent.name: agent for agent in job.agents}
    agents[lost].kill()
    two = job.wait_for_training(world=2, after=three.number)
    expect_to_go_on(job, three, two, done - 3)
    assert not (job.folder / "disk").exists() or not list((job.folder / "disk").glob("step-*.json"))


def test_a_node_that_leaves_and_one_that_comes_cost_no_step(job: Job, three: Generation) -> None:
    some_steps(job, three)
    agents = {agent.name: agent for agent in job.agents}
    left = three.nodes[2]
    agents[left].signal(signal.SIGTERM)
    two = job.wait_for_training(world=2, after=three.number)
    expect_to_go_on(job, three, two, newest(job, three))
    some_steps(job, two)
    job.join("d", TORCH_PRELOADED, "--nnodes=1:3", "--lease-ttl=60", script=(SCRIPT, job.folder))
    again = job.wait_for_training(world=3, after=two.number)
    expect_to_go_on(job, two, again, newest(job, two))


def test_a_save_is_found_by_another_world(job: Job, second_job: Job) -> None:
    """All agents are gone, and their memory with them: a world of another size goes on from what is on disk."""
    first = job.start("a", TORCH_PRELOADED, "--nproc-per-node=3", script=(SCRIPT, job.folder, "5"))
    job.wait_for_training(world=3)
    job.wait_for(lambda: list((job.folder / "disk").glob("step-*.json")), "the save to be on disk")
    first.kill()
    job.wait_for(lambda: not job.processes(), "the workers to end")
    second_job.start("a", TORCH_PRELOADED, "--nproc-per-node=2", script=(SCRIPT, job.folder))
    second_job.wait_for_training(world=2)
    (loaded,) = second_job.history(what="loaded", rank=0)
    was = job.history(what="step", step=5)
    assert loaded["step"] == 5
    assert {one["whole"] for one in was} == {loaded["whole"]}


def test_a_leave_without_replicas_brings_the_last_step_to_disk(job: Job, in_etcd: None) -> None:
    options = (TORCH_PRELOADED, "--nnodes=1:2", "--lease-ttl=60", "--memory-replicas=0")
    agents = [job.join(name, *options, script=(SCRIPT, job.folder)) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    some_steps(job, two)
    agents[1].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    expect_to_go_on(job, two, one, newest(job, two))
