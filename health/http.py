"""Answers scrapes, probes, peers and browsers: GET or HEAD of /metrics, /healthz, /readyz and of other pages, one
answer per connection.

Each client has a thread for itself, so no client waits for a slow one. Whatever a client does, it costs at most one of
`max_connections` places and threads, a head of the size that the standard library allows, and one answer in memory.
When all places are taken, a newcomer gets that of the oldest client: one that connects and asks at once is served in
any flood of silent clients. A client that neither sends nor reads for `silence_s` loses its place, too. Pages that wait
for a disk or for others (`slow`) take a few of the places at most, so that probes are answered meanwhile. While the
machine allows no other thread, the few that stand by answer, so that nobody kills a pod that trains; a client for whom
none is free is not answered then.

It only shows. There is no TLS, and no authentication but what a slow page makes of the request's bearer token: the
caller binds to loopback or the pod's address.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl

from ..threads import Thread
from .metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

NODE_PATH = "/node"
"""The introduction of an agent to its peers, in JSON."""
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

STANDING = 2
"""Threads that stand by for clients."""

ACCEPT_PAUSE_S = 1.0
"""The rest after this process ran out of file descriptors."""

REST_S, RESTS = 0.5, 3.0
"""The least time from one rendering of /metrics and its like to the next; and from its end, in its own durations."""

_BEARER = re.compile(r"(?i)bearer +([!-~]+)")


class Page(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The parts of a request that pages read."""

    query: Mapping[str, str]
    token: str = ""
    """The bearer token; empty without one."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a liveness or readiness check found: `ok` decides between 200 and 503, `detail` is the body."""

    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What clients may cost."""

    max_connections: int = 32
    silence_s: float = 5.0
    at_once: int = 4
    """Clients that may wait for a slow page, of each path."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What makes the pages, for any thread. Only those of `slow` may block. One that raises is answered with a 500."""

    metrics: Callable[[], bytes]
    liveness: Callable[[], Probe]
    readiness: Callable[[], Probe]
    pages: Mapping[str, Callable[[PageRequest], Page]] = field(default_factory=dict)
    """By path."""
    slow: Mapping[str, Callable[[PageRequest], Page]] = field(default_factory=dict)
    """By path; they take the place of other pages of their path."""


class HealthServer:
    """Serves on `bind`, a bound and listening socket that it owns from now on."""

    def __init__(
        self,
        bind: socket.socket,
        answers: Answers,
        limits: ClientLimits = ClientLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address: tuple[str, int] = bind.getsockname()[:2]
        self.limits = limits
        self._bind = bind
        self._pages: dict[str, Callable[[PageRequest], Page]] = {
            "/metrics": rested(lambda _: Page(HTTPStatus.OK, CONTENT_TYPE, answers.metrics()), clock),
            "/healthz": lambda _: _probe_page(answers.liveness()),
            "/readyz": lambda _: _probe_page(answers.readiness()),
            **answers.pages,
            **{path: self._slow_page(make) for path, make in answers.slow.items()},
        }
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        self._closed = False
        self._thread = Thread(self._serve, "health-http")
        self._idle = threading.Semaphore(STANDING)
        self._taken: queue.SimpleQueue[tuple[socket.socket, Any] | None] = queue.SimpleQueue()
        """Clients for the standing threads, one for each that was idle; None ends one."""
        self._standing = [Thread(self._stand_by, "http-answer") for _ in range(STANDING)]

    def start(self) -> None:
        for thread in (*self._standing, self._thread):
            thread.start()

    def close(self) -> None:
        """Stop serving and close every socket, the listening one included. May be called twice."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._bind.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join(self.limits.silence_s)
        self._bind.close()
        with self._lock:
            for client in self._clients:
                _cut(client)
        for _ in self._standing:
            self._taken.put(None)

    def page(self, target: str, request: PageRequest) -> Page:
        """What is at this path. A page that fails is logged."""
        make = self._pages.get(target)
        if make is None:
            return status_page(HTTPStatus.NOT_FOUND, ": try " + ", ".join(self._pages))
        try:
            return make(request)
        except Exception:
            logger.exception("cannot answer: path=%s", target)
            return status_page(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _serve(self) -> None:
        while not self._closed:
            try:
                client, address = self._bind.accept()
            except OSError as error:
                if (
                    not self._closed
                ):  # the client left while it waited, or this process has no descriptor left
                    logger.warning("cannot accept: error=%s retry_in_s=%g", error, ACCEPT_PAUSE_S)
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            with self._lock:
                if len(self._clients) >= self.limits.max_connections:
                    oldest = next(iter(self._clients))
                    del self._clients[oldest]
                    _cut(oldest)
                self._clients[client] = None
            if self._idle.acquire(blocking=False):
                self._taken.put((client, address))
            else:
                answer = partial(self._answer, client, address)
                Thread(answer, "http-answer", partial(self._end, client)).start()

    def _stand_by(self) -> None:
        for client, address in iter(self._taken.get, None):
            self._answer(client, address)
            self._idle.release()

    def _answer(self, client: socket.socket, address: Any) -> None:
        """In the thread of a client."""
        try:
            client.settimeout(self.limits.silence_s)
            _Handler(client, address, cast(Any, self))
        except OSError:
            pass  # the client has left, is silent, or has lost its place
        except Exception:  # a thread that fails ends the agent
            logger.exception("cannot answer a client")
        finally:
            self._end(client)

    def _end(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.pop(client, None)
            _cut(client)
            client.close()

    def _slow_page(self, make: Callable[[PageRequest], Page]) -> Callable[[PageRequest], Page]:
        places = threading.BoundedSemaphore(self.limits.at_once)

        def page(request: PageRequest) -> Page:
            if not places.acquire(blocking=False):
                return status_page(HTTPStatus.SERVICE_UNAVAILABLE, ": asked too often at once")
            try:
                return make(request)
            finally:
                places.release()

        return page


class _Handler(BaseHTTPRequestHandler):
    """Answers one request as it is made; raises OSError when the client is gone."""

    protocol_version = default_request_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        token = _BEARER.fullmatch(self.headers.get("Authorization", "").strip())
        request = PageRequest(dict(parse_qsl(query)), token[1] if token is not None else "")
        page = cast(HealthServer, self.server).page(path, request)
        self.send_response_only(page.status)
        for name, value in (
            ("Content-Type", page.content_type),
            ("Content-Length", str(len(page.body))),
            ("Connection", "close"),
            *page.headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """A line of the log for each request would hide all others."""


def rested(make: Callable[[PageRequest], Page], clock: Callable[[], float]) -> Callable[[PageRequest], Page]:
    """The same page for all until it has rested: for one that is dear, of which a flood must not hold up the main
    loop. Who asks while it is made gets the one before."""
    lock = threading.Lock()
    newest: list[tuple[float, Page]] = []

    def page(request: PageRequest) -> Page:
        if not lock.acquire(blocking=not newest):
            return newest[0][1]
        try:
            began_at = clock()
            if not newest or began_at >= newest[0][0]:
                made = make(request)
                newest[:] = [(max(began_at + REST_S, clock() + RESTS * (clock() - began_at)), made)]
            return newest[0][1]
        finally:
            lock.release()

    return page


def _cut(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def status_page(status: HTTPStatus, advice: str = "") -> Page:
    return Page(status, TEXT, f"{status.value} {status.phrase}{advice}\n".encode())


def _probe_page(probe: Probe) -> Page:
    status = HTTPStatus.OK if probe.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(status, TEXT, f"{probe.detail}\n".encode(errors="replace"))


def json_page(render: Callable[[], str]) -> Callable[[PageRequest], Page]:
    return lambda _: Page(HTTPStatus.OK, JSON, render().encode())
