"""What the proof suite (tests/proof) has no column for: shards of nodes that are not in the next world."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Job

SCRIPT = Path(__file__).with_name("sharding.py")
PRELOADED = "--preload=torch.distributed.fsdp,elastic_agent.worker"
"""What the script imports: less than what workers with DistributedDataParallel do."""


@pytest.mark.long
def test_what_only_a_node_that_stands_by_has_is_not_lost(job: Job, in_etcd: None) -> None:
    """Of 2 x 2 ranks on four nodes the second is lost: the two that go on have the same half, and a third the other."""
    options = (PRELOADED, "--nnodes=2:4", "--nodes-multiple-of=2", "--lease-ttl=60", "--last-call=60s")
    for name in ("a", "b", "c", "d"):
        job.join(name, *options, script=(SCRIPT, job.folder, "hsdp"))
    four = job.wait_for_training(world=4)
    job.wait_for(lambda: job.history(what="step", generation=four.number, rank=0, step=6), "some steps")
    {agent.name: agent for agent in job.agents}[four.nodes[1]].kill()
    newest = min(
        max(one["step"] for one in job.history(what="step", generation=four.number, rank=rank))
        for rank in four.starts
    )
    two = job.wait_for_training(world=2, after=four.number)
    assert two.nodes == [four.nodes[0], four.nodes[2]]
    for loaded in job.history(what="loaded", generation=two.number):
        assert loaded["step"] >= newest - 1, "a step was lost that all had copied"
        was = job.history(what="step", generation=four.number, step=loaded["step"])
        assert {one["whole"] for one in was} == {loaded["whole"]}
