"""The c10d store as the other nodes see it: calls sent to the node that hosts it (`host`).

A call is answered within the request timeout, or raises within it:

    no answer             StoreUnavailable; a write may or may not happen still, until the next call is answered
    connection ended      StoreUnavailable, whether another one can be made or is refused: ask again. A refusal does not
                          prove that the host has ended; a firewall that is loaded anew sends the same
    another host answers  LeaseExpired, and Compacted to a watch: the agent that hosted the store was started again,
                          and the new store is empty. What this client held belongs to the old one, and no call of it
                          reaches the new one, until the client asks for a new lease there
    another job's answers StoreMismatch, and so where another version hosts it, or another program listens: leave

After a call without an answer the store opens a second link in the background and goes over to it when it stands,
so that a network that heals is used again at once, and a host that hangs is used again when it wakes. The host drops
what comes late over the older link. A `Link` may hang; nothing here waits for one without a deadline.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...threads import Thread
from ..errors import (
    Compacted,
    LeaseExpired,
    StoreClosed,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
)
from ..store.interface import (
    Change,
    Compare,
    Delete,
    Grant,
    LeaseId,
    Outcome,
    Put,
    Read,
    Snapshot,
    Store,
    Watch,
)
from ..store.store_kind import retry_connect
from .link import (
    PENDING_S,
    Call,
    Changes,
    Done,
    Granted,
    KeepAlive,
    Link,
    LinkBroken,
    LongPoll,
    PortClosed,
    Refused,
    Result,
    Revoke,
    Transact,
    open_link,
    probe_port,
    refused,
)

REQUEST_TIMEOUT_S = 5.0

SILENT_S = 3.0
"""A joining agent waits so long for each answer before it says that there is none."""

OPENING_GIVEN_UP_S = 30.0
"""A connection that hangs this long while it is made is left alone, and another one tried."""

PROBE_AGAIN_S = 0.5  # while a connection is made

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Opening:
    """A link being made in a thread of its own, which may hang."""

    given_up_at: float
    accepted: threading.Event
    link: Future[Link]

    def fail(self, error: StoreError) -> None:
        """For who waits, unless there is an answer already."""
        if not self.link.done():
            self.link.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call under way."""

    link: Link
    answer: Future[Result]
    within_s: float
    deadline: float


class C10dStore(Store):
    """The client's end of a store that another node hosts. Made by `connect`."""

    def __init__(self, address: str, port: int, job: str, request_timeout_s: float) -> None:
        self._address = address
        self._port = port
        self._job = job
        self._request_timeout_s = request_timeout_s
        self._client = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._granted_by: str | None = None
        """The host that granted this client's newest lease."""
        self._link: Link | None = None
        self._links_tried = 0
        self._opening: _Opening | None = None
        self._closed = False

    @classmethod
    def connect(
        cls,
        address: str,
        port: int,
        job: str,
        timeout_s: float,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> C10dStore:
        """Join the store that another node hosts, or will host soon.

        Raises StoreUnavailable when `timeout_s` seconds of trying were not enough, StoreMismatch at once.
        """
        store = cls(address, port, job, request_timeout_s)
        deadline = time.monotonic() + timeout_s
        refused: StoreUnavailable | None = None

        def look() -> None:
            nonlocal refused
            try:
                store._go_over_to_new_link(min(deadline, time.monotonic() + SILENT_S))
            except StoreUnavailable as error:
                if isinstance(error.__cause__, PortClosed):
                    refused = error
                raise

        try:
            retry_connect(look, deadline, random.Random())
        except StoreUnavailable as last:
            store.close()
            error = refused or last  # the last try may have had no time for an answer
            raise StoreUnavailable(
                f"no c10d store on {address}:{port} after {timeout_s:g} s: {error}. Check that the agent which "
                "hosts it runs, that --rdzv-endpoint or --master-addr names its address, and that no firewall closes "
                "the port"
            ) from error
        except StoreError:
            store.close()
            raise
        return store

    def grant(self, ttl_s: float) -> LeaseId:
        asked = self._ask(Grant(ttl_s))
        lease = self._answer(asked, Granted).lease
        self._granted_by = asked.link.host
        return lease

    def keep_alive(self, lease: LeaseId) -> None:
        self._answer(self._ask(KeepAlive(lease)), Done)

    def revoke(self, lease: LeaseId) -> None:
        self._answer(self._ask(Revoke(lease)), Done)

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        return self._answer(self._ask(Transact(compares, writes)), Outcome)

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        return self._answer(self._ask(Read(scopes, oldest_under)), Snapshot)

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        return _C10dWatch(self, scopes, after_revision)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.close(wait_s=1.0)

    def _ask(self, call: Call, pending_s: float = 0.0) -> _Asked:
        """The host may take `pending_s` to answer, besides what every call may take."""
        within_s = pending_s + self._request_timeout_s
        deadline = time.monotonic() + within_s
        with self._lock:
            link = self._link
        if self._closed:
            raise self._closed_error()
        assert link is not None, "connect() comes first"
        if not isinstance(call, Grant) and self._granted_by not in (None, link.host):
            raise LeaseExpired(
                f"the agent that hosts the c10d store on {self._where} was started again, and the leases of the "
                "first store went with it"
            )
        return _Asked(link, link.ask(call), within_s, deadline)

    def _answer(self, asked: _Asked, expected: type[R]) -> R:
        try:
            answer = asked.answer.result(max(0.0, asked.deadline - time.monotonic()))
        except FutureTimeout:
            with self._lock:
                self._start_opening()
            raise StoreUnavailable(
                f"the host of the c10d store, {self._where}, gave no answer for {asked.within_s:g} s: it hangs, or the "
                "network to it is cut; what was asked may have been done: read before asking again"
            ) from None
        except LinkBroken as broken:
            self._go_over_to_new_link(min(asked.deadline, time.monotonic() + self._request_timeout_s))
            raise StoreUnavailable(
                f"the connection to the c10d store on {self._where} was cut ({broken}), and made again; "
                "what was asked may have been done: read before asking again"
            ) from broken
        if isinstance(answer, Refused):
            raise refused(answer)
        if isinstance(answer, expected):
            return answer
        raise StoreMismatch(
            f"the c10d store on {self._where} answered with {type(answer).__name__} where {expected.__name__} "
            "was expected: run the same version of elastic-agent on every node"
        )

    def _go_over_to_new_link(self, deadline: float) -> Link:
        """A link that is not broken, made by now or in time.

        Raises StoreUnavailable, StoreClosed, and StoreMismatch where another job's or version's store stands there now.
        """
        with self._lock:
            if self._link is not None and not self._link.broken:
                return self._link
            opening = self._start_opening()
        try:
            return self._wait_for(opening, deadline)
        except FutureTimeout as error:
            if not opening.accepted.is_set():
                raise StoreUnavailable(
                    f"{self._where} takes no connection: the network to it, or the name service, does not answer"
                ) from error
            raise StoreUnavailable(
                f"something listens on {self._where}, but does not answer as a TCPStore: another program has that "
                "port (choose another one), or the agent that hosts the store hangs"
            ) from error
        except PortClosed as error:
            if self._link is None:
                raise StoreUnavailable(str(error)) from error
            raise StoreUnavailable(
                f"{self._where} refuses connections: the agent that hosts the c10d store has ended, or a firewall "
                "resets them. If it has ended, start it again at the same --rdzv-endpoint, and the job goes on"
            ) from error
        except StoreError as error:  # a new one for each thread that waited for the same link
            raise type(error)(str(error)) from error

    def _wait_for(self, opening: _Opening, deadline: float) -> Link:
        """If the host ends just after it took the connection, torch tries for 15 s or more: probe the port again."""
        while True:
            try:
                return opening.link.result(max(0.0, min(deadline - time.monotonic(), PROBE_AGAIN_S)))
            except FutureTimeout:
                if time.monotonic() >= deadline:
                    raise
            try:
                if opening.accepted.is_set():
                    probe_port(self._address, self._port, max(0.1, deadline - time.monotonic()))
            except StoreUnavailable:
                continue  # it does not answer: the opening may still
            except PortClosed:
                with self._lock:
                    if self._opening is opening:
                        self._opening = None
                raise

    def _start_opening(self) -> _Opening:
        """Under the lock. At most one at a time is waited for."""
        if self._closed:
            raise self._closed_error()
        now = time.monotonic()
        if self._opening is None or self._opening.link.done() or self._opening.given_up_at <= now:
            self._links_tried += 1
            self._opening = _Opening(now + OPENING_GIVEN_UP_S, threading.Event(), Future())
            opening = self._opening
            Thread(
                partial(self._open, self._links_tried, opening),
                "c10d-opening",
                lambda: opening.fail(StoreUnavailable("a thread for the connection has failed")),
            ).start()
        return self._opening

    def _open(self, number: int, opening: _Opening) -> None:
        try:
            # Our own connection first: torch waits half a second and more before it tries a refused one again.
            probe_port(self._address, self._port, self._request_timeout_s)
            opening.accepted.set()
            link = open_link(self._address, self._port, self._job, self._client, number)
        except Exception as error:
            opening.link.set_exception(error)
            return
        with self._lock:
            problem: StoreError | None = None
            if self._closed:
                problem = self._closed_error()
            elif self._link is not None and self._link.number > number:
                problem = StoreUnavailable("overtaken by a newer connection")
            unused: Link | None = link
            if problem is None:
                unused, self._link = self._link, link
        if unused is not None:
            unused.close()
        if problem is None:
            opening.link.set_result(link)
        else:
            opening.link.set_exception(problem)

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the c10d store on {self._where} was closed on this side")

    @property
    def _where(self) -> str:
        return f"{self._address}:{self._port}"


class _C10dWatch(Watch):
    """One `LongPoll` after another; the one under way outlives a `next` that times out."""

    def __init__(self, store: C10dStore, scopes: tuple[str, ...], after_revision: int) -> None:
        self._store = store
        self._scopes = scopes
        self._after = after_revision
        self._host: str | None = None
        """Whose revisions it counts."""
        self._asked: _Asked | None = None
        self._closed = False

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        until = time.monotonic() + timeout_s
        while True:
            asked = self._asked = self._asked or self._ask()
            if self._closed:  # looked at after `_asked` is set: `close` does the reverse
                raise StoreClosed("the watch was closed")
            try:
                asked.answer.exception(max(0.0, min(until, asked.deadline) - time.monotonic()))
            except CancelledError:
                raise StoreClosed("the watch was closed") from None
            except FutureTimeout:
                if time.monotonic() < asked.deadline:
                    return ()
            self._asked = None
            news = self._store._answer(asked, Changes)
            self._after = news.revision
            if news.changes:
                return news.changes

    def _ask(self) -> _Asked:
        """Raises Compacted when another host answers: its revisions are others."""
        store = self._store
        try:
            asked = store._ask(LongPoll(self._scopes, self._after), PENDING_S)
        except LeaseExpired as error:
            raise Compacted(str(error)) from error
        if self._host not in (None, asked.link.host):
            raise Compacted(f"the agent that hosts the c10d store on {store._where} was started again")
        self._host = asked.link.host
        return asked

    def close(self) -> None:
        self._closed = True
        if (asked := self._asked) is not None:
            asked.answer.cancel()
