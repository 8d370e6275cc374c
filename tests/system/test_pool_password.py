"""A pool in an etcd that asks for a password, given in a file: the agents of its jobs read it, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_agent.agent.common.exits import ExitCode
from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import Job
from .pools import Pool

PASSWORD = "only-for-agents"


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    with etcd_cluster(args=("--bcrypt-cost=4",)) as cluster:
        cluster.ctl("user", "add", f"root:{PASSWORD}")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("auth", "enable")
        yield cluster


@pytest.mark.parametrize(
    "preload",
    [pytest.param("none", id="cold"), pytest.param("json", id="spare", marks=pytest.mark.long)],
)
def test_a_job_of_the_pool_has_the_store_s_password_file(
    job: Job, guarded: EtcdCluster, preload: str
) -> None:
    [(host, port)] = guarded.endpoints
    pool = Pool(job)
    try:
        file = job.folder / "password"
        file.write_text(PASSWORD)
        file.chmod(0o600)
        endpoint = f"--rdzv-endpoint=etcd://{host}:{port}"
        pool.place = (endpoint, "--etcd-user=root", f"--etcd-password-file={file}")
        daemon = pool.daemon("a", f"--preload={preload}")
        pool.offered(daemon)
        mine = pool.submit()
        [start] = pool.starts(mine, 1)
        assert PASSWORD not in start["env"].values()
        pool.end_job(mine)
        assert pool.wait(mine) == ExitCode.SUCCESS
        assert PASSWORD not in daemon.text
    finally:
        pool.close()
