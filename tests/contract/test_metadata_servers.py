"""Notices over HTTP: servers that answer as the clouds' metadata servers do, and some that should not be one."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic_agent.agent.common.http_client import NoAnswer
from elastic_agent.agent.machine.notices import (
    ACTION_PATH,
    EVENTS_PATH,
    MAINTENANCE_PATH,
    MAX_BYTES,
    NAME_PATH,
    PREEMPTED_PATH,
    TIMEOUT_S,
    MetadataServer,
    Notice,
    aws,
    azure,
    gcp,
)
from elastic_agent.codec import Invalid
from elastic_agent.rendezvous.records import Endpoint
from tests.metadata_server import FakeMetadataServer

AT = "2026-01-02T03:04:05Z"
LATE_S = 1.0
"""On a machine that is busy."""


class Cloud:
    """One cloud's server, in a thread, and the agent's way to ask it."""

    def __init__(self, *, header: tuple[str, str], token: str = "") -> None:
        self.pages: dict[str, str] = {}
        self.server = FakeMetadataServer(("127.0.0.1", 0), lambda: self.pages, header=header, token=token)
        self.asked = Endpoint("127.0.0.1", self.server.server_address[1])
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers there."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


def test_ec2() -> None:
    with contextlib.closing(Cloud(header=("X-aws-ec2-metadata-token", "s3cret"), token="s3cret")) as cloud:
        source = MetadataServer(aws, cloud.asked)
        assert source.poll() is None
        cloud.pages[ACTION_PATH] = json.dumps({"action": "terminate", "time": AT})
        found = source.poll()
        assert isinstance(found, Notice)
        assert found.ends_at == 1767323045.0
        assert not cloud.server.refused
        source.known = "a token from before the machine was paused"
        assert source.poll() == found


def test_compute_engine() -> None:
    with contextlib.closing(Cloud(header=("Metadata-Flavor", "Google"))) as cloud:
        cloud.pages |= {PREEMPTED_PATH: "FALSE", MAINTENANCE_PATH: "NONE"}
        assert MetadataServer(gcp, cloud.asked).poll() is None
        cloud.pages[PREEMPTED_PATH] = "TRUE"
        assert isinstance(MetadataServer(gcp, cloud.asked).poll(), Notice)
        assert not cloud.server.refused


def test_azure() -> None:
    event = {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm-7"],
        "EventStatus": "Scheduled",
        "NotBefore": "Fri, 02 Jan 2026 03:04:05 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    with contextlib.closing(Cloud(header=("Metadata", "true"))) as cloud:
        cloud.pages |= {NAME_PATH: "vm-7", EVENTS_PATH: json.dumps({"DocumentIncarnation": 1, "Events": []})}
        source = MetadataServer(azure, cloud.asked)
        assert source.poll() is None
        cloud.pages[EVENTS_PATH] = json.dumps({"DocumentIncarnation": 2, "Events": [event]})
        found = source.poll()
        assert isinstance(found, Notice)
        assert found.ends_at == 1767323045.0
        assert not cloud.server.refused


def test_another_clouds_server_is_not_understood() -> None:
    with contextlib.closing(Cloud(header=("Metadata", "true"))) as cloud:
        for says in (aws, gcp):
            with pytest.raises(Invalid):
                MetadataServer(says, cloud.asked).poll()


# --- Those that are none


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[MetadataServer]:
    """`serve` gets each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(4096)
                        serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield MetadataServer(gcp, Endpoint("127.0.0.1", listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)


def _trickle(connection: socket.socket, head: bytes) -> None:
    connection.sendall(head)
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.05)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "serve",
    [
        lambda connection: None,
        lambda connection: time.sleep(3.0),
        lambda connection: _trickle(connection, b"HTTP/1.1 200 OK\r\nX: "),
        lambda connection: _trickle(connection, HEAD % 1000),
        lambda connection: connection.sendall(HEAD % 100 + b"half"),
        lambda connection: connection.sendall(HEAD % (MAX_BYTES + 1) + bytes(MAX_BYTES + 1)),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(10 * MAX_BYTES)),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 10_000),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"A" * 100_000),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n"),
        lambda connection: connection.sendall(b"\x16\x03\x01" + bytes(range(256)) * 50),
        lambda connection: connection.sendall(HEAD.replace(b"%d", b"-5") + b"x"),
    ],
    ids=[
        *(
            "closes",
            "silent",
            "slow head",
            "slow body",
            "half",
            "long",
            "endless",
            "many headers",
            "long header",
        ),
        *("ssh", "tls", "negative length"),
    ],
)
def test_what_is_no_metadata_server_costs_a_second_and_says_nothing(
    serve: Callable[[socket.socket], object],
) -> None:
    with listening(serve) as server:
        began = time.monotonic()
        with contextlib.suppress(OSError, NoAnswer):
            assert len(server.ask("/", {}).body) <= MAX_BYTES
        assert time.monotonic() - began < TIMEOUT_S + LATE_S


def test_a_machine_without_one_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        MetadataServer(gcp, Endpoint("127.0.0.1", port)).ask("/", {})
