"""Agents that meet in a real etcd: what they make of their options, and where a password never shows up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster, make_certificates

from .harness import Agent, Job

CANARY = "canary-of-the-password"
ROOT = "root:root"


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    """A member that speaks plain text and knows no users: its URL."""
    with etcd_cluster() as cluster:
        yield cluster.url(0).replace("http:", "etcd:")


@pytest.fixture
def guarded(job: Job) -> Iterator[EtcdCluster]:
    """Mutual TLS and passwords. The user `trainer` may do what a job needs, and nothing else."""
    certificates = make_certificates(job.folder)
    for name in ("server", "client"):
        certificates.issue(name, name)
        certificates.file(f"{name}.key").chmod(0o600)
    with etcd_cluster(tls=certificates, args=("--bcrypt-cost", "4")) as cluster:
        cluster.ctl("user", "add", ROOT)
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("user", "add", f"trainer:{CANARY}")
        cluster.ctl("role", "add", "job")
        cluster.ctl(
            "role", "grant-permission", "job", "--prefix=true", "readwrite", f"/elastic-agent/{job.id}/"
        )
        cluster.ctl("user", "grant-role", "trainer", "job")
        cluster.ctl("auth", "enable")
        yield cluster


def join(job: Job, name: str, endpoint: str, *options: str, **more: object) -> Agent:
    return job.start(name, f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job.id}", *options, **more)


def credentials(job: Job, cluster: EtcdCluster) -> tuple[str, ...]:
    files = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
    endpoint = cluster.url(0).removeprefix("https://")
    return (
        endpoint,
        "--rdzv-backend=etcd",
        *(f"--etcd-{name}={job.folder / file}" for name, file in files.items()),
    )


@pytest.mark.long
def test_no_node_is_special(job: Job, etcd: str) -> None:
    agents = [join(job, name, f"{etcd}/tests", "--nnodes=1:2", "--lease-ttl=2") for name in ("a", "b")]
    old = job.wait_for_training(world=2)
    first = next(agent for agent in agents if agent.name == old.nodes[0])
    first.kill()
    job.wait_for_training(world=1, after=old.number)


def test_a_password_shows_up_nowhere(job: Job, guarded: EtcdCluster) -> None:
    password = job.folder / "password"
    password.write_text(CANARY)
    password.chmod(0o600)
    options = (
        *credentials(job, guarded),
        "--etcd-user=trainer",
        f"--etcd-password-file={password}",
        "--nproc-per-node=2",
        f"--log-dir={job.folder}",
    )
    checked = join(job, "checked", *options, "--check-config")
    assert checked.exit_code() == 0
    assert CANARY not in checked.text
    agent = join(job, "a", *options)
    job.wait_for_training(world=2)
    processes = job.processes()
    assert len(processes) >= 4, "the agent, its guard, two workers"
    for process in processes:
        assert CANARY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        if process.pid != agent.pid:
            assert CANARY not in process.environment.values(), str(process)
    assert CANARY not in agent.get("/metrics")[1]
    assert agent.get("/readyz")[0] == 200
    agent.signal(15)
    assert agent.exit_code() == 143
    for file in (path for path in job.folder.rglob("*") if path.is_file() and path != password):
        assert CANARY.encode() not in file.read_bytes(), file


def test_a_wrong_password_is_a_matter_of_configuration(job: Job, guarded: EtcdCluster) -> None:
    file = job.folder / "password"
    file.write_text("wrong-password\n")
    file.chmod(0o600)
    options = (*credentials(job, guarded), "--etcd-user=trainer", f"--etcd-password-file={file}")
    refused = join(job, "a", *options)
    assert refused.exit_code() == 78
    assert refused.says("check the user and the password")
    assert not refused.says("wrong-password")
    file.write_text(f"{CANARY}\n")
    join(job, "b", *options)
    job.wait_for_training(world=1)


@pytest.mark.long
def test_wrong_certificates_are_a_matter_of_configuration(job: Job, etcd: str) -> None:
    wrong = job.folder / "ca.pem"
    wrong.write_text("no certificate\n")
    agent = join(job, "a", etcd, f"--etcd-ca={wrong}")
    assert agent.exit_code() == 78
    assert agent.says(str(wrong))


@pytest.mark.long
def test_the_certificate_of_another_authority_is_refused_before_anything_starts(
    job: Job, guarded: EtcdCluster
) -> None:
    (job.folder / "others").mkdir()
    other = make_certificates(job.folder / "others").file("ca.pem")
    agent = join(job, "a", *credentials(job, guarded), f"--etcd-ca={other}")
    assert agent.exit_code() == 78
    assert agent.says("its certificate is not the one to expect")
    assert job.generations() == []


def test_where_nobody_answers_the_agent_gives_up_after_the_join_timeout(job: Job) -> None:
    agent = join(job, "a", "etcd://127.0.0.1:1,localhost:2", "--join-timeout=2", "--lease-ttl=1")
    assert agent.exit_code() == 69
    assert agent.says("looking for the rendezvous store at 127.0.0.1:1, localhost:2, for up to 2 s")
    assert agent.says("--rdzv-endpoint")


@pytest.mark.long
def test_a_signal_ends_the_search_for_the_store(job: Job) -> None:
    agent = join(job, "a", "etcd://127.0.0.1:1")
    job.wait_for_text(agent, "looking for the rendezvous store")
    agent.signal(15)
    assert agent.exit_code() == 143
