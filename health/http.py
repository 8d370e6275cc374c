"""Answers scrapes, probes, peers and browsers: GET or HEAD of /metrics, /healthz, /readyz and of other pages, one
answer per connection.

Each client has a thread for itself, so no client waits for a slow one. Two stand by, so that a probe is answered also
while this process can start no thread; all others are started when they are needed. Whatever a client does, it costs
at most one of `max_connections` places and threads, a bounded head and one answer in memory, and `lifetime_s` seconds.
When all places are taken, a newcomer gets that of the oldest client that has its answer or has not asked yet: a client
that connects and asks at once is served in any flood of silent clients. Pages that wait for a disk or for others
(`slow`) take a few of the places at most, so that probes are answered meanwhile.

It only shows. There is no TLS, and no authentication but what a slow page makes of the request's bearer token: the
caller binds to loopback or the pod's address.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import logging
import queue
import re
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import IO, Any, NamedTuple, cast
from urllib.parse import parse_qsl

from .families import CONTENT_TYPE

logger = logging.getLogger(__name__)

NODE_PATH = "/node"
"""The introduction of an agent to its peers, in JSON."""
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

_REQUEST_LINE = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.[0-9]\r?\n")
_BEARER = re.compile(r"(?i)bearer +([!-~]+)")
_METHODS = ("GET", "HEAD")
_MOST_QUERY_FIELDS = 16
_STANDING = 2
"""Threads for clients that are there from the start."""


class Page(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
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
class Limits:
    """What clients may cost. `accept_pause_s`: the rest after this process ran out of file descriptors."""

    max_connections: int = 32
    lifetime_s: float = 5.0
    head_bytes: int = 8 * 1024
    discard_bytes: int = 1024 * 1024
    accept_pause_s: float = 1.0
    at_once: int = 4
    """Clients that may wait for one slow page."""
    metrics_rest_s: float = 0.5
    """The least time between two renderings of /metrics: all scrapes in between get the same bytes."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What makes the pages, for any thread. Only those of `slow` may block. One that raises is answered with a 500."""

    metrics: Callable[[], bytes]
    liveness: Callable[[], Probe]
    readiness: Callable[[], Probe]
    pages: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """In JSON, by path."""
    queried: Mapping[str, Callable[[Request], Page]] = field(default_factory=dict)
    """By path."""
    slow: Mapping[str, Callable[[Request], Page]] = field(default_factory=dict)
    """By path; they take the place of other pages of their path."""


class _Phase(enum.IntEnum):
    """Who has the lowest one loses its place first."""

    ANSWERED = 0
    """It is waited for the client to close: closing over unread bytes would reset the connection, and the client could
    lose the answer."""
    READING = 1
    MAKING = 2
    """Its page is made."""
    WRITING = 3


class _Client:
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.phase = _Phase.READING


class HealthServer:
    """Serves on `bind`, a bound and listening socket that it owns from now on.

    `thread` makes the one that accepts, of its work and name, and those of clients. `evicted` counts clients that lost
    their place to others.
    """

    def __init__(
        self,
        bind: socket.socket,
        answers: Answers,
        thread: Callable[..., threading.Thread],
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bind.setblocking(False)
        self.address: tuple[str, int] = bind.getsockname()[:2]
        self.evicted = 0
        self.limits = limits
        self._bind = bind
        self._clock = clock
        self._pages: dict[str, Callable[[Request], Page]] = {
            "/metrics": lambda _: self._metrics_page(answers.metrics),
            "/healthz": lambda _: _probe_page(answers.liveness()),
            "/readyz": lambda _: _probe_page(answers.readiness()),
            **{path: _json_page(render) for path, render in answers.pages.items()},
            **answers.queried,
            **{path: partial(self._slow_page, path, make) for path, make in answers.slow.items()},
        }
        self._rendering = threading.Lock()
        self._metrics: tuple[float, Page] | None = None
        """Until when the newest rendering is served, and it."""
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()
        """Clients that wait for a slow page, by path."""
        self._clients: dict[_Client, None] = {}  # the oldest first
        self._new_thread = thread
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = thread(self._serve, "health-http")
        self._idle = 0
        """Standing threads that wait for a client."""
        self._taken: queue.SimpleQueue[tuple[_Client, Any] | None] = queue.SimpleQueue()
        """Clients for them, one for each that was idle; None ends one."""
        self._standing = [thread(self._stand_by, "http-answer") for _ in range(_STANDING)]

    def start(self) -> None:
        for each in (*self._standing, self._thread):
            each.start()

    def close(self) -> None:
        """Stop serving and close every socket, the listening one included. May be called twice."""
        self._wake_write.close()  # the other end becomes readable, which ends the thread
        if self._thread.ident is None:
            self._release()  # never started
        else:
            self._thread.join(self.limits.lifetime_s)

    def page(self, target: str, request: Request) -> Page:
        """What is at this path. A page that fails is logged."""
        make = self._pages.get(target)
        if make is None:
            return status_page(HTTPStatus.NOT_FOUND, ": try " + ", ".join(self._pages))
        try:
            return make(request)
        except Exception:
            logger.exception("cannot answer: path=%s", target)
            return status_page(HTTPStatus.INTERNAL_SERVER_ERROR)

    # In the thread that accepts.

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_read, selectors.EVENT_READ)
                selector.register(self._bind, selectors.EVENT_READ)
                while True:
                    ready = [key.fileobj for key, _ in selector.select(self._patience_s())]
                    if self._wake_read in ready:
                        return
                    self._expire()
                    if self._bind in ready:
                        self._accept()
        finally:
            self._release()  # also after a bug: a refused probe is clearer than one without an answer

    def _patience_s(self) -> float | None:
        with self._lock:
            deadline = min((client.deadline for client in self._clients), default=None)
        return max(0.01, deadline - self._clock()) if deadline is not None else None

    def _expire(self) -> None:
        now = self._clock()
        with self._lock:
            for client in [each for each in self._clients if each.deadline <= now]:
                late = client.phase is _Phase.READING
                self._dismiss(client, HTTPStatus.REQUEST_TIMEOUT if late else HTTPStatus.SERVICE_UNAVAILABLE)

    def _accept(self) -> None:
        try:
            sock, address = self._bind.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client left while it waited in the queue
        except OSError as error:
            # Out of descriptors or kernel memory. The queue stays readable: trying again at once would spin.
            pause_s = self.limits.accept_pause_s
            logger.warning("cannot accept scrapes and probes: error=%s retry_in_s=%g", error, pause_s)
            self._wake_read.settimeout(pause_s)
            with contextlib.suppress(TimeoutError):
                self._wake_read.recv(1, socket.MSG_PEEK)
            return
        sock.setblocking(True)
        client = _Client(sock, self._clock() + self.limits.lifetime_s)
        with self._lock:
            if len(self._clients) >= self.limits.max_connections:
                self.evicted += 1
                # Of equals, the first: the oldest.
                least_worth = min(self._clients, key=lambda each: each.phase)
                self._dismiss(least_worth, HTTPStatus.SERVICE_UNAVAILABLE)
            self._clients[client] = None
            stands_by = self._idle > 0
            if stands_by:
                self._idle -= 1
                self._taken.put((client, address))
        if not stands_by:
            none = partial(self._end, client, HTTPStatus.SERVICE_UNAVAILABLE)
            self._new_thread(partial(self._answer, client, address), "http-answer", none).start()

    def _dismiss(self, client: _Client, status: HTTPStatus) -> None:
        """Give its place to others, under the lock. Its thread ends, as its socket does. A client without an answer
        gets the reason."""
        self._clients.pop(client, None)
        with contextlib.suppress(OSError):
            if client.phase in (_Phase.READING, _Phase.MAKING):
                client.sock.send(_bytes_of(status_page(status)), socket.MSG_DONTWAIT)
            client.sock.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        with self._lock:
            for client in list(self._clients):
                self._clients.pop(client)
                with contextlib.suppress(OSError):
                    client.sock.shutdown(socket.SHUT_RDWR)
        for _ in self._standing:
            self._taken.put(None)
        self._wake_read.close()
        self._bind.close()

    # In the thread of a client.

    def _stand_by(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            taken = self._taken.get()
            if taken is None:
                return
            self._answer(*taken)

    def _answer(self, client: _Client, address: Any) -> None:
        try:
            _Handler(self, client, address)
            client.phase = _Phase.ANSWERED
            client.sock.shutdown(socket.SHUT_WR)
            left = self.limits.discard_bytes
            while left > 0 and (size := len(client.sock.recv(65536))):
                left -= size
        except OSError:
            pass  # the client has reset the connection, or has lost its place
        except Exception:  # a thread that fails ends the agent
            logger.exception("cannot answer a client")
        finally:
            self._end(client)

    def _end(self, client: _Client, status: HTTPStatus | None = None) -> None:
        with self._lock:
            if status is not None:
                self._dismiss(client, status)
            self._clients.pop(client, None)
            client.sock.close()

    def _slow_page(self, path: str, make: Callable[[Request], Page], request: Request) -> Page:
        with self._lock:
            if self._busy[path] >= self.limits.at_once:
                return status_page(HTTPStatus.SERVICE_UNAVAILABLE, ": asked too often at once")
            self._busy[path] += 1
        try:
            return make(request)
        finally:
            with self._lock:
                self._busy[path] -= 1

    def _metrics_page(self, render: Callable[[], bytes]) -> Page:
        """Rendering holds up the main loop: a flood of scrapes must not."""
        with self._rendering:
            now = self._clock()
            if self._metrics is None or now >= self._metrics[0]:
                page = Page(HTTPStatus.OK, CONTENT_TYPE, render())
                self._metrics = now + self.limits.metrics_rest_s, page
            return self._metrics[1]


class _Head:
    """What `BaseHTTPRequestHandler` reads of a client: lines of a bounded head."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file = file
        self._left = most
        self.close = file.close

    def readline(self, _: int = -1) -> bytes:
        line = self._file.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class _Handler(BaseHTTPRequestHandler):
    """Answers one request as it is made; raises OSError when the client is gone."""

    protocol_version = request_version = "HTTP/1.1"
    command = ""

    def __init__(self, health: HealthServer, client: _Client, address: Any) -> None:
        self._health = health
        self._client = client
        super().__init__(client.sock, address, cast(Any, None))

    def handle(self) -> None:
        head = _Head(cast(IO[bytes], self.rfile), self._health.limits.head_bytes + len("\r\n\r\n"))
        self.rfile = cast(Any, head)
        try:
            self.raw_requestline = head.readline()
            if not _REQUEST_LINE.fullmatch(self.raw_requestline):
                self._send(status_page(HTTPStatus.BAD_REQUEST))
            elif self.parse_request():
                self._send(self._page())
        except http.client.LineTooLong:
            self._send(status_page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by `parse_request`."""
        self._send(status_page(HTTPStatus(code)))

    def _page(self) -> Page:
        if self.command not in _METHODS:
            refused = status_page(HTTPStatus.METHOD_NOT_ALLOWED)
            return refused._replace(headers=(f"Allow: {', '.join(_METHODS)}",))
        self._client.phase = _Phase.MAKING
        path, _, query = self.path.partition("?")
        try:
            fields = dict(parse_qsl(query, max_num_fields=_MOST_QUERY_FIELDS))
        except ValueError:
            fields = {}
        token = _BEARER.fullmatch(self.headers.get("Authorization", "").strip())
        return self._health.page(path, Request(fields, token[1] if token is not None else ""))

    def _send(self, page: Page) -> None:
        self._client.phase = _Phase.WRITING
        self.wfile.write(_bytes_of(page, with_body=self.command != "HEAD"))


def status_page(status: HTTPStatus, advice: str = "") -> Page:
    return Page(status, TEXT, f"{status.value} {status.phrase}{advice}\n".encode())


def _probe_page(probe: Probe) -> Page:
    status = HTTPStatus.OK if probe.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(status, TEXT, f"{probe.detail}\n".encode(errors="replace"))


def _json_page(render: Callable[[], str]) -> Callable[[Request], Page]:
    return lambda _: Page(HTTPStatus.OK, JSON, render().encode())


def _bytes_of(page: Page, *, with_body: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
        *page.headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (page.body if with_body else b"")
