"""One request over HTTP, answered whole, in time and within a size, or not at all.

Any program may listen there: no answer makes `request` or `get` raise anything but what it declares. Never through a
proxy: agents and metadata servers are asked directly.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...rendezvous.records import Endpoint


class NoAnswer(Exception):
    """What came back is no answer of HTTP, too long, or, for `get`, no page of an agent: not status 200, no text."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An HTTP answer."""

    status: int
    body: bytes = b""


class _Bounded(socket.socket):
    """All that is read of it comes before one deadline."""

    left_s: Callable[[], float]

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self.left_s())
        return super().recv_into(*args)


def request(
    server: Endpoint,
    path: str,
    clock: Callable[[], float],
    timeout_s: float,
    max_bytes: int,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> HttpReply:
    """The answer, with a body of at most `max_bytes`.

    Raises ConnectionRefusedError when no process listens there any more, another OSError when the other side cannot be
    reached or is silent, and NoAnswer.
    """
    deadline = clock() + timeout_s

    def left_s() -> float:
        if (left := deadline - clock()) <= 0.0:
            raise TimeoutError(f"no whole answer within {timeout_s:g} s")
        return left

    connection = http.client.HTTPConnection(server.address, server.port)
    try:
        connected = socket.create_connection((server.address, server.port), timeout_s)
        with _Bounded(fileno=connected.detach()) as bounded:
            bounded.left_s = left_s
            bounded.settimeout(left_s())
            connection.sock = bounded
            connection.request(method, path, headers={**(headers or {}), "Connection": "close"})
            response = connection.getresponse()
            body = response.read(max_bytes + 1)
    except (http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"no answer of HTTP, but {error!r}") from error
    finally:
        connection.close()
    if len(body) > max_bytes:
        raise NoAnswer(f"more than {max_bytes} bytes")
    return HttpReply(response.status, body)


def get(server: Endpoint, path: str, clock: Callable[[], float], timeout_s: float, max_bytes: int) -> str:
    """The page of an agent at `path`. Raises as `request` does."""
    reply = request(server, path, clock, timeout_s, max_bytes)
    if reply.status != 200:
        raise NoAnswer(f"no HTTP answer with status 200, but {reply.status}")
    try:
        return reply.body.decode()
    except UnicodeDecodeError as error:
        raise NoAnswer("no text") from error
