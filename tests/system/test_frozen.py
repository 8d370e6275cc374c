"""An agent that stands still for longer than its lease (A4): the others go on, and waking it does no harm."""

from __future__ import annotations

import os
import signal
import time

import pytest

from .harness import RECORDER, Job, without

OPTIONS = ("--nnodes=1:3", "--lease-ttl=2")
FROZEN_S = 3.0
"""Longer than the lease."""


def test_a_frozen_agent_is_replaced_and_joins_as_a_new_incarnation_when_it_wakes(job: Job) -> None:
    agents = {name: job.join(name, *OPTIONS) for name in ("a", "b", "c")}
    three = job.wait_for_training(world=3)
    frozen = agents["b"]
    old_life = three.starts[three.rank_on("b")]["env"]["ELASTIC_AGENT_INCARNATION"]
    old_pid = three.pid(three.rank_on("b"))

    frozen.signal(signal.SIGSTOP)
    two = job.wait_for_training(world=2, after=three.number)
    assert two.nodes == without(three.nodes, "b")
    assert old_pid in {worker.pid for worker in job.workers("b")}, "nobody can stop the frozen node's worker"

    frozen.signal(signal.SIGCONT)
    again = job.wait_for_training(world=3, after=two.number)
    assert again.nodes[-1] == "b", "whoever comes anew stands behind"
    stopped = job.history(what="sigterm", node="b", generation=three.number)
    started = again.starts[again.rank_on("b")]
    assert stopped, "it stopped its workers first"
    assert stopped[0]["at"] < started["at"]
    assert frozen.says("stopping generation"), "and said so"
    assert job.history(what="start", node="b", generation=two.number) == []
    assert old_life in started["env"]["ELASTIC_AGENT_INCARNATION"], "a new incarnation of the same process"


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True], ids=["the agent", "agent and worker"])
def test_a_node_that_no_other_can_follow_goes_on_after_any_freeze(job: Job, whole: bool) -> None:
    agent = job.start("a", "--lease-ttl=2")
    old = job.wait_for_training(world=1)
    frozen = [agent.pid, *(worker.pid for worker in job.workers() if whole)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(FROZEN_S)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    job.wait_for_steps(old, for_s=1.0)
    assert [generation.number for generation in job.generations()] == [old.number]
    assert not agent.says("lease")


@pytest.mark.long
@pytest.mark.usefixtures("in_etcd")
def test_a_short_freeze_disturbs_nobody(job: Job) -> None:
    agents = {name: job.join(name, "--nnodes=2", "--lease-ttl=20") for name in ("a", "b")}
    old = job.wait_for_training(world=2)
    agents["b"].signal(signal.SIGSTOP)
    done = len(job.history(what="step", node="a"))
    job.wait_for(lambda: len(job.history(what="step", node="a")) >= done + 25, "half a second of steps")
    agents["b"].signal(signal.SIGCONT)
    done = len(job.history(what="step", node="b"))
    job.wait_for(lambda: len(job.history(what="step", node="b")) >= done + 25, "more steps")
    assert [generation.number for generation in job.generations()][-1] == old.number


@pytest.mark.long
@pytest.mark.usefixtures("in_etcd")
def test_a_frozen_worker_is_killed_when_its_generation_ends(job: Job) -> None:
    job.start("a", "--nproc-per-node=2", script=(RECORDER, "--fault=1:0:20:1"))
    old = job.wait_for_training(world=2)
    os.kill(old.pid(1), signal.SIGSTOP)
    job.wait_for_training(world=2, after=1)
    assert not [worker for worker in job.workers() if worker.generation == 1]
