"""What one node finds out about another one, on loopback: no stranger and no silence holds it up."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_agent.health.checks import pairs
from elastic_agent.health.checks.pairs import NodeFacts, all_reduce, reach

HERE = "127.0.0.1"
TOKEN = "0" * 32


def facts(port: int, address: str = HERE) -> NodeFacts:
    return NodeFacts("b", address, port=port, token=TOKEN)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "ANSWER_S", 0.5)
    monkeypatch.setattr(pairs, "CONNECT_S", 0.5)


@contextlib.contextmanager
def serving() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as listener:
        thread = threading.Thread(target=pairs.serve, args=(listener, TOKEN))
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
        assert reach(HERE, [facts(bound.getsockname()[1])]) == {"b": "refused"}


def test_silence_after_the_connection_is_told_from_a_refusal() -> None:
    with socket.create_server((HERE, 0)) as silent:
        assert reach(HERE, [facts(silent.getsockname()[1])]) == {"b": "silent"}


def test_a_full_backlog_is_silence_to_syn() -> None:
    with socket.socket() as full, contextlib.ExitStack() as taken:
        full.bind((HERE, 0))
        full.listen(0)
        for _ in range(4):
            client = taken.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert reach(HERE, [facts(full.getsockname()[1])]) == {"b": "dropped"}


@pytest.mark.parametrize(
    ("answer", "obstacle"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 32, "stranger"), (b"", "silent")]
)
def test_another_program_at_the_port_is_named_so(answer: bytes, obstacle: str) -> None:
    with another_program(answer) as port:
        assert reach(HERE, [facts(port)]) == {"b": obstacle}


def test_strangers_neither_hang_nor_crash_the_server() -> None:
    with serving() as port, contextlib.ExitStack() as strangers:
        for said in (b"", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 32):
            stranger = strangers.enter_context(socket.create_connection((HERE, port)))
            stranger.sendall(said)
        assert reach(HERE, [facts(port)]) == {}


# --- The all-reduce


def two_nodes() -> tuple[NodeFacts, NodeFacts, socket.socket]:
    """And where the store of the first listens."""
    store = socket.create_server((HERE, 0))
    port = store.getsockname()[1]
    return NodeFacts("a", HERE, store_port=port), NodeFacts("b", HERE), store


def test_two_nodes_do_an_all_reduce() -> None:
    pytest.importorskip("torch")
    a, b, store = two_nodes()
    with store, ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda pair: all_reduce(1, *pair, store), [(a, b), (b, a)])]
    assert [problem for _, problem in answers] == ["", ""]
    assert all(rate > 1e5 for rate, _ in answers)


def test_a_process_that_fails_hangs_or_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, store = two_nodes()

    def says(*command: str) -> str:
        monkeypatch.setattr(pairs, "probe_command", lambda python, module, main: [*command])
        rate, problem = all_reduce(1, a, b, store)
        assert rate == 0.0
        return problem

    with store:
        python = sys.executable, "-c"
        failed = says(*python, "import sys; sys.exit('RuntimeError: connect failed')")
        assert failed == "RuntimeError: connect failed"
        assert says(*python, "import os; os.kill(os.getpid(), 9)") == "it ended with -9"
        assert "No such file" in says("/nonesuch")
        monkeypatch.setattr(pairs, "WITHIN_S", 0.2)
        began = time.monotonic()
        assert "it hangs" in says(*python, "import time; time.sleep(60)")
        assert time.monotonic() - began < 10.0
