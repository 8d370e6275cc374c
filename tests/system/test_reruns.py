"""The same job again, in a store that remembers the last run."""

from __future__ import annotations

from tests.etcd_servers import EtcdCluster

from .harness import RECORDER, Job


def test_a_job_is_run_again_under_its_name_where_that_is_asked_for(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    few_steps = (RECORDER, "--steps=5")
    for run, options in enumerate([[], [], ["--run-again"]]):
        agents = [job.join(name, "--nnodes=2", *options, script=few_steps) for name in ("a", "b")]
        assert [agent.exit_code() for agent in agents] == [0, 0]
        assert [generation.number for generation in job.generations()] == list(range(1, max(run, 1) + 1))
