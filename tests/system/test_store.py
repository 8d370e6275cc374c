"""The rendezvous store: its host dies or leaves, others misuse it, strangers knock at every port."""

from __future__ import annotations

import os
import random
import signal
import socket
import ssl

import pytest

from .harness import Job
from .processes import listening_ports

FAST_LEASE = "--lease-ttl=2"


def test_when_the_store_host_is_stopped_all_end_and_the_message_names_it(job: Job) -> None:
    host, *others = (job.join(name, "--nnodes=1:3", FAST_LEASE) for name in ("a", "b", "c"))
    job.wait_for_training(world=3)
    host.signal(signal.SIGTERM)
    assert host.exit_code() == 143
    for agent in others:
        assert agent.exit_code() == 69
        assert agent.says(
            "ended with exit code 69: node a, which hosts the c10d rendezvous store, was asked to stop"
        )


@pytest.mark.long
def test_a_name_that_a_living_agent_has_is_refused(job: Job) -> None:
    job.join("a", "--nnodes=1:2", "--lease-ttl=1")
    old = job.wait_for_training(world=1)
    second = job.join("a", "--nnodes=1:2", "--lease-ttl=1")
    assert second.exit_code() == 73
    assert second.says("another live agent of job 'default' is already called 'a'")
    assert job.generations()[-1].number == old.number, "the first one was not disturbed"


def test_another_jobs_store_is_refused(job: Job) -> None:
    job.join("a", "--nnodes=1:2", "--rdzv-id=mine")
    old = job.wait_for_training(world=1)
    stranger = job.join("b", "--nnodes=1:2", "--rdzv-id=other")
    assert stranger.exit_code() == 76
    assert stranger.says("job 'mine', expected 'other'")
    assert job.generations()[-1].number == old.number


def test_strangers_at_every_port_change_nothing(job: Job) -> None:
    agents = [job.join(name, "--nnodes=2", FAST_LEASE) for name in ("a", "b")]
    old = job.wait_for_training(world=2)
    ports = {(agent.name, port) for agent in agents for port in listening_ports(agent.pid)}
    assert len(ports) >= 5, "store; master and metrics on each"
    rng = random.Random(11)
    open_connections = []
    for _, port in sorted(ports):
        for junk in (b"\0" * 64, rng.randbytes(4096), b"GET /metrics HTTP/1.1\r\n" + b"x" * 70_000, b""):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            open_connections.append(connection)  # and never closed while the test runs
            connection.settimeout(1)
            try:
                connection.sendall(junk)
            except OSError:
                pass  # closed on us, as it should be
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
                plain.settimeout(0.2)
                ssl._create_unverified_context().wrap_socket(plain)
        except OSError:
            pass
    for agent in agents:
        assert agent.metric("elastic_agent_rendezvous_generation") == old.number, "the metrics still answer"
        assert agent.process.poll() is None
    assert [generation.number for generation in job.generations()][-1] == old.number
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=2, after=old.number)
    for connection in open_connections:
        connection.close()
