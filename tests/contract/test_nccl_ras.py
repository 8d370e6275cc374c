"""NCCL's RAS port, asked over real sockets: servers that answer, are silent, talk nonsense, never end, are not there.

`ANSWER` is written by the format strings of NCCL's own `ras/client_support.cc`: no NCCL runs here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.workers.evidence import ras
from elastic_agent.agent.workers.evidence.collector import THOROUGH, Target
from elastic_agent.agent.workers.evidence.keeper import EvidenceKeeper
from elastic_agent.threads import Thread

ANSWER = """NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 4711 on node 10.0.0.2 managing GPU 3

Warnings
========

#0-0 (f1e2d3c4b5a69788) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 115
  Rank 3 has launched up to operation 114 -- GPU 3 managed by process 4711 on node 10.0.0.2
"""
HANDSHAKE = "SERVER PROTOCOL 2\nOK\n"

Serve = Callable[[socket.socket], None]
Where = tuple[tuple[str, int], ...]


class Server:
    """Serves one client as `serve` does, once it has said what it wants."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where: Where = (self._listener.getsockname(),)
        self.ordered = b""
        self._thread = Thread(self._run, "test")
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client:
                while not self.ordered.endswith(b"STATUS\n"):
                    self.ordered += client.recv(4096) or b"STATUS\n"
                self._serve(client)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the client has left its connection open"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.close()


def says(*texts: str | bytes) -> Serve:
    def serve(client: socket.socket) -> None:
        for text in texts:
            client.sendall(text.encode() if isinstance(text, str) else text)

    return serve


def until_the_client_leaves(*texts: str) -> Serve:
    def serve(client: socket.socket) -> None:
        says(*texts)(client)
        while client.recv(4096):
            pass

    return serve


def without_end(client: socket.socket) -> None:
    says(HANDSHAKE)(client)
    while True:
        client.sendall(b"more and more\n" * 1000)


def asked(where: Where) -> str:
    question = ras.ask(where, time.monotonic)
    assert question is not None
    return question.end()


@pytest.mark.parametrize("server", [says(HANDSHAKE, ANSWER)], indirect=True)
def test_what_it_says_is_kept_without_the_handshake(server: Server) -> None:
    assert asked(server.where) == ANSWER.strip()
    assert server.ordered == b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n"


@pytest.mark.parametrize("server", [says(HANDSHAKE, "\x1b]0;title\x07 a\x1b[31mb\r\n\xff\n")], indirect=True)
def test_nothing_that_a_terminal_obeys_is_kept(server: Server) -> None:
    text = asked(server.where)
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.startswith(" ab")


@pytest.mark.parametrize(
    "server",
    [
        until_the_client_leaves(),
        says(),
        says("HTTP/1.1 400 Bad Request\r\n\r\n"),
        says(bytes(range(256)) * 99),
    ],
    indirect=True,
    ids=["silence", "the end at once", "another protocol", "garbage"],
)
def test_an_answer_that_is_not_of_ras_is_none(server: Server) -> None:
    assert asked(server.where) == ""


@pytest.mark.parametrize("server", [until_the_client_leaves(HANDSHAKE, ANSWER)], indirect=True)
def test_what_came_in_time_of_an_answer_that_never_ends_is_kept(server: Server) -> None:
    text = asked(server.where)
    assert text.startswith(ANSWER.strip())
    assert text.splitlines()[-1].startswith("... (cut: ")


@pytest.mark.parametrize("server", [without_end], indirect=True)
def test_bytes_without_end_are_cut(server: Server) -> None:
    text = asked(server.where)
    assert ras.MOST_BYTES / 2 < len(text) <= ras.MOST_BYTES + ras._MOST_LINE
    assert text.splitlines()[-1].startswith("... (cut: ")


@pytest.mark.parametrize("server", [says(HANDSHAKE, ANSWER)], indirect=True)
def test_what_has_come_when_the_time_is_over_is_read(server: Server) -> None:
    """A look at the workers may take longer than that."""
    now = time.monotonic()
    question = ras.ask(server.where, lambda: now)
    assert question is not None
    server._thread.join(10)
    now += 100.0
    assert question.end() == ANSWER.strip()


def test_where_nothing_listens_nothing_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refuses = listener.getsockname()
    assert ras.ask((refuses,), time.monotonic) is None
    assert ras.ask((), time.monotonic) is None


@pytest.mark.parametrize("server", [says(HANDSHAKE, ANSWER)], indirect=True)
def test_of_several_addresses_the_one_that_listens_is_asked(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refuses = listener.getsockname()
    assert asked((refuses, *server.where)) == ANSWER.strip()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (("127.0.0.1", 28028), ("::1", 28028))),
        (
            {"NCCL_RAS_ENABLE": "1", "NCCL_RAS_ADDR": "localhost:28029"},
            (("127.0.0.1", 28029), ("::1", 28029)),
        ),
        ({"NCCL_RAS_ADDR": "10.0.0.1:4000"}, (("10.0.0.1", 4000),)),
        ({"NCCL_RAS_ADDR": "[fe80::1]:4000"}, (("fe80::1", 4000),)),
        ({"NCCL_RAS_ENABLE": "0"}, ()),
        *(
            ({"NCCL_RAS_ADDR": wrong}, ())
            for wrong in (
                "",
                "localhost",
                "localhost:",
                "localhost:0",
                "localhost:70000",
                "localhost:" + "9" * 5000,
                "localhost:²",
                "gpu7:4000",
            )
        ),
    ],
)
def test_the_address_is_ncclss_own(environment: dict[str, str], expected: Where) -> None:
    assert ras.addresses(environment) == expected


@pytest.mark.parametrize("server", [says(HANDSHAKE, ANSWER)], indirect=True)
def test_a_thorough_look_keeps_it_and_its_findings(server: Server, tmp_path: Path) -> None:
    counts: list[tuple[str, str]] = []
    keeper = EvidenceKeeper(
        "a", tmp_path, time.monotonic, lambda tool, result: counts.append((tool, result)), ras_at=server.where
    )
    keeper.begin("digits", "r1", 1)
    look = keeper.look("inquiry-1", [Target(3, 0, os.getpid())], THOROUGH)
    assert look.wait(time.monotonic() + 30, time.monotonic)
    assert keeper._thread is not None
    keeper._thread.join(30)
    assert look.path is not None
    assert (look.path / "ras.txt").read_text() == ANSWER.strip()
    summary = (look.path / "summary.txt").read_text().splitlines()
    assert [line for line in summary if "launched up to operation 114" in line]
    assert "NCCL's RAS: DEAD" in summary
    assert counts.count(("ras", "ok")) == 1
