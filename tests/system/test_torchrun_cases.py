"""What torch asks of its own agent and launcher in their tests, asked of ours, where no other test does.

`tests/torch_cases.md` lists torch's cases with the test of ours for each; `docs/migrating.md` shows which of them
torchrun fails.
"""

from __future__ import annotations

import operator
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from elastic_agent.launcher import LaunchConfig, elastic_launch
from tests.etcd_servers import EtcdCluster

from .harness import RECORDER, Job

FAST_LEASE = "--lease-ttl=2"

PLACE = ("ROLE_NAME", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")


@pytest.mark.long
def test_nodes_with_one_two_and_three_workers_add_up_call_each_other_and_return_results_by_rank(
    etcd: EtcdCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> dict[str, Any]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo")
        total = torch.full((100, 100), rank)
        dist.all_reduce(total)
        dist.destroy_process_group()
        answer = None
        if rank in (0, world - 1):
            rpc.init_rpc(f"rank{rank}", rank=min(rank, 1), world_size=2)
            if rank == 0:
                answer = rpc.rpc_sync(f"rank{world - 1}", operator.mul, (6, 7))
            rpc.shutdown()
        return {
            "place": " ".join(os.environ[name] for name in PLACE),
            "sum": total,
            "answer": answer,
            "much": "x" * 10_000_000 * (rank == 1),
            "launched": dist.is_torchelastic_launched(),
        }

    def launch(node: str, role: str, workers: int) -> dict[int, Any]:
        config = LaunchConfig(
            min_nodes=3,
            max_nodes=3,
            nproc_per_node=workers,
            run_id=job,
            rdzv_backend="etcd",
            rdzv_endpoint=etcd.url(0).removeprefix("http://"),
            local_addr="127.0.0.1",
            max_restarts=0,
            options={"role": role, "node-id": node, "node-rank": str(workers - 1), "join-timeout": "60"},
        )
        return elastic_launch(config, work)()

    job = uuid.uuid4().hex
    nodes = (("a", "trainer", 1), ("b", "reader", 2), ("c", "trainer", 3))
    with ThreadPoolExecutor(len(nodes)) as pool:
        of_nodes = list(pool.map(lambda node: launch(*node), nodes))
    assert [list(of_node) for of_node in of_nodes] == [[0], [1, 2], [3, 4, 5]], (
        "by global rank, its own alone"
    )
    results = {rank: result for of_node in of_nodes for rank, result in of_node.items()}
    assert [result["place"] for _, result in sorted(results.items())] == [
        "trainer 0 0 1 0 4",
        "reader 1 0 2 0 2",
        "reader 2 1 2 1 2",
        "trainer 3 0 3 1 4",
        "trainer 4 1 3 2 4",
        "trainer 5 2 3 3 4",
    ]
    assert all(torch.equal(result["sum"], torch.full((100, 100), 15)) for result in results.values())
    assert results[0]["answer"] == 42
    assert len(results[1]["much"]) == 10_000_000
    assert all(result["launched"] for result in results.values()), "as torch sees it"
    assert "was started with other" not in "".join(capfd.readouterr()), "all run the same"


def test_a_failure_after_the_other_node_has_finished_restarts_both_and_at_last_ends_both(
    job: Job, etcd: EtcdCluster
) -> None:
    job.use_etcd(etcd)
    script = (RECORDER, "--fault=*:1:3:0", "--fault=1:0:50:7", "--fault=2:0:50:8")
    agents = [job.join(name, "--nnodes=2", "--max-restarts=1", script=script) for name in ("a", "b")]
    assert agents[0].exit_code() == 1
    assert agents[1].exit_code(within_s=10.0) == 1, "neither waits for the other"
    assert [sorted(generation.starts) for generation in job.generations()] == [[0, 1], [0, 1]]
    for agent in agents:
        assert agent.says("2 failures, --max-restarts allows 1")


@pytest.mark.long
def test_an_agent_that_is_killed_as_it_joins_is_not_waited_for(job: Job, etcd: EtcdCluster) -> None:
    """As a rule before there is a world: the first one waits for latecomers."""
    job.use_etcd(etcd)
    options = ("--nnodes=1:3", "--max-restarts=0", FAST_LEASE, "--last-call=3s")
    kept, lost = (job.join(name, *options, script=(RECORDER, "--steps=50")) for name in ("a", "b"))
    record = f"/elastic-agent/{job.id}/nodes/b"
    job.wait_for(lambda: '"kvs"' in etcd.ctl("get", "--keys-only", record), "b to join")
    lost.kill()
    assert kept.exit_code() == 0
    newest = job.generations()[-1]
    assert newest.nodes == ["a"]
    assert job.history(what="end", generation=newest.number)


@pytest.mark.long
def test_a_node_that_stood_by_to_the_end_ends_as_the_job_did(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    until = job.folder / "until"
    script = ("sh", "-c", f"until [ -e {until} ]; do sleep 0.05; done")
    agents = [job.join(name, "--nnodes=1", "--no-python", script=script) for name in ("a", "b")]

    def one_stands_by() -> bool:
        return any("standing by" in agent.get("/readyz")[1] for agent in agents if agent.says("at http"))

    job.wait_for(one_stands_by, "one to stand by")
    until.touch()
    assert [agent.exit_code() for agent in agents] == [0, 0]
