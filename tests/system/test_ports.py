"""Ports under fire, with real agents: a worker's port that is taken, a script with a port of its own, and a filter."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import TORCH_PRELOADED, Job
from .networks import Network, network

SERVER = """
import socket, sys
socket.create_server(("127.0.0.1", int(sys.argv[1])))
"""

OWN_PORTS = """
import os, socket
import torch.distributed as dist
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])
dist.init_process_group("gloo")
"""

MASTER_PORT = 25000


def script(folder: Path, text: str) -> Path:
    file = folder / "script.py"
    file.write_text(text)
    return file


def test_a_port_that_is_taken_is_retried_twice_without_budget_and_its_owner_named(
    job: Job, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = job.start("a", "--max-restarts=1", script=(script(tmp_path, SERVER), str(port)))
        failed = rf"rank 0 failed: .*port {port}: pid {os.getpid()}, "
        job.wait_for(lambda: len(re.findall(failed, agent.text)) == 2, "a second failure")
    assert agent.exit_code() == 0


@pytest.mark.long
def test_ranks_that_each_find_a_port_are_warned_on_each_node(job: Job, tmp_path: Path) -> None:
    words = script(tmp_path, OWN_PORTS)
    agents = [
        job.join(node, "--nnodes=2", f"--node-rank={rank}", TORCH_PRELOADED, script=(words,))
        for rank, node in enumerate("ab")
    ]
    for rank, agent in enumerate(agents):
        job.wait_for_text(
            agent, rf"rank {rank} of this script meets at port \d+; the agent has given it MASTER_PORT="
        )


@pytest.fixture
def net() -> Iterator[Network]:
    with network("store", "a", "b") as net:
        yield net


@pytest.fixture
def etcd(net: Network) -> Iterator[EtcdCluster]:
    with etcd_cluster(places=[net["store"].place]) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("verdict", "found"),
    [("drop", "no answer"), pytest.param("reject", "connection refused", marks=pytest.mark.long)],
)
def test_a_filter_is_named_with_node_and_port(
    job: Job, net: Network, etcd: EtcdCluster, verdict: str, found: str
) -> None:
    net["a"].disturb(f"tcp dport {MASTER_PORT} counter {verdict}", sent=False)
    host, port = etcd.endpoints[0]
    store = (f"--rdzv-endpoint=etcd://{host}:{port}", f"--rdzv-id={job.id}", "--etcd-insecure", "--nnodes=2")
    a, b = (
        job.start(
            name,
            *store,
            f"--node-rank={rank}",
            f"--port-range={MASTER_PORT}",
            f"--http-address={net[name].address}:0",
            enter=net[name].enter,
        )
        for rank, name in enumerate("ab")
    )
    there = rf"node b does not reach {net['a'].address}:{MASTER_PORT} of node a, where the workers meet"
    job.wait_for_text(b, f"{there}: {found}")
    assert net["a"].disturbed
    assert not a.says("does not reach")
