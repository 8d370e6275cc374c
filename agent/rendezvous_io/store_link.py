"""The agent's three threads at the store: one asks, one keeps the lease alive, one watches.

Each does one blocking thing and posts what comes back to the client; none of them decides anything. The main loop
gives them work through `ask`, `keep` and `follow`, which never block. A thread that a dead store holds for ever is a
daemon: it delays no end, and the lease that it no longer confirms ends the workers. The lease speaks for the main
loop: while that does not turn (`heartbeat`), it is not confirmed.

`PeerLink` asks other nodes' agents who they are, over HTTP, one short-lived thread for each question. What an answer
means is decided elsewhere (`rendezvous/liveness.py`); here it only becomes a finding. A machine
refuses when no process listens on the port any more. Everything else that is no proper introduction counts as silence:
a timeout, a network that cannot be reached, another program's answer.
"""

from __future__ import annotations

import errno
import logging
import math
import queue
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from ...health.http import NODE_PATH
from ...rendezvous.errors import (
    Compacted,
    LeaseExpired,
    RecordInvalid,
    StoreClosed,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
)
from ...rendezvous.liveness import Peer, ProbeFailure, ProbeResult
from ...rendezvous.node.transactions import RETRY, RetryPolicy
from ...rendezvous.records import Endpoint, PeerStatus
from ...rendezvous.store.interface import (
    Answer,
    Change,
    Grant,
    LeaseId,
    Read,
    Request,
    Store,
    Subscription,
    Watch,
)
from ...rendezvous.store.store_kind import KEEP_ALIVES_PER_TTL
from ...threads import Thread
from ..common.events import Event, ThreadFailed
from ..common.exits import REMEDIES, ExitCode
from ..common.http_client import NoAnswer, get

log = logging.getLogger(__name__)

_T = TypeVar("_T")

RETRIES_PER_KEEP_ALIVE = 4
"""At least: a store that refuses at once is asked about so often in the time between two keep-alives."""

WATCH_TURN_S = 10.0
"""A watch without changes returns this often; the length has no effect on behaviour."""


class StoreClient(Protocol):
    """One node's part in a protocol over the store: a `Participant`, or a `PoolMember`."""

    @property
    def subscription(self) -> Subscription | None: ...

    def answered(self, request: Request, answer: Answer, now: float) -> None: ...

    def failed(self, request: Request, error: StoreError, now: float) -> None: ...

    def changed(self, changes: tuple[Change, ...], now: float) -> None: ...

    def lost_track(self) -> None: ...

    def lease_confirmed(self, lease: LeaseId, asked_at: float) -> None: ...

    def lease_gone(self, lease: LeaseId | None) -> None: ...

    def store_mismatched(self, reason: str) -> None: ...


class StoreLink:
    """Asks the store, keeps the lease alive and watches, each in a thread of its own."""

    def __init__(
        self,
        store: Store,
        client: StoreClient,
        lease_ttl_s: float,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        rng: random.Random,
        turning: Callable[[], bool] = lambda: True,
        asked: Callable[[str, float | None], None] = lambda operation, took_s: None,
    ) -> None:
        """The lease is confirmed only while the main loop is `turning`: a node that does not act must lose it. `client`
        is the main loop's, which tells it what is posted. `asked` is told in these threads of each request, and how
        many seconds the answer took; None: there was none."""
        self.confirmed_at = -math.inf
        """When the newest confirmed keep-alive was sent; for any thread."""
        self._turning = turning
        self._asked = asked
        self._store = store
        self._client = client
        self._interval_s = lease_ttl_s / KEEP_ALIVES_PER_TTL
        self._retry = RetryPolicy(max_wait_s=self._interval_s / RETRIES_PER_KEEP_ALIVE)
        self._post = post
        self._clock = clock
        self._rng = rng
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        """None is the last one."""
        self._wanted = threading.Condition()
        self._lease: LeaseId | None = None
        self._confirm_at = 0.0
        self._subscription: Subscription | None = None
        self._watch: Watch | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        for name, work in (("requests", self._serve), ("lease", self._keep_alive), ("watch", self._observe)):
            why = f"it raised (see the log), or could not be started: {REMEDIES[errno.EAGAIN]}"
            gone = ThreadFailed(f"store-{name}", why, ExitCode.NOT_HERE)
            Thread(work, f"store-{name}", partial(self._post, gone)).start()

    def ask(self, request: Request) -> None:
        """Carry out one request; `answered` or `failed` of the client follows."""
        self._requests.put(request)

    def keep(self, lease: LeaseId | None) -> None:
        """From now on confirm this lease; it is as good as new."""
        if lease != self._lease:
            with self._wanted:
                self._lease, self._confirm_at = lease, self._clock() + self._interval_s
                self._wanted.notify_all()

    def follow(self, subscription: Subscription | None) -> None:
        """From now on watch this, and nothing else."""
        if subscription is self._subscription:
            return
        with self._wanted:
            self._subscription = subscription
            if self._watch is not None:
                self._watch.close()
            self._wanted.notify_all()

    def close(self) -> None:
        """End the threads; the store stays open."""
        self._closed.set()
        self._requests.put(None)
        with self._wanted:
            self._lease = None
            self._wanted.notify_all()
        self.follow(None)

    # ---------------------------------------------------------------- store-requests

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._post(partial(self._answered, request, self._carry_out(request)))
            except StoreError as error:
                self._post(partial(self._failed, request, error))

    def _answered(self, request: Request, answer: Answer) -> None:
        """In the main loop, as all that is posted."""
        self._client.answered(request, answer, self._clock())

    def _failed(self, request: Request, error: StoreError) -> None:
        self._client.failed(request, error, self._clock())

    def _carry_out(self, request: Request) -> Answer:
        if isinstance(request, Grant):
            return self._measured("grant", lambda: self._store.grant(request.ttl_s))
        if isinstance(request, Read):
            return self._measured("read", lambda: self._store.read(request.scopes, request.oldest_under))
        return self._measured("transact", lambda: self._store.transact(request.compares, request.writes))

    def _measured(self, operation: str, ask: Callable[[], _T]) -> _T:
        """For any of the threads. An expired lease is no error."""
        asked_at = self._clock()
        try:
            answer = ask()
        except (LeaseExpired, StoreClosed):
            raise
        except StoreError:
            self._asked(operation, None)
            raise
        self._asked(operation, self._clock() - asked_at)
        return answer

    # ---------------------------------------------------------------- store-lease

    def _keep_alive(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            with self._wanted:
                self._wanted.wait_for(lambda: self._lease is not None or self._closed.is_set())
                lease, wait_s = self._lease, self._confirm_at - self._clock()
            if lease is None:
                return
            if wait_s > 0.0:
                self._closed.wait(wait_s)
                continue
            if not self._turning():
                self._closed.wait(self._interval_s)
                continue
            asked_at = self._clock()
            try:
                self._measured("keep_alive", lambda lease=lease: self._store.keep_alive(lease))  # type: ignore[misc]
            except LeaseExpired:
                self._post(partial(self._client.lease_gone, lease))
                self._await_another(lease)
                continue
            except StoreMismatch as error:
                self._post(partial(self._client.store_mismatched, str(error)))
                return
            except StoreError as error:
                if attempt == 0:
                    log.warning("lease not confirmed, trying on: %s", error)
                again_at = asked_at + self._retry.wait_s(attempt, self._rng)
                self._closed.wait(max(0.0, again_at - self._clock()))
                attempt += 1
                continue
            if attempt:
                log.info("lease confirmed again, after %d failed tries", attempt)
                attempt = 0
            self.confirmed_at = asked_at
            self._post(partial(self._client.lease_confirmed, lease, asked_at))
            with self._wanted:
                if self._lease == lease:
                    self._confirm_at = asked_at + self._interval_s

    def _await_another(self, lease: LeaseId) -> None:
        with self._wanted:
            self._wanted.wait_for(lambda: self._lease != lease or self._closed.is_set())

    # ---------------------------------------------------------------- store-watch

    def _observe(self) -> None:
        while not self._closed.is_set():
            with self._wanted:
                self._wanted.wait_for(lambda: self._subscription is not None or self._closed.is_set())
                subscription = self._subscription
            if subscription is None:
                return
            try:
                self._observe_one(subscription)
            except StoreMismatch as error:
                self._post(partial(self._client.store_mismatched, str(error)))
                return
            except StoreClosed:  # as a rule the watch, by `follow`
                if self._subscription is subscription:
                    return

    def _observe_one(self, subscription: Subscription) -> None:
        """Until another subscription is wanted. Raises StoreMismatch, and StoreClosed when the watch was closed."""
        watch: Watch | None = None
        attempt = 0
        while self._subscription is subscription:
            try:
                if watch is None:
                    with self._wanted:
                        if self._subscription is not subscription:
                            return
                        self._watch = watch = self._store.watch(
                            subscription.scopes, subscription.after_revision
                        )
                changes = watch.next(WATCH_TURN_S)
                attempt = 0
                if changes:
                    self._post(partial(self._changed, subscription, changes))
            except Compacted:
                self._post(partial(self._lost_track, subscription))
                with self._wanted:
                    self._wanted.wait_for(lambda: self._subscription is not subscription)
            except StoreUnavailable as error:
                self._asked("watch", None)
                if attempt == 0:
                    log.warning("watch interrupted, trying on: %s", error)
                self._closed.wait(RETRY.wait_s(attempt, self._rng))
                attempt += 1

    def _changed(self, subscription: Subscription, changes: tuple[Change, ...]) -> None:
        if subscription is self._client.subscription:
            self._client.changed(changes, self._clock())

    def _lost_track(self, subscription: Subscription) -> None:
        if subscription is self._client.subscription:
            self._client.lost_track()


TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 8 * 1024


class PeerLink:
    """How many questions are open at once is bounded by the caller (`liveness.MOST_AT_ONCE`)."""

    def __init__(
        self,
        probed: Callable[[Peer, ProbeResult, float, float], object],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """`probed` is the participant's: it gets each finding, in the main loop."""
        self._probed = probed
        self._post = post
        self._clock = clock

    def ask(self, peer: Peer) -> None:
        """`probed` follows."""
        asked_at = self._clock()
        silent = partial(self._found, peer, asked_at, ProbeFailure.SILENT)
        Thread(partial(self._ask, peer, asked_at), "peer", partial(self._post, silent)).start()

    def _ask(self, peer: Peer, asked_at: float) -> None:
        self._post(partial(self._found, peer, asked_at, find(peer.http, self._clock, TIMEOUT_S)))

    def _found(self, peer: Peer, asked_at: float, finding: ProbeResult) -> None:
        self._probed(peer, finding, asked_at, self._clock())


def find(http: Endpoint, clock: Callable[[], float], timeout_s: float) -> ProbeResult:
    """The introduction of the agent at `http`, or why there is none."""
    try:
        return PeerStatus.from_json(get(http, NODE_PATH, clock, timeout_s, MAX_ANSWER_BYTES))
    except ConnectionRefusedError:
        return ProbeFailure.REFUSED
    except (OSError, NoAnswer, RecordInvalid):
        return ProbeFailure.SILENT
