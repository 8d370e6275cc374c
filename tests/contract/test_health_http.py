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
from functools import partial
from http import HTTPStatus

import pytest

from elastic_agent import threads
from elastic_agent.health import http as health_http
from elastic_agent.health.http import (
    NODE_PATH,
    Answers,
    ClientLimits,
    HealthServer,
    Page,
    PageRequest,
    Probe,
    json_page,
)
from elastic_agent.health.metrics import CONTENT_TYPE
from tests.waiting import wait_for

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
    def pages(self) -> dict[str, Callable[[PageRequest], Page]]:
        return {NODE_PATH: json_page(lambda: self.introduction)}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are rendered for each scrape."""
    monkeypatch.setattr(health_http, "REST_S", 0.0)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def server(agent: Agent) -> Iterator[HealthServer]:
    """Its clock stands still unless a test moves it, so that no client here is ever cut off by a slow machine."""
    server = HealthServer(
        listening_socket(),
        Answers(lambda: agent.page(), lambda: agent.live, lambda: agent.ready, agent.pages),
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


wait_until = partial(wait_for, within_s=PATIENCE_S, every_s=0.005)


def assert_answers(server: HealthServer) -> None:
    assert get(server, "/metrics") == (200, headers(b"up 1\n", CONTENT_TYPE), b"up 1\n")


def headers(body: bytes, content_type: str = "text/plain; charset=utf-8") -> dict[str, str]:
    return {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}


# What is served.


def test_a_flood_of_scrapes_renders_the_metrics_twice_a_second(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_http, "REST_S", 0.5)
    rendered: list[float] = []

    def page() -> bytes:
        rendered.append(agent.now_s)
        return b"up %d\n" % len(rendered)

    answers = Answers(page, lambda: agent.live, lambda: agent.ready)
    with served(agent, answers, ClientLimits()) as server:
        for moment, expected in ((7.0, b"up 1\n"), (7.4, b"up 1\n"), (7.6, b"up 2\n"), (8.0, b"up 2\n")):
            agent.now_s = moment
            assert [get(server, "/metrics")[2] for _ in range(3)] == [expected] * 3
    assert rendered == [7.0, 7.6]


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


@pytest.mark.parametrize("path", ["/", "/nothing", "/metrics/", "/../metrics", "/%6detrics"])
def test_other_paths_are_not_found(server: HealthServer, path: str) -> None:
    status, _, body = get(server, path)
    assert (status, body) == (404, b"404 Not Found: try /metrics, /healthz, /readyz, /node\n")


# What is broken.


@pytest.mark.parametrize(
    "request_line",
    [
        b"",
        b"hello",
        b"get /metrics HTTP/1.1",
        b"GET metrics HTTP/1.1",
        b"GET /metrics HTTP/2.0",
        b"GET /met\xffrics HTTP/1.1",
        b"POST /metrics HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_a_garbage_request_line_gets_no_page(server: HealthServer, request_line: bytes) -> None:
    reply = exchange(server, request_line + b"\r\n\r\n")
    assert not reply or status(reply) in (400, 404, 501, 505)
    assert_answers(server)


def test_a_client_that_leaves_or_resets_in_the_middle_harms_no_other(server: HealthServer) -> None:
    for request in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        for linger in (b"\0" * 8, b"\1\0\0\0\0\0\0\0"):  # closed with a FIN, closed with a RST
            with connect(server) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.sendall(request)
    assert_answers(server)


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


def test_a_request_that_trips_the_server_costs_its_client_alone(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def trips(self: object) -> Page:
        raise ValueError("a header that nobody thought of")

    failed: list[str] = []
    threads.listen(lambda name, error: failed.append(name))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(health_http._Handler, "do_GET", trips)
            assert exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
        assert_answers(server)
    finally:
        threads.listen()
    assert failed == []
    assert "cannot answer a client" in caplog.text


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
        assert len(server._clients) >= 3
        half.sendall(b"ics HTTP/1.1\r\n\r\n")
        assert status(read_all(half)) == 200
        silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status(read_all(silent)) == 200
        assert len(read_all(not_reading)) >= len(HUGE)


def test_a_client_that_does_not_read_its_answer_in_time_is_closed(agent: Agent) -> None:
    agent.page = lambda: HUGE
    answers = Answers(lambda: agent.page(), lambda: agent.live, lambda: agent.ready)
    with served(agent, answers, ClientLimits(silence_s=0.1)) as server, connect(server) as not_reading:
        not_reading.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert not_reading.recv(1) == b"H"
        wait_until(lambda: not server._clients, "it has lost its place")
        assert len(read_all(not_reading)) < len(HUGE)


def test_with_the_real_clock_a_silent_client_is_closed_without_any_other_traffic() -> None:
    probe = Probe(True, "ok")
    server = HealthServer(
        listening_socket(),
        Answers(lambda: b"", lambda: probe, lambda: probe),
        limits=ClientLimits(silence_s=0.05),
    )
    server.start()
    try:
        with connect(server) as silent:
            assert read_all(silent) == b""
    finally:
        server.close()


def test_500_silent_clients_hold_32_places_and_keep_no_other_out(server: HealthServer) -> None:
    with ExitStack() as crowd:
        clients = [crowd.enter_context(connect(server)) for _ in range(500)]
        assert_answers(server)
        assert len(server._clients) <= 32
        assert read_all(clients[0]) == b""  # the oldest lost its place
        newest = clients[-1]
        newest.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert status(read_all(newest)) == 200
        assert_answers(server)


# Its own life.


def test_close_ends_the_thread_and_frees_the_port_and_every_descriptor(agent: Agent) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    server = HealthServer(
        listening_socket(), Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, agent.pages)
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
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) == descriptors, "the threads of its clients have ended"
    )


def test_a_hanging_callback_does_not_keep_the_agent_from_stopping() -> None:
    hanging, let_go = threading.Event(), threading.Event()

    def hang() -> bytes:
        hanging.set()
        let_go.wait(PATIENCE_S)
        return b""

    probe = Probe(True, "ok")
    server = HealthServer(
        listening_socket(), Answers(hang, lambda: probe, lambda: probe), limits=ClientLimits(silence_s=0.05)
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


def test_without_descriptors_it_rests_and_then_serves_who_waited(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind = failing_socket(OSError(errno.EMFILE, "Too many open files"))
    answers = Answers(lambda: b"up 1\n", lambda: agent.live, lambda: agent.ready, agent.pages)
    monkeypatch.setattr(health_http, "ACCEPT_PAUSE_S", 0.3)
    server = HealthServer(bind, answers)
    began = time.monotonic()  # its first accept() may be over when start() returns
    server.start()
    try:
        assert_answers(server)
        assert time.monotonic() - began >= 0.3
        assert bind.tries >= 2
        assert "Too many open files" in caplog.text
    finally:
        server.close()


# --- Slow pages


@dataclass
class Disk:
    """What a slow page waits for."""

    answers: threading.Event = field(default_factory=threading.Event)
    asked: list[PageRequest] = field(default_factory=list)

    def page(self, request: PageRequest) -> Page:
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
        ClientLimits(at_once=2),
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
    assert disk.asked == [PageRequest({"job": "a", "rank": "1"}, "s3")]


def test_probes_are_answered_while_no_thread_starts_as_long_as_one_stands_by(
    slow: HealthServer, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "http-answer":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threads, "START_WITHIN_S", 0.0)
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            wait_until(lambda: slow._idle._value > 0, "one stands by")
            assert get(slow, "/healthz")[0] == 200
        wait_until(lambda: slow._idle._value == 2, "both stand by")
        with ask_slow(slow), ask_slow(slow):
            wait_until(lambda: len(disk.asked) == 2, "both are busy")
            assert exchange(slow, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
            disk.answers.set()
        wait_until(lambda: slow._idle._value == 2, "both stand by again")
        assert get(slow, "/healthz")[0] == 200
    assert get(slow, "/logs")[0] == 200


def test_a_slow_page_takes_few_threads(slow: HealthServer, disk: Disk) -> None:
    with ask_slow(slow), ask_slow(slow):
        wait_until(lambda: len(disk.asked) == 2, "both are asked")
        with ask_slow(slow) as third:
            assert status(read_all(third)) == 503
        assert_answers(slow)
        disk.answers.set()
    wait_until(lambda: get(slow, "/logs")[0] == 200, "its threads are free again")


def test_who_waits_for_one_slow_page_takes_no_place_of_another(agent: Agent, disk: Disk) -> None:
    slow = {"/logs": disk.page, "/all": lambda _: Page(HTTPStatus.OK, "text/plain", b"all")}
    answers = Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, slow=slow)
    with served(agent, answers, ClientLimits(at_once=1)) as server, ask_slow(server):
        wait_until(lambda: len(disk.asked) == 1, "it is asked")
        assert [get(server, path)[0] for path in ("/logs", "/all")] == [503, 200]
        disk.answers.set()


def test_who_asks_for_a_page_while_it_is_made_gets_the_one_before(agent: Agent, disk: Disk) -> None:
    page = health_http.rested(disk.page, lambda: agent.now_s)
    disk.answers.set()
    before = page(PageRequest({}, "before"))
    disk.answers.clear()
    making = threading.Thread(target=page, args=(PageRequest({}, "after"),))
    making.start()
    wait_until(lambda: len(disk.asked) == 2, "it is made anew")
    try:
        assert page(PageRequest({})) is before
    finally:
        disk.answers.set()
        making.join()
    assert page(PageRequest({})) is not before


# --- Pages that look at what is asked


def test_a_page_sees_its_query_and_may_have_headers_of_its_own(agent: Agent) -> None:
    def page(request: PageRequest) -> Page:
        return Page(HTTPStatus.OK, "text/html", repr(request).encode(), (("X-Kind", "a"),))

    with served(agent, Answers(lambda: b"", lambda: agent.live, lambda: agent.ready, {"/": page})) as server:
        status, headers, body = get(server, "/?since=5")
        assert (status, headers["X-Kind"]) == (200, "a")
        assert body == repr(PageRequest({"since": "5"})).encode()
        assert get(server, "/", "HEAD")[1] == {**headers, "Content-Length": str(len(repr(PageRequest({}))))}
        assert get(server, "/nothing")[2] == b"404 Not Found: try /metrics, /healthz, /readyz, /\n"


@contextmanager
def served(agent: Agent, answers: Answers, limits: ClientLimits | None = None) -> Iterator[HealthServer]:
    server = HealthServer(listening_socket(), answers, limits or ClientLimits(), clock=lambda: agent.now_s)
    server.start()
    try:
        yield server
    finally:
        server.close()
