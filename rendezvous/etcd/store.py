"""The store on an etcd cluster (v3 API): no node of the job is special, and none hosts anything.

Everything is one request to etcd: a transaction compares, writes, and reads back what it compared; a read of several
scopes is one transaction, too, so that all of it is of one revision, and linearizable. Keys are stored under
`<prefix>/<job>/` and given out without it.

Requests are answered within a fifth of the lease's time to live or raise StoreUnavailable, so that several
keep-alives fit in while a lease counts as good. `channel` leaves a member in trouble for another.

A watch is one stream with a watcher for each scope, made again where it left off when it breaks. A thread of each
stream reads it into a queue, because gRPC cannot wait for an answer with a timeout. The stream moves together with the
calls: when they leave a member, it is closed with their channel, and `next` raises. What has been delivered is
remembered for each scope on its own, since etcd lets one watcher of a stream run ahead of another that still catches
up. Nothing here waits between two tries: that is the caller's part.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from ...threads import Thread
from ..errors import Compacted, LeaseExpired, StoreClosed, StoreError, StoreRefused, StoreUnavailable
from ..store.interface import (
    Change,
    Compare,
    Delete,
    Entry,
    LeaseId,
    Outcome,
    Put,
    Snapshot,
    Store,
    Watch,
    is_folder,
)
from ..store.store_kind import Access, retry_connect
from .access import context
from .channel import LEASE_GRANT, LEASE_KEEP_ALIVE, LEASE_REVOKE, TXN, WATCH, Connection, Method

log = logging.getLogger(__name__)


class EtcdStore(Store):
    """A job's keys on an etcd cluster. Made by `connect`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages = connection.rpc.messages
        self._root = connection.root
        self._granted_in: int | None = None
        """The life of the store in which it granted this client's newest lease."""

    @classmethod
    def connect(cls, access: Access) -> EtcdStore:
        """Find a member that lets us read and write the job's keys, or only read them.

        Raises StoreRefused as soon as every address was tried and a person has to change something, and
        StoreUnavailable when `access.timeout_s` seconds of trying were not enough.
        """
        if access.tls is not None:
            context(access.tls)
        rng = random.Random()
        deadline = time.monotonic() + access.timeout_s
        connection = Connection(access, rng)
        store = cls(connection)
        refusals = 0

        def introduce() -> None:
            nonlocal refusals
            try:
                if access.lease_ttl_s is None:
                    store.read(())
                else:
                    store._introduce()
            except StoreRefused as error:
                refusals += 1
                if refusals >= max(1, len(connection.addresses.ring)):
                    raise
                raise StoreUnavailable(str(error)) from error

        try:
            retry_connect(introduce, deadline, rng)
        except StoreRefused:
            store.close()
            raise
        except StoreUnavailable as error:
            store.close()
            raise StoreUnavailable(
                f"no etcd on {access.where} after {access.timeout_s:g} s: {error}. Check that it runs and has a "
                "leader, that --rdzv-endpoint names its client addresses, and that no firewall closes the ports"
            ) from error
        except StoreError:
            store.close()
            raise
        return store

    def _introduce(self) -> None:
        """A transaction that may do everything we ever do, under a comparison that never holds."""
        messages, key = self._messages, self._key("")
        never = messages.Compare(
            key=key, target=messages.Compare.MOD, result=messages.Compare.LESS, mod_revision=0
        )
        put = messages.RequestOp(request_put=messages.PutRequest(key=key))
        look = self._range(key, count_only=True)
        request = messages.TxnRequest(compare=[never], success=[put], failure=[look])
        self._connection.call(TXN, request, repeatable=True)

    def grant(self, ttl_s: float) -> LeaseId:
        """etcd counts in whole seconds and has a least time to live: the lease lives `ttl_s` or longer."""
        request = self._messages.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        life = self._connection.history.seen.life
        lease = int(self._connection.call(LEASE_GRANT, request).ID)
        self._granted_in = life
        return lease

    def keep_alive(self, lease: LeaseId) -> None:
        request = self._messages.LeaseKeepAliveRequest(ID=lease)
        if self._call(LEASE_KEEP_ALIVE, request, hedged=True).TTL <= 0:
            raise LeaseExpired(f"lease {lease:x} is unknown to etcd: it expired, or was revoked")

    def revoke(self, lease: LeaseId) -> None:
        try:
            self._connection.call(LEASE_REVOKE, self._messages.LeaseRevokeRequest(ID=lease))
        except LeaseExpired:
            pass

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        messages = self._messages
        looks = [self._range(self._key(compare.key)) for compare in compares]
        request = messages.TxnRequest(
            compare=[
                messages.Compare(
                    key=self._key(compare.key),
                    target=messages.Compare.MOD,
                    result=messages.Compare.EQUAL,
                    mod_revision=compare.mod_revision,
                )
                for compare in compares
            ],
            success=[*(self._write(write) for write in writes), *looks],
            failure=looks,
        )
        answer = self._call(TXN, request)
        found = answer.responses[len(answer.responses) - len(compares) :]
        entries = (self._entries(response) for response in found)
        return Outcome(
            answer.succeeded, answer.header.revision, tuple(entry[0] if entry else None for entry in entries)
        )

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        looks = [self._range(*self._bounds(scope)) for scope in scopes]
        if oldest_under is not None:
            order = self._messages.RangeRequest
            how = {"sort_target": order.CREATE, "sort_order": order.ASCEND, "limit": 1}
            looks.append(self._range(*self._bounds(oldest_under), **how))
        # Without anything to read etcd would answer from what a member happens to know.
        looks = looks or [self._range(self._key(""), count_only=True)]
        answer = self._call(TXN, self._messages.TxnRequest(success=looks), repeatable=True)
        entries = {entry.key: entry for response in answer.responses for entry in self._entries(response)}
        return Snapshot(answer.header.revision, tuple(entries[key] for key in sorted(entries)))

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        ranges = tuple(map(self._bounds, scopes))
        return EtcdWatch(self._connection, ranges, after_revision, self._change)

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: Method, request: Any, **how: bool) -> Any:
        """Raises LeaseExpired before and after: nothing of a lease of the store before counts in this one."""
        self._check_lease()
        answer = self._connection.call(method, request, **how)
        self._check_lease()
        return answer

    def _check_lease(self) -> None:
        if self._granted_in not in (None, self._connection.history.seen.life):
            raise LeaseExpired("etcd has gone back to an older state since it granted this lease")

    def _key(self, key: str) -> bytes:
        return (self._root + key).encode()

    def _bounds(self, scope: str) -> tuple[bytes, bytes]:
        """The first key, and the first one behind the last, as etcd wants them: nothing behind a single key."""
        first = self._key(scope)
        return first, first[:-1] + b"0" if is_folder(scope) else b""  # "0" follows "/"

    def _range(self, key: bytes, end: bytes = b"", **how: Any) -> Any:
        messages = self._messages
        return messages.RequestOp(request_range=messages.RangeRequest(key=key, range_end=end, **how))

    def _write(self, write: Put | Delete) -> Any:
        messages, key = self._messages, self._key(write.key)
        if isinstance(write, Delete):
            return messages.RequestOp(request_delete_range=messages.DeleteRangeRequest(key=key))
        put = messages.PutRequest(key=key, value=write.value.encode(), lease=write.lease or 0)
        return messages.RequestOp(request_put=put)

    def _entries(self, response: Any) -> list[Entry]:
        return [self._entry(pair) for pair in response.response_range.kvs]

    def _entry(self, pair: Any) -> Entry:
        self._connection.history.saw_entry(pair.key, pair.mod_revision)
        value = pair.value.decode(errors="replace")  # its reader names the key when it makes no sense
        return Entry(self._relative(pair), value, pair.create_revision, pair.mod_revision)

    def _change(self, event: Any) -> Change:
        pair = event.kv
        entry = self._entry(pair) if event.type == event.PUT else None
        return Change(pair.mod_revision, self._relative(pair), entry)

    def _relative(self, pair: Any) -> str:
        return str(pair.key.decode(errors="replace").removeprefix(self._root))


Bounds: TypeAlias = tuple[bytes, bytes]
"""The first key, and the first one behind the last."""

UNREAD = 256
"""Answers that may wait for `next`; then etcd has to wait, too."""


class EtcdWatch(Watch):
    def __init__(
        self,
        connection: Connection,
        scopes: tuple[Bounds, ...],
        after_revision: int,
        understand: Callable[[Any], Change],
    ) -> None:
        """`understand` makes a change of one of etcd's events."""
        self._connection = connection
        self._scopes = scopes
        self._delivered = [after_revision] * len(scopes)
        self._understand = understand
        self._life = connection.history.seen.life
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._closed = False

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        deadline = time.monotonic() + timeout_s
        while True:
            stream = self._open_stream()
            try:
                answer = stream.next(deadline)
            except StoreError:
                with self._lock:
                    self._stream = None
                    if self._closed:
                        raise StoreClosed("the watch was closed") from None
                raise
            if answer is None:
                return ()
            if answer[1].created:
                self._connection.look(answer[1].header)
            changes = self._take(*answer)
            if changes:
                return changes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._stream is not None:
                self._stream.cancel()

    def _open_stream(self) -> _Stream:
        with self._lock:
            if self._closed:
                raise StoreClosed("the watch was closed")
            if self._life != self._connection.history.seen.life:
                raise Compacted("etcd has gone back to an older state: its revisions are others")
            if self._stream is None:
                self._stream = _Stream(
                    self._connection, tuple(zip(self._scopes, self._delivered, strict=True))
                )
            return self._stream

    def _take(self, number: int, answer: Any) -> tuple[Change, ...]:
        changes = tuple(
            self._understand(event)
            for event in answer.events
            if event.kv.mod_revision > self._delivered[number]
        )
        if changes:
            # etcd never splits one revision over two answers unless it is asked to.
            self._delivered[number] = changes[-1].revision
        elif not answer.created:
            # A notice of progress: this watcher has every change up to here.
            self._delivered[number] = max(self._delivered[number], answer.header.revision)
        return changes


class _Stream:
    """One call, from its beginning to its end."""

    def __init__(self, connection: Connection, watchers: tuple[tuple[Bounds, int], ...]) -> None:
        messages = connection.rpc.messages
        requests = [
            messages.WatchRequest(
                create_request=messages.WatchCreateRequest(
                    key=first, range_end=end, start_revision=delivered + 1, progress_notify=True
                )
            )
            for (first, end), delivered in watchers
        ]
        self._connection = connection
        self._channel, self._call, self._token = connection.stream(WATCH, requests)
        self._confirmed_by = time.monotonic() + connection.request_timeout_s
        self._wanted = len(requests)
        self._numbers: dict[int, int] = {}
        """From etcd's id of a watcher to its place among ours: etcd confirms them in the order of the requests."""
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(UNREAD)
        self._cancelled = False
        Thread(self._read, "etcd-watch", lambda: self._answers.put(self._problem(None))).start()

    def next(self, deadline: float) -> tuple[int, Any] | None:
        """The next answer, with the place of its watcher; None at the deadline. Raises what ended the stream."""
        while True:
            until = deadline
            if len(self._numbers) < self._wanted:
                until = min(deadline, self._confirmed_by)
            try:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if until == deadline:
                    return None
                self.cancel()
                raise self._connection.fail_over(
                    self._channel, f"etcd on {self._channel.address} did not confirm a watch"
                ) from None
            if isinstance(answer, StoreError):
                raise answer
            self._room.release()
            if answer.canceled:
                self.cancel()
                raise self._refusal(answer)
            if answer.created:
                self._numbers[answer.watch_id] = len(self._numbers)
            return self._numbers[answer.watch_id], answer

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()
        self._room.release()

    def _refusal(self, answer: Any) -> StoreError:
        if answer.compact_revision:
            return Compacted(f"etcd has forgotten all changes before revision {answer.compact_revision}")
        return self._connection.watch_refused(self._channel, answer.cancel_reason, self._token)

    def _read(self) -> None:
        ending: Exception | None = None
        try:
            for answer in self._call:
                self._answers.put(answer)
                self._room.acquire()
        except self._connection.rpc.grpc.RpcError as error:
            ending = error
        self._answers.put(self._problem(ending))

    def _problem(self, ending: Any) -> StoreError:
        if self._cancelled:
            return StoreClosed("the watch was closed")
        try:
            if ending is None:
                return self._connection.fail_over(
                    self._channel, f"etcd on {self._channel.address} ended a watch"
                )
            if ending.code().name == "RESOURCE_EXHAUSTED":
                return Compacted("more changed than one message can hold: read everything again")
            return self._connection.problem(self._channel, ending, self._token)
        except StoreError as error:
            return error
