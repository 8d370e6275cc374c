"""Nodes that leave hand over what only they have: real agents, whose checkpoint directory is local to each node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .harness import TORCH_PRELOADED, Agent, Generation, Job
from .test_memory_servers import SERVER, start

SHARDED = Path(__file__).with_name("sharding.py")
REPLICATED = Path(__file__).with_name("remembering.py")

LOCAL = {"SYSTEM_TEST_CHECKPOINTS": "/proc/self/cwd/disk"}
"""One path on all nodes, and another directory on each."""


def join(job: Job, name: str, script: Path, *options: str, nodes: str = "1:3") -> Agent:
    folder = job.folder / f"of-{name}"
    folder.mkdir()
    return job.join(
        name,
        TORCH_PRELOADED,
        f"--nnodes={nodes}",
        "--lease-ttl=60",
        *options,
        script=(script, job.folder),
        environment=LOCAL,
        enter=("env", f"--chdir={folder}"),
    )


def train(job: Job, training: Generation) -> None:
    rank = max(training.starts)
    job.wait_for(
        lambda: len(job.history(what="step", generation=training.number, rank=rank)) > 10, "some steps"
    )


def last_step(job: Job, training: Generation) -> int:
    steps = {one["rank"]: one["step"] for one in job.history(what="step", generation=training.number)}
    assert len(set(steps.values())) == 1, "they have not ended at the same step"
    return steps[0]


@pytest.mark.long
def test_two_partners_leave_at_once_and_take_no_shards_with_them(job: Job, in_etcd: None) -> None:
    agents = {name: join(job, name, SHARDED) for name in ("a", "b", "c")}
    three = job.wait_for_training(world=3)
    train(job, three)
    for name in ("a", "b"):
        agents[name].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=three.number)
    [loaded] = job.history(what="loaded", generation=one.number)
    assert loaded["step"] == last_step(job, three)
    assert {
        one["whole"] for one in job.history(what="step", generation=three.number, step=loaded["step"])
    } == {loaded["whole"]}
    assert not list(job.folder.glob("of-*/disk/*/step-*")), "it came from disk"
    for name in ("a", "b"):
        assert agents[name].exit_code() == 143
        assert not agents[name].says("lost with it")


@pytest.mark.long
@pytest.mark.parametrize("leavers", [1, 2])
def test_a_new_node_goes_on_with_the_state_of_all_that_leave_at_once(
    job: Job, in_etcd: None, leavers: int
) -> None:
    """It has stood by until then; what they save is on disks that it does not see."""
    agents = [join(job, name, REPLICATED, nodes=f"1:{leavers}") for name in "ab"[:leavers]]
    before = job.wait_for_training(world=leavers)
    new = join(job, "n", REPLICATED, nodes=f"1:{leavers}")
    job.wait_for(lambda: '"n"' in agents[0].get("/job")[1], "the new node to stand by")
    job.wait_for(lambda: new.says("preloaded"), "it to be ready")
    train(job, before)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    after = job.wait_for_training(world=1, after=before.number)
    assert after.nodes == ["n"]
    [loaded] = job.history(what="loaded", generation=after.number)
    assert loaded["step"] == last_step(job, before)
    if leavers == 1:  # of the same world size: with the same random numbers
        [was] = job.history(what="step", generation=before.number, step=loaded["step"])
        assert was["bits"] == loaded["bits"]


def test_what_there_is_no_time_for_is_said_before_it_is_lost(job: Job, in_etcd: None) -> None:
    notice = job.folder / "notice"
    leaver, _ = start(job, "a", f"--notice=file:{notice}"), start(job, "b")
    job.wait_for(lambda: len(job.history(what="read", same=True)) == 2, "the replicas")
    [server] = [
        process.pid
        for process in job.processes()
        if SERVER in (command := Path(f"/proc/{process.pid}/cmdline").read_bytes()) and b"\0b\0" in command
    ]
    os.kill(server, signal.SIGSTOP)
    try:
        notice.write_text("4")
        leaver.exit_code()
    finally:
        os.kill(server, signal.SIGCONT)
    rank = next(one["rank"] for one in job.history(what="start", node="a"))
    assert leaver.says(
        rf"the shards of rank {rank} after step 3 of generation \d are only in the memory of this node, as far as it "
        "knows, and are lost with it: the time for that was over"
    )
