"""Answers the probes of other nodes: echoes a byte, says the time, takes a stream, sends one.

Any program may connect. One that does not begin with the check's request token gets nothing and is cut off; at most
`AT_ONCE` are served at a time, each for `LONGEST_S` at most, and nothing that they send is kept.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .....codec import from_plain
from .....threads import Thread
from ...processes import read_order, say, wait_for_end
from ..results import ProbeEndpoint
from .client import (
    ANSWER_S,
    CHUNK,
    ECHO,
    INSTANT,
    REACH,
    SINK,
    SOURCE,
    STREAM_S,
    STREAMED,
    TIME,
    receive_exactly,
    receive_stream,
)

AT_ONCE = 128
LONGEST_S = 8.0
MOST_ECHOES = 1000

wall_clock = time.time


def serve(
    listener: socket.socket, endpoint: ProbeEndpoint, clock: Callable[[], float] = time.monotonic
) -> None:
    """Until the listener is closed or shut down."""
    room = threading.Semaphore(AT_ONCE)

    def one(client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError):
                _answer(client, endpoint, clock)
        finally:
            room.release()

    listener.settimeout(None)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="answer") as pool:
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


def _answer(client: socket.socket, endpoint: ProbeEndpoint, clock: Callable[[], float]) -> None:
    client.settimeout(ANSWER_S)
    shown = receive_exactly(client, len(endpoint.request_token) + 1)
    if not hmac.compare_digest(shown[:-1], endpoint.request_token.encode()):
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(endpoint.reply_token.encode())
    ends = clock() + LONGEST_S
    want = shown[-1:]
    if want == REACH:
        client.recv(1)  # the other side closes first, so that no port here waits for what may still come
    elif want == ECHO:
        _echo(client, ends, clock, lambda: b"x")
    elif want == TIME:
        _echo(client, ends, clock, lambda: INSTANT.pack(wall_clock()))
    elif want == SINK:
        _take(client, ends, clock)
    elif want == SOURCE:
        _send(client, clock)


def _echo(
    client: socket.socket, ends: float, clock: Callable[[], float], answer: Callable[[], bytes]
) -> None:
    for _ in range(MOST_ECHOES):
        if clock() >= ends or not client.recv(1):
            return
        client.sendall(answer())


def _take(client: socket.socket, ends: float, clock: Callable[[], float]) -> None:
    _, count, took_s = receive_stream(client, clock)
    client.settimeout(ANSWER_S)
    client.sendall(STREAMED.pack(count, took_s))
    # To close now would send a reset, and the answer might be lost to it.
    while clock() < ends and client.recv(CHUNK):
        pass


def _send(client: socket.socket, clock: Callable[[], float]) -> None:
    chunk = memoryview(bytes(CHUNK))
    ends = clock() + STREAM_S + ANSWER_S
    while (left_s := ends - clock()) > 0.0:
        client.settimeout(left_s)
        client.send(chunk)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def main() -> None:
    """Serves at the listener with this descriptor until standard input ends."""
    order = read_order()
    listener = socket.socket(fileno=order["listener"])
    endpoint = from_plain(ProbeEndpoint, order["endpoint"])
    Thread(lambda: serve(listener, endpoint), "serve").start()
    say({"serves": True})
    wait_for_end()
    os._exit(0)  # whatever its threads still send
