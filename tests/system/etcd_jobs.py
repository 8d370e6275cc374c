"""Jobs of three nodes on a cluster of three etcd members, and which member, lease or process of them to hit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from tests.etcd_servers import EtcdCluster

from .harness import Agent, Generation, Job
from .processes import connected_ports

NODES = ("a", "b", "c")
LEASE_S = 5.0
"""The default of --lease-ttl."""

NoteGap: TypeAlias = Callable[[str, Job], float]


def start(job: Job, cluster: EtcdCluster, *options: str) -> Generation:
    job.use_etcd(cluster)
    for name in NODES:
        job.join(name, "--nnodes=1:3", *options)
    return job.wait_for_training(world=len(NODES))


def agent_of(job: Job, node: str) -> Agent:
    """Its newest."""
    return next(agent for agent in reversed(job.agents) if agent.name == node)


def member_of(agent: Agent, cluster: EtcdCluster) -> int:
    """The member that this agent talks to."""
    ports = connected_ports(agent.pid)
    return next(number for number, member in enumerate(cluster.members) if member.port in ports)


@contextmanager
def quorum_lost(cluster: EtcdCluster, for_s: float) -> Iterator[float]:
    """Two members, the leader one of them, stand still for so long, or until the body is over. Yields the instant."""
    leader = cluster.leader()
    frozen = [leader, (leader + 1) % len(cluster.members)]
    since = time.monotonic()
    for number in frozen:
        cluster.freeze(number)
    yield since
    time.sleep(max(0.0, since + for_s - time.monotonic()))
    cluster.heal()


def last_steps(job: Job, generation: Generation, nodes: Iterable[str] = NODES) -> float:
    """When the last worker of this generation on these nodes took its last step."""
    return max(
        step["at"] for step in job.history(what="step", generation=generation.number) if step["node"] in nodes
    )


def record_key(job: Job, key: str) -> str:
    return f"/elastic-agent/{job.id}/{key}"


def lease_of(job: Job, cluster: EtcdCluster, node: str) -> str:
    """In the words of `etcdctl lease revoke`."""
    found = json.loads(cluster.ctl("get", record_key(job, f"nodes/{node}")))["kvs"]
    return f"{found[0]['lease']:x}"


def assert_all_live(agents: Sequence[Agent]) -> None:
    ended = {agent.name: agent.process.poll() for agent in agents if agent.process.poll() is not None}
    assert not ended, f"agents have ended: {ended}"
