"""What one node finds out about another one. Each probe has a process of its own, which `processes` starts and bounds.

The *client* asks another node's *server*: does it answer, what time is it there, how fast is a byte, and how fast are
many. Every wait has an end, whatever the other side does. What keeps a node from the other one is an `Obstacle`, told
apart by what the kernel says: silence is a packet filter that drops, or a cable; a refusal comes from the machine
itself. Any program may connect to the server. One that does not begin with the check's request token gets nothing and
is cut off; at most `SERVED_AT_ONCE` are served at a time, each for `LONGEST_S` at most, and nothing of theirs is kept.

A small *all-reduce* of two nodes is done as the workers of a job do it: one process on each, started for one pair. It
imports torch, then reads its order: the one that measures first lets torch be imported meanwhile.

A *directory* is one for several nodes when each sees the small file that another has written there. The file is removed
as soon as standard input ends, which it does with the process that started this one. A file is looked for by opening
its name, and not before all are written: a file server's client may remember for seconds that there is no such file,
and less often opens what is none.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import statistics
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...codec import from_plain, plain
from ...threads import Thread
from .pairs import Measurement, Obstacle, ProbeEndpoint, Reach
from .processes import read_order, say, wait_for_end

CONNECT_S = 3.0
"""The kernel sends SYN at once and after 1 s, and a third one just after this time."""
ANSWER_S = 2.0
ROUND_TRIPS = 100
LONGEST_EXCHANGE_S = 0.5
"""Half of it is how much a clock may seem to be off."""
LATENCY_S = 3.0
"""For all round trips: fewer count, too, where they are slow."""
STREAM_S = 0.5
STREAMS = 2
"""One after the other, of which the faster one counts: a machine may have been busy for a moment."""
CHUNK = 1 << 18
ASKED_AT_ONCE = 64
LARGE_VANISH = "single bytes pass, and of a stream nothing does"

_BY_ERRNO = {
    errno.ECONNREFUSED: Obstacle.REFUSED,
    errno.ETIMEDOUT: Obstacle.DROPPED,
    errno.EHOSTUNREACH: Obstacle.NO_ROUTE,
    errno.ENETUNREACH: Obstacle.NO_ROUTE,
    errno.EHOSTDOWN: Obstacle.NO_ROUTE,
    errno.EPERM: Obstacle.NO_ROUTE,
    errno.EACCES: Obstacle.NO_ROUTE,
    errno.ECONNRESET: Obstacle.RESET,
    errno.EPIPE: Obstacle.RESET,
}

REACH, ECHO, SINK, SOURCE = b"r", b"e", b"i", b"o"
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
            with opened(endpoint, address, REACH) as connection:
                return Reach(me, endpoint.node, clock_offset_s=_offset(connection))
        except Blocked as problem:
            return Reach(me, endpoint.node, problem.obstacle, problem.detail)

    if not endpoints:
        return ()
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(endpoints))) as pool:
        return tuple(pool.map(one, endpoints))


def measure(me: str, address: str, endpoint: ProbeEndpoint, number: int) -> Measurement:
    """`address` is this node's own, and `number` the round. Never raises."""
    found = Measurement(number, me, endpoint.node)
    try:
        with opened(endpoint, address, ECHO) as connection:
            found = replace(found, latency_s=_latency(connection))
        for _ in range(STREAMS):
            with opened(endpoint, address, SINK) as connection:
                found = replace(found, sent=max(found.sent or 0.0, _send_to(connection)))
            with opened(endpoint, address, SOURCE) as connection:
                received = receive_stream(connection)[0]
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


def receive_stream(connection: socket.socket) -> tuple[float, int, float]:
    """Rate, bytes and seconds of what comes within `STREAM_S` after the first packet; all 0 when none comes in time.

    The first packet starts the clock and is not counted: what had gathered on the way would look like speed.
    """
    room = bytearray(CHUNK)
    began: float | None = None
    count, ends = 0, time.monotonic() + ANSWER_S
    with contextlib.suppress(TimeoutError):
        while (left_s := ends - time.monotonic()) > 0.0:
            connection.settimeout(left_s)
            got = connection.recv_into(room)
            if not got:
                break
            if began is None:
                began = time.monotonic()
                ends = began + STREAM_S
            else:
                count += got
    if began is None:
        return 0.0, 0, 0.0
    took_s = max(time.monotonic() - began, 1e-6)
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


def _latency(connection: socket.socket) -> float:
    took: list[float] = []
    ends = time.monotonic() + LATENCY_S
    while len(took) < ROUND_TRIPS and time.monotonic() < ends:
        began = time.monotonic()
        connection.sendall(b"x")
        _one_answer(connection, 1)
        took.append(time.monotonic() - began)
    return statistics.median(took)


def _offset(connection: socket.socket) -> float | None:
    """As NTP does: the other clock was read about in the middle of the exchange. None: it was too long, or the answer
    is no instant."""
    began, instant = time.monotonic(), time.time()
    connection.sendall(b"x")
    (there,) = INSTANT.unpack(_one_answer(connection, INSTANT.size))
    took_s = time.monotonic() - began
    offset = float(there - instant - took_s / 2)
    return offset if took_s < LONGEST_EXCHANGE_S and abs(offset) < 2**40 else None  # nor is NaN


def _send_to(connection: socket.socket) -> float:
    """Send until the other side says at which rate it came. 0 when it says nothing."""
    chunk, answer = memoryview(bytes(CHUNK)), b""
    ends = time.monotonic() + STREAM_S + 2 * ANSWER_S
    connection.setblocking(False)
    while len(answer) < STREAMED.size and (left_s := ends - time.monotonic()) > 0.0:
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


def client_main() -> None:
    """Reaches all `endpoints`, or measures the only one in a `round`."""
    order = read_order()
    me, address = order["me"], order["address"]
    endpoints = [from_plain(ProbeEndpoint, endpoint) for endpoint in order["endpoints"]]
    if order["round"] is None:
        say({"reached": plain(reach(me, address, endpoints))})
    else:
        say({"measured": plain(measure(me, address, endpoints[0], order["round"]))})


# --- The server

SERVED_AT_ONCE = 128
LONGEST_S = 8.0
MOST_ECHOES = 1000

wall_clock = time.time


def serve(listener: socket.socket, endpoint: ProbeEndpoint) -> None:
    """Until the listener is closed or shut down."""
    room = threading.Semaphore(SERVED_AT_ONCE)

    def one(client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError):
                _answer(client, endpoint)
        finally:
            room.release()

    listener.settimeout(None)
    with ThreadPoolExecutor(SERVED_AT_ONCE, thread_name_prefix="answer") as pool:
        while True:
            room.acquire()
            try:
                client, _ = listener.accept()
            except ConnectionError:  # the client's, already gone
                room.release()
                continue
            except OSError:
                return
            pool.submit(one, client)


def _answer(client: socket.socket, endpoint: ProbeEndpoint) -> None:
    client.settimeout(ANSWER_S)
    shown = receive_exactly(client, len(endpoint.request_token) + 1)
    if not hmac.compare_digest(shown[:-1], endpoint.request_token.encode()):
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(endpoint.reply_token.encode())
    ends = time.monotonic() + LONGEST_S
    want = shown[-1:]
    if want == REACH:
        _echo(client, ends, lambda: INSTANT.pack(wall_clock()))
    elif want == ECHO:
        _echo(client, ends, lambda: b"x")
    elif want == SINK:
        _take(client, ends)
    elif want == SOURCE:
        _send(client)


def _echo(client: socket.socket, ends: float, answer: Callable[[], bytes]) -> None:
    """The other side closes first, so that no port here waits for what may still come."""
    for _ in range(MOST_ECHOES):
        if time.monotonic() >= ends or not client.recv(1):
            return
        client.sendall(answer())


def _take(client: socket.socket, ends: float) -> None:
    _, count, took_s = receive_stream(client)
    client.settimeout(ANSWER_S)
    client.sendall(STREAMED.pack(count, took_s))
    # To close now would send a reset, and the answer might be lost to it.
    while time.monotonic() < ends and client.recv(CHUNK):
        pass


def _send(client: socket.socket) -> None:
    chunk = memoryview(bytes(CHUNK))
    ends = time.monotonic() + STREAM_S + ANSWER_S
    while (left_s := ends - time.monotonic()) > 0.0:
        client.settimeout(left_s)
        client.send(chunk)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def server_main() -> None:
    """Serves at the listener with this descriptor until standard input ends."""
    order = read_order()
    listener = socket.socket(fileno=order["listener"])
    endpoint = from_plain(ProbeEndpoint, order["endpoint"])
    Thread(lambda: serve(listener, endpoint), "serve").start()
    say({"serves": True})
    wait_for_end()
    os._exit(0)  # whatever its threads still send


# --- An all-reduce

ELEMENTS = 1 << 20
"""Floats: 4 MiB."""
ALL_REDUCES = 3
ALL_REDUCE_S = 30.0
"""For each step of the two. The node that measures comes later, by all that it measures."""


def all_reduce_main() -> None:
    try:
        import torch  # noqa: F401  before the order: it takes seconds
    except ImportError as error:
        answer: dict[str, Any] = {"missing": f"torch cannot be imported: {error}"}
    else:
        try:
            order = read_order()
            answer = {"seconds": all_reduce(**order)}
        except Exception as error:  # whatever torch raises is the answer
            first = str(error).strip().split("\n", 1)[0]
            answer = {"problem": f"{type(error).__name__}: {first}"[:400]}
    say(answer)
    # Torch may hang in its own end, when the other node is gone.
    os._exit(0)


def all_reduce(
    rank: int, address: str, port: int, interface: str, key: str, backend: str, listener: int | None
) -> float:
    """Seconds of the fastest. `listener` is the descriptor of the socket at `address` and `port`, on rank 0."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    timeout = timedelta(seconds=ALL_REDUCE_S)
    own: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    store = dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout, **own)
    dist.init_process_group(
        backend, store=dist.PrefixStore(key, store), rank=rank, world_size=2, timeout=timeout
    )
    device = "cuda" if backend == "nccl" else "cpu"
    took = []
    for _ in range(ALL_REDUCES):
        tensor = torch.full((ELEMENTS,), rank + 1.0, device=device)
        began = time.monotonic()
        dist.all_reduce(tensor)
        if not bool((tensor == 3.0).all()):  # waits for the device, too
            raise ArithmeticError("the sum is wrong: memory, a device or a network card changes data")
        took.append(time.monotonic() - began)
    dist.barrier()
    return min(took)


# --- A directory

PREFIX = ".elastic-agent-check-"
LOOK_S = 3.0
"""For how long a file that is not seen is looked for again."""
PAUSE_S = 0.25


def directory_main() -> None:
    """Holds a file in `hold`, or looks for `files` in `look`."""
    order = read_order()
    if "hold" in order:
        _hold(Path(order["hold"]))
    else:
        say({"seen": look(Path(order["look"]), order["files"])})


def look(
    directory: Path,
    files: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Those of these names that are there."""
    ends, seen = clock() + LOOK_S, set[str]()
    while True:
        seen |= {name for name in files if name not in seen and _there(directory, name)}
        if len(seen) == len(files) or clock() >= ends:
            return [name for name in files if name in seen]
        sleep(PAUSE_S)


def _there(directory: Path, name: str) -> bool:
    if not name.startswith(PREFIX) or "/" in name:
        return False
    try:
        with open(directory / name, "rb") as file:
            return file.read(len(name)) == name.encode()
    except OSError:
        return False


def _hold(directory: Path) -> None:
    file = directory / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with open(file, "xb") as opened:
                opened.write(file.name.encode())
                opened.flush()
                os.fsync(opened.fileno())
            say({"file": file.name})
            wait_for_end()
        finally:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
    except OSError as error:
        say({"problem": f"{directory}: {error.strerror}"})
