"""A node joins that is not like the others: none may harm a job that trains."""

from __future__ import annotations

import pytest

from .harness import LACKING, RECORDER, WHOLE_TORCH, Job


@pytest.mark.long
def test_newcomers_that_are_not_like_the_others_leave_a_healthy_job_alone(job: Job) -> None:
    first = job.join("a", "--min-nodes=1", "--max-nodes=3", script=(LACKING,))
    job.wait_for_training(world=1)

    other = job.join("other", "--min-nodes=1", "--max-nodes=3", script=(RECORDER,))
    assert other.exit_code() == 65
    assert other.says(r"this node would run recorder\.py .*and the job runs lacking\.py .*as node a does")

    slow = job.join("slow", "--min-nodes=1", "--max-nodes=3", "--lease-ttl=9", script=(LACKING,))
    assert slow.exit_code() == 65
    assert slow.says(r"started with --lease-ttl 9s, where the job has 5s, as node a was started")

    # No --max-nodes: were it to coordinate, it would have no room for others.
    lacking = job.join("lacking", "--min-nodes=1", script=(LACKING,), environment={"LACKS_A_PACKAGE": "yes"})
    job.wait_for_text(
        lacking, r"started with --max-nodes 1, where the job has 3\. What the job has is node a's"
    )
    job.wait_for_text(
        lacking, r"waiting: excluded: each of 2 failures in a row began there alone.*no_such_package"
    )
    assert first.says(r"node lacking is excluded: each of 2 failures in a row began there alone")
    job.wait_for_metric(lacking, "elastic_agent_node_excluded", 1)
    left_alone = job.wait_for_training(world=1, after=2)
    assert left_alone.nodes == ["a"]

    job.join("good", "--min-nodes=1", "--max-nodes=3", script=(LACKING,))
    assert sorted(job.wait_for_training(world=2, after=left_alone.number).nodes) == ["a", "good"]
    lacking.signal(15)
    assert lacking.exit_code() == 143
    mended = job.join("lacking", "--min-nodes=1", "--max-nodes=3", script=(LACKING,), environment=WHOLE_TORCH)
    assert "lacking" in job.wait_for_training(world=3, after=left_alone.number + 1).nodes
    assert mended.process.poll() is None
