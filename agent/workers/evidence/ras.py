"""Asks NCCL's RAS port: NCCL 2.24 or newer says there, as text, what it knows of all processes of the job.

Every process of NCCL listens at the same address of its node, and one of them answers for all: which processes are
missing or dead, and in which communicators the ranks have launched different numbers of operations. Nothing follows
from that for a verdict: ranks are counted within a communicator, and numbers that differ are usual while a job runs.
It is kept for people.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping

from ....rendezvous.text import clean

ADDRESS = "localhost:28028"
"""NCCL's own default of NCCL_RAS_ADDR."""
WITHIN_S = 1.0
"""From the beginning of the connection to the last byte."""
CONNECT_S = 0.1
"""Of these: on the same machine a port takes a connection at once, or not at all."""
MOST_BYTES = 256 * 1024
MOST_FINDINGS = 16
_MOST_LINE = 1000
_ORDERS = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n"
_GREETING = "SERVER PROTOCOL "
_HEADINGS = ("Errors", "Warnings")


def addresses(environment: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Where it may listen, by the variables that NCCL reads, too. None: it is off, or the name is one that a name
    server would have to resolve.

    >>> addresses({}), addresses({"NCCL_RAS_ADDR": "[::1]:4000"}), addresses({"NCCL_RAS_ENABLE": "0"})
    ((('127.0.0.1', 28028), ('::1', 28028)), (('::1', 4000),), ())
    """
    if environment.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return ()
    host, _, port = environment.get("NCCL_RAS_ADDR", ADDRESS).rpartition(":")
    host = host.strip("[]")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16):
        return ()
    if host == "localhost":
        return ("127.0.0.1", int(port)), ("::1", int(port))
    try:
        return ((str(ipaddress.ip_address(host)), int(port)),)
    except ValueError:
        return ()


class Question:
    """Asked, and not answered yet."""

    def __init__(self, connection: socket.socket, until: float, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._until = until
        self._clock = clock

    def end(self) -> str:
        """The answer, as far as it came in time; empty if none came, or one that is not RAS's."""
        with self._connection as connection:
            read, whole = self._read(connection)
        greeting, *lines = read.decode(errors="replace").split("\n")
        if not greeting.startswith(_GREETING):
            return ""
        lines = lines[1:] if lines[:1] == ["OK"] else lines
        if not whole:
            lines.append(
                f"... (cut: no more than {MOST_BYTES} bytes, or what comes within {WITHIN_S:g} s, is kept)"
            )
        return "\n".join(clean(line)[:_MOST_LINE] for line in lines).strip("\n")

    def _read(self, connection: socket.socket) -> tuple[bytes, bool]:
        """`whole`: it has said all."""
        read = bytearray()
        while len(read) < MOST_BYTES:
            try:
                # When the time is over, what has come already is still read.
                connection.settimeout(max(0.0, self._until - self._clock()))
                some = connection.recv(MOST_BYTES - len(read))
            except OSError:
                return bytes(read), False
            if not some:
                return bytes(read), True
            read += some
        return bytes(read), False


def ask(where: tuple[tuple[str, int], ...], clock: Callable[[], float]) -> Question | None:
    """None where nothing listens."""
    until = clock() + WITHIN_S
    for address in where:
        try:
            connection = socket.create_connection(address, timeout=CONNECT_S)
        except OSError:
            continue
        try:
            connection.sendall(_ORDERS)
        except OSError:
            connection.close()
            continue
        return Question(connection, until, clock)
    return None


def findings(answer: str) -> Iterator[str]:
    """The first lines of what it calls errors and warnings."""
    lines = answer.split("\n")
    begin = next((at for at, line in enumerate(lines) if line in _HEADINGS), len(lines))
    told = (line for line in lines[begin:] if line.strip("=") and line not in _HEADINGS)
    for _, line in zip(range(MOST_FINDINGS), told, strict=False):
        yield f"NCCL's RAS: {line.strip()}"
