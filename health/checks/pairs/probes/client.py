"""Asks another node's `server`: does it answer, how fast is a byte, how fast are many, and what time is it there.

Every wait has an end, whatever the other side does. What keeps a node from the other one is an `Obstacle`, told apart
by what the kernel says: silence is a packet filter that drops, or a cable; a refusal comes from the machine itself.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .....codec import from_plain, plain
from ...processes import read_order, say
from ..results import Measurement, Obstacle, ProbeEndpoint, Reach

CONNECT_S = 3.0
"""The kernel sends SYN at once and after 1 s, and a third one just after this time."""
ANSWER_S = 2.0
ROUND_TRIPS = 100
LATENCY_S = 3.0
"""For all round trips: fewer count, too, where they are slow."""
TIMES = 9
STREAM_S = 0.5
STREAMS = 2
"""One after the other, of which the faster one counts: a machine may have been busy for a moment."""
CHUNK = 1 << 18
AT_ONCE = 64
LARGE_VANISH = "single bytes pass, and of a stream nothing does"

_BY_ERRNO = {
    errno.ECONNREFUSED: Obstacle.REFUSED,
    errno.ETIMEDOUT: Obstacle.DROPPED,
    errno.EHOSTUNREACH: Obstacle.NO_ROUTE,
    errno.ENETUNREACH: Obstacle.NO_ROUTE,
    errno.EHOSTDOWN: Obstacle.NO_ROUTE,
    errno.EPERM: Obstacle.FORBIDDEN,
    errno.EACCES: Obstacle.FORBIDDEN,
    errno.ECONNRESET: Obstacle.RESET,
    errno.EPIPE: Obstacle.RESET,
}

REACH, ECHO, TIME, SINK, SOURCE = b"r", b"e", b"t", b"i", b"o"
"""What a probe wants, as the byte after what it has to show."""
INSTANT = struct.Struct("!d")
STREAMED = struct.Struct("!Qd")
"""Bytes and seconds."""


class Blocked(Exception):
    """The other node does not answer as it should."""

    def __init__(self, obstacle: Obstacle, detail: str) -> None:
        super().__init__(detail)
        self.obstacle, self.detail = obstacle, detail[:512]


def reach(me: str, address: str, endpoints: Sequence[ProbeEndpoint]) -> tuple[Reach, ...]:
    """Try them all, at once but for a bound."""

    def one(endpoint: ProbeEndpoint) -> Reach:
        try:
            with opened(endpoint, address, REACH):
                return Reach(me, endpoint.node)
        except Blocked as problem:
            return Reach(me, endpoint.node, problem.obstacle, problem.detail)

    if not endpoints:
        return ()
    with ThreadPoolExecutor(min(AT_ONCE, len(endpoints))) as pool:
        return tuple(pool.map(one, endpoints))


def measure(
    me: str, address: str, endpoint: ProbeEndpoint, number: int, clock: Callable[[], float] = time.monotonic
) -> Measurement:
    """`address` is this node's own, and `number` the round. Never raises."""
    found = Measurement(number, me, endpoint.node)
    try:
        with opened(endpoint, address, ECHO) as connection:
            found = replace(found, latency_s=_latency(connection, clock))
        with opened(endpoint, address, TIME) as connection:
            found = replace(found, clock_offset_s=_offset(connection, clock))
        for _ in range(STREAMS):
            with opened(endpoint, address, SINK) as connection:
                found = replace(found, sent=max(found.sent or 0.0, _send(connection, clock)))
            with opened(endpoint, address, SOURCE) as connection:
                received = receive_stream(connection, clock)[0]
                found = replace(found, received=max(found.received or 0.0, received))
            if 0.0 in (found.sent, found.received):
                break
    except Blocked as problem:
        return replace(found, obstacle=problem.obstacle, detail=problem.detail)
    if 0.0 in (found.sent, found.received):
        return replace(found, obstacle=Obstacle.SILENT, detail=LARGE_VANISH)
    return found


@contextlib.contextmanager
def opened(endpoint: ProbeEndpoint, source: str, want: bytes) -> Iterator[socket.socket]:
    """A connection from the address `source` on which `endpoint` has answered as only it can. Raises Blocked, also for
    errors of the connection in the body."""
    try:
        with _connected(endpoint, source) as connection:
            connection.settimeout(ANSWER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(endpoint.request_token.encode() + want)
            answer = receive_exactly(connection, len(endpoint.reply_token))
            if not hmac.compare_digest(answer, endpoint.reply_token.encode()):
                raise Blocked(Obstacle.STRANGER, "another program answers there")
            yield connection
    except TimeoutError as error:
        detail = f"the connection came to be, and no answer within {ANSWER_S:g} s"
        raise Blocked(Obstacle.SILENT, detail) from error
    except OSError as error:
        raise Blocked(_BY_ERRNO.get(error.errno or 0, Obstacle.OWN), error.strerror or str(error)) from error


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Fewer bytes only at the end of the stream. Raises OSError."""
    found = b""
    while len(found) < count and (more := connection.recv(count - len(found))):
        found += more
    return found


def receive_stream(connection: socket.socket, clock: Callable[[], float]) -> tuple[float, int, float]:
    """Rate, bytes and seconds of what comes within `STREAM_S` after the first packet; all 0 when none comes in time.

    The first packet starts the clock and is not counted: what had gathered on the way would look like speed.
    """
    room = bytearray(CHUNK)
    began: float | None = None
    count, ends = 0, clock() + ANSWER_S
    with contextlib.suppress(TimeoutError):
        while (left_s := ends - clock()) > 0.0:
            connection.settimeout(left_s)
            got = connection.recv_into(room)
            if not got:
                break
            if began is None:
                began = clock()
                ends = began + STREAM_S
            else:
                count += got
    if began is None:
        return 0.0, 0, 0.0
    took_s = max(clock() - began, 1e-6)
    return count / took_s, count, took_s


def _connected(endpoint: ProbeEndpoint, source: str) -> socket.socket:
    """Raises Blocked."""
    try:
        family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
        to = socket.getaddrinfo(endpoint.address, endpoint.port, family, flags=socket.AI_NUMERICHOST)[0][4]
        own = socket.getaddrinfo(source, 0, family, flags=socket.AI_NUMERICHOST)[0][4]
    except OSError as error:
        raise Blocked(Obstacle.OWN, f"{source} cannot ask {endpoint.address}: {error}") from error
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        connection.bind(own)
        connection.connect(to)
    except TimeoutError as error:
        connection.close()
        raise Blocked(Obstacle.DROPPED, f"no answer to SYN within {CONNECT_S:g} s") from error
    except OSError as error:
        connection.close()
        raise Blocked(_BY_ERRNO.get(error.errno or 0, Obstacle.OWN), error.strerror or str(error)) from error
    return connection


def _latency(connection: socket.socket, clock: Callable[[], float]) -> float:
    took: list[float] = []
    ends = clock() + LATENCY_S
    while len(took) < ROUND_TRIPS and clock() < ends:
        began = clock()
        connection.sendall(b"x")
        _one_answer(connection, 1)
        took.append(clock() - began)
    return statistics.median(took)


def _offset(connection: socket.socket, clock: Callable[[], float]) -> float:
    """By the fastest of some exchanges, as NTP does: the other clock was read about in its middle."""
    found = []
    for _ in range(TIMES):
        began, instant = clock(), time.time()
        connection.sendall(b"x")
        (there,) = INSTANT.unpack(_one_answer(connection, INSTANT.size))
        took_s = clock() - began
        found.append((took_s, there - instant - took_s / 2))
    offset = min(found)[1]
    if not abs(offset) < 2**40:  # NaN, too
        raise Blocked(Obstacle.STRANGER, "the answer is no instant")
    return float(offset)


def _send(connection: socket.socket, clock: Callable[[], float]) -> float:
    """Send until the other side says at which rate it came. 0 when it says nothing."""
    chunk, answer = memoryview(bytes(CHUNK)), b""
    ends = clock() + STREAM_S + 2 * ANSWER_S
    connection.setblocking(False)
    while len(answer) < STREAMED.size and (left_s := ends - clock()) > 0.0:
        readable, writable, _ = select.select([connection], [connection], [], left_s)
        if readable:
            more = connection.recv(STREAMED.size - len(answer))
            if not more:
                raise Blocked(Obstacle.RESET, "the connection was closed in the middle of the stream")
            answer += more
        elif writable:
            connection.send(chunk)
    # What has not been sent yet need not arrive.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if len(answer) < STREAMED.size:
        return 0.0
    count, took_s = STREAMED.unpack(answer)
    if not (0 < took_s < 60.0 and count < 2**50):
        return 0.0
    return float(count / took_s)


def _one_answer(connection: socket.socket, count: int) -> bytes:
    answer = receive_exactly(connection, count)
    if len(answer) < count:
        raise Blocked(Obstacle.RESET, "the connection was closed in the middle")
    return answer


def main() -> None:
    """Reaches all `endpoints`, or measures the only one in a `round`."""
    order = read_order()
    me, address = order["me"], order["address"]
    endpoints = [from_plain(ProbeEndpoint, endpoint) for endpoint in order["endpoints"]]
    if order["round"] is None:
        say({"reached": plain(reach(me, address, endpoints))})
    else:
        say({"measured": plain(measure(me, address, endpoints[0], order["round"]))})
