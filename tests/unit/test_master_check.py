"""Whether the workers' meeting port answers: who is warned, and that the question ends."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_agent.agent.workers import generation
from elastic_agent.agent.workers.generation import (
    PAUSE_S,
    WARN_AFTER_S,
    MasterCheck,
    connect,
    find_obstacle,
)
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World

from .supervised import Supervised

MASTER = Endpoint("10.0.0.1", 41213)
MEMBERS = Member("b", "b-1", 1, 0), Member("a", "a-1", 2, 1)
WORLD = World("job", 7, Phase.RUNNING, MEMBERS, MASTER, Cause(CauseKind.START))


@dataclass
class Network:
    """`answers`: what comes of each try, and after how many seconds at most; the last one for ever."""

    answers: list[tuple[OSError | None, float]]
    now: float = 100.0
    over: threading.Event = field(default_factory=threading.Event)
    tries: int = 0

    def connect(self, to: Endpoint, timeout_s: float) -> None:
        assert to == MASTER
        assert timeout_s > 0
        self.tries += 1
        error, after_s = self.answers[min(self.tries, len(self.answers)) - 1]
        self.now += min(after_s, timeout_s)
        if error is not None:
            raise error

    def find_obstacle(self) -> str:
        self.over.wait = self.pause  # type: ignore[method-assign]
        return find_obstacle(MASTER, self.over, self.connect, lambda: self.now)

    def pause(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.over.is_set()


SILENCE = (TimeoutError("timed out"), 1000.0)
REFUSED = (ConnectionRefusedError(111, "Connection refused"), 0.0)


def test_a_port_that_answers_is_asked_once() -> None:
    network = Network([(None, 0.1)])
    assert network.find_obstacle() == ""
    assert network.tries == 1


@pytest.mark.parametrize(("answer", "words"), [(SILENCE, "no answer"), (REFUSED, "connection refused")])
def test_one_that_does_not_is_asked_for_two_seconds(answer: tuple[OSError, float], words: str) -> None:
    network = Network([answer])
    assert network.find_obstacle() == words
    assert network.now - 100.0 == pytest.approx(WARN_AFTER_S)
    if answer is REFUSED:
        assert network.tries == pytest.approx(WARN_AFTER_S / PAUSE_S)


def test_one_that_answers_late_is_no_obstacle() -> None:
    assert Network([REFUSED, REFUSED, (None, 0.1)]).find_obstacle() == ""


def test_the_end_of_the_generation_is_the_end_of_the_question() -> None:
    network = Network([REFUSED])
    network.over.set()
    assert network.find_obstacle() == ""
    assert not network.tries


def test_an_end_in_the_last_pause_leaves_no_warning() -> None:
    network = Network([SILENCE])
    ended = network.connect

    def connect_and_end(to: Endpoint, timeout_s: float) -> None:
        network.over.set()
        ended(to, timeout_s)

    network.connect = connect_and_end  # type: ignore[method-assign]
    assert network.find_obstacle() == ""


def test_the_warning_names_both_nodes_and_who_need_not_care(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation, "find_obstacle", lambda master, over: "no answer")
    check = MasterCheck(WORLD, "a")
    with caplog.at_level(logging.WARNING):
        check._run()
    assert (
        "generation 7: node a does not reach 10.0.0.1:41213 of node b, where the workers meet: no answer for 2 s. "
        "Harmless for scripts that do not use MASTER_PORT. If a packet filter"
    ) in caplog.text
    assert not check.under_way


def test_a_connection_is_made_and_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect(Endpoint("127.0.0.1", server.getsockname()[1]), 5.0)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""


# ---------------------------------------------------------------- when it runs


class Check(MasterCheck):
    """Without a thread."""

    started = False

    def start(self) -> None:
        self.started = True


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    made: list[Check] = []

    def make(world: World, node: str) -> Check:
        made.append(Check(world, node))
        return made[-1]

    monkeypatch.setattr(generation, "MasterCheck", make)
    return made


def test_the_node_of_rank_0_does_not_ask_itself(checks: list[Check], tmp_path: Path) -> None:
    Supervised(tmp_path, 2).start()
    assert not checks


@pytest.mark.parametrize("end", ["failure", "success of one", "success elsewhere", "stop"])
def test_the_check_begins_with_the_workers_and_ends_with_any_of_them(
    checks: list[Check], tmp_path: Path, end: str
) -> None:
    node = Supervised(tmp_path, 2)
    node.start(first="b")
    node.turn()
    (check,) = checks
    assert check.started
    assert check.under_way
    assert (check._node, check._world.members[0].node) == ("a", "b")
    if end == "success elsewhere":
        node.others_succeed()
        node.turn()
    elif end == "stop":
        node.supervisor.stop(1.0, gently=True, reason="a test")
    else:
        node.exit(1, int(end == "failure"))
        node.turn()
        node.logs.answer()
        node.turn()
    assert not check.under_way
    assert bool(node.reported) == (end == "failure")
