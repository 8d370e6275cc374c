"""One question over HTTP to an agent, answered whole, in time and within a size, or not at all.

Any program may listen there: no answer makes `get` raise anything but what it declares.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from ...rendezvous.records import Endpoint

MAX_HEAD_BYTES = 4 * 1024


class NoAnswer(Exception):
    """What came back is no page of an agent: too late, too long, another status than 200, no text."""


def get(http: Endpoint, path: str, clock: Callable[[], float], timeout_s: float, at_most: int) -> str:
    """The page at `path`, of at most so many bytes.

    Raises ConnectionRefusedError when no process listens there any more, another OSError when the other side cannot be
    reached or is silent, and NoAnswer.
    """
    deadline = clock() + timeout_s

    def left_s() -> float:
        if (left := deadline - clock()) <= 0.0:
            raise TimeoutError(f"no whole answer within {timeout_s:g} s")
        return left

    most = MAX_HEAD_BYTES + at_most
    answer = bytearray()
    with socket.create_connection((http.address, http.port), timeout_s) as connection:
        connection.settimeout(left_s())
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        while len(answer) <= most:
            connection.settimeout(left_s())
            chunk = connection.recv(64 * 1024)
            if not chunk:
                break
            answer += chunk
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if len(answer) > most:
        raise NoAnswer(f"more than {most} bytes")
    status = head.split(b"\r\n")[0]
    if b" 200 " not in status:
        raise NoAnswer(f"no HTTP answer with status 200, but {status[:80]!r}")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise NoAnswer("no text") from error
