"""Whether the workers' meeting port answers: who is warned, and that the question ends."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_agent.agent.workers import generation
from elastic_agent.agent.workers.generation import check_master
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World

from .supervised import Supervised


def warned(caplog: pytest.LogCaptureFixture, port: int, over: threading.Event | None = None) -> str:
    members = Member("b", "b-1", 1, 0), Member("a", "a-1", 2, 1)
    world = World("job", 7, Phase.RUNNING, members, Endpoint("127.0.0.1", port), Cause(CauseKind.START))
    with caplog.at_level(logging.WARNING):
        check_master(world, "a", over or threading.Event())
    return caplog.text


def test_a_port_that_answers_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        assert warned(caplog, server.getsockname()[1]) == ""
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""


def test_the_warning_names_both_nodes_and_who_need_not_care(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation, "WARN_AFTER_S", 0.2)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert (
            f"generation 7: node a does not reach 127.0.0.1:{port} of node b, where the workers meet: connection "
            "refused. Harmless for scripts that do not use MASTER_PORT. If a packet filter"
        ) in warned(caplog, port)


def test_silence_is_no_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def silent(to: tuple[str, int], timeout_s: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(generation, "WARN_AFTER_S", 0.1)
    monkeypatch.setattr(socket, "create_connection", silent)
    assert "where the workers meet: no answer for 0.1 s" in warned(caplog, 1)


def test_the_end_of_the_generation_is_the_end_of_the_question(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    over.set()
    assert warned(caplog, 1, over) == ""


def test_a_port_that_refuses_because_its_workers_have_just_ended_is_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()
    soon = threading.Timer(0.05, over.set)
    soon.start()
    assert warned(caplog, 1, over) == ""
    soon.join()


# ---------------------------------------------------------------- when it runs


class AtOnce:
    """In the place of a thread."""

    def __init__(self, work: Callable[[], None], name: str, otherwise: Callable[[], None]) -> None:
        self.start = work


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """What ends each of the checks, which do nothing here."""
    made: list[threading.Event] = []

    def check(world: World, node: str, over: threading.Event) -> None:
        assert (node, world.members[0].node) == ("a", "b")
        made.append(over)

    monkeypatch.setattr(generation, "check_master", check)
    monkeypatch.setattr(generation, "Thread", AtOnce)
    return made


def test_the_node_of_rank_0_does_not_ask_itself(checks: list[threading.Event], tmp_path: Path) -> None:
    Supervised(tmp_path, 2).start()
    assert not checks


@pytest.mark.parametrize("end", ["failure", "success of one", "stop"])
def test_the_check_begins_with_the_workers_and_ends_with_any_of_them(
    checks: list[threading.Event], tmp_path: Path, end: str
) -> None:
    node = Supervised(tmp_path, 2)
    node.start(first="b")
    node.turn()
    (over,) = checks
    assert not over.is_set()
    if end == "stop":
        node.supervisor.stop(1.0, gently=True, reason="a test")
    else:
        node.exit(1, int(end == "failure"))
        node.turn()
        node.logs.answer()
        node.turn()
    assert over.is_set()
    assert bool(node.reported) == (end == "failure")
