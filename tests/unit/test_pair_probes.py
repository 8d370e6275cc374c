"""What one node finds out about another one, on loopback: no stranger and no silence holds it up."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_agent.health.checks import pair_probes
from elastic_agent.health.checks.pair_probes import AllReduceOrder, all_reduce, reach
from elastic_agent.health.checks.pairs import NodeFacts, Obstacle

HERE = "127.0.0.1"
TOKEN = "0" * 32 + "1" * 32


def facts(port: int, address: str = HERE) -> NodeFacts:
    return NodeFacts("b", "b-1", address, port, TOKEN, 1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probes, "ANSWER_S", 0.5)
    monkeypatch.setattr(pair_probes, "CONNECT_S", 0.5)


@contextlib.contextmanager
def serving() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as listener:
        thread = threading.Thread(target=pair_probes.serve, args=(listener, TOKEN))
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
        assert not thread.is_alive()


@contextlib.contextmanager
def another_program(answer: bytes) -> Iterator[int]:
    with socket.create_server((HERE, 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                with client:
                    client.sendall(answer)
                    client.recv(64)

        threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()[1]


def test_a_node_that_answers_is_reached() -> None:
    with serving() as port:
        assert reach(HERE, [facts(port)] * 100) == {}
    assert reach(HERE, []) == {}


def test_a_port_without_a_listener_refuses() -> None:
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        assert reach(HERE, [facts(bound.getsockname()[1])]) == {"b": Obstacle.REFUSED}


def test_silence_after_the_connection_is_told_from_a_refusal() -> None:
    with socket.create_server((HERE, 0)) as silent:
        assert reach(HERE, [facts(silent.getsockname()[1])]) == {"b": Obstacle.SILENT}


def test_a_full_backlog_is_silence_to_syn() -> None:
    with socket.socket() as full, contextlib.ExitStack() as taken:
        full.bind((HERE, 0))
        full.listen(0)
        for _ in range(4):
            client = taken.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert reach(HERE, [facts(full.getsockname()[1])]) == {"b": Obstacle.DROPPED}


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 32, b""])
def test_another_program_at_the_port_is_named_so(answer: bytes) -> None:
    with another_program(answer) as port:
        assert reach(HERE, [facts(port)])["b"] in (Obstacle.STRANGER, Obstacle.SILENT)


def test_an_address_that_is_not_ours_is_our_own_trouble() -> None:
    assert reach("192.0.2.1", [facts(29500)]) == {"b": Obstacle.OWN}


def test_strangers_neither_hang_nor_crash_the_server_and_get_nothing() -> None:
    with serving() as port, contextlib.ExitStack() as strangers:
        for said in (b"", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 32):
            stranger = strangers.enter_context(socket.create_connection((HERE, port)))
            stranger.sendall(said)
        assert reach(HERE, [facts(port)]) == {}
        stranger.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(64) == b""


def test_a_flood_holds_no_more_connections_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probes, "AT_ONCE", 2)
    monkeypatch.setattr(pair_probes, "ANSWER_S", 60.0)
    with serving() as port, contextlib.ExitStack() as strangers:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            strangers.enter_context(socket.create_connection((HERE, port)))
        time.sleep(0.3)
        held = len(os.listdir("/proc/self/fd")) - before - 20
    assert held <= 3


# --- The all-reduce


def orders() -> Iterator[AllReduceOrder]:
    with socket.create_server((HERE, 0)) as store:
        port = store.getsockname()[1]
        yield AllReduceOrder(0, HERE, port, "lo", "check-1", "gloo", store.fileno())
        yield AllReduceOrder(1, HERE, port, "lo", "check-1", "gloo")


def test_two_nodes_do_an_all_reduce() -> None:
    pytest.importorskip("torch")
    made = orders()
    both = [next(made), next(made)]
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda order: all_reduce(order, sys.executable, os.environ), both)]
    made.close()
    assert [problem for _, problem in answers] == ["", ""]
    assert all(rate > 1e5 for rate, _ in answers)


def test_a_process_that_fails_hangs_or_is_not_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = AllReduceOrder(1, HERE, 1, "lo", "check-1", "gloo")

    def says(program: str) -> str:
        monkeypatch.setattr(
            pair_probes, "probe_command", lambda python, module, main: [python, "-c", program]
        )
        rate, problem = all_reduce(order, sys.executable, os.environ)
        assert rate == 0.0
        return problem

    assert says("import sys; sys.exit('RuntimeError: connect failed')") == "RuntimeError: connect failed"
    assert says("import os; os.kill(os.getpid(), 9)") == "it ended with -9"
    monkeypatch.setattr(pair_probes, "WITHIN_S", 0.2)
    began = time.monotonic()
    assert "it hangs" in says("import time; time.sleep(60)")
    assert time.monotonic() - began < 10.0
    assert all_reduce(order, "/nonesuch", os.environ)[1].startswith("/nonesuch: No such file")
