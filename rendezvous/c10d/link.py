"""One conversation between a client and the host of the c10d store.

A TCPStore client is one connection with one lock, and a call on a host that hangs never returns, whatever timeout
it was given. So a link owns two connections and two threads that may hang as long as they like:

    c10d-sender      takes calls from an outbox and pushes them to the host
    c10d-receiver    pops the replies and gives each to the thread that waits for its id

All other threads only ever wait for a future, with their own deadline. A link never recovers: at the first error it is
broken, and all threads that wait get `LinkBroken`. Opening another one is up to the store.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from ...codec import Invalid
from ...threads import Thread
from ..errors import StoreError, StoreMismatch, StoreUnavailable
from ..store.wire import (
    REQUEST_LIMIT_BYTES,
    Call,
    Caller,
    CheckGoesOn,
    Request,
    Result,
    decode_meta,
    decode_reply,
    encode_request,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore

OUTBOX = 256
"""Calls that may wait for a host that does not read."""

IDLE_TIMEOUT = timedelta(days=1)
"""For pops whose time we judge ourselves: torch logs every timeout, and counts it in 32 bits of milliseconds."""

CONNECT_TIMEOUT = timedelta(seconds=15)
"""torch asks for the name of every address that it connects to; a dead name server makes that take 10 s."""

_log = logging.getLogger(__name__)


class LinkBroken(StoreError):
    """The connection ended; another connection shows whether the host did."""


class PortClosed(StoreError):
    """The host's address refuses connections."""


class Link:
    def __init__(self, sending: TCPStore, receiving: TCPStore, host: str, client: str, number: int) -> None:
        self.host = host
        """The host's name for its present life."""
        self.broken = False
        self._client = client
        self.number = number
        self._replies = reply_queue(client, number)
        self._ids = itertools.count(1)
        self._asked: dict[int, Future[Result]] = {}
        self._asking = threading.Lock()
        self._outbox: queue.Queue[tuple[str, bytes] | None] = queue.Queue(OUTBOX)
        failed = partial(self._end, "a thread of the connection has failed")
        self._threads = (
            Thread(partial(self._send, sending), "c10d-sender", failed),
            Thread(partial(self._receive, receiving), "c10d-receiver", failed),
        )
        for thread in self._threads:
            thread.start()

    def ask(self, call: Call) -> Future[Result]:
        """Send the call; its answer comes later. Raises StoreError when it cannot even be sent."""
        number, answer = next(self._ids), Future[Result]()
        message = encode_request(Request(Caller(self._client, self.number, number), call))
        if len(message) > REQUEST_LIMIT_BYTES:
            raise StoreError(
                f"a call of {len(message)} bytes is too long for the c10d store, at most {REQUEST_LIMIT_BYTES}; "
                "store a reference in the record instead of the data"
            )
        with self._asking:
            if self.broken:
                answer.set_exception(LinkBroken("the connection to the host of the c10d store had ended"))
                return answer
            try:
                self._outbox.put_nowait((REQUEST_QUEUE, message))
            except queue.Full as error:
                raise StoreUnavailable(
                    f"{OUTBOX} calls wait for a host that does not take any: it hangs or cannot be reached"
                ) from error
            self._asked[number] = answer
        return answer

    def close(self, wait_s: float = 0.0) -> None:
        """End the conversation; all that wait get LinkBroken. The threads end when the host lets them."""
        self._end("closed on this side", (self._replies, b""))
        for thread in self._threads:
            thread.join(wait_s)

    def _end(self, reason: str, *farewell: tuple[str, bytes]) -> None:
        with self._asking:
            if self.broken:
                return
            self.broken = True
            waiting, self._asked = self._asked, {}
        for answer in waiting.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(LinkBroken(reason))
        try:
            for last in (*farewell, None):
                self._outbox.put_nowait(last)
        except queue.Full:
            pass  # the sender hangs in a push; only the end of the connection ends it

    def _send(self, sending: TCPStore) -> None:
        from torch.distributed import DistError

        try:
            while (item := self._outbox.get()) is not None:
                sending.queue_push(*item)
        except DistError as error:
            self._end(str(error))

    def _receive(self, receiving: TCPStore) -> None:
        from torch.distributed import DistError

        while True:
            try:
                raw = receiving.queue_pop(self._replies)
            except DistError as error:
                self._end(str(error))
                return
            if self.broken:
                return
            try:
                reply = decode_reply(raw)
            except Invalid as error:
                _log.warning("dropped a reply of the c10d store: %s", error)
                continue
            with self._asking:
                answer = self._asked.pop(reply.id, None)
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_result(reply.result)


def probe_port(address: str, port: int, timeout_s: float) -> None:
    """Connect once to see whether a process listens there. Raises PortClosed and StoreUnavailable."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except ConnectionRefusedError as error:
        raise PortClosed(f"no process listens on {address}:{port}") from error
    except OSError as error:
        raise StoreUnavailable(f"cannot connect to {address}:{port}: {error}") from error


def open_link(address: str, port: int, job: str, client: str, number: int) -> Link:
    """Connect, and make sure that this is the store of our job. May hang: call it in a thread that may.

    Raises StoreUnavailable and StoreMismatch.
    """
    from torch.distributed import DistError, DistStoreError, TCPStore

    try:
        sending, receiving = (
            TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
            for _ in range(2)
        )
        try:
            # The host writes it first of all: it is missing for milliseconds, or for good.
            sending.wait([META_KEY], timedelta(seconds=2))
        except DistStoreError as error:
            # torch raises this, too, when the host, or the network to it, stood still for so long.
            if not sending.check([META_KEY]):
                raise StoreMismatch(
                    f"{address}:{port} is a TCPStore, but not one that elastic-agent hosts (it has no "
                    f"{META_KEY!r}): point --rdzv-endpoint at another port"
                ) from error
        meta = sending.get(META_KEY)
    except DistError as error:
        raise StoreUnavailable(f"{address}:{port} does not answer as a TCPStore: {error}") from error
    try:
        host = decode_meta(meta, job)
    except CheckGoesOn as error:
        raise StoreUnavailable(
            f"`elastic-agent check --nodes` hosts a store of its own at {address}:{port}: start the agent that "
            "hosts the job's store after its end"
        ) from error
    except Invalid as error:
        raise StoreMismatch(
            f"the c10d store on {address}:{port} is not ours to join: {error}; "
            "use that --rdzv-id and that version of elastic-agent, or another --rdzv-endpoint"
        ) from error
    receiving.set_timeout(IDLE_TIMEOUT)
    return Link(sending, receiving, host, client, number)


META_KEY = "elastic-agent/meta"
REQUEST_QUEUE = "elastic-agent/requests"
REPLY_LIMIT_BYTES = 7 * 1024 * 1024
"""TCPStore itself cuts the connection above 8 MiB."""


def reply_queue(client: str, link: int) -> str:
    return f"elastic-agent/replies/{client}/{link}"
