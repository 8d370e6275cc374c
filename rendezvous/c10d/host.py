"""The node that hosts the c10d store: a `MemoryStore` that also answers other nodes, over a TCPStore it serves.

Its own node calls it directly, without a round trip. The TCPStore carries messages only and holds no state of ours:
clients push calls to one queue, each client pops the answers from a queue of its own. Two threads do that work:

    c10d-requests    pops calls, one at a time, and answers them
    c10d-changes     waits for changes (and so for leases to expire, also without a call) and answers the `LongPoll`
                     calls that were pending because nothing had changed yet

A `LongPoll` is answered once, at the latest after `PENDING_S`, and then forgotten, so that a client that died costs one
pending call and one unread answer, and those only for a while. Calls of one client are done in the order in which it
made them; once a client has used a newer link, a call that comes late over an older one is dropped, because its caller
gave up on it long ago and may have read back that it did not happen.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...codec import Invalid
from ...threads import Thread
from ..errors import Compacted, StoreClosed, StoreUnavailable
from ..records import WORLD_KEY, World
from ..store.interface import Change, Compare, Delete, Outcome, Put, in_scopes
from ..store.kv_state import KvState
from ..store.memory import MemoryStore
from .link import (
    CONNECT_TIMEOUT,
    IDLE_TIMEOUT,
    META_KEY,
    PENDING_S,
    REPLY_LIMIT_BYTES,
    REQUEST_QUEUE,
    Caller,
    Changes,
    LongPoll,
    Refused,
    Reply,
    Result,
    carry_out,
    decode_request,
    encode_meta,
    encode_reply,
    reply_queue,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore

QUIET_S = 120.0
"""A client that was silent for this long is forgotten, and the answers it never fetched are thrown away."""

BASES, BASE_STEP = 2**20, 2**32
"""Revisions and leases of a host count from a multiple of the step, drawn at random: no job comes so far."""

SWEEP_S = 5.0
"""How often it is looked whether these times have passed."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingWatch:
    scopes: tuple[str, ...]
    after_revision: int
    until: float


@dataclass(slots=True)
class _Client:
    link: int
    seen_at: float


class C10dHost(MemoryStore):
    """The store itself, in the process that hosts it. Ends for all nodes with `close` or with the process."""

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        job: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        past: World | None = None,
        remember: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take over `listener`, bound and listening, reachable by the others as `address`.

        `past` is the newest world of an earlier host at this address, if that is known; `remember` gets each world
        before a node can see it. Raises StoreUnavailable when torch cannot serve on the listener.
        """
        from torch.distributed import DistError, TCPStore

        # What counts in the store of one host means nothing in that of the next one: no revision, no lease of it.
        super().__init__(clock, KvState(base=random.SystemRandom().randrange(BASES) * BASE_STEP))
        self._remember = remember
        if past is not None:
            self.transact((), (Put(WORLD_KEY, past.carried_over().to_json()),))
        self.dropped = 0
        """Messages that were not done: garbage, another schema, or late over a link that is no longer used."""
        self._pending: dict[Caller, _PendingWatch] = {}
        self._watching = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._remembering = threading.Lock()
        self._closing = threading.Event()
        self._feed = self.watch(("",), 0)

        bound, port = listener.getsockname()[:2]
        self._own_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound), port
        try:
            self._server = TCPStore(
                *self._own_address,
                is_master=True,
                wait_for_workers=False,
                timeout=CONNECT_TIMEOUT,
                master_listen_fd=listener.detach(),
                use_libuv=True,
            )
            self._server.set(META_KEY, encode_meta(job, host=uuid.uuid4().hex).decode())
            self._inbox = self._open_inbox()
        except DistError as error:
            raise StoreUnavailable(
                f"cannot host the c10d store on {address}:{port} (bound to {bound}): {error}; "
                "check that this node can connect to that address itself, or choose another --rdzv-endpoint"
            ) from error
        self._threads = (
            Thread(self._serve, "c10d-requests"),
            Thread(self._notify, "c10d-changes"),
        )
        for thread in self._threads:
            thread.start()

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        with self._changed:
            for write in writes:
                if isinstance(write, Put) and write.key == WORLD_KEY and self._open().holds(compares):
                    self._remember(write.value)
            return super().transact(compares, writes)

    def close(self) -> None:
        super().close()
        with self._remembering:
            if self._closing.is_set():
                return
            self._closing.set()
        self._server.queue_push(REQUEST_QUEUE, b"")
        for thread in self._threads:
            thread.join()
        del self._inbox, self._server

    # The thread c10d-requests.

    def _serve(self) -> None:
        from torch.distributed import DistError

        while True:
            try:
                raw = self._inbox.queue_pop(REQUEST_QUEUE)
            except DistError:  # a day without a call, or another program popped what woke us
                self._inbox = self._open_inbox()
                continue
            if self._closing.is_set():
                return
            try:
                self._handle(raw)
            except StoreClosed:
                return
            except Exception:  # one odd request must not end the job
                self.dropped += 1
                _log.exception("a request to the c10d store failed")

    def _open_inbox(self) -> TCPStore:
        from torch.distributed import TCPStore

        inbox = TCPStore(*self._own_address, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
        inbox.set_timeout(IDLE_TIMEOUT)
        return inbox

    def _handle(self, raw: bytes) -> None:
        try:
            request = decode_request(raw)
        except Invalid as error:
            self.dropped += 1
            # Once: any program that reaches the port can push as many as it likes.
            _log.log(
                logging.WARNING if self.dropped == 1 else logging.DEBUG,
                "c10d store dropped a message: %s",
                error,
            )
            return
        if not self._admit(request.caller):
            self.dropped += 1
        elif isinstance(request.call, LongPoll):
            self._await(request.caller, request.call)
        else:
            self._answer(request.caller, carry_out(self, request.call))

    def _await(self, caller: Caller, call: LongPoll) -> None:
        # Under the lock, so that c10d-changes handles each change either before (then `carry_out` sees it) or after
        # (then it sees the pending call).
        with self._watching:
            result = carry_out(self, call)
            if isinstance(result, Changes) and not result.changes:
                until = (
                    self._clock() + PENDING_S - SWEEP_S
                )  # the sweep that finds it late may just have passed
                self._pending[caller] = _PendingWatch(call.scopes, call.after_revision, until)
                return
        self._answer(caller, result)

    # The thread c10d-changes.

    def _notify(self) -> None:
        try:
            while True:
                try:
                    self._tell(self._feed.next(SWEEP_S))
                except Compacted as error:
                    self._tell_all_to_read_again(error)
                self._forget_quiet_clients()
        except StoreClosed:
            return

    def _tell(self, changes: tuple[Change, ...]) -> None:
        now = self._clock()
        with self._watching:
            for caller, pending in list(self._pending.items()):
                after = pending.after_revision
                wanted = tuple(
                    change
                    for change in changes
                    if change.revision > after and in_scopes(change.key, pending.scopes)
                )
                if changes:
                    pending.after_revision = max(after, changes[-1].revision)
                if wanted or pending.until <= now:
                    self._answer_pending(caller, Changes(pending.after_revision, wanted))

    def _tell_all_to_read_again(self, error: Compacted) -> None:
        with self._watching:
            for caller in list(self._pending):
                self._answer_pending(caller, Refused("Compacted", str(error)))
            self._feed = self.watch(("",), self.read(()).revision)

    def _answer_pending(self, caller: Caller, result: Result) -> None:
        del self._pending[caller]
        self._answer(caller, result)

    # Both threads.

    def _answer(self, caller: Caller, result: Result) -> None:
        encoded = encode_reply(Reply(caller.id, result))
        if len(encoded) > REPLY_LIMIT_BYTES:
            text = f"the answer has {len(encoded)} bytes, the store carries at most {REPLY_LIMIT_BYTES}"
            kind = "Compacted" if isinstance(result, Changes) else "StoreError"
            encoded = encode_reply(Reply(caller.id, Refused(kind, text)))
        if self._admit(caller):
            self._server.queue_push(reply_queue(caller.client, caller.link), encoded)

    def _admit(self, caller: Caller) -> bool:
        """Note that this client lives. False when it has gone on to a newer link; its first call there ends this."""
        with self._remembering:
            known = self._clients.get(caller.client)
            if known is not None and known.link > caller.link:
                return False
            if known is not None and known.link < caller.link:
                self._drain(caller.client, known.link)
            self._clients.pop(caller.client, None)  # so that the dictionary is in the order of `seen_at`
            self._clients[caller.client] = _Client(caller.link, self._clock())
            return True

    def _forget_quiet_clients(self) -> None:
        now = self._clock()
        with self._remembering:
            for name, client in list(self._clients.items()):
                if client.seen_at + QUIET_S > now:
                    break
                self._drain(name, client.link)
                del self._clients[name]

    def _drain(self, client: str, link: int) -> None:
        from torch.distributed import QueueEmptyError

        queue = reply_queue(client, link)
        try:
            while self._server.queue_len(queue):
                self._server.queue_pop(queue, False)
        except QueueEmptyError:
            pass  # its client lives after all, and was quicker
