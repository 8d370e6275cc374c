"""How messages travel: lines on UNIX stream sockets, for both ends, and the worker's side of the conversations."""

from __future__ import annotations

import logging
import os
import socket
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ...codec import Checked, Codec, Invalid
from .environment import WorkerEnv
from .messages import LentLock, Report, encode

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def send(connection: socket.socket, message: Checked, timeout_s: float, *descriptors: int) -> None:
    """With open files, for one who asks for those. Raises OSError."""
    connection.settimeout(timeout_s)
    raw = encode(message)
    if descriptors:
        raw = raw[socket.send_fds(connection, [raw], descriptors) :]
    connection.sendall(raw)


def receive(
    connection: socket.socket, codec: Codec[_T], timeout_s: float, files: list[int] | None = None
) -> _T:
    """The one message that the other end sends. Raises OSError, also when it takes longer; Invalid.

    `files` gets the descriptor of a file that comes with it; the caller closes it, also after an error.
    """
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            if files is None:
                chunk = connection.recv(codec.most_bytes)
            else:
                chunk, came, *_ = socket.recv_fds(connection, codec.most_bytes, 1, socket.MSG_CMSG_CLOEXEC)
                files += came
        except TimeoutError as error:
            raise TimeoutError(f"no whole message within {timeout_s:g} s") from error
        if not chunk:
            raise Invalid(f"it ended the connection after {len(line)} bytes of a message")
        line += chunk
        if len(line) > codec.most_bytes:
            raise Invalid(f"message of more than {codec.most_bytes} bytes")
    return codec.decode(line)


def ask(address: str, question: Checked, codec: Codec[_T], timeout_s: float) -> _T:
    """The answer, over a connection of its own. Raises OSError and Invalid."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        send(connection, question, timeout_s)
        return receive(connection, codec, timeout_s)


class Lines(Generic[_T]):
    """The whole messages in what has come so far."""

    def __init__(self, codec: Codec[_T]) -> None:
        self._codec = codec
        self._rest = b""

    def add(self, data: bytes) -> list[_T]:
        """Raises Invalid."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._codec.most_bytes:
            raise Invalid(f"message of more than {self._codec.most_bytes} bytes")
        return [self._codec.decode(line) for line in lines]


class Reporter:
    """Sends this process's reports; `environ` says where to and as whom."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._pid = os.getpid()
        self._silent = True
        try:
            self._env = WorkerEnv.of(environ)
            self._silent = not self._env.reports
        except Invalid as error:
            logger.warning("no reports to the agent: reason=%s", error)

    def send(self, report: Callable[[int, int], Report | LentLock], *descriptors: int) -> bool:
        """Send the report made for this generation and local rank, with open files, or drop it: False."""
        if self._silent or os.getpid() != self._pid:
            return False
        try:
            # One for each report: they are rare, and at the end of the process nothing is left open.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
                message = encode(report(self._env.generation, self._env.local_rank))
                rights = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
                )
                channel.sendmsg([message], rights, 0, self._env.reports)
            return True
        except OSError:
            # The agent is restarting, or its queue is full: the next report carries newer news anyway.
            pass
        except (Invalid, TypeError) as error:
            # The caller's mistake, but a wrong progress report must not end a training run.
            self._silent = True
            logger.warning("no more reports to the agent: reason=%s", error)
        return False
