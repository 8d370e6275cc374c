"""Whether the workers' meeting port answers: who is warned."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path

import pytest

from elastic_agent.agent.workers import supervisor
from elastic_agent.agent.workers.generation import check_master
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World

from .supervised import Supervised


def warned(caplog: pytest.LogCaptureFixture, port: int) -> str:
    members = Member("b", "b-1", 1, 0), Member("a", "a-1", 2, 1)
    world = World("job", 7, Phase.RUNNING, members, Endpoint("127.0.0.1", port), Cause(CauseKind.START))
    with caplog.at_level(logging.WARNING):
        check_master(world, "a")
    return caplog.text


def test_a_port_that_answers_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        assert warned(caplog, server.getsockname()[1]) == ""
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""


def test_a_port_that_refuses_belongs_to_workers_that_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        assert warned(caplog, bound.getsockname()[1]) == ""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (TimeoutError("timed out"), "no answer"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to host"),
    ],
)
def test_the_warning_names_both_nodes_and_who_need_not_care(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError, found: str
) -> None:
    def silent(to: tuple[str, int], timeout_s: float) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", silent)
    assert (
        f"generation 7: node a does not reach 127.0.0.1:1 of node b, where the workers meet: {found}. "
        "Harmless for scripts that do not use MASTER_PORT. If a packet filter"
    ) in warned(caplog, 1)


@pytest.mark.parametrize(("first", "asks"), [(None, 0), ("b", 1)])
def test_only_the_node_of_rank_0_does_not_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str | None, asks: int
) -> None:
    made: list[str] = []

    class NoThread:
        def __init__(self, work: object, name: str, otherwise: object) -> None:
            made.append(name)

        def start(self) -> None:
            pass

    monkeypatch.setattr(supervisor, "Thread", NoThread)
    Supervised(tmp_path, 2).start(first=first)
    assert made == ["master-port"] * asks
