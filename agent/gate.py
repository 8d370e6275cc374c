"""A UNIX socket at which this node's workers ask one question each, and get one answer.

One thread accepts, and one for each client answers: who hangs delays nobody else. A client sends one line and gets
one; the answer may take its time (the store is asked), and a client that has gone meanwhile is its own business.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from ..rendezvous.threads import Thread
from ..worker.wire.channel import receive, send
from ..worker.wire.codec import Checked, Codec, Invalid

log = logging.getLogger(__name__)

_Question = TypeVar("_Question")

CLIENT_S = 2.0
"""How long a worker may take to ask once it is connected, and to take its answer."""

ACCEPT_PAUSE_S = 1.0
"""The rest after this process ran out of file descriptors."""


class Gate(Generic[_Question]):
    """See the module's docstring. `answer` is called by many threads."""

    def __init__(
        self,
        path: Path,
        subject: str,
        questions: Codec[_Question],
        reply: Callable[[_Question], Checked],
        *,
        most: int,
    ) -> None:
        """`subject` names what is asked about, in the log. More than `most` clients at once wait in the backlog."""
        self.path = path
        self._subject = subject
        self._questions = questions
        self._reply_to = reply
        self._places = threading.BoundedSemaphore(most)
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def start(self) -> None:
        Thread(self._accept, f"{self._subject}-gate").start()

    def close(self) -> None:
        self._closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone does not
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                self._places.release()
                if self._closed.is_set():
                    return
                log.warning("cannot accept a question about a %s: %s", self._subject, error)
                self._closed.wait(ACCEPT_PAUSE_S)
                continue
            ended = partial(self._ended, connection)
            Thread(partial(self._serve, connection), f"{self._subject}-client", ended).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            send(connection, self._reply_to(receive(connection, self._questions, CLIENT_S)), CLIENT_S)
        except (OSError, Invalid) as error:
            log.warning("a question about a %s is left without an answer: %s", self._subject, error)
        self._ended(connection)

    def _ended(self, connection: socket.socket) -> None:
        """Answered or not: the client hears that there is no more to come."""
        connection.close()
        self._places.release()
