"""The memory server: a process of the agent that serves this node's copies to other nodes, and brings them there.

`processes` starts it through `shim`, so that it dies with the agent. Its standard input is a listening UNIX socket,
over which this node's workers send orders (`worker/storage/replication/messages.py`); another listening socket is for
other nodes, over TCP. It ignores SIGTERM: a service manager sends that to all at once, and nodes that go on need what
is here until the agent ends.

The io thread waits for connections, requests, orders and seals; a request has a thread of the pool while it is
answered, and each partner a thread that brings it copies. While nothing comes nothing turns.

The orders to replicate are kept in the agent's folder in memory, so that they outlive this process.

No torch here, nor anything else that takes long to import.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ...codec import Invalid
from ...threads import Thread, listen
from ...worker.storage.replication.client import CopyGone
from ...worker.storage.replication.key_file import read_key
from ...worker.storage.replication.link import (
    MAC_BYTES,
    PROOF_BYTES,
    Damaged,
    Link,
    NotAuthenticated,
    answered,
    hello,
)
from ...worker.storage.replication.messages import (
    ORDERS,
    REQUESTS,
    End,
    Found,
    Gone,
    List,
    Order,
    Read,
    Replicate,
    Settled,
    Stretch,
)
from ...worker.wire.channel import receive
from ...worker.wire.messages import ReplicationReport
from ...worker.wire.messages import encode as encode_report
from ..common.events import IoThread
from ..workers.processes.proc import say
from .copies import CopyReader, Seals, VerifiedPieces, copies_of, keep, kept_orders
from .receiver import Receiver
from .replicator import Replicator

AT_ONCE = 32
"""Requests that are answered at the same time, copies that are taken included."""
ORDER_S = 1.0
"""How long an order may take to come."""
LOOK_S = 1.0
"""Between two looks for copies, where the kernel does not tell of them."""
MOST_DESCRIPTORS = 4096


def main(memory: str, limit: str, node: str, reports: str, listener: str) -> None:
    """Until the agent's end. `limit` in bytes; `listener` is a descriptor."""
    os.nice(10)  # training comes first
    listen(_failed)
    _raise_descriptors()
    server = Server(memory, int(limit), node, partial(_report_to, reports))
    server.serve(socket.socket(fileno=int(listener)), socket.socket(fileno=0))
    threading.Event().wait()


def _failed(name: str, error: BaseException) -> None:
    """The agent starts another process."""
    say(f"the memory server ends, its thread {name} has failed: {error!r}")
    os._exit(1)


class Server:
    """One memory server, of which any number fit into a process."""

    def __init__(
        self, memory: str, limit: int, node: str, report: Callable[[ReplicationReport], None]
    ) -> None:
        """`report` is called in any thread."""
        self._memory = memory
        self._io = IoThread("server")
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="answer")
        self._verified = VerifiedPieces()
        self.receiver = Receiver(memory, limit)
        self.replicator = Replicator(memory, node, report, random.Random())
        self._orders: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._seals = Seals(memory)
        self._sockets: tuple[socket.socket, ...] = ()

    def serve(self, listener: socket.socket, orders: socket.socket) -> None:
        """Returns at once; `listener` is for other nodes."""
        self._sockets = listener, orders
        self._entrance = Entrance(listener, self._memory, self._io, self._serve)
        for order in kept_orders(self._memory):
            self._carry_out(order)
        self._io.start()
        self._entrance.open()
        orders.setblocking(False)
        self._io.watch(orders.fileno(), partial(self._accept_order, orders))
        if self._seals.blind:
            self._io.later(LOOK_S, self._look)
        else:
            self._io.watch(self._seals.readable, self._sealed)
        Thread(self._take_orders, "orders").start()

    def close(self) -> None:
        """For tests; the process itself is killed."""
        for listener in self._sockets:
            self._io.forget(listener.fileno(), listener.close)
        self._io.close()
        self._entrance.close()
        self.replicator.close()
        self._orders.put(None)
        self._pool.shutdown(wait=False)
        self._seals.close()

    # ---------------------------------------------------------------- requests

    def _serve(self, link: Link) -> None:
        self._pool.submit(self._answer, link)

    def _answer(self, link: Link) -> None:
        try:
            answer(link, self._memory, self.receiver, self._verified)
        except OSError:
            link.close()  # the other end is gone, or says what nothing here understands
        except BaseException:
            link.close()
            sys.excepthook(*sys.exc_info())
        else:
            self._io.post(partial(self._entrance.wait, link))

    # ---------------------------------------------------------------- seals

    def _sealed(self) -> None:
        if self._seals.read():
            self.replicator.look()
        if self._seals.blind:
            self._io.forget(self._seals.readable, self._seals.close)
            self._io.later(LOOK_S, self._look)

    def _look(self) -> None:
        self.replicator.look()
        self._io.later(LOOK_S, self._look)

    # ---------------------------------------------------------------- orders

    def _accept_order(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._orders.put(connection)

    def _take_orders(self) -> None:
        while (connection := self._orders.get()) is not None:
            with connection:
                try:
                    order = receive(connection, ORDERS, ORDER_S)
                except (OSError, Invalid) as error:
                    say(f"an order to the memory server is left: {error}")
                    continue
            if isinstance(order, Replicate):
                keep(self._memory, order)
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        parts: list[Callable[[], None]]
        if isinstance(order, Replicate):
            parts = [lambda: self.replicator.replicate(order), lambda: self.receiver.replicate(order)]
        elif isinstance(order, Settled):
            parts = [lambda: self.receiver.settle(order)]
        else:
            parts = [lambda: self.receiver.abandon(order)]
        for part in parts:
            try:
                part()
            except OSError as error:
                if os.path.isdir(self._memory):  # else the agent ends
                    say(f"an order is not carried out as it should be: {type(order).__name__}: {error}")


def _report_to(path: str, report: ReplicationReport) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
            agent.sendto(encode_report(report), path)
    except OSError:
        pass  # the agent has too much to do, or is ending


def _raise_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---------------------------------------------------------------- entrance

HANDSHAKE_S = 5.0
AT_THE_DOOR = 64
MOST_INSIDE = 1024
SILENCE_S = 10.0
"""The longest wait for bytes that a client has announced, or for room to send what it has asked for."""
ACCEPTED_AT_ONCE = 32
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
    """Lets those in who have the job's key, and bounds how many others wait at the door.

    A connection first has to answer the handshake (`worker/storage/replication/link.py`), for which it has
    `HANDSHAKE_S`. Until then it costs a descriptor and a few bytes: at most `AT_THE_DOOR` wait, and one more costs the
    oldest its place. Connections that are in, and wait for their next request, have no thread: at most `MOST_INSIDE`,
    and one more costs the one that has been idle for longest its own, which then makes another.

    For the io thread, which watches all connections that no request is being answered on.
    """

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
        for _ in range(ACCEPTED_AT_ONCE):
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


# ---------------------------------------------------------------- requests

STRETCH_BYTES = 1 << 20
MOST_CHARS = 500
NEXT_S = 0.002
"""How long a thread waits for the next request of a connection before others have it: of many small reads each comes
right after the other."""


def answer(link: Link, memory: str, receiver: Receiver, verified: VerifiedPieces) -> None:
    """The request that has begun to come, and those right behind it. Raises OSError, and then the connection is of no
    more use."""
    with _Answers(link, memory, receiver, verified) as answers:
        answers.give()
        while link.waits(NEXT_S):
            answers.give()


class _Answers:
    def __init__(self, link: Link, memory: str, receiver: Receiver, verified: VerifiedPieces) -> None:
        self._link = link
        self._memory = memory
        self._receiver = receiver
        self._verified = verified
        self._buffer = bytearray()
        self._copy: CopyReader | None = None
        """That was read last."""

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            self._copy.close()

    def give(self) -> None:
        request = self._link.receive(REQUESTS)
        if self._link.payload_bytes:
            raise Damaged("a request with a payload")
        if isinstance(request, List):
            for copy in copies_of(self._memory, request.directory):
                self._link.send(Found(copy))
            self._link.send(End())
        elif isinstance(request, Read):
            try:
                self._read(request)
            except CopyGone as gone:
                self._link.send(Gone(str(gone)[:MOST_CHARS]))
        else:
            self._receiver.receive(self._link, request)

    def _read(self, request: Read) -> None:
        copy = self._copy_of(request)
        end = request.offset + request.length
        if end > copy.header.size:
            raise CopyGone(f"the copy has {copy.header.size} bytes, and {end} are asked for")
        if len(self._buffer) < min(STRETCH_BYTES, request.length):
            self._buffer = bytearray(min(STRETCH_BYTES, request.length))
        with memoryview(self._buffer) as buffer:
            for offset in range(request.offset, end, STRETCH_BYTES):
                with buffer[: min(STRETCH_BYTES, end - offset)] as stretch:
                    if request.verify:
                        copy.verify(offset, len(stretch), self._verified.of(copy))
                    copy.read(offset, stretch)
                    self._link.send(Stretch(), stretch)

    def _copy_of(self, request: Read) -> CopyReader:
        """Raises CopyGone."""
        version = request.generation, request.step
        copy = self._copy
        if copy is not None and (copy.folder, copy.slot, copy.header.version) == (
            request.folder,
            request.slot,
            version,
        ):
            return copy
        found = CopyReader(self._memory, request.folder, request.slot, version)
        if copy is not None:
            copy.close()
        self._copy = found
        return found
