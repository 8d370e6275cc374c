"""Whether the workers' meeting port answers: who is warned, when it is a failure, and that the question ends."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field

import pytest

from elastic_agent.agent.workers.supervision.master_check import (
    FAIL_AFTER_S,
    PAUSE_S,
    WARN_AFTER_S,
    connect,
    find_obstacle,
)
from elastic_agent.rendezvous.records import Endpoint

MASTER = Endpoint("10.0.0.1", 41213)
THERE = "10.0.0.1:41213 of node a"


@dataclass
class Network:
    """`answers`: what comes of each try, and after how many seconds at most; the last one for ever."""

    answers: list[tuple[OSError | None, float]]
    now: float = 100.0
    over: threading.Event = field(default_factory=threading.Event)
    warned: list[tuple[float, str]] = field(default_factory=list)
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
        def warn(problem: str) -> None:
            self.warned.append((self.now - 100.0, problem))

        self.over.wait = self.pause  # type: ignore[method-assign]
        return find_obstacle(MASTER, THERE, self.over, warn, self.connect, lambda: self.now)

    def pause(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.over.is_set()


SILENCE = (TimeoutError("timed out"), 1000.0)
REFUSED = (ConnectionRefusedError(111, "Connection refused"), 0.0)


def test_a_port_that_answers_is_asked_once() -> None:
    network = Network([(None, 0.1)])
    assert network.find_obstacle() == ""
    assert (network.tries, network.warned) == (1, [])


@pytest.mark.parametrize(("answer", "words"), [(SILENCE, "no answer"), (REFUSED, "connection refused")])
def test_a_port_that_does_not_is_named_with_its_node(answer: tuple[OSError, float], words: str) -> None:
    network = Network([answer])
    problem = network.find_obstacle()
    (warning,) = network.warned
    assert warning[0] == pytest.approx(WARN_AFTER_S)
    assert (
        f"does not reach {THERE}, where the workers meet: {words} for 2 s. If a packet filter" in warning[1]
    )
    assert f"{words} for 20 s" in problem
    assert network.now - 100.0 == pytest.approx(FAIL_AFTER_S)
    if answer is REFUSED:
        assert network.tries == pytest.approx(FAIL_AFTER_S / PAUSE_S)


def test_one_that_answers_late_is_no_failure() -> None:
    network = Network([SILENCE, (None, 1.0)])
    assert network.find_obstacle() == ""
    assert len(network.warned) == 1


def test_the_end_of_the_generation_is_the_end_of_the_question() -> None:
    network = Network([REFUSED])
    network.over.set()
    assert network.find_obstacle() == ""
    assert not network.tries


def test_a_connection_is_made_and_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect(Endpoint("127.0.0.1", server.getsockname()[1]), 5.0)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""
