"""One line of JSON each way over a UNIX stream socket: how a worker asks its agent, and how it is answered.

A line is an object with the version of what is spoken, `{"v": 1, ...}`; what else is in it `commits` and `drain` say.
Both ends use this file. No torch here: the agent imports it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 8192


class MessageError(ValueError):
    """What the other end sent is no question and no answer; the text says why not."""


def send_line(connection: socket.socket, line: bytes, timeout_s: float) -> None:
    """Raises OSError."""
    connection.settimeout(timeout_s)
    connection.sendall(line)


def receive_line(connection: socket.socket, timeout_s: float) -> bytes:
    """The one line that the other end sends. Raises OSError, also when it takes longer; MessageError."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            chunk = connection.recv(MAX_BYTES)
        except TimeoutError as error:
            raise TimeoutError(f"no whole message within {timeout_s:g} s") from error
        if not chunk:
            raise MessageError(f"it ended the connection after {len(line)} bytes of a message")
        line += chunk
        if len(line) > MAX_BYTES:
            raise MessageError(f"message of more than {MAX_BYTES} bytes")
    return line


def to_line(version: int, body: Mapping[str, object]) -> bytes:
    return json.dumps({"v": version, **body}).encode() + b"\n"


def body_of(line: bytes, version: int) -> dict[str, Any]:
    """Raises MessageError."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"message is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise MessageError(f"message is a JSON {type(body).__name__}, expected an object")
    found = body.pop("v", None)
    if type(found) is not int or found != version:
        raise MessageError(f"message of version {found!r}, this one reads {version}")
    return body
