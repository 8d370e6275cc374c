"""Reads and answers what this node's workers send (`worker/wire/messages.py`), in the io thread.

There are two sockets, in a folder that only this user can enter. Datagrams are reports. On the stream socket a worker
either asks one question over a connection of its own, and is answered once, in a thread of its own: the store may have
to be asked. Or it guards its last step: then its connection lasts as long as it does, its messages are posted, and the
main loop answers them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

from ...codec import Invalid, kind_of
from ...threads import Thread
from ...worker.wire.channel import Lines
from ...worker.wire.channel import send as send_answer
from ...worker.wire.environment import WorkerEnv
from ...worker.wire.messages import (
    FROM_WORKERS,
    MAX_BYTES,
    CommitAnswer,
    CommitQuestion,
    FromGuard,
    Guarding,
    Question,
    StepAnswer,
    ToGuard,
    encode,
)
from ..common.events import Event, IoThread
from .commit_fence import CommitFence
from .last_steps import LastSteps, Receiver
from .worker_reports import ReportReceiver

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1
"""The rest of the listener after this process ran out of file descriptors; the connection waits."""

ANSWER_S = 2.0
"""How long a worker may take to take its answer."""

MAX_CLIENTS = 512
"""Connections at once, of workers that have not asked yet or guard; the next one is closed."""


class WorkerLinks:
    """`send` is for the main loop."""

    def __init__(
        self,
        env: WorkerEnv,
        commits: CommitFence,
        steps: LastSteps,
        reports: ReportReceiver,
        io: IoThread,
        post: Callable[[Event], None],
    ) -> None:
        self._commits = commits
        self._steps = steps
        self._reports = reports
        self._io = io
        self._post = post
        self._receiver: Receiver | None = None
        """Since `start`."""
        self._clients: dict[socket.socket, _Client] = {}
        """Those that have not asked yet, and those that guard. For the io thread."""
        self._guards: dict[tuple[int, int], socket.socket] = {}
        """By generation and local rank. For the io thread."""
        self._out_of_descriptors = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(env.socket)
        self._listener.listen(MAX_CLIENTS)
        self._listener.setblocking(False)

    def start(self, receiver: Receiver) -> None:
        """`receiver` is told what workers send, in the main loop."""
        self._receiver = receiver
        self._io.watch(self._reports.socket.fileno(), partial(self._reports.read, receiver))
        self._listen()

    def close(self) -> None:
        if not self._io.post(self._end):
            self._end()

    def send(self, generation: int, local_rank: int, message: ToGuard) -> None:
        self._io.post(partial(self._send, (generation, local_rank), message))

    def after_reports(self, then: Callable[[], object]) -> None:
        """Call `then` once the reports that have been sent until now are posted. For any thread, after the workers."""

        def read() -> None:
            try:
                if self._reports.socket.fileno() >= 0 and self._receiver is not None:
                    while self._reports.read(self._receiver):
                        pass  # the kernel queues few, and no worker is left that sends more
            finally:
                then()  # the agent's end waits for it

        if not self._io.post(read):
            then()

    # ---------------------------------------------------------------- reading

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:  # it was not closed while it rested
            self._io.watch(self._listener.fileno(), self._accept)

    def _end(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        for ours in (self._listener, self._reports.socket):
            self._io.forget(ours.fileno())
            ours.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not self._out_of_descriptors:
                log.warning("cannot accept a worker's connection: %s", error)
            self._out_of_descriptors = True
            self._io.forget(self._listener.fileno())
            self._io.later(ACCEPT_PAUSE_S, self._listen)
            return
        self._out_of_descriptors = False
        if len(self._clients) == MAX_CLIENTS:
            connection.close()
            return
        client = self._clients[connection] = _Client(connection)
        self._io.watch(connection.fileno(), partial(self._read, client))

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(MAX_BYTES, socket.MSG_DONTWAIT)
            for message in client.lines.add(data):
                if isinstance(message, Question):
                    self._forget(client)
                    answer = partial(self._answer, client.connection, message)
                    Thread(answer, "worker-answer", client.connection.close).start()
                    return
                self._pass_on(client, message)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""  # it was killed with words of ours unread
        except (OSError, Invalid) as error:
            log.warning("a worker's connection is closed: %s", error)
            data = b""
        if not data:
            self._drop(client)

    def _pass_on(self, client: _Client, message: FromGuard) -> None:
        if isinstance(message, Guarding):
            if client.guards is not None:
                raise Invalid("a second Guarding from a worker")
            client.guards = message.generation, message.local_rank
            self._guards[client.guards] = client.connection
        if client.guards is None:
            raise Invalid(f"{kind_of(type(message))} from a worker that has sent no Guarding")
        self._post_of_guard(client.guards, message)

    def _post_of_guard(self, guard: tuple[int, int], message: FromGuard | None) -> None:
        assert self._receiver is not None, "no worker connects before `start`"
        self._post(partial(self._receiver.guard_sent, *guard, message))

    def _send(self, guard: tuple[int, int], message: ToGuard) -> None:
        connection = self._guards.get(guard)
        if connection is not None:
            try:
                connection.send(encode(message), socket.MSG_DONTWAIT)
            except OSError as error:
                log.debug("local rank %d does not take %s: %s", guard[1], kind_of(type(message)), error)

    def _forget(self, client: _Client) -> None:
        self._io.forget(client.connection.fileno())
        del self._clients[client.connection]
        if client.guards is not None and self._guards.get(client.guards) is client.connection:
            del self._guards[client.guards]
            self._post_of_guard(client.guards, None)

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        client.connection.close()

    # ---------------------------------------------------------------- answering

    def _answer(self, connection: socket.socket, question: Question) -> None:
        answer: CommitAnswer | StepAnswer
        with connection:
            if isinstance(question, CommitQuestion):
                answer = self._commits.answer(question)
            else:
                assert self._receiver is not None, "no worker asks before `start`"
                answer = self._steps.answer(question, self._receiver)
            try:
                send_answer(connection, answer, ANSWER_S)
            except OSError as error:
                log.warning("a worker does not take its answer to %s: %s", question, error)


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines(FROM_WORKERS)
        self.guards: tuple[int, int] | None = None
        """Its generation and local rank, of one that guards its last step."""
