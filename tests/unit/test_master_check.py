"""Whether the workers' meeting port answers: who is warned."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_agent.agent.workers import generation, supervisor
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World

from .supervised import Supervised


def away(port: int) -> str:
    members = Member("b", "b-1", 1, 0), Member("a", "a-1", 2, 1)
    world = World("job", 7, Phase.RUNNING, members, Endpoint("127.0.0.1", port), Cause(CauseKind.START))
    return generation.master_away(world, "a")


def test_a_port_that_answers_is_asked_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        assert away(server.getsockname()[1]) == ""
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""


@pytest.mark.parametrize("ended", [False, True])
def test_a_port_that_refuses_may_belong_to_workers_that_have_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, ended: bool
) -> None:
    """Then those here are asked to end, too, before they are warned."""
    monkeypatch.setattr(generation, "WARN_AFTER_S", 0.0)
    monkeypatch.setattr(supervisor, "Thread", lambda work, *_: SimpleNamespace(start=work))
    scene = Supervised(tmp_path, 2)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        scene.start(first="b", master=Endpoint(*bound.getsockname()))
    if ended:
        scene.supervisor.stop(1.0, gently=False, reason="another node's worker has failed")
    scene.turn()
    assert ("does not reach" in caplog.text) == (not ended)


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
