"""Hosts of c10d stores, in this process and in one of their own that a test may kill; an etcd server."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from elastic_agent.rendezvous.c10d.host import C10dHost
from tests.etcd_servers import EtcdCluster, etcd_cluster

ADDRESS = "127.0.0.1"

HOST_PROGRAM = """
import socket, sys
from elastic_agent.rendezvous.c10d.host import C10dHost
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
port = listener.getsockname()[1]
host = C10dHost(listener, "127.0.0.1", sys.argv[1])
print(port, flush=True)
sys.stdin.read()
host.close()
"""


@dataclass(frozen=True)
class HostProcess:
    port: int
    process: subprocess.Popen[str]


def start_host_process(job: str, port: int = 0) -> HostProcess:
    process = subprocess.Popen(
        [sys.executable, "-c", HOST_PROGRAM, job, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the host process ended with {process.wait()}"
    return HostProcess(int(line), process)


def end_host_process(host: HostProcess) -> None:
    host.process.kill()
    host.process.communicate()


@pytest.fixture(scope="session")
def shared_host_process() -> Iterator[HostProcess]:
    """One for all tests that do it no harm: it takes a second to import torch."""
    host = start_host_process("job")
    yield host
    end_host_process(host)


@pytest.fixture
def host_process() -> Iterator[Callable[..., HostProcess]]:
    hosts: list[HostProcess] = []

    def start(job: str = "job", port: int = 0) -> HostProcess:
        hosts.append(start_host_process(job, port))
        return hosts[-1]

    yield start
    for host in hosts:
        end_host_process(host)


def started_host() -> tuple[C10dHost, int]:
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    return C10dHost(listener, ADDRESS, "job"), port


@pytest.fixture(scope="session")
def shared_host() -> Iterator[tuple[C10dHost, int]]:
    """In this process, for all tests that do it no harm."""
    host, port = started_host()
    yield host, port
    host.close()


@pytest.fixture
def c10d_host() -> Iterator[tuple[C10dHost, int]]:
    host, port = started_host()
    yield host, port
    host.close()


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdCluster]:
    """For all tests that do it no harm, with its default limits."""
    with etcd_cluster() as cluster:
        yield cluster
