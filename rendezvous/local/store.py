"""The local store as other processes of its machine see it: calls sent to the process that hosts it (`host`).

A call is answered within the request timeout, or raises within it:

    no answer             StoreUnavailable; a write may or may not happen still, until the next call is answered
    connection ended      StoreUnavailable, and so while no process hosts the store: ask again
    another host answers  as the one before would have, with all keys and leases; but Compacted to a watch, since it
                          knows nothing of the changes that the other one has seen
    another version's     StoreMismatch: leave

A client that may host (`take_over`) does so as soon as it finds that no process does: in a daemon that has joined
another's store, so that all goes on when that one ends. It calls this host over the socket, too.

A call has a connection to itself while it is under way, and leaves it to the next one; a watch keeps its own. There are
no threads here: a caller waits on its connection itself, with a deadline.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...codec import Invalid
from ..errors import Compacted, StoreClosed, StoreError, StoreMismatch, StoreUnavailable
from ..store.interface import Change, Compare, Delete, LeaseId, Outcome, Put, Snapshot, Store, Watch
from ..store.requests import Grant, Read
from ..store.retry_connect import retry_connect
from ..store.wire import (
    PARKED_S,
    REQUEST_LIMIT_BYTES,
    Call,
    Caller,
    Changes,
    Done,
    Granted,
    KeepAlive,
    LongPoll,
    Refused,
    Request,
    Revoke,
    Transact,
    decode_reply,
    encode_request,
    refused,
)
from .connection import Connection, ConnectionBroken, NotHosted, connect
from .files import StoreFiles

REQUEST_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)

R = TypeVar("R")


class LocalStore(Store):
    """The client's end of a store that another process hosts. Made by `connect`."""

    def __init__(
        self, files: StoreFiles, request_timeout_s: float, take_over: Callable[[], Store] | None = None
    ) -> None:
        self._files = files
        self._take_over = take_over
        self._taking_over = threading.Lock()
        self._own_host: Store | None = None
        self._request_timeout_s = request_timeout_s
        self._client = uuid.uuid4().hex
        self._link = 1
        """Grows with each call that got no answer: the host does not do what comes late."""
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False

    @classmethod
    def connect(
        cls,
        files: StoreFiles,
        timeout_s: float,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        rng: random.Random | None = None,
        *,
        take_over: Callable[[], Store] | None = None,
    ) -> LocalStore:
        """Join the store that another process hosts, or will host soon. `take_over` hosts it in this process, or raises
        StoreUnavailable.

        Raises StoreUnavailable when `timeout_s` seconds of trying were not enough, StoreRefused and StoreMismatch at
        once.
        """
        store = cls(files, request_timeout_s, take_over)
        deadline = time.monotonic() + timeout_s
        try:
            retry_connect(lambda: store._give_back(store._take(deadline)), deadline, rng or random.Random())
        except StoreError:
            store.close()
            raise
        return store

    def grant(self, ttl_s: float) -> LeaseId:
        return self._call(Grant(ttl_s), Granted).lease

    def keep_alive(self, lease: LeaseId) -> None:
        self._call(KeepAlive(lease), Done)

    def revoke(self, lease: LeaseId) -> None:
        self._call(Revoke(lease), Done)

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        return self._call(Transact(compares, writes), Outcome)

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        return self._call(Read(scopes, oldest_under), Snapshot)

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        return _LocalWatch(self, scopes, after_revision)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._all:
                connection.end()
        for connection in idle:
            self._discard(connection)
        with self._taking_over:
            if self._own_host is not None:
                self._own_host.close()

    def _call(self, call: Call, expected: type[R]) -> R:
        deadline = time.monotonic() + self._request_timeout_s
        connection = self._take(deadline)
        try:
            asked, message = self._message(call)
            connection.send(message, deadline)
            answer = self._answer(connection, asked, deadline)
        except TimeoutError:
            self._discard(connection)
            raise self._no_answer(self._request_timeout_s) from None
        except ConnectionBroken as error:
            self._discard(connection)
            raise self._broken(error) from error
        except StoreError:
            self._discard(connection)
            raise
        self._give_back(connection)
        return self._understood(answer, expected)

    def _message(self, call: Call) -> tuple[int, bytes]:
        """And the id by which its answer is known. Raises StoreError."""
        asked = Request(Caller(self._client, self._link, next(self._ids)), call)
        message = encode_request(asked)
        if len(message) > REQUEST_LIMIT_BYTES:
            raise StoreError(
                f"a call of {len(message)} bytes is too long for the local store, at most {REQUEST_LIMIT_BYTES}; "
                "store a reference in the record instead of the data"
            )
        return asked.caller.id, message

    def _answer(self, connection: Connection, asked: int, deadline: float) -> object:
        """Raises TimeoutError, ConnectionBroken and StoreMismatch."""
        while True:
            try:
                reply = decode_reply(connection.receive(deadline))
            except Invalid as error:
                raise StoreMismatch(
                    f"the host of the store in {self._files.folder} gave an answer that cannot be read: {error}; run "
                    "the same version of elastic-agent as its daemon"
                ) from error
            if reply.id == asked:
                return reply.result

    def _understood(self, answer: object, expected: type[R]) -> R:
        if isinstance(answer, expected):
            return answer
        if isinstance(answer, Refused):
            raise refused(answer)
        raise StoreMismatch(
            f"the host of the store in {self._files.folder} answered with {type(answer).__name__} where "
            f"{expected.__name__} was expected: run the same version of elastic-agent as its daemon"
        )

    def _take(self, deadline: float) -> Connection:
        """One to whatever process hosts the store now. Raises StoreError."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if connection.idle:
                return connection
            self._discard(connection)
        connection = self._open(deadline)
        try:
            connection.meet(deadline)
        except TimeoutError:
            self._discard(connection)
            raise StoreUnavailable(
                f"the host of the store in {self._files.folder} takes connections, but does not answer: it hangs"
            ) from None
        except ConnectionBroken as error:
            self._discard(connection)
            self._check_open()
            raise StoreUnavailable(
                f"the host of the store in {self._files.folder} has closed the connection at once ({error}): it is "
                "about to end, or has too many of them"
            ) from error
        except StoreError:
            self._discard(connection)
            raise
        return connection

    def _open(self, deadline: float) -> Connection:
        self._check_open()
        try:
            connection = connect(self._files, deadline)
        except NotHosted:
            if not self._hosts_now():
                raise
            connection = connect(self._files, deadline)
        with self._lock:
            self._all.add(connection)
        if self._closed:
            self._discard(connection)
        self._check_open()
        return connection

    def _hosts_now(self) -> bool:
        """Whether this process has taken the host's place. Raises StoreUnavailable."""
        with self._taking_over:
            self._check_open()
            if self._take_over is None or self._own_host is not None:
                return self._own_host is not None
            self._own_host = self._take_over()
        log.info("the agent that has hosted the pool's store has ended: this one hosts it from now on")
        return True

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: Connection) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def _no_answer(self, waited_s: float) -> StoreUnavailable:
        with self._lock:
            self._link += 1
        return StoreUnavailable(
            f"the host of the store in {self._files.folder} gave no answer for {waited_s:g} s: it hangs; what was "
            "asked may have been done: read before asking again"
        )

    def _broken(self, error: ConnectionBroken) -> StoreError:
        if self._closed:
            return self._closed_error()
        return StoreUnavailable(
            f"the host of the store in {self._files.folder} has closed the connection ({error}); what was asked may "
            "have been done: read before asking again"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the store in {self._files.folder} was closed on this side")


@dataclass(frozen=True, slots=True)
class _Waiting:
    connection: Connection
    asked: int
    deadline: float


class _LocalWatch(Watch):
    """One `LongPoll` after another on a connection of its own; the one under way outlives a `next` that times out."""

    def __init__(self, store: LocalStore, scopes: tuple[str, ...], after_revision: int) -> None:
        self._store = store
        self._scopes = scopes
        self._after = after_revision
        self._host: str | None = None
        """Whose revisions it counts."""
        self._connection: Connection | None = None
        self._waiting: _Waiting | None = None
        self._closing = threading.Lock()
        self._closed = False

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        store, until = self._store, time.monotonic() + timeout_s
        while True:
            try:
                waiting = self._waiting or self._ask()
                answer = store._answer(waiting.connection, waiting.asked, min(until, waiting.deadline))
                self._check_host(waiting.connection)
                self._waiting = None
                news = store._understood(answer, Changes)
            except TimeoutError:
                self._check_open()
                if self._connection is not None:
                    self._check_host(self._connection)
                if self._waiting is None or time.monotonic() < self._waiting.deadline:
                    return ()
                self._forget()
                raise store._no_answer(PARKED_S + store._request_timeout_s) from None
            except ConnectionBroken as error:
                self._forget()
                self._check_open()
                raise store._broken(error) from error
            except StoreError:
                self._forget()
                raise
            self._after = news.revision
            if news.changes:
                return news.changes

    def close(self) -> None:
        with self._closing:
            self._closed = True
            connection = self._connection
        if connection is not None:
            connection.end()

    def _ask(self) -> _Waiting:
        """Raises TimeoutError, ConnectionBroken and StoreError."""
        store = self._store
        asking_until = time.monotonic() + store._request_timeout_s
        self._check_open()
        if self._connection is None:
            connection = store._open(asking_until)
            with self._closing:
                self._connection = connection
            self._check_open()
        asked, message = store._message(LongPoll(self._scopes, self._after))
        try:
            self._connection.send(message, asking_until)
        except TimeoutError:
            self._forget()
            raise store._no_answer(store._request_timeout_s) from None
        deadline = time.monotonic() + PARKED_S + store._request_timeout_s
        self._waiting = _Waiting(self._connection, asked, deadline)
        return self._waiting

    def _check_host(self, connection: Connection) -> None:
        """Raises Compacted: the revisions of another host are others."""
        host = connection.host
        if host is None:
            return
        if self._host not in (None, host):
            self._forget()
            raise Compacted(f"the store in {self._store._files.folder} has another host now")
        self._host = host

    def _forget(self) -> None:
        with self._closing:
            connection, self._connection, self._waiting = self._connection, None, None
        if connection is not None:
            self._store._discard(connection)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the watch was closed")
        self._store._check_open()
