"""Answers scrapes, probes and peers: GET or HEAD of /metrics, /healthz, /readyz and of pages in JSON, one answer per
connection.

One thread serves every client with non-blocking sockets, so all that a scrape ever waits for is other answers
being rendered, never other clients. A connection goes one way through these phases:

    reading    until its request head is complete
    answering  while a thread makes the answer: for *slow* pages alone, which may wait for a disk or another process
    writing    until the whole answer, a page or an error, is in the kernel
    lingering  until the client closes; what it still sends is thrown away. Closing over unread bytes would
               make the kernel reset the connection, and the client could lose the answer

Invariant: whatever a client does, it costs at most one of `max_connections` places, a bounded head and one
answer in memory, and `lifetime_s` seconds. When all places are taken, a newcomer gets the place of the oldest
client that has its answer or has not asked yet: a client that connects and asks at once is served in any flood of
silent clients.

It only shows. There is no TLS, and no authentication but what a slow page makes of the request's bearer token: the
caller binds to loopback or the pod's address.
"""

from __future__ import annotations

import contextlib
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
from typing import TypeAlias
from urllib.parse import parse_qsl

from .families import CONTENT_TYPE

logger = logging.getLogger(__name__)

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[!-~]*) HTTP/1\.[0-9]")
_METHODS = (b"GET", b"HEAD")
_END_OF_HEAD = b"\r\n\r\n"
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"

NODE_PATH = "/node"
"""The introduction of an agent to its peers, in JSON."""

Page: TypeAlias = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""

_BEARER = re.compile(rb"(?i)authorization: *bearer +([!-~]+) *")
_MOST_FIELDS = 16
"""Of a query."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a slow page is asked for."""

    query: Mapping[str, str]
    token: str
    """Of its bearer; empty without one."""


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
    """Threads that answer for one slow page."""


class _Connection:
    """One client. `answer` is None until there is one, then what is still to send, so empty while lingering."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.head = bytearray()
        self.answer: memoryview | None = None
        self.asked = False
        """A thread makes the answer; the selector does not know the socket meanwhile."""
        self.discarded = 0

    def worth(self) -> int:
        """Who keeps a place longest when places run out: answering or writing (2), reading (1), lingering (0)."""
        if self.answer is None:
            return 2 if self.asked else 1
        return 2 if self.answer else 0


@dataclass(frozen=True, slots=True)
class Answers:
    """What makes the pages. Only those of `slow` may block: each runs on a thread of its own, and holds up its own page
    alone. One that raises is answered with a 500."""

    metrics: Callable[[], bytes]
    liveness: Callable[[], Probe]
    readiness: Callable[[], Probe]
    pages: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """In JSON, by path."""
    slow: Mapping[str, Callable[[Request], Page]] = field(default_factory=dict)
    """By path; they take the place of other pages of their path."""


class HealthServer:
    """Serves on `bind`, a bound and listening socket that it owns from now on.

    `thread` makes the one that serves, of its work and name, and those of slow answers. `evicted` counts clients that
    lost their place to others.
    """

    def __init__(
        self,
        bind: socket.socket,
        answers: Answers,
        thread: Callable[[Callable[[], None], str], threading.Thread],
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bind.setblocking(False)
        self.address: tuple[str, int] = bind.getsockname()[:2]
        self.evicted = 0
        self._bind = bind
        self._limits = limits
        self._clock = clock
        self._pages: dict[bytes, Callable[[], Page]] = {
            b"/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, answers.metrics()),
            b"/healthz": lambda: _probe_page(answers.liveness()),
            b"/readyz": lambda: _probe_page(answers.readiness()),
        }
        for path, render in answers.pages.items():
            self._pages[path.encode()] = _json_page(render)
        self._new_thread = thread
        self._slow = {path.encode(): answer for path, answer in answers.slow.items()}
        self._busy: Counter[bytes] = Counter()
        """Threads that make answers, by path."""
        self._made: queue.SimpleQueue[tuple[_Connection, bytes, bytes]] = queue.SimpleQueue()
        """By them: for whom, of which path, the answer."""
        self._connections: dict[_Connection, None] = {}  # the oldest first
        self._accept_paused_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(bind, selectors.EVENT_READ)
        self._thread = thread(self._serve, "health-http")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close every socket, the listening one included. May be called twice."""
        self._wake_write.close()  # the other end becomes readable, which ends the thread
        if self._thread.ident is None:
            self._release()  # never started
        else:
            # Bounded, because a callback that hangs must not keep the agent from stopping.
            self._thread.join(self._limits.lifetime_s)

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._release()  # also after a bug: a refused probe is clearer than one without an answer

    def _turn(self) -> bool:
        newcomers = False
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._wake_read:
                if not self._wake_read.recv(4096):
                    return False
                self._collect()
            elif key.fileobj is self._bind:
                newcomers = True
            else:
                self._advance(key.data)
        self._expire()
        if newcomers:
            self._accept()  # last, so that no client that sent its request in time loses its place to a newcomer
        return True

    def _patience_s(self) -> float | None:
        deadlines = [connection.deadline for connection in self._connections]
        if self._accept_paused_until is not None:
            deadlines.append(self._accept_paused_until)
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def _accept(self) -> None:
        """Take one client: one per turn, so that each can ask before the next ones push it out."""
        try:
            sock, _ = self._bind.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client left while it waited in the queue
        except OSError as error:
            # Out of descriptors or kernel memory. The queue stays readable: trying again at once would spin.
            pause_s = self._limits.accept_pause_s
            logger.warning("cannot accept scrapes and probes: error=%s retry_in_s=%g", error, pause_s)
            self._selector.unregister(self._bind)
            self._accept_paused_until = self._clock() + pause_s
            return
        sock.setblocking(False)
        if len(self._connections) >= self._limits.max_connections:
            self.evicted += 1
            least_worth = min(self._connections, key=_Connection.worth)  # of equals, the first: the oldest
            self._dismiss(least_worth, HTTPStatus.SERVICE_UNAVAILABLE)
        connection = _Connection(sock, self._clock() + self._limits.lifetime_s)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _advance(self, connection: _Connection) -> None:
        try:
            if connection.answer is None:
                self._read(connection)
            elif connection.answer:
                self._write(connection, connection.answer)
            else:
                self._linger(connection)
        except BlockingIOError:
            pass  # woken for nothing
        except OSError:
            self._drop(connection)  # reset by the client

    def _read(self, connection: _Connection) -> None:
        chunk = connection.sock.recv(self._limits.head_bytes)
        head = connection.head
        head += chunk
        end = head.find(_END_OF_HEAD)
        if not chunk:
            answer = _answer(
                *_status_page(HTTPStatus.BAD_REQUEST)
            )  # it finished sending without a whole head
        elif (len(head) if end < 0 else end) > self._limits.head_bytes:
            answer = _answer(*_status_page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        elif end < 0:
            return
        elif (path := self._slow_path(head)) is not None:
            self._selector.unregister(connection.sock)
            self._begin_answer(connection, path, bytes(head[:end]))
            return
        else:
            answer = self._respond(bytes(head[:end]))
        head.clear()
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
        self._write(connection, memoryview(answer))

    def _slow_path(self, head: bytearray) -> bytes | None:
        request = _REQUEST_LINE.fullmatch(bytes(head).split(b"\r\n", 1)[0])
        path = request[2].split(b"?", 1)[0] if request is not None and request[1] in _METHODS else None
        return path if path in self._slow else None

    def _begin_answer(self, connection: _Connection, path: bytes, head: bytes) -> None:
        connection.asked = True
        connection.head.clear()
        if self._busy[path] >= self._limits.at_once:
            full = _status_page(HTTPStatus.SERVICE_UNAVAILABLE, ": asked too often at once")
            self._answered(connection, _answer(*full))
            return
        self._busy[path] += 1
        self._new_thread(partial(self._make_answer, connection, path, head), "http-answer").start()

    def _make_answer(self, connection: _Connection, path: bytes, head: bytes) -> None:
        """In a thread of its own."""
        try:
            page = self._slow[path](_request(head))
        except Exception:
            logger.exception("cannot answer: path=%s", path.decode())
            page = _status_page(HTTPStatus.INTERNAL_SERVER_ERROR)
        answer = _answer(*page, with_body=head.startswith(b"GET"))
        self._made.put((connection, path, answer))
        with contextlib.suppress(OSError):  # the server has been closed
            self._wake_write.send(b".")

    def _collect(self) -> None:
        """What threads have made since."""
        with contextlib.suppress(queue.Empty):
            while True:
                connection, path, answer = self._made.get_nowait()
                self._busy[path] -= 1
                if connection in self._connections:
                    self._answered(connection, answer)

    def _answered(self, connection: _Connection, answer: bytes) -> None:
        connection.asked = False
        connection.answer = memoryview(answer)
        self._selector.register(connection.sock, selectors.EVENT_WRITE, connection)

    def _write(self, connection: _Connection, answer: memoryview) -> None:
        connection.answer = answer
        connection.answer = answer[connection.sock.send(answer) :]
        if not connection.answer:
            connection.sock.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _linger(self, connection: _Connection) -> None:
        discarded = len(connection.sock.recv(64 * 1024))
        connection.discarded += discarded
        if discarded == 0 or connection.discarded > self._limits.discard_bytes:
            self._drop(connection)

    def _respond(self, head: bytes) -> bytes:
        request = _REQUEST_LINE.fullmatch(head.split(b"\r\n", 1)[0])
        if request is None:
            return _answer(*_status_page(HTTPStatus.BAD_REQUEST))
        method, target = request.groups()
        if method not in _METHODS:
            return _answer(*_status_page(HTTPStatus.METHOD_NOT_ALLOWED))
        return _answer(*self._page(target), with_body=method == b"GET")

    def _page(self, target: bytes) -> Page:
        page = self._pages.get(target.split(b"?", 1)[0])
        if page is None:
            return _status_page(
                HTTPStatus.NOT_FOUND,
                ": try " + ", ".join(path.decode() for path in {**self._pages, **self._slow}),
            )
        try:
            return page()
        except Exception:
            logger.exception("cannot answer a scrape or probe: target=%s", target.decode())
            return _status_page(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _expire(self) -> None:
        now = self._clock()
        for connection in [each for each in self._connections if each.deadline <= now]:
            late = HTTPStatus.SERVICE_UNAVAILABLE if connection.asked else HTTPStatus.REQUEST_TIMEOUT
            self._dismiss(connection, late)
        if self._accept_paused_until is not None and self._accept_paused_until <= now:
            self._accept_paused_until = None
            self._selector.register(self._bind, selectors.EVENT_READ)

    def _dismiss(self, connection: _Connection, status: HTTPStatus) -> None:
        """Close now. A client without an answer gets the reason, if its socket takes the bytes at once."""
        if connection.answer is None:
            try:
                connection.sock.send(_answer(*_status_page(status)))
            except OSError:
                pass
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        if not connection.asked:
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _release(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._wake_read.close()
        self._bind.close()


def _status_page(status: HTTPStatus, advice: str = "") -> Page:
    return status, _TEXT, f"{status.value} {status.phrase}{advice}\n".encode()


def _probe_page(probe: Probe) -> Page:
    status = HTTPStatus.OK if probe.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return status, _TEXT, f"{probe.detail}\n".encode(errors="replace")


def _request(head: bytes) -> Request:
    """Of a head that is one."""
    first, *fields = head.split(b"\r\n")
    target = first.split(b" ")[1].decode()
    tokens = (found[1].decode() for field in fields if (found := _BEARER.fullmatch(field)))
    try:
        query = dict(parse_qsl(target.partition("?")[2], max_num_fields=_MOST_FIELDS))
    except ValueError:
        query = {}
    return Request(query, next(tokens, ""))


def _json_page(render: Callable[[], str]) -> Callable[[], Page]:
    return lambda: (HTTPStatus.OK, _JSON, render().encode())


def _answer(status: HTTPStatus, content_type: str, body: bytes, *, with_body: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    return "\r\n".join(lines).encode() + _END_OF_HEAD + (body if with_body else b"")
