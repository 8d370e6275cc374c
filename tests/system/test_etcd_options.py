"""Agents that meet in a real etcd: what they make of their options, and where a password never shows up."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import PATIENCE_S, Agent, Job

CANARY = "canary-of-the-password"
PASSWORD = {"ELASTIC_AGENT_ETCD_PASSWORD": CANARY}


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    """A member on loopback: HOST:PORT."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        client, peer = (f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets)
        for listener in sockets:
            listener.close()
        words = ["etcd", "--data-dir", folder, "--listen-client-urls", f"http://{client}"]
        words += ["--advertise-client-urls", f"http://{client}", "--listen-peer-urls", f"http://{peer}"]
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not listens(client):
                assert time.monotonic() < deadline, (Path(folder) / "log").read_text()
                time.sleep(0.02)
            yield client
        finally:
            process.kill()
            process.wait()


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def join(job: Job, name: str, endpoint: str, *options: str, **more: object) -> Agent:
    return job.start(name, f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job.id}", *options, **more)


def test_no_node_is_special(job: Job, etcd: str) -> None:
    endpoint = f"etcd://{etcd}/tests"
    agents = [join(job, name, endpoint, "--nnodes=1:2", "--lease-ttl=2") for name in ("a", "b")]
    old = job.wait_for_training(world=2)
    first = next(agent for agent in agents if agent.name == old.nodes[0])
    first.kill()
    job.wait_for_training(world=1, after=old.number)


def test_a_password_shows_up_nowhere(job: Job, etcd: str) -> None:
    options = ("--etcd-user=trainer", "--nproc-per-node=2", f"--log-dir={job.folder}")
    checked = join(job, "checked", f"etcd://{etcd}", *options, "--check-config", environment=PASSWORD)
    assert checked.exit_code() == 0
    assert checked.says(r"^# etcd-password: \*\*\* +# ELASTIC_AGENT_ETCD_PASSWORD$")
    agent = join(job, "a", f"etcd://{etcd}", *options, environment=PASSWORD)
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
    for file in (path for path in job.folder.rglob("*") if path.is_file()):
        assert CANARY.encode() not in file.read_bytes(), file


def test_wrong_certificates_are_a_matter_of_configuration(job: Job, etcd: str) -> None:
    wrong = job.folder / "ca.pem"
    wrong.write_text("no certificate\n")
    agent = join(job, "a", f"etcd://{etcd}", f"--etcd-ca={wrong}")
    assert agent.exit_code() == 78
    assert agent.says(str(wrong))


def test_where_nobody_answers_the_agent_gives_up_after_the_join_timeout(job: Job) -> None:
    agent = join(job, "a", "etcd://127.0.0.1:1,localhost:2", "--join-timeout=2", "--lease-ttl=1")
    assert agent.exit_code() == 69
    assert agent.says("looking for the rendezvous store at 127.0.0.1:1, localhost:2, for up to 2 s")
    assert agent.says("--rdzv-endpoint")


def test_a_signal_ends_the_search_for_the_store(job: Job) -> None:
    agent = join(job, "a", "etcd://127.0.0.1:1")
    job.wait_for_text(agent, "looking for the rendezvous store")
    agent.signal(15)
    assert agent.exit_code() == 143
