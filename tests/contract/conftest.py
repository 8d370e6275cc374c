"""Hosts of c10d and local stores, in this process and in one of their own that a test may kill; an etcd server."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_agent.rendezvous.c10d.host import C10dHost
from elastic_agent.rendezvous.local.files import StoreFiles
from elastic_agent.rendezvous.local.host import LocalHost
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


LOCAL_HOST_PROGRAM = """
import sys
from pathlib import Path
from elastic_agent.rendezvous.local.host import LocalHost
from elastic_agent.rendezvous.local.files import StoreFiles
host = LocalHost(StoreFiles(Path(sys.argv[1]), "pool"))
print("hosts", flush=True)
sys.stdin.read()
host.close()
"""


def start_local_process(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOCAL_HOST_PROGRAM, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hosts\n", f"the host process ended with {process.wait()}"
    return process


@pytest.fixture(scope="session")
def shared_local_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreFiles]:
    """For all tests that do it no harm."""
    folder = tmp_path_factory.mktemp("local")
    process = start_local_process(folder)
    yield StoreFiles(folder, "pool")
    process.kill()
    process.communicate()


@pytest.fixture(scope="session")
def shared_local_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalHost, StoreFiles]]:
    """In this process, for all tests that do it no harm."""
    place = StoreFiles(tmp_path_factory.mktemp("local"), "pool")
    host = LocalHost(place)
    yield host, place
    host.close()


@pytest.fixture
def local_host(tmp_path: Path) -> Iterator[Callable[[], LocalHost]]:
    """Starts another one in the same place, where the first has ended."""
    hosts: list[LocalHost] = []

    def start() -> LocalHost:
        hosts.append(LocalHost(StoreFiles(tmp_path, "pool")))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdCluster]:
    """For all tests that do it no harm, with its default limits."""
    with etcd_cluster() as cluster:
        yield cluster
