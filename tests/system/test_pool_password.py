"""A pool in an etcd that asks for a password, given by the variable: jobs' agents have it, their workers do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_agent.agent.common.exits import PoolCode
from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import Job
from .pools import Pool

PASSWORD = "only-for-agents"
VARIABLE = "ELASTIC_AGENT_ETCD_PASSWORD"


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    with etcd_cluster(args=("--bcrypt-cost=4",)) as cluster:
        cluster.ctl("user", "add", f"root:{PASSWORD}")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("auth", "enable")
        yield cluster


@pytest.mark.parametrize("preload", ["none", "json"], ids=["cold", "standby"])
def test_a_job_of_the_pool_has_the_store_s_password_and_its_workers_do_not(
    job: Job, guarded: EtcdCluster, preload: str
) -> None:
    [(host, port)] = guarded.endpoints
    pool = Pool(job)
    try:
        pool.place = (f"--rdzv-endpoint=etcd://{host}:{port}", "--etcd-user=root")
        pool.environment[VARIABLE] = PASSWORD
        daemon = pool.daemon("a", f"--preload={preload}")
        pool.job.wait_for_text(daemon, "idle: waiting for a job")
        mine = pool.submit()
        [start] = pool.starts(mine, 1)
        assert VARIABLE not in start["env"]
        pool.end_job(mine)
        assert pool.wait(mine) == PoolCode.DONE
        assert PASSWORD not in daemon.text
    finally:
        pool.close()
