"""Agents whose memory servers bring their workers' shards to one another, and a key that shows up nowhere."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import Agent, Job

REPLICATING = Path(__file__).with_name("replicating.py")
SERVER = b"agent.checkpoints.server"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


def start(job: Job, name: str, *options: str) -> Agent:
    rendezvous = (
        "--local-addr=127.0.0.1",
        "--nnodes=2",
        "--lease-ttl=2",
        f"--log-dir={job.folder}/logs-{name}",
    )
    return job.join(name, *rendezvous, *options, script=(REPLICATING, job.folder))


def servers(job: Job) -> list[int]:
    found = []
    for process in job.processes():
        try:
            if SERVER in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                found.append(process.pid)
        except OSError:
            pass
    return found


def replicated(agent: Agent) -> int | None:
    replica = json.loads(agent.get("/status")[1])["replica"]
    return replica["step"] if replica is not None else None


def test_shards_come_to_the_other_node_and_the_key_shows_up_nowhere(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    agents = [start(job, name) for name in ("a", "b")]
    job.wait_for(lambda: len(job.history(what="read", same=True)) == 2, "both replicas to be read back")
    assert {record["nodes"][0] for record in job.history(what="acked", node="a")} == {"b"}
    for agent in agents:
        job.wait_for(lambda agent=agent: replicated(agent) == 3, "the report")
        assert agent.metric("elastic_agent_replica_partners_unreachable") == 0

    # The key: in the store and in files of the two folders in memory, and nowhere else.
    [entry] = json.loads(etcd.ctl("get", f"/elastic-agent/{job.id}/memory-key"))["kvs"]
    key = base64.b64decode(entry["value"]).decode()
    assert len(key) == 64
    forms = [key.encode(), bytes.fromhex(key)]
    processes = job.processes()
    assert len(servers(job)) == 2
    for process in processes:
        for file in ("cmdline", "environ"):
            content = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert not any(form in content for form in forms), process
    pages = [
        agent.get(page)[1]
        for agent in agents
        for page in ("/metrics", "/status", "/job", "/node", "/events", "/")
    ]
    assert not any(key in page for page in pages)

    # A killed server is started again and goes on with its orders; nothing else is disturbed.
    [killed, _] = servers(job)
    os.kill(killed, signal.SIGKILL)
    job.wait_for(lambda: len(servers(job)) == 2 and killed not in servers(job), "another memory server")
    agents[0].signal(signal.SIGTERM)
    assert agents[0].exit_code() == 143
    agents[1].signal(signal.SIGTERM)
    assert agents[1].exit_code() == 143
    assert servers(job) == []
    assert any(
        agent.says("the memory server has ended, another is started: killed by SIGKILL") for agent in agents
    )
    for file in (path for path in job.folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert not any(form in content for form in forms), file


@pytest.mark.long
def test_a_job_that_has_no_shards_has_no_memory_server(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    for name in ("a", "b"):
        job.join(name, "--local-addr=127.0.0.1", "--nnodes=2", "--lease-ttl=2")
    job.wait_for_training(world=2)
    assert servers(job) == []
