"""The memory server: a process of the agent that serves this node's copies to other nodes, and brings them there.

`memory_server` starts it through `shim`, so that it dies with the agent. Its standard input is a listening UNIX socket,
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
import os
import queue
import random
import resource
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .....codec import Invalid
from .....threads import Thread, listen
from .....worker.storage.replication.link import Link
from .....worker.storage.replication.messages import (
    ORDERS,
    Order,
    Replicate,
    Settled,
)
from .....worker.wire.channel import receive
from .....worker.wire.messages import ReplicationReport
from .....worker.wire.messages import encode as encode_report
from ....common.io_thread import IoThread
from .copies import VerifiedPieces
from .entrance import Entrance
from .orders import keep, kept_orders
from .rate import Rate
from .receiving import Receiver
from .replicator import Progress, Replicator
from .requests import answer
from .seals import Seals

AT_ONCE = 32
"""Requests that are answered at the same time, copies that are taken included."""
ORDER_S = 1.0
"""How long an order may take to come."""
LOOK_S = 1.0
"""Between two looks for copies, where the kernel does not tell of them."""
MOST_DESCRIPTORS = 4096


def main(memory: str, limit: str, node: str, reports: str, rate: str, listener: str) -> None:
    """Until the agent's end. `limit` in bytes, `rate` in bytes per second; `listener` is a descriptor."""
    os.nice(10)  # training comes first
    listen(_failed)
    _raise_descriptors()
    server = Server(memory, int(limit), node, int(rate), partial(_report_to, reports))
    server.serve(socket.socket(fileno=int(listener)), socket.socket(fileno=0))
    threading.Event().wait()


def _failed(name: str, error: BaseException) -> None:
    """The agent starts another process."""
    _say(f"the memory server ends, its thread {name} has failed: {error!r}")
    os._exit(1)


class Server:
    """One memory server, of which any number fit into a process."""

    def __init__(
        self, memory: str, limit: int, node: str, rate: int, report: Callable[[ReplicationReport], None]
    ) -> None:
        """`report` is called in any thread."""
        self._memory = memory
        self._io = IoThread("server")
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="answer")
        self._report = report
        self._reporting = threading.Lock()
        self._progress = Progress(0, 0, 0.0, 0, ())
        self._reported_bytes = 0
        self._verified = VerifiedPieces()
        self.receiver = Receiver(memory, limit, self._received)
        self.replicator = Replicator(memory, node, Rate(rate), self._replicated, random.Random())
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

    # ---------------------------------------------------------------- reports

    def _replicated(self, progress: Progress) -> None:
        with self._reporting:
            self._progress = progress
        self._received()

    def _received(self) -> None:
        """A replica has come, or there is another progress."""
        with self._reporting:
            found = self._progress
            new_bytes = found.sent_bytes - self._reported_bytes
            self._reported_bytes = found.sent_bytes
            held = self.receiver.held_bytes()
            self._report(
                ReplicationReport(
                    found.generation, found.step, found.lag_s, new_bytes, held, found.unreachable
                )
            )

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
                    _say(f"an order to the memory server is left: {error}")
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
                    _say(f"an order is not carried out as it should be: {type(order).__name__}: {error}")


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


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the agent's console stands still
        print(f"elastic-agent: {text}", file=sys.stderr)
