"""One conversation between a client and the host of the c10d store: what they send each other, and the connection.

A *call* is what a client asks, some of them a node's `requests` as they are, a *result* what comes back. Both travel
as the codec writes them: JSON only, checked as it comes in, never code. With a call travels its `Caller`, which names
the client, its *link* (this client's first connection, its second, ...) and the call's id on that link; with the result
travels that id again, so that a late answer is never taken for the answer to something else. What reaches the host can
send anything: what does not decode raises Invalid and goes no further.

A TCPStore client is one connection with one lock, and a call on a host that hangs never returns, whatever timeout
it was given. So a link owns two connections and two threads that may hang as long as they like:

    c10d-sender      takes calls from an outbox and pushes them to the host
    c10d-receiver    pops the replies and gives each to the thread that waits for its id

All other threads only ever wait for a future, with their own deadline. A link never recovers: at the first error it is
broken, and all threads that wait get `LinkBroken`. Opening another one is up to the store.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import re
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from ...codec import Codec, Count, Invalid, Text, from_plain, load_object, plain, shown
from ...threads import Thread
from ..errors import Compacted, LeaseExpired, StoreClosed, StoreError, StoreMismatch, StoreUnavailable
from ..store.interface import (
    Change,
    Compare,
    Delete,
    Grant,
    LeaseId,
    Outcome,
    Put,
    Read,
    Revision,
    Snapshot,
    Store,
)
from ..store.store_kind import check_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SCHEMA = 3
_PROGRAM = "elastic-agent"
REQUEST_LIMIT_BYTES = 2 * 1024 * 1024
"""A record (at most `records.MAX_RECORD_BYTES`) that has been escaped once more fits well."""

PENDING_S = 30.0
"""A `LongPoll` without a change is answered after this long, and so renewed by clients that still live."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Revoke:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Transact:
    compares: tuple[Compare, ...]
    writes: tuple[Put | Delete, ...]


@dataclass(frozen=True, slots=True)
class LongPoll:
    """Answered with `Changes` once a key in `scopes` changes after that revision, or after a while without."""

    scopes: tuple[str, ...]
    after_revision: Revision


@dataclass(frozen=True, slots=True)
class Granted:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Changes:
    """Every change up to `revision` in the scopes of the poll: the next one goes on from there."""

    revision: Revision
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    error: Annotated[str, Text(64)]
    """"LeaseExpired", "Compacted", "StoreUnavailable" or "StoreError"."""
    text: str


Call: TypeAlias = Grant | KeepAlive | Revoke | Transact | Read | LongPoll
Result: TypeAlias = Granted | Done | Outcome | Snapshot | Changes | Refused


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for the answer, and to which of its calls."""

    client: Annotated[str, Text(32, re.compile(r"[0-9a-f]{32}"))]
    link: Count
    id: Count


@dataclass(frozen=True, slots=True)
class Request:
    caller: Caller
    call: Call


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    result: Result


@dataclass(frozen=True, slots=True)
class _Meta:
    """What a host publishes first of all. Every version has the first two fields."""

    program: str
    schema: Count
    job: str
    host: str


_CALLS: Codec[Call] = Codec((Grant, KeepAlive, Revoke, Transact, Read, LongPoll), SCHEMA, REQUEST_LIMIT_BYTES)
_RESULTS: Codec[Result] = Codec((Granted, Done, Outcome, Snapshot, Changes, Refused), SCHEMA, 2**31)


_REFUSALS: Mapping[str, type[StoreError]] = {
    kind.__name__: kind for kind in (LeaseExpired, Compacted, StoreUnavailable)
}


def carry_out(store: Store, call: Call) -> Result:
    """Do what a client asks. Raises StoreClosed."""
    try:
        match call:
            case Grant(ttl_s):
                return Granted(store.grant(ttl_s))
            case KeepAlive(lease):
                store.keep_alive(lease)
                return Done()
            case Revoke(lease):
                store.revoke(lease)
                return Done()
            case Transact(compares, writes):
                return store.transact(compares, writes)
            case Read(scopes, oldest_under):
                return store.read(scopes, oldest_under)
            case LongPoll(scopes, after_revision):
                changes = store.watch(scopes, after_revision).next(0.0)
                return Changes(changes[-1].revision if changes else after_revision, changes)
    except StoreClosed:
        raise
    except StoreError as error:
        return refusal(error)


def refusal(error: StoreError) -> Refused:
    return Refused(type(error).__name__, str(error))


def refused(refusal: Refused) -> StoreError:
    """The error that the client's caller gets."""
    return _REFUSALS.get(refusal.error, StoreError)(refusal.text)


def encode_request(request: Request) -> bytes:
    return _dump({**plain(request.caller), **_CALLS.pack(request.call)})


def decode_request(raw: bytes) -> Request:
    """Raises Invalid."""
    body = _CALLS.load(raw)
    caller = from_plain(Caller, {name: body.pop(name, None) for name in ("client", "link", "id")})
    return Request(caller, _CALLS.unpack(body))


def encode_reply(reply: Reply) -> bytes:
    return _dump({"id": reply.id, **_RESULTS.pack(reply.result)})


def decode_reply(raw: bytes) -> Reply:
    """Raises Invalid."""
    body = _RESULTS.load(raw)
    call = body.pop("id", None)
    if type(call) is not int:
        raise Invalid("reply without the id of a call")
    return Reply(call, _RESULTS.unpack(body))


def encode_meta(job: str, host: str) -> bytes:
    """What a host publishes about itself; `host` is new in every life of a host."""
    return _dump(plain(_Meta(_PROGRAM, SCHEMA, job, host)))


class CheckGoesOn(Invalid):
    """A check hosts the store, and is about to end."""


def decode_meta(raw: bytes, job: str) -> str:
    """The host's name for this life. Raises Invalid, with what was found, when it is not ours to join, and CheckGoesOn
    when it is not yet."""
    if len(raw) > REQUEST_LIMIT_BYTES:
        raise Invalid(f"{len(raw)} bytes that elastic-agent did not write")
    body = load_object(raw, "introduction")
    program, schema = body.get("program"), body.get("schema")
    if program != _PROGRAM:
        raise Invalid(f"program {shown(program)}, expected {_PROGRAM!r}")
    if type(schema) is not int or schema != SCHEMA:
        raise Invalid(f"schema {shown(schema)}, this version of elastic-agent speaks schema {SCHEMA}")
    meta = from_plain(_Meta, body)
    if meta.job == check_of(job):
        raise CheckGoesOn("the store of a check")
    if meta.job != job:
        raise Invalid(f"job {meta.job!r}, expected {job!r}")
    return meta.host


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


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
