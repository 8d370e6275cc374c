"""What the health server promises its clients, and what no client can do to it, over real loopback sockets."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest

from elastic_agent import threads
from elastic_agent.health.families import CONTENT_TYPE
from elastic_agent.health.http import NODE_PATH, Answers, HealthServer, Limits, Page, Probe, Request
from elastic_agent.threads import Thread

PATIENCE_S = 30.0  # a deadline for waiting, far beyond what any of these tests needs
HUGE = b"x" * 16_000_000  # more than the buffers of both sockets hold


def listening_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


@dataclass
class Agent:
    """What the server shows; tests change it while the server runs. `now_s` is the server's clock."""

    page: Callable[[], bytes] = lambda: b"up 1\n"
    live: Probe = field(default_factory=lambda: Probe(True, "main loop turned 0.1 s ago"))
    ready: Probe = field(default_factory=lambda: Probe(False, "joining"))
    introduction: str = '{"node": "a"}'
    now_s: float = 1000.0

    @property
    def pages(self) -> dict[str, Callable[[], str]]:
        return {NODE_PATH: lambda: self.introduction}


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def server(agent: Agent) -> Iterator[HealthServer]:
    """Its clock stands still unless a test moves it, so that no client here is ever cut off by a slow machine. Metrics
    are rendered for each scrape."""
    server = HealthServer(
        listening_socket(),
        Answers(lambda: agent.page(), lambda: agent.live, lambda: agent.ready, agent.pages),
        Thread,
        Limits(metrics_rest_s=0.0),
        clock=lambda: agent.now_s,
    )
    server.start()
    yield server
    server.close()


def connect(server: HealthServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=PATIENCE_S)


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def read_until_quiet(client: socket.socket) -> bytes:
    received = b""
    while select.select([client], [], [], 0.05)[0]:
        received += client.recv(1 << 20)
    return received


def exchange(server: HealthServer, request: bytes) -> bytes:
    with connect(server) as client:
        client.sendall(request)
        return read_all(client)


def get(server: HealthServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    head, _, body = exchange(server, f"{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode()).partition(
        b"\r\n\r\n"
    )
    status_line, *lines = head.decode().split("\r\n")
    return int(status_line.split()[1]), dict(line.split(": ", 1) for line in lines), body


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.005)


def assert_answers(server: HealthServer) -> None:
    assert get(server, "/metrics") == (200, headers(b"up 1\n", CONTENT_TYPE), b"up 1\n")


def headers(body: bytes, content_type: str = "text/plain; charset=utf-8") -> dict[str, str]:
    return {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}


# What is served.


def test_metrics_are_served_with_their_content_type(server: HealthServer) -> None:
    assert_answers(server)


def test_a_flood_of_scrapes_renders_the_metrics_twice_a_second(agent: Agent) -> None:
    rendered: list[float] = []

    def page() -> bytes:
        rendered.append(agent.now_s)
        return b"up %d\n" % len(rendered)

    answers = Answers(page, lambda: agent.live, lambda: agent.ready)
    with served(agent, answers, Limits()) as server:
        for moment, expected in ((7.0, b"up 1\n"), (7.4, b"up 1\n"), (7.6, b"up 2\n"), (8.0, b"up 2\n")):
            agent.now_s = moment
            assert [get(server, "/metrics")[2] for _ in range(3)] == [expected] * 3
    assert rendered == [7.0, 7.6]


def test_a_query_does_not_change_the_path(server: HealthServer) -> None:
    assert get(server, "/metrics?name=up")[2] == b"up 1\n"


def test_a_probe_answers_200_or_503_with_the_reason(server: HealthServer, agent: Agent) -> None:
    assert get(server, "/healthz")[::2] == (200, b"main loop turned 0.1 s ago\n")
    assert get(server, "/readyz")[::2] == (503, b"joining\n")
    agent.live, agent.ready = Probe(False, "main loop stuck"), Probe(True, "running")
    assert get(server, "/healthz")[::2] == (503, b"main loop stuck\n")
    assert get(server, "/readyz")[::2] == (200, b"running\n")


def test_peers_get_an_introduction(server: HealthServer, agent: Agent) -> None:
    assert get(server, NODE_PATH)[::2] == (200, b'{"node": "a"}')
    agent.introduction = '{"node": "b"}'
    assert get(server, NODE_PATH)[::2] == (200, b'{"node": "b"}')


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", NODE_PATH, "/nothing"])
def test_head_has_the_head_of_get_and_no_body(server: HealthServer, path: str) -> None:
    got_status, got_headers, body = get(server, path)
    assert body
    assert get(server, path, "HEAD") == (got_status, got_headers, b"")


@pytest.mark.parametrize("path", ["/", "/nothing", "/metrics/", "//metrics", "/../metrics", "/%6detrics"])
def test_other_paths_are_not_found(server: HealthServer, path: str) -> None:
    status, _, body = get(server, path)
    assert (status, body) == (404, b"404 Not Found: try /metrics, /healthz, /readyz, /node\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused_with_those_that_are_allowed(server: HealthServer, method: str) -> None:
    got_status, got_headers, _ = get(server, "/metrics", method)
    assert (got_status, got_headers["Allow"]) == (405, "GET, HEAD")


def test_a_page_larger_than_the_socket_buffers_arrives_whole(server: HealthServer, agent: Agent) -> None:
    page = bytes(range(256)) * 64 * 1024
    agent.page = lambda: page
    assert get(server, "/metrics")[2] == page


def test_a_request_in_single_bytes_is_answered(server: HealthServer) -> None:
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.1\r\n\r\n":
            client.sendall(bytes([byte]))
        assert status(read_all(client)) == 200


def test_a_client_that_has_finished_sending_is_still_answered(server: HealthServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert status(read_all(client)) == 200


# What is broken.


@pytest.mark.parametrize(
    "request_line",
    [
        b"",
        b"hello",
        b"GET /metrics",
        b"GET  /metrics HTTP/1.1",
        b"get /metrics HTTP/1.1",
        b"GET metrics HTTP/1.1",
        b"GET /metrics HTTP/2.0",
        b"GET /met\x00rics HTTP/1.1",
        b"GET /met\xffrics HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_a_garbage_request_line_is_a_bad_request(server: HealthServer, request_line: bytes) -> None:
    assert status(exchange(server, request_line + b"\r\n\r\n")) == 400
    assert_answers(server)


def test_half_a_request_is_a_bad_request(server: HealthServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /metrics HT")
        client.shutdown(socket.SHUT_WR)
        assert status(read_all(client)) == 400


def test_a_client_that_leaves_or_resets_in_the_middle_harms_no_other(server: HealthServer) -> None:
    for request in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        for linger in (b"\0" * 8, b"\1\0\0\0\0\0\0\0"):  # closed with a FIN, closed with a RST
            with connect(server) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.sendall(request)
    assert_answers(server)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"G" * 70_000, id="70 kB line without an end"),
        pytest.param(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", id="70 kB line"),
        pytest.param(b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n", id="10,000 headers"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 8167 + b"\r\n\r\n", id="one byte too many"),
    ],
)
def test_a_head_beyond_the_limit_is_refused_and_the_client_gets_to_read_it(
    server: HealthServer, request_bytes: bytes
) -> None:
    assert status(exchange(server, request_bytes)) == 431
    assert_answers(server)


def test_a_head_of_just_the_limit_is_answered(server: HealthServer) -> None:
    request = b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 8166
    assert len(request) == Limits().head_bytes
    assert status(exchange(server, request + b"\r\n\r\n")) == 200


def test_a_client_that_never_stops_sending_is_cut_off(server: HealthServer) -> None:
    def send_for_ever(client: socket.socket) -> None:
        while True:
            client.sendall(b"\x00" * 65536)

    with connect(server) as client, pytest.raises((ConnectionResetError, BrokenPipeError)):
        send_for_ever(client)


def test_a_raising_callback_is_a_logged_500_and_the_server_lives_on(
    server: HealthServer, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    good = agent.page

    def broken() -> bytes:
        raise RuntimeError("no such family")

    agent.page = broken
    with caplog.at_level(logging.ERROR):
        got_status, _, body = get(server, "/metrics")
    assert (got_status, body) == (500, b"500 Internal Server Error\n")
    assert "/metrics" in caplog.text
    assert "no such family" in caplog.text
    agent.page = good
    assert_answers(server)


# Who may wait for whom: nobody for a client.


def test_silent_and_slow_clients_delay_no_other(server: HealthServer, agent: Agent) -> None:
    agent.page = lambda: HUGE
    with connect(server) as silent, connect(server) as half, connect(server) as not_reading:
        half.sendall(b"GET /metr")
        not_reading.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert not_reading.recv(1) == b"H"  # its answer is under way and cannot fit the socket's buffers
        agent.page = lambda: b"up 1\n"
        for _ in range(20):
            assert_answers(server)
        assert server.evicted == 0
        half.sendall(b"ics HTTP/1.1\r\n\r\n")
        assert status(read_all(half)) == 200
        silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status(read_all(silent)) == 200
        assert len(read_all(not_reading)) >= len(HUGE)


def test_a_client_that_sends_no_request_in_time_gets_a_408_and_is_closed(
    server: HealthServer, agent: Agent
) -> None:
    with connect(server) as silent, connect(server) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        assert_answers(server)  # clients are accepted in order: both are in
        agent.now_s += 4.9
        assert_answers(server)
        with connect(server) as later:
            assert_answers(server)
            agent.now_s += 0.2
            assert_answers(server)
            assert status(read_all(silent)) == status(read_all(half)) == 408
            later.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert status(read_all(later)) == 200


def test_a_client_that_does_not_read_its_answer_in_time_is_closed(server: HealthServer, agent: Agent) -> None:
    agent.page = lambda: HUGE
    with connect(server) as not_reading:
        not_reading.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert not_reading.recv(1) == b"H"
        agent.page = lambda: b"up 1\n"
        agent.now_s += 5.1
        assert_answers(server)
        assert len(read_all(not_reading)) < len(HUGE)


def test_a_client_that_never_closes_after_its_answer_is_closed(server: HealthServer, agent: Agent) -> None:
    with connect(server) as staying:
        staying.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status(read_all(staying)) == 200
        descriptors = len(os.listdir("/proc/self/fd"))
        agent.now_s += 5.1
        assert_answers(server)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) < descriptors, "the server's end is closed")


def test_with_the_real_clock_a_silent_client_is_closed_without_any_other_traffic() -> None:
    probe = Probe(True, "ok")
    server = HealthServer(
        listening_socket(),
        Answers(lambda: b"", lambda: probe, lambda: probe),
        Thread,
        limits=Limits(lifetime_s=0.05),
    )
    server.start()
    try:
        with connect(server) as silent:
            assert status(read_all(silent)) == 408
    finally:
        server.close()


def test_500_silent_clients_hold_32_places_and_keep_no_other_out(server: HealthServer) -> None:
    with ExitStack() as crowd:
        clients = [crowd.enter_context(connect(server)) for _ in range(500)]
        assert_answers(server)
        assert server.evicted == 500 - 32 + 1  # the scrape took a place too
        assert status(read_all(clients[0])) == 503  # the oldest lost its place, and knows why
        newest = clients[-1]
        newest.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert status(read_all(newest)) == 200
        assert_answers(server)


def test_500_garbage_clients_keep_no_other_out(server: HealthServer) -> None:
    with ExitStack() as crowd:
        for number in range(500):
            client = crowd.enter_context(connect(server))
            client.sendall([b"\x16\x03\x01\x00", b"GET /", b"\r\n\r\n", b"x" * 9000][number % 4])
            if number % 50 == 0:
                assert_answers(server)
        assert_answers(server)


def test_an_answered_client_loses_its_place_before_one_that_has_not_asked(server: HealthServer) -> None:
    with ExitStack() as crowd:
        silent = crowd.enter_context(connect(server))
        for _ in range(31):
            staying = crowd.enter_context(connect(server))
            staying.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert status(read_all(staying)) == 200
        assert_answers(server)
        assert server.evicted == 1
        silent.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert status(read_all(silent)) == 200


@contextmanager
def held(server: HealthServer, agent: Agent, answer: bytes) -> Iterator[None]:
    """While inside, the server's thread waits in a callback, so that what happens meanwhile meets in one turn."""
    page, reached, let_go = agent.page, threading.Event(), threading.Event()

    def wait() -> bytes:
        reached.set()
        assert let_go.wait(PATIENCE_S)
        return answer

    agent.page = wait
    with connect(server) as holder:
        holder.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert reached.wait(PATIENCE_S)
        agent.page = page
        try:
            yield
        finally:
            let_go.set()
        assert status(read_all(holder)) == 200


def test_a_client_that_asks_does_not_lose_its_place_to_a_newcomer_of_the_same_turn(
    server: HealthServer, agent: Agent
) -> None:
    with ExitStack() as crowd:
        oldest, *_ = [crowd.enter_context(connect(server)) for _ in range(31)]
        with held(server, agent, answer=HUGE):  # all places taken, one of them by an answer being written
            newcomer = crowd.enter_context(connect(server))
            oldest.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert status(read_all(oldest)) == 200
        newcomer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert status(read_all(newcomer)) == 200


def test_an_answer_cut_off_by_its_deadline_has_nothing_else_appended(
    server: HealthServer, agent: Agent
) -> None:
    agent.page = lambda: HUGE
    with connect(server) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        received = slow.recv(1)
        with held(server, agent, answer=b""):
            received += read_until_quiet(slow)  # now its socket has room for more bytes
            agent.now_s += 5.1
        received += read_all(slow)
    assert len(received) < len(HUGE)
    assert received.endswith(b"x")


def test_memory_does_not_grow_with_garbage(server: HealthServer) -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    block = b"\x00" * 65536

    def send_garbage(blocks: int) -> None:
        with connect(server) as client:
            try:
                for _ in range(blocks):
                    client.sendall(block)
            except (ConnectionResetError, BrokenPipeError):
                pass

    send_garbage(1024)
    before = resident_bytes()
    for _ in range(200):
        send_garbage(8)
    send_garbage(1024)
    assert_answers(server)
    assert resident_bytes() - before < 10_000_000


# Its own life.


def test_close_ends_the_thread_and_frees_the_port_and_every_descriptor(agent: Agent) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    server = HealthServer(
        listening_socket(), Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, agent.pages), Thread
    )
    server.start()
    assert any(thread.name == "health-http" for thread in threading.enumerate())
    with connect(server) as open_client:
        get(server, "/healthz")
        server.close()
        server.close()
        assert read_all(open_client) == b""
    assert not any(thread.name == "health-http" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_server_that_was_never_started_closes_too(agent: Agent) -> None:
    listener = listening_socket()
    server = HealthServer(
        listener, Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, agent.pages), Thread
    )
    server.close()
    server.close()
    assert listener.fileno() == -1


def test_a_hanging_callback_does_not_keep_the_agent_from_stopping() -> None:
    hanging, let_go = threading.Event(), threading.Event()

    def hang() -> bytes:
        hanging.set()
        let_go.wait(PATIENCE_S)
        return b""

    probe = Probe(True, "ok")
    server = HealthServer(
        listening_socket(),
        Answers(hang, lambda: probe, lambda: probe),
        Thread,
        limits=Limits(lifetime_s=0.05),
    )
    server.start()
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert hanging.wait(PATIENCE_S)
        server.close()
        assert not let_go.is_set()
        let_go.set()
        wait_until(
            lambda: "health-http" not in [each.name for each in threading.enumerate()], "its thread ends"
        )


class Failing(socket.socket):
    """A listening socket whose first `accept` fails; the client stays in the queue."""

    error: OSError
    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries == 1:
            raise self.error
        return super().accept()


def failing_socket(error: OSError) -> Failing:
    bind = Failing()
    bind.error = error
    bind.bind(("127.0.0.1", 0))
    bind.listen()
    return bind


@pytest.mark.parametrize("error", [BlockingIOError(), ConnectionAbortedError()])
def test_a_client_that_leaves_the_queue_does_not_keep_the_next_waiting(agent: Agent, error: OSError) -> None:
    clock_that_ends_no_pause = 1000.0
    server = HealthServer(
        failing_socket(error),
        Answers(lambda: b"up 1\n", lambda: agent.live, lambda: agent.ready, agent.pages),
        Thread,
        clock=lambda: clock_that_ends_no_pause,
    )
    server.start()
    try:
        assert_answers(server)
    finally:
        server.close()


def test_its_thread_cannot_be_caught_in_accept(agent: Agent) -> None:
    bind = listening_socket()
    server = HealthServer(
        bind, Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, agent.pages), Thread
    )
    assert not bind.getblocking()
    server.close()


class FalseAlarm(socket.socket):
    """One client's socket that is reported ready once too early, in each direction."""

    alarms: set[str]

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.raise_once("recv")
        return super().recv(size, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self.raise_once("send")
        return super().send(data, flags)

    def raise_once(self, direction: str) -> None:
        if direction in self.alarms:
            self.alarms.remove(direction)
            raise BlockingIOError


class FalseAlarms(socket.socket):
    def accept(self) -> tuple[socket.socket, object]:
        accepted, address = super().accept()
        client = FalseAlarm(fileno=accepted.detach())
        client.alarms = {"recv", "send"}
        return client, address


def test_a_client_whose_socket_is_not_ready_after_all_is_answered_when_it_is(agent: Agent) -> None:
    bind = FalseAlarms()
    bind.bind(("127.0.0.1", 0))
    bind.listen()
    server = HealthServer(
        bind, Answers(lambda: b"up 1\n", lambda: agent.live, lambda: agent.ready, agent.pages), Thread
    )
    server.start()
    try:
        assert_answers(server)
    finally:
        server.close()


def test_without_descriptors_it_rests_and_then_serves_who_waited(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    clock_readings: list[float] = []  # the server reads its clock in each turn of its loop

    def clock() -> float:
        clock_readings.append(agent.now_s)
        return agent.now_s

    bind = failing_socket(OSError(errno.EMFILE, "Too many open files"))
    limits = Limits(accept_pause_s=0.02)
    server = HealthServer(
        bind,
        Answers(lambda: b"up 1\n", lambda: agent.live, lambda: agent.ready, agent.pages),
        Thread,
        limits,
        clock,
    )
    server.start()
    try:
        with connect(server) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            wait_until(lambda: len(clock_readings) > 20, "many turns while its clock stands still")
            assert bind.tries == 1
            assert "Too many open files" in caplog.text
            agent.now_s += 1.0
            assert status(read_all(client)) == 200
    finally:
        server.close()


# --- Slow pages


@dataclass
class Disk:
    """What a slow page waits for."""

    answers: threading.Event = field(default_factory=threading.Event)
    asked: list[Request] = field(default_factory=list)

    def page(self, request: Request) -> Page:
        self.asked.append(request)
        assert self.answers.wait(PATIENCE_S)
        return Page(HTTPStatus.OK, "text/plain", f"{request.token} {sorted(request.query.items())}".encode())


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def slow(agent: Agent, disk: Disk) -> Iterator[HealthServer]:
    server = HealthServer(
        listening_socket(),
        Answers(
            lambda: agent.page(),
            lambda: agent.live,
            lambda: agent.ready,
            agent.pages,
            slow={"/logs": disk.page},
        ),
        Thread,
        Limits(at_once=2),
        clock=lambda: agent.now_s,
    )
    server.start()
    yield server
    disk.answers.set()
    server.close()


def ask_slow(server: HealthServer, target: str = "/logs", *fields: str) -> socket.socket:
    client = connect(server)
    client.sendall("\r\n".join((f"GET {target} HTTP/1.1", *fields, "", "")).encode())
    return client


def test_a_slow_page_holds_no_other_up(slow: HealthServer, disk: Disk) -> None:
    with ask_slow(slow, "/logs?job=a&rank=%31", "AUTHORIZATION: Bearer s3", "x: y") as client:
        wait_until(lambda: len(disk.asked) == 1, "it is asked")
        assert_answers(slow)
        disk.answers.set()
        assert read_all(client).endswith(b"\r\n\r\ns3 [('job', 'a'), ('rank', '1')]")
    assert disk.asked == [Request({"job": "a", "rank": "1"}, "s3")]


def test_a_slow_page_for_which_no_thread_starts_is_answered_and_asked_again(
    slow: HealthServer, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "http-answer":
            raise RuntimeError("can't start new thread")
        start(thread)

    disk.answers.set()
    with monkeypatch.context() as patch:
        patch.setattr(threads, "START_WITHIN_S", 0.0)
        patch.setattr(threading.Thread, "start", refuse)
        assert [get(slow, "/logs")[0] for _ in range(3)] == [503] * 3
        assert_answers(slow)
    assert get(slow, "/logs")[0] == 200


def test_a_slow_page_takes_few_threads(slow: HealthServer, disk: Disk) -> None:
    with ask_slow(slow), ask_slow(slow):
        wait_until(lambda: len(disk.asked) == 2, "both are asked")
        with ask_slow(slow) as third:
            assert status(read_all(third)) == 503
        assert_answers(slow)
        disk.answers.set()
    wait_until(lambda: get(slow, "/logs")[0] == 200, "its threads are free again")


def test_who_waits_too_long_for_a_slow_page_is_told_so(slow: HealthServer, disk: Disk, agent: Agent) -> None:
    with ask_slow(slow) as client:
        wait_until(lambda: len(disk.asked) == 1, "it is asked")
        agent.now_s += Limits().lifetime_s
        get(slow, "/healthz")  # time is looked at when something happens
        assert status(read_all(client)) == 503
    disk.answers.set()
    wait_until(lambda: get(slow, "/logs")[0] == 200, "the late answer harms no other")


def test_a_slow_page_whose_reader_has_gone_is_made_for_no_one(slow: HealthServer, disk: Disk) -> None:
    ask_slow(slow).close()
    wait_until(lambda: len(disk.asked) == 1, "it is asked")
    disk.answers.set()
    wait_until(lambda: get(slow, "/logs")[0] == 200, "the next one is answered")


@pytest.mark.parametrize("target", ["/logs?" + "&".join(["a=b"] * 17), "/logs?%", "/logs?=&&;"])
def test_a_query_that_is_none_is_empty(slow: HealthServer, disk: Disk, target: str) -> None:
    disk.answers.set()
    with ask_slow(slow, target) as client:
        assert status(read_all(client)) == 200
    assert disk.asked == [Request({}, "")]


def test_a_slow_page_that_fails_is_an_error_of_its_own(
    slow: HealthServer, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.asked = None  # type: ignore[assignment]
    assert get(slow, "/logs")[0] == 500
    assert "cannot answer: path=/logs" in caplog.text
    assert get(slow, "/logs", "POST")[0] == 405


# --- Pages that look at what is asked


def test_a_page_sees_its_query_and_may_have_headers_of_its_own(agent: Agent) -> None:
    def page(request: Request) -> Page:
        return Page(HTTPStatus.OK, "text/html", repr(request).encode(), ("X-Kind: a",))

    with served(
        agent, Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, queried={"/": page})
    ) as server:
        status, headers, body = get(server, "/?since=5")
        assert (status, headers["X-Kind"]) == (200, "a")
        assert body == repr(Request({"since": "5"})).encode()
        assert get(server, "/", "HEAD")[1] == {**headers, "Content-Length": str(len(repr(Request({}))))}
        assert get(server, "/nothing")[2] == b"404 Not Found: try /metrics, /healthz, /readyz, /\n"


# --- Streams


@dataclass
class Feed:
    """What a stream sends: each item once to each client, and what all have in common when there is no item left."""

    server: HealthServer | None = None
    items: list[bytes] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    made: int = 0
    closed: int = 0

    def begin(self, request: Request) -> FeedStream:
        self.requests.append(request)
        return FeedStream(self)

    def say(self, *items: bytes) -> None:
        self.items += items
        assert self.server is not None
        self.server.wake()


@dataclass
class FeedStream:
    feed: Feed
    sent: int = 0

    def next(self) -> bytes:
        items, self.sent = self.feed.items[self.sent :], len(self.feed.items)
        self.feed.made += 1
        return b"".join(items)

    def close(self) -> None:
        self.feed.closed += 1


STREAMS = Limits(streams=3, stream_rests_s=0.0, metrics_rest_s=0.0)


@contextmanager
def served(
    agent: Agent,
    answers: Answers,
    limits: Limits = STREAMS,
) -> Iterator[HealthServer]:
    server = HealthServer(listening_socket(), answers, Thread, limits, clock=lambda: agent.now_s)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def feed() -> Feed:
    return Feed()


@pytest.fixture
def streaming(agent: Agent, feed: Feed) -> Iterator[HealthServer]:
    answers = Answers(
        lambda: agent.page(),
        lambda: agent.live,
        lambda: agent.ready,
        agent.pages,
        streams={"/stream": feed.begin},
    )
    with served(agent, answers) as server:
        feed.server = server
        yield server


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"X-Accel-Buffering: no\r\nConnection: close\r\n\r\n"
)


def watch(server: HealthServer, *fields: str) -> socket.socket:
    client = connect(server)
    client.sendall("\r\n".join(("GET /stream?since=7 HTTP/1.1", *fields, "", "")).encode())
    return client


def read_exactly(client: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = client.recv(size - len(received))
        assert piece, "it has ended"
        received += piece
    return received


def reads(client: socket.socket, expected: bytes) -> None:
    assert read_exactly(client, len(expected)) == expected


def test_a_stream_sends_what_there_is_and_then_what_comes(streaming: HealthServer, feed: Feed) -> None:
    feed.say(b"one ")
    with watch(streaming, "last-event-ID: a-1:4") as first, watch(streaming) as second:
        for client in (first, second):
            reads(client, STREAM_HEAD + b"one ")
        assert feed.requests == [Request({"since": "7"}, last_event="a-1:4"), Request({"since": "7"})]
        feed.say(b"two ")
        feed.say(b"three ")
        for client in (first, second):
            reads(client, b"two three ")
        assert_answers(streaming)
    wait_until(lambda: feed.closed == 2, "both are gone")


def test_what_comes_in_quick_succession_is_sent_together(
    streaming: HealthServer, agent: Agent, feed: Feed
) -> None:
    streaming._limits = Limits(stream_rests_s=1.0)
    with watch(streaming) as client:
        reads(client, STREAM_HEAD)
        feed.say(b"one ")
        reads(client, b"one ")
        for _ in range(50):
            feed.say(b"x")
        assert_answers(streaming)
        made = feed.made
        assert read_until_quiet(client) == b""
        agent.now_s += 1.0
        assert_answers(streaming)
        feed.say()
        reads(client, b"x" * 50)
        assert feed.made <= made + 2


def test_a_slow_reader_costs_one_answer_and_holds_no_other_up(
    streaming: HealthServer, agent: Agent, feed: Feed
) -> None:
    with watch(streaming) as slow, watch(streaming) as quick:
        # As much as it has read at once the kernel would keep for it, up to more than HUGE.
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        reads(slow, STREAM_HEAD)
        reads(quick, STREAM_HEAD)
        feed.say(HUGE)
        reads(quick, HUGE)
        made = feed.made
        for number in range(20):
            feed.say(b"%02d" % number)
            reads(quick, b"%02d" % number)
            assert_answers(streaming)
        assert feed.made - made <= 21, "nothing is made for who has not taken what there was"
        reads(slow, HUGE)
        reads(slow, b"".join(b"%02d" % number for number in range(20)))
        feed.say(HUGE)
        reads(quick, HUGE)

        def later() -> bool:
            agent.now_s += Limits().lifetime_s
            assert_answers(streaming)
            return feed.closed == 1

        wait_until(later, "who takes nothing loses its place")
        assert len(read_all(slow)) < len(HUGE)
        feed.say(b"on")
        reads(quick, b"on")


def test_there_are_few_streams_and_one_that_leaves_makes_room(streaming: HealthServer, feed: Feed) -> None:
    with ExitStack() as crowd:
        clients = [crowd.enter_context(watch(streaming)) for _ in range(3)]
        for client in clients:
            reads(client, STREAM_HEAD)
        with watch(streaming) as fourth:
            answer = read_all(fourth)
        assert status(answer) == 503
        assert answer.endswith(b"503 Service Unavailable: at most 3 streams at once\n")
        assert len(feed.requests) == 3
        clients[0].close()
        wait_until(lambda: feed.closed == 1, "its place is free")
        with watch(streaming) as fifth:
            reads(fifth, STREAM_HEAD)


def test_500_silent_clients_and_all_streams_keep_no_other_out(streaming: HealthServer, feed: Feed) -> None:
    with ExitStack() as crowd:
        watching = [crowd.enter_context(watch(streaming)) for _ in range(3)]
        for client in watching:
            reads(client, STREAM_HEAD)
        silent = [crowd.enter_context(connect(streaming)) for _ in range(500)]
        for number in range(10):
            assert_answers(streaming)
            feed.say(b"%d" % number)
            for client in watching:
                reads(client, b"%d" % number)
        silent[-1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert status(read_all(silent[-1])) == 200
        assert feed.closed == 0


def test_a_stream_without_events_beats_and_ends(streaming: HealthServer, agent: Agent) -> None:
    with watch(streaming) as client:
        reads(client, STREAM_HEAD)
        for _ in range(3):
            agent.now_s += Limits().beat_s
            assert_answers(streaming)
            reads(client, b":\n\n")
        agent.now_s += Limits().stream_s
        assert_answers(streaming)
        assert read_all(client) in (b"", b":\n\n")


def test_a_client_that_talks_without_end_on_its_stream_is_cut_off(
    streaming: HealthServer, feed: Feed
) -> None:
    with watch(streaming) as client:
        reads(client, STREAM_HEAD)
        client.sendall(b"x" * 1000)
        feed.say(b"on")
        reads(client, b"on")
        with pytest.raises(OSError):
            client.sendall(b"x" * 65_536_000)
    wait_until(lambda: feed.closed == 1, "it has lost its place")
    assert_answers(streaming)


def test_a_stream_that_fails_costs_its_own_client_alone(
    streaming: HealthServer, feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    with watch(streaming) as client:
        reads(client, STREAM_HEAD)
        feed.items = None  # type: ignore[assignment]
        streaming.wake()
        assert read_all(client) == b""
        with watch(streaming) as another:
            assert status(read_all(another)) == 500
    assert caplog.text.count("Traceback") == 2
    feed.items = []
    wait_until(lambda: feed.closed == 2, "each has been told its end")
    assert_answers(streaming)


def test_head_of_a_stream_and_its_other_methods(streaming: HealthServer, feed: Feed) -> None:
    assert get(streaming, "/stream", "HEAD")[::2] == (200, b"")
    assert get(streaming, "/stream", "POST")[0] == 405
    assert not feed.requests


def test_a_server_that_closes_ends_its_streams(streaming: HealthServer, feed: Feed) -> None:
    with watch(streaming) as client:
        reads(client, STREAM_HEAD)
        feed.items.append(b"the last")
        streaming.close()
        assert read_all(client) == b"the last"
    assert feed.closed == 1
    streaming.wake()


def test_waking_never_waits(streaming: HealthServer, agent: Agent) -> None:
    """The thread of the server stands still meanwhile, and reads nothing."""
    with held(streaming, agent, b""):
        for _ in range(100_000):
            streaming.wake()
    assert_answers(streaming)
