"""Answers scrapes, probes, peers and browsers: GET or HEAD of /metrics, /healthz, /readyz and of other pages, one
answer per connection; and sends events for as long as a client stays.

One thread serves every client with non-blocking sockets, so all that a scrape ever waits for is other answers
being rendered, never other clients. A connection goes one way through these phases:

    reading    until its request head is complete
    answering  while a thread makes the answer: for *slow* pages alone, which may wait for a disk or another process
    writing    until the whole answer, a page or an error, is in the kernel
    lingering  until the client closes; what it still sends is thrown away. Closing over unread bytes would
               make the kernel reset the connection, and the client could lose the answer
    streaming  in place of the last two, for a stream of events: the next events are rendered when the kernel has taken
               all before, so a slow reader gets fewer of them and costs no more memory. Some places are for streams

Invariant: whatever a client does, it costs at most one of `max_connections` places, a bounded head and one
answer in memory, and `lifetime_s` seconds; as one of the `streams`, `stream_s`, if it keeps reading. When all places
are taken, a newcomer gets the place of the oldest client that has its answer or has not asked yet: a client that
connects and asks at once is served in any flood of silent clients.

It only shows. There is no TLS, and no authentication but what a slow page makes of the request's bearer token: the
caller binds to loopback or the pod's address.

Requests and answers of the HTTP server, as bytes and back: pure functions."""

from __future__ import annotations

import contextlib
import logging
import math
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
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl

from .families import CONTENT_TYPE

logger = logging.getLogger(__name__)

NODE_PATH = "/node"
"""The introduction of an agent to its peers, in JSON."""


class Stream(Protocol):
    """The events for one client. The server's thread calls it, so it must not block."""

    def next(self) -> bytes:
        """The events since the last call; empty: none. Called when all before is sent and the server was woken."""

    def close(self) -> None:
        """The client is gone. Called once."""


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
    streams: int = 8
    stream_s: float = 900.0
    """How long a stream may last; a browser then opens another one, which continues it."""
    stream_rests_s: float = 0.2
    """The least time between two sends to streams: events that come meanwhile are sent together."""
    beat_s: float = 15.0
    """A stream without events sends a comment so often, to find out whether its client is gone."""
    metrics_rest_s: float = 0.5
    """The least time between two renderings of /metrics: all scrapes in between get the same bytes."""


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
        self.stream: Stream | None = None
        self.ends_at = math.inf
        self.beat_at = math.inf
        """These three belong to a connection that is streaming."""

    def worth(self) -> int:
        """Who keeps a place longest when places run out: streaming (3), answering or writing (2), reading (1),
        lingering (0)."""
        if self.stream is not None:
            return 3
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
    queried: Mapping[str, Callable[[Request], Page]] = field(default_factory=dict)
    """By path."""
    streams: Mapping[str, Callable[[Request], Stream]] = field(default_factory=dict)
    """By path."""
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
        thread: Callable[..., threading.Thread],
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bind.setblocking(False)
        self.address: tuple[str, int] = bind.getsockname()[:2]
        self.evicted = 0
        self._bind = bind
        self._limits = limits
        self._clock = clock
        self._pages: dict[bytes, Callable[[Request], Page]] = {
            b"/metrics": lambda _: self._metrics_page(answers.metrics),
            b"/healthz": lambda _: probe_page(answers.liveness()),
            b"/readyz": lambda _: probe_page(answers.readiness()),
        }
        for path, render in answers.pages.items():
            self._pages[path.encode()] = json_page(render)
        for path, make in answers.queried.items():
            self._pages[path.encode()] = make
        for path in answers.streams:
            self._pages[path.encode()] = lambda _: Page(HTTPStatus.OK, EVENT_STREAM, b"")
        self._streams = {path.encode(): make for path, make in answers.streams.items()}
        self._metrics: tuple[float, Page] | None = None
        """Until when the newest rendering is served, and it."""
        self._feed_at = math.inf
        """When the streams are asked for more events."""
        self._fed_at = -math.inf
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
        self._wake_write.setblocking(False)  # while it is full, the thread is to wake up anyway
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

    def wake(self) -> None:
        """There are new events for the streams. For any thread; never waits."""
        with contextlib.suppress(OSError):  # the server has been closed, or has not read the last ones
            self._wake_write.send(b".")

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
                    self._feed_at = -math.inf  # the last events, as far as sockets take them at once
                    self._feed()
                    return False
                self._collect()
                self._feed_at = min(self._feed_at, self._fed_at + self._limits.stream_rests_s)
            elif key.fileobj is self._bind:
                newcomers = True
            else:
                self._advance(key.data)
        self._expire()
        self._feed()
        if newcomers:
            self._accept()  # last, so that no client that sent its request in time loses its place to a newcomer
        return True

    def _patience_s(self) -> float | None:
        deadlines = [connection.deadline for connection in self._connections]
        if self._accept_paused_until is not None:
            deadlines.append(self._accept_paused_until)
        for connection in self._streaming():
            deadlines += [connection.beat_at, self._feed_at]
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
            if connection.stream is not None:
                self._exchange(connection)
            elif connection.answer is None:
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
        end = head.find(END_OF_HEAD)
        if not chunk:
            answer = answer_of(
                *status_page(HTTPStatus.BAD_REQUEST)
            )  # it finished sending without a whole head
        elif (len(head) if end < 0 else end) > self._limits.head_bytes:
            answer = answer_of(*status_page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        elif end < 0:
            return
        elif (path := self._slow_path(head)) is not None:
            self._selector.unregister(connection.sock)
            self._begin_answer(connection, path, bytes(head[:end]))
            return
        elif (path := self._stream_path(head)) is not None:
            answer = self._begin_stream(connection, path, bytes(head[:end]))
        else:
            answer = self._respond(bytes(head[:end]))
        head.clear()
        if connection.stream is not None:
            self._send(connection, answer)
            return
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
        self._write(connection, memoryview(answer))

    def _slow_path(self, head: bytearray) -> bytes | None:
        method, path = asked(head)
        return path if method in METHODS and path in self._slow else None

    def _stream_path(self, head: bytearray) -> bytes | None:
        method, path = asked(head)
        return path if method == b"GET" and path in self._streams else None

    def _begin_answer(self, connection: _Connection, path: bytes, head: bytes) -> None:
        connection.asked = True
        connection.head.clear()
        if self._busy[path] >= self._limits.at_once:
            full = status_page(HTTPStatus.SERVICE_UNAVAILABLE, ": asked too often at once")
            self._answered(connection, answer_of(*full))
            return
        self._busy[path] += 1
        none = answer_of(
            *status_page(HTTPStatus.SERVICE_UNAVAILABLE, ": no thread can be started for it now")
        )
        otherwise = partial(self._give, connection, path, none)
        self._new_thread(partial(self._make_answer, connection, path, head), "http-answer", otherwise).start()

    def _make_answer(self, connection: _Connection, path: bytes, head: bytes) -> None:
        """In a thread of its own."""
        try:
            page = self._slow[path](request_of(head))
        except Exception:
            logger.exception("cannot answer: path=%s", path.decode())
            page = status_page(HTTPStatus.INTERNAL_SERVER_ERROR)
        answer = answer_of(*page, with_body=head.startswith(b"GET"))
        self._give(connection, path, answer)

    def _give(self, connection: _Connection, path: bytes, answer: bytes) -> None:
        """For any thread."""
        self._made.put((connection, path, answer))
        self.wake()

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

    # Streams.

    def _streaming(self) -> list[_Connection]:
        return [connection for connection in self._connections if connection.stream is not None]

    def _begin_stream(self, connection: _Connection, path: bytes, head: bytes) -> bytes:
        """The first bytes to this client."""
        if len(self._streaming()) >= self._limits.streams:
            full = f": at most {self._limits.streams} streams at once"
            return answer_of(*status_page(HTTPStatus.SERVICE_UNAVAILABLE, full))
        try:
            connection.stream = self._streams[path](request_of(head))
            first = connection.stream.next()
        except Exception:
            self._end_stream(connection)
            logger.exception("cannot answer: path=%s", path.decode())
            return answer_of(*status_page(HTTPStatus.INTERNAL_SERVER_ERROR))
        # The end of a client whose machine is gone is not seen otherwise for a quarter of an hour.
        patience_ms = round(2000 * self._limits.beat_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        connection.ends_at = self._clock() + self._limits.stream_s
        return STREAM_HEAD + first

    def _end_stream(self, connection: _Connection) -> None:
        stream, connection.stream = connection.stream, None
        if stream is not None:
            stream.close()

    def _exchange(self, connection: _Connection) -> None:
        """A streaming connection is writable, or has sent something, or is closed."""
        with contextlib.suppress(BlockingIOError):
            received = connection.sock.recv(64 * 1024)
            connection.discarded += len(received)
            if not received or connection.discarded > self._limits.discard_bytes:
                self._drop(connection)
                return
        pending = bool(connection.answer)
        self._send(connection)
        if pending and not connection.answer:
            self._feed_at = min(self._feed_at, self._fed_at + self._limits.stream_rests_s)

    def _send(self, connection: _Connection, more: bytes = b"") -> None:
        """Send as much as the socket takes. Raises OSError."""
        rest, now, sent = memoryview(more) if more else connection.answer or memoryview(b""), self._clock(), 0
        with contextlib.suppress(BlockingIOError):
            sent = connection.sock.send(rest) if rest else 0
        connection.answer = rest[sent:]
        waits = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.answer else 0)
        self._selector.modify(connection.sock, waits, connection)
        if not connection.answer:
            connection.deadline = connection.ends_at
        elif sent or more:
            connection.deadline = min(connection.ends_at, now + self._limits.lifetime_s)
        if sent:
            connection.beat_at = now + self._limits.beat_s

    def _feed(self) -> None:
        """Send new events, or a beat, to every stream that has nothing left to send."""
        now = self._clock()
        fed = now >= self._feed_at
        if fed:
            self._feed_at, self._fed_at = math.inf, now
        for connection in self._streaming():
            beat = now >= connection.beat_at
            if connection.answer or not (fed or beat) or connection.stream is None:
                continue
            try:
                more = connection.stream.next() or (BEAT if beat else b"")
                if more:
                    self._send(connection, more)
            except OSError:
                self._drop(connection)  # reset by the client
            except Exception:
                logger.exception("cannot go on with a stream")
                self._drop(connection)

    def _respond(self, head: bytes) -> bytes:
        request = REQUEST_LINE.fullmatch(head.split(b"\r\n", 1)[0])
        if request is None:
            return answer_of(*status_page(HTTPStatus.BAD_REQUEST))
        method, target = request.groups()
        if method not in METHODS:
            return answer_of(*status_page(HTTPStatus.METHOD_NOT_ALLOWED))
        return answer_of(*self._page(target, request_of(head)), with_body=method == b"GET")

    def _page(self, target: bytes, request: Request) -> Page:
        page = self._pages.get(target.split(b"?", 1)[0])
        if page is None:
            return status_page(
                HTTPStatus.NOT_FOUND,
                ": try " + ", ".join(path.decode() for path in {**self._pages, **self._slow}),
            )
        try:
            return page(request)
        except Exception:
            logger.exception("cannot answer a scrape or probe: target=%s", target.decode())
            return status_page(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _metrics_page(self, render: Callable[[], bytes]) -> Page:
        """Rendering holds up the main loop: a flood of scrapes must not."""
        now = self._clock()
        if self._metrics is None or now >= self._metrics[0]:
            page = Page(HTTPStatus.OK, CONTENT_TYPE, render())
            self._metrics = now + self._limits.metrics_rest_s, page
        return self._metrics[1]

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
                connection.sock.send(answer_of(*status_page(status)))
            except OSError:
                pass
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        if not connection.asked:
            self._selector.unregister(connection.sock)
        connection.sock.close()
        self._end_stream(connection)

    def _release(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._wake_read.close()
        self._bind.close()


REQUEST_LINE = re.compile(rb"([A-Z]+) (/[!-~]*) HTTP/1\.[0-9]")
METHODS = (b"GET", b"HEAD")
END_OF_HEAD = b"\r\n\r\n"
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

EVENT_STREAM = "text/event-stream"

_BEARER = re.compile(rb"(?i)authorization: *bearer +([!-~]+) *")
_LAST_EVENT = re.compile(rb"(?i)last-event-id: *([!-~]+) *")
_MOST_QUERY_FIELDS = 16

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\nX-Accel-Buffering: no\r\n"
    b"Connection: close\r\n\r\n"
)
BEAT = b":\n\n"
"""A comment, which browsers skip."""


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
    last_event: str = ""
    """The id of the last event that a reconnecting client has received; empty without one."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a liveness or readiness check found: `ok` decides between 200 and 503, `detail` is the body."""

    ok: bool
    detail: str


def status_page(status: HTTPStatus, advice: str = "") -> Page:
    return Page(status, TEXT, f"{status.value} {status.phrase}{advice}\n".encode())


def probe_page(probe: Probe) -> Page:
    status = HTTPStatus.OK if probe.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(status, TEXT, f"{probe.detail}\n".encode(errors="replace"))


def asked(head: bytes | bytearray) -> tuple[bytes, bytes]:
    """Method and path; both empty if the first line is not a request line."""
    request = REQUEST_LINE.fullmatch(bytes(head).split(b"\r\n", 1)[0])
    return (request[1], request[2].split(b"?", 1)[0]) if request is not None else (b"", b"")


def request_of(head: bytes) -> Request:
    """The request in a head whose first line is a request line."""
    first, *fields = head.split(b"\r\n")
    target = first.split(b" ")[1].decode()
    try:
        query = dict(parse_qsl(target.partition("?")[2], max_num_fields=_MOST_QUERY_FIELDS))
    except ValueError:
        query = {}

    def of(pattern: re.Pattern[bytes]) -> str:
        return next((found[1].decode() for field in fields if (found := pattern.fullmatch(field))), "")

    return Request(query, token=of(_BEARER), last_event=of(_LAST_EVENT))


def json_page(render: Callable[[], str]) -> Callable[[Request], Page]:
    return lambda _: Page(HTTPStatus.OK, JSON, render().encode())


def answer_of(
    status: HTTPStatus,
    content_type: str,
    body: bytes,
    headers: tuple[str, ...] = (),
    *,
    with_body: bool = True,
) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    return "\r\n".join(lines).encode() + END_OF_HEAD + (body if with_body else b"")
