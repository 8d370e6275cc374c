"""FSDP2 under real agents: planned changes lose no step where its shards are in memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .harness import Agent, Generation, Job

SCRIPT = Path(__file__).with_name("sharded_kinds.py")
PRELOADED = (
    "--preload=torch.distributed.fsdp,torch.distributed.tensor.parallel,torch.distributed.optim,"
    "elastic_agent.worker"
)
"""What the script imports: less than what workers with DistributedDataParallel do."""


def newest(job: Job, training: Generation) -> int:
    """The step that all its ranks have finished, of all kinds."""
    last: dict[tuple[int, str], int] = {}
    for one in job.history(what="loaded", generation=training.number):
        last[one["rank"], one["kind"]] = one["step"]
    for one in job.history(what="step", generation=training.number):
        last[one["rank"], one["kind"]] = one["step"]
    return min(last.values(), default=0)


def least(job: Job, training: Generation, what: str) -> int:
    """The newest step that all ranks had "copied", or partners had "acknowledged", of all kinds."""
    found: dict[tuple[int, str], int] = {}
    for one in job.history(what="step", generation=training.number):
        found[one["rank"], one["kind"]] = one[what]
    return min(found.values(), default=0)


def reach(job: Job, training: Generation, step: int) -> int:
    """Wait until all ranks have finished this step; which one they have finished then."""
    job.wait_for(lambda: newest(job, training) >= step, f"step {step}")
    return newest(job, training)


def some_steps(job: Job, training: Generation) -> None:
    reach(job, training, 6 + job.history(what="loaded", generation=training.number)[0]["step"])


def expect_to_go_on(job: Job, before: Generation, after: Generation, least: int) -> None:
    """The whole state is what it was after that step, and so are the random numbers where the world is as large."""
    for loaded in job.history(what="loaded", generation=after.number):
        assert loaded["step"] >= least, "a step was lost that all had copied"
        of_step = {name: loaded[name] for name in ("kind", "step")}
        was = job.history(what="step", generation=before.number, **of_step) or job.history(
            what="loaded", generation=before.number, **of_step
        )
        assert {one["whole"] for one in was} == {loaded["whole"]}
        if len(before.starts) == len(after.starts):
            assert loaded["randomness"] in {one["randomness"] for one in was if one["rank"] == loaded["rank"]}


def agents_of(job: Job) -> dict[str, Agent]:
    return {agent.name: agent for agent in job.agents}


@pytest.mark.long
def test_nodes_that_leave_come_and_are_lost_cost_no_step(job: Job, in_etcd: None) -> None:
    options, script = (PRELOADED, "--nnodes=1:3", "--lease-ttl=60"), (SCRIPT, job.folder)
    for name in ("a", "b", "c"):
        job.join(name, *options, "--last-call=60s", script=script)
    three = job.wait_for_training(world=3)
    some_steps(job, three)
    agents_of(job)[three.nodes[2]].signal(signal.SIGTERM)
    two = job.wait_for_training(world=2, after=three.number)
    expect_to_go_on(job, three, two, newest(job, three))
    some_steps(job, two)
    job.join("d", *options, script=script)
    three = job.wait_for_training(world=3, after=two.number)
    expect_to_go_on(job, two, three, newest(job, two))

    # Two ranks take what three had out of their memory, and the replica of the lost one's.
    job.wait_for(lambda: least(job, three, "acknowledged"), "replicas")
    acknowledged = least(job, three, "acknowledged")
    agents_of(job)[three.nodes[1]].kill()
    two = job.wait_for_training(world=2, after=three.number)
    expect_to_go_on(job, three, two, acknowledged)
