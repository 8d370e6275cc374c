"""The agent's end of the connections over which workers learn that their generation has failed.

One thread reads them all and posts what they say; the main loop answers. It costs nothing while nothing fails.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..rendezvous.threads import Thread
from ..worker.wire.channel import Lines
from ..worker.wire.codec import Invalid, kind_of
from ..worker.wire.messages import FROM_GUARDS, FromGuard, Guarding, ToGuard, encode
from .events import Event, JustInTimeMessage

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1
"""The rest after this process ran out of file descriptors; the connection waits."""

MAX_GUARDS = 256
"""Connections at once; more are broken."""


class SalvageGate:
    """One thread; `tell` is for the main loop."""

    def __init__(self, path: Path, post: Callable[[Event], None]) -> None:
        self.path = path
        self._post = post
        self._guards: dict[tuple[int, int], socket.socket] = {}
        """By generation and local rank."""
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)

    def start(self) -> None:
        Thread(self._serve, "salvage-gate").start()

    def close(self) -> None:
        self._waker.close()

    def tell(self, generation: int, local_rank: int, message: ToGuard) -> None:
        with self._lock:
            connection = self._guards.get((generation, local_rank))
            if connection is not None:
                try:
                    connection.send(encode(message), socket.MSG_DONTWAIT)
                except OSError as error:
                    log.debug("rank %d does not hear %s: %s", local_rank, kind_of(type(message)), error)

    def _serve(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj, key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("cannot accept a worker's connection: %s", error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        if len(self._selector.get_map()) > MAX_GUARDS:
            connection.close()
        else:
            self._selector.register(connection, selectors.EVENT_READ, _Guard())

    def _read(self, connection: socket.socket, guard: _Guard) -> None:
        try:
            data = connection.recv(4096, socket.MSG_DONTWAIT)
            for message in guard.lines.add(data):
                self._hear(connection, guard, message)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""  # it was killed with words of ours unread
        except (OSError, Invalid) as error:
            log.warning("a worker's connection is closed: %s", error)
            data = b""
        if not data:
            self._drop(connection, guard)

    def _hear(self, connection: socket.socket, guard: _Guard, message: FromGuard) -> None:
        if isinstance(message, Guarding):
            guard.name = message.generation, message.local_rank
            with self._lock:
                self._guards[guard.name] = connection
        if guard.name is None:
            raise Invalid(f"{kind_of(type(message))} from a worker that has not said who it is")
        self._post(JustInTimeMessage(*guard.name, message))

    def _drop(self, connection: socket.socket, guard: _Guard) -> None:
        self._selector.unregister(connection)
        with self._lock:
            connection.close()
            if guard.name is None or self._guards.get(guard.name) is not connection:
                return
            del self._guards[guard.name]
        self._post(JustInTimeMessage(*guard.name, None))


class _Guard:
    """What is known of one connection."""

    def __init__(self) -> None:
        self.lines = Lines(FROM_GUARDS)
        self.name: tuple[int, int] | None = None
