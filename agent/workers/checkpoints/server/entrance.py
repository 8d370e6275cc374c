"""Lets those in who have the job's key, and bounds how many others wait at the door.

A connection first has to answer the handshake (`worker/storage/replication/link.py`), for which it has `HANDSHAKE_S`.
Until then it costs a descriptor and a few bytes: at most `AT_THE_DOOR` wait, and one more costs the oldest its place.
Connections that are in, and wait for their next request, have no thread: at most `MOST_INSIDE`, and one more costs the
one that has been idle for longest its own, which then makes another.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .....worker.storage.replication.key_file import read_key
from .....worker.storage.replication.link import (
    MAC_BYTES,
    PROOF_BYTES,
    Link,
    NotAuthenticated,
    answered,
    hello,
)
from ....common.io_thread import IoThread

HANDSHAKE_S = 5.0
AT_THE_DOOR = 64
MOST_INSIDE = 1024
SILENCE_S = 10.0
"""The longest wait for bytes that a client has announced, or for room to send what it has asked for."""
AT_ONCE = 32
"""Connections that are accepted before others have their turn."""
PAUSE_S = 0.1
"""Without a descriptor for another connection."""


@dataclass(slots=True)
class _Visitor:
    connection: socket.socket
    said: bytes
    until: float
    """Monotonic."""
    proof: bytes = b""


class Entrance:
    """For the io thread, which watches all connections that no request is being answered on."""

    def __init__(
        self, listener: socket.socket, memory: str, io: IoThread, serve: Callable[[Link], None]
    ) -> None:
        """`serve` is called when a request has begun to come, and must not wait. Afterwards `wait` for the next."""
        self._listener = listener
        self._memory = memory
        self._io = io
        self._serve = serve
        self._door: dict[int, _Visitor] = {}
        """By descriptor, the oldest first."""
        self._sweeping = False
        self._inside: dict[int, Link] = {}
        listener.setblocking(False)

    def open(self) -> None:
        self._io.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """After the io thread's end."""
        for visitor in self._door.values():
            visitor.connection.close()
        for link in self._inside.values():
            link.close()

    def wait(self, link: Link) -> None:
        """For the next request on this connection."""
        descriptor = link.connection.fileno()
        if len(self._inside) >= MOST_INSIDE:
            oldest = next(iter(self._inside))
            self._io.forget(oldest, self._inside.pop(oldest).close)
        self._inside[descriptor] = link
        self._io.watch(descriptor, partial(self._asked, descriptor))

    def _asked(self, descriptor: int) -> None:
        self._io.forget(descriptor)
        self._serve(self._inside.pop(descriptor))

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._io.forget(self._listener.fileno())
                    self._io.later(PAUSE_S, self.open)
                return
            self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        visitor = _Visitor(connection, hello(), time.monotonic() + HANDSHAKE_S)
        try:
            connection.send(visitor.said)
        except OSError:
            connection.close()
            return
        if len(self._door) >= AT_THE_DOOR:
            self._turn_away(next(iter(self._door.values())))
        descriptor = connection.fileno()
        self._door[descriptor] = visitor
        self._io.watch(descriptor, partial(self._listen, visitor))
        if not self._sweeping:
            self._sweeping = True
            self._io.later(HANDSHAKE_S, self._sweep)

    def _sweep(self) -> None:
        """Those whose time is over; one pause for all, however many come and go."""
        now = time.monotonic()
        for visitor in [visitor for visitor in self._door.values() if visitor.until <= now]:
            self._turn_away(visitor)
        oldest = next(iter(self._door.values()), None)
        self._sweeping = oldest is not None
        if oldest is not None:
            self._io.later(oldest.until - now, self._sweep)

    def _turn_away(self, visitor: _Visitor) -> None:
        descriptor = visitor.connection.fileno()
        if self._door.get(descriptor) is visitor:
            del self._door[descriptor]
            self._io.forget(descriptor, visitor.connection.close)

    def _listen(self, visitor: _Visitor) -> None:
        try:
            more = visitor.connection.recv(PROOF_BYTES - len(visitor.proof))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        visitor.proof += more
        if not more:
            self._turn_away(visitor)
        elif len(visitor.proof) == PROOF_BYTES:
            self._let_in(visitor)

    def _let_in(self, visitor: _Visitor) -> None:
        connection = visitor.connection
        try:
            key = read_key(self._memory)
            link, reply = answered(connection, visitor.said, visitor.proof, key, SILENCE_S)
            if connection.send(reply) != MAC_BYTES:
                raise NotAuthenticated("the other end does not read")
        except OSError:
            self._turn_away(visitor)
            return
        descriptor = connection.fileno()
        del self._door[descriptor]
        self._io.forget(descriptor)
        self.wait(link)
