"""The same job again, in a store that remembers the last run."""

from __future__ import annotations

from tests.etcd_servers import EtcdCluster

from .harness import RECORDER, Job


def test_a_job_that_has_succeeded_does_not_run_again_until_it_is_forgotten(
    job: Job, etcd: EtcdCluster
) -> None:
    job.use_etcd(etcd)
    for _ in range(2):
        agents = [job.join(name, "--nnodes=2", script=(RECORDER, "--steps=5")) for name in ("a", "b")]
        assert [agent.exit_code() for agent in agents] == [0, 0]
        assert len(job.history(what="start")) == 2
    assert agents[0].says(f"etcdctl del --prefix /elastic-agent/{job.id}/")
    etcd.ctl("del", "--prefix", f"/elastic-agent/{job.id}/")
    script = job.folder / "again.py"  # with no history: the generations of a new job begin with 1
    script.write_text("import os, sys; open(sys.argv[1] + os.environ['RANK'], 'x')")
    agents = [job.join(name, "--nnodes=2", script=(script, job.folder / "ran-")) for name in ("a", "b")]
    assert [agent.exit_code() for agent in agents] == [0, 0]
    assert {path.name for path in job.folder.glob("ran-*")} == {"ran-0", "ran-1"}
