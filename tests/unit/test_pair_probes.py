"""Probes between two nodes, on loopback: what they measure, and that no stranger and no silence holds them up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.codec import from_plain, plain
from elastic_agent.health.checks import pair_probes, processes
from elastic_agent.health.checks.pair_probes import look, measure, reach
from elastic_agent.health.checks.pairs import Measurement, Obstacle, ProbeEndpoint, Reach
from elastic_agent.health.checks.processes import NoAnswer, Probe, ask

HERE = "127.0.0.1"
ASK, ANSWER = "0" * 32, "1" * 32


def listening() -> socket.socket:
    return socket.create_server((HERE, 0))


def endpoint_of(listener: socket.socket) -> ProbeEndpoint:
    return ProbeEndpoint("b", *listener.getsockname(), ASK, ANSWER)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probes, "STREAM_S", 0.05)
    monkeypatch.setattr(pair_probes, "ANSWER_S", 0.3)
    monkeypatch.setattr(pair_probes, "CONNECT_S", 0.2)


@contextlib.contextmanager
def serving() -> Iterator[ProbeEndpoint]:
    with listening() as listener:
        endpoint = endpoint_of(listener)
        thread = threading.Thread(target=pair_probes.serve, args=(listener, endpoint))
        thread.start()
        yield endpoint
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
        assert not thread.is_alive()


@contextlib.contextmanager
def answering(*answers: bytes, reset: bool = False) -> Iterator[ProbeEndpoint]:
    """Another program: it takes what comes, and sends each connection these."""
    with listening() as listener:

        def run() -> None:
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                with one, contextlib.suppress(OSError):
                    one.settimeout(1.0)
                    if not reset:
                        one.recv(33)
                    for answer in answers:
                        one.sendall(answer)
                    if not answers and not reset:
                        one.recv(1)

        thread = threading.Thread(target=run)
        thread.start()
        yield endpoint_of(listener)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)


def test_a_node_that_answers_is_reached_and_measured() -> None:
    with serving() as endpoint:
        (reached,) = reach("a", HERE, [endpoint])
        found = measure("a", HERE, endpoint, 1)
    assert found.obstacle is None, found.detail
    assert found.pair == ("a", "b")
    assert found.latency_s is not None
    assert 0 < found.latency_s < 0.1
    assert (reached.obstacle, reached.target) == (None, "b")
    assert reached.clock_offset_s == pytest.approx(0.0, abs=0.1)
    assert found.sent is not None
    assert found.received is not None
    assert min(found.sent, found.received) > 1e6


def test_the_other_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probes, "wall_clock", lambda: time.time() - 3600.0)
    with serving() as endpoint:
        (found,) = reach("a", HERE, [endpoint])
    assert found.clock_offset_s == pytest.approx(-3600.0, abs=0.5)


def test_a_port_without_a_listener_refuses() -> None:
    with listening() as listener:
        endpoint = endpoint_of(listener)
    (found,) = reach("a", HERE, [endpoint])
    assert found.obstacle is Obstacle.REFUSED


def test_silence_after_the_connection_is_told_from_a_refusal() -> None:
    with listening() as listener:  # its backlog takes the connection
        (found,) = reach("a", HERE, [endpoint_of(listener)])
    assert found.obstacle is Obstacle.SILENT


def test_a_full_backlog_is_silence_to_syn() -> None:
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind((HERE, 0))
        listener.listen(0)
        for _ in range(3):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        (found,) = reach("a", HERE, [endpoint_of(listener)])
    assert found.obstacle is Obstacle.DROPPED
    assert "no answer to SYN" in found.detail


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"2" * 32, b"\xff" * 5000])
def test_another_program_at_the_port_is_named_so(answer: bytes) -> None:
    with answering(answer) as endpoint:
        (found,) = reach("a", HERE, [endpoint])
    assert found.obstacle in (Obstacle.STRANGER, Obstacle.RESET)


def test_an_address_that_is_not_ours_is_our_own_trouble() -> None:
    with serving() as endpoint:
        (found,) = reach("a", "192.0.2.7", [endpoint])
        (family,) = reach("a", "::1", [endpoint])
    assert (found.obstacle, family.obstacle) == (Obstacle.OWN, Obstacle.OWN)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"x" * 10_000,
        b"\x7f\xf8" + b"\0" * 6,  # not a number
        b"\x7f\xf0" + b"\0" * 6,  # infinity
        b"\xff" * 16,
        b"\0" * 16,
    ],
)
def test_no_answer_of_a_door_breaks_a_measurement(answer: bytes) -> None:
    """It knows the secret, and says nonsense."""
    with answering(ANSWER.encode(), answer) as endpoint:
        began = time.monotonic()
        found = measure("a", HERE, endpoint, 2)
        (reached,) = reach("a", HERE, [endpoint])
        assert time.monotonic() - began < 5.0
    assert isinstance(found, Measurement)
    assert found.obstacle is not None
    assert reached.clock_offset_s is None or abs(reached.clock_offset_s) < 2**40


def test_strangers_neither_hang_nor_crash_the_server() -> None:
    with serving() as endpoint, contextlib.ExitStack() as held:
        strangers = [held.enter_context(socket.create_connection((HERE, endpoint.port))) for _ in range(200)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(bytes([number]) * (number % 40))
        talker = held.enter_context(socket.create_connection((HERE, endpoint.port)))
        talker.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        (found,) = reach("a", HERE, [endpoint])
        # The idle ones have all places for as long as an answer may take, and no longer.
        if found.obstacle is not None:
            (found,) = reach("a", HERE, [endpoint])
        assert found.obstacle is None, found
        with contextlib.suppress(ConnectionError):
            assert talker.recv(100) == b"", "who does not know the secret gets nothing"


def test_what_a_stranger_asks_for_with_a_wrong_secret_is_not_done() -> None:
    with serving() as endpoint:
        (found,) = reach("a", HERE, [replace(endpoint, request_token="f" * 32)])
        assert found.obstacle in (Obstacle.STRANGER, Obstacle.RESET)


def test_many_nodes_are_tried_at_once() -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(listening()) for _ in range(60)]
        endpoints = [
            replace(endpoint_of(listener), node=f"n{number}") for number, listener in enumerate(silent)
        ]
        began = time.monotonic()
        found = reach("a", HERE, endpoints)
        assert time.monotonic() - began < 3.0
    assert [one.target for one in found] == [endpoint.node for endpoint in endpoints]
    assert reach("a", HERE, []) == ()


def test_probes_run_in_processes_of_their_own() -> None:
    with listening() as listener, contextlib.closing(Probe("server", descriptors=[listener.fileno()])) as own:
        endpoint = endpoint_of(listener)
        own.order({"listener": listener.fileno(), "endpoint": plain(endpoint)})
        assert own.answer(10.0) == {"serves": True}
        order = {"me": "a", "address": HERE, "endpoints": [plain(endpoint)], "round": None}
        (reached,) = ask("client", order, "reached", 10.0)
        assert replace(from_plain(Reach, reached), clock_offset_s=None) == Reach("a", "b")


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ({"look": "/", "files": 5}, "has ended without an answer"),
        ({"hold": "/proc/1"}, "no answer of the probe directory within 0.5 s"),
    ],
)
def test_a_probe_that_crashes_or_hangs_is_no_answer(
    order: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hold" in order:
        monkeypatch.setattr(processes, "PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(NoAnswer, match=problem):
        ask("directory", order, "seen", 0.5 if "hold" in order else 10.0)


def test_the_file_of_another_node_is_seen_and_gone_with_its_process(tmp_path: Path) -> None:
    here, there = Probe("directory"), Probe("directory")
    here.order({"hold": str(tmp_path / "checkpoints")})
    there.order({"hold": str(tmp_path / "checkpoints")})
    files = [str(probe.answer(10.0)["file"]) for probe in (here, there)]
    assert look(tmp_path / "checkpoints", files, sleep=lambda pause_s: None) == files
    here.end(10.0)
    there.close()
    (tmp_path / "checkpoints" / files[1]).unlink(missing_ok=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_file_that_is_not_seen_at_once_is_looked_for_again(tmp_path: Path) -> None:
    name, now = ".elastic-agent-check-1", 0.0

    def sleep(pause_s: float) -> None:
        nonlocal now
        now += pause_s
        if now > 1.0:
            (tmp_path / name).write_text(name)

    assert look(tmp_path, [name], lambda: now, sleep) == [name]
    began = now
    assert look(tmp_path, [name, ".elastic-agent-check-2"], lambda: now, sleep) == [name]
    assert 3.0 <= now - began < 4.0


def test_only_files_of_a_check_are_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    names = ["secret", "../secret", ".elastic-agent-check-/../secret"]
    assert look(tmp_path, names, sleep=lambda pause_s: None, clock=iter(range(100)).__next__) == []


def test_a_directory_that_cannot_be_written_is_said_so() -> None:
    assert "/proc/none/such" in ask("directory", {"hold": "/proc/none/such"}, "problem", 10.0)
