"""The process that hosts the local store: a `MemoryStore` that also answers other processes, over a UNIX socket.

Its own threads call it directly. What comes over the socket is read and answered by one thread, local-store, that
blocks on nothing but its selector; a transaction that changes a key without a lease is answered when it is on disk
(`journal`). The next host goes on with all keys and leases: each lease has its whole time to live again, but for those
of processes that have ended.

A process of another user, root's apart, is turned away as it connects. Each connection may hold so many bytes, so many
calls without an answer, and the beginning of a message for so long; one that sends anything else than calls of ours is
cut, and nothing happens to the others.

All of this is on one machine: nothing that has seen a change survives the loss of power that could undo it, so a change
is seen by all at once, and only its author waits for the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import selectors
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ...threads import Thread
from ..errors import Compacted, StoreClosed, StoreError, StoreUnavailable
from ..store.interface import Compare, Delete, Entry, LeaseId, Outcome, Put
from ..store.kv_state import KvState
from ..store.memory import MemoryStore
from ..store.requests import Grant
from ..store.wire import (
    PARKED_S,
    Call,
    Caller,
    CallInvalid,
    Changes,
    Granted,
    LongPoll,
    Refused,
    Reply,
    Result,
    Transact,
    carry_out,
    decode_request,
    encode_meta,
    encode_reply,
    refusal,
)
from .clients import Client, Connection, Parked
from .files import HostLock, StoreFiles, process_of, start_of, user_of
from .frames import FrameInvalid, frame
from .journal import Begun, Ended, Journal, Leased, Line, Written
from .recovery import left_s, recovered

MOST_CONNECTIONS = 2048
REPLY_LIMIT_BYTES = 512 * 1024 * 1024
MESSAGE_S = 10.0
"""From the first byte of a message to its last."""
FULL_PAUSE_S = 0.5
"""No connection is accepted for so long when this process has no file descriptor left."""
DISK_S = 10.0
"""How long a thread of this process waits for the disk."""

_READ_BYTES = 256 * 1024
_log = logging.getLogger(__name__)


class LocalHost(MemoryStore):
    """The store itself, in the process that hosts it."""

    def __init__(self, files: StoreFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises HostedAlready, StoreRefused, and StoreUnavailable where the folder cannot be used."""
        files.check()
        self._files = files
        self.dropped = 0
        """Connections that were cut, because of who they were or what they sent."""
        try:
            self._lock = HostLock(files)
            try:
                past = recovered(files)
                super().__init__(clock, KvState(base=past.base, ended=self._lease_ended))
                self._base = past.base
                self._leases = {one.lease: one for one in past.leases}
                ttl_s = {one.lease: left_s(one) for one in past.leases}
                self._state.restore(past.entries, ttl_s, past.lease_of, clock())
                self._journal = Journal(
                    files.state, Begun(files.job, past.base), self._content, self._changed
                )
                self._listener = _listen(files)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise StoreUnavailable(
                f"cannot host the store of pool {files.job} in {files.folder}: {error}; check the folder's permissions "
                "and the space there, or name another one (--rdzv-endpoint local:///FOLDER)"
            ) from error
        self._introduction = frame(encode_meta(files.job, host=uuid.uuid4().hex))
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepts_again_at: float | None = None
        self._connections: set[Connection] = set()
        self._clients: dict[str, Client] = {}
        self._from_disk: deque[tuple[Connection, Caller, Result]] = deque()
        self._parked_seen = self._state.revision
        """The revision up to which parked calls were looked at."""
        self._closing, self._waking = threading.Lock(), threading.Lock()
        self._ended = False
        self._thread = Thread(self._serve, "local-store", self._end)
        self._thread.start()

    def grant(self, ttl_s: float) -> LeaseId:
        return self._grant(ttl_s, os.getpid())

    def revoke(self, lease: LeaseId) -> None:
        super().revoke(lease)
        self._wake_thread()

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        outcome, lasts = self._transact(compares, writes)
        self._wake_thread()
        if lasts:
            ended: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
            self._journal.when_on_disk(ended.put)
            try:
                error = ended.get(timeout=DISK_S)
            except queue.Empty:
                raise StoreUnavailable(f"{self._files.state} is on a disk that does not answer") from None
            if error is not None:
                raise self._not_kept(error)
        return outcome

    def close(self) -> None:
        super().close()
        self._wake_thread()
        self._thread.join()
        self._end()

    def _grant(self, ttl_s: float, pid: int) -> LeaseId:
        with self._changed:
            lease = super().grant(ttl_s)
            self._leases[lease] = Leased(lease, ttl_s, pid, start_of(pid))
            self._journal.add(self._leases[lease])
        self._wake_thread()  # it may expire earlier than any other
        return lease

    def _lease_ended(self, lease: LeaseId) -> None:
        del self._leases[lease]
        self._journal.add(Ended(lease))

    def _content(self) -> list[Line]:
        """All that the next host needs."""
        return [*self._leases.values(), *(self._written((entry,)) for entry in self._state.entries())]

    def _written(self, entries: tuple[Entry, ...], deleted: tuple[str, ...] = ()) -> Written:
        lease_of = {entry.key: self._state.lease_of(entry.key) for entry in entries}
        return Written(entries, deleted, {key: lease for key, lease in lease_of.items() if lease is not None})

    def _transact(
        self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]
    ) -> tuple[Outcome, bool]:
        """The outcome, and whether the disk must have it before it is known."""
        with self._changed:
            outcome = super().transact(compares, writes)
            if not (outcome.succeeded and writes):
                return outcome, False
            now = {write.key: self._state.entry(write.key) for write in writes}
            entries = tuple(entry for entry in now.values() if entry is not None)
            self._journal.add(
                self._written(entries, tuple(key for key, entry in now.items() if entry is None))
            )
            return outcome, any(isinstance(write, Delete) or write.lease is None for write in writes)

    def _not_kept(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"the store's host cannot keep this in {self._files.state}: {error}; make room there, or correct its "
            "permissions; it was done, but may be lost with the host"
        )

    def _wake_thread(self) -> None:
        """Have the thread local-store look at what has changed."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---------------------------------------------------------------- local-store

    def _serve(self) -> None:
        try:
            while True:
                self._answer_parked()
                for key, events in self._selector.select(self._idle_s()):
                    if key.fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._advance(key.data, events)
                self._answer_from_disk()
        except StoreClosed:
            return

    def _idle_s(self) -> float | None:
        """Until something is to be done without being asked."""
        with self._changed:
            due = [] if (expiry := self._open().next_expiry()) is None else [expiry]
        due += [one.begun_at + MESSAGE_S for one in self._connections if one.begun_at is not None]
        due += [parked.until for one in self._connections for parked in one.parked.values()]
        due += [] if self._accepts_again_at is None else [self._accepts_again_at]
        return max(0.0, min(due) - self._clock()) if due else None

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._selector.unregister(self._listener)
                    self._accepts_again_at = self._clock() + FULL_PAUSE_S
                return
            uid = user_of(accepted)
            if uid not in (os.geteuid(), 0) or len(self._connections) >= MOST_CONNECTIONS:
                self._report_dropped(
                    f"a connection of user {uid} was refused: {len(self._connections)} are open"
                )
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = Connection(accepted)
            self._connections.add(connection)
            self._send(connection, self._introduction)

    def _advance(self, connection: Connection, events: int) -> None:
        """Read what there is to read, and do what is asked."""
        if connection not in self._connections:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection.reads:
                received = connection.socket.recv(_READ_BYTES)
                if not received:
                    self._drop(connection)
                    return
                connection.received.feed(received)
            self._work(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
        except (FrameInvalid, CallInvalid) as error:
            self._report_dropped(f"a connection of user {user_of(connection.socket)} was cut: {error}")
            self._drop(connection)
        except StoreClosed:
            raise
        except Exception:  # one odd call must not end the store
            self.dropped += 1
            _log.exception("a call to the local store failed")
            self._drop(connection)

    def _work(self, connection: Connection) -> None:
        """Do the calls that have come whole, as many as may be answered now."""
        while connection.reads and (message := connection.received.take()) is not None:
            connection.begun_at = None
            try:
                request = decode_request(message)
            except CallInvalid as error:
                if error.caller is None:
                    raise
                refused = Refused("StoreError", f"the host refused the call: {error}")
                self._answer(connection, error.caller, refused)
                continue
            if not self._admit(connection, request.caller):
                refused = Refused("StoreUnavailable", "a later call of this client was answered first")
                self._answer(connection, request.caller, refused)
            else:
                self._do(connection, request.caller, request.call)
        if not (connection.received and connection.reads):
            connection.begun_at = None
        elif connection.begun_at is None:
            connection.begun_at = self._clock()
        self._update_selector(connection)

    def _admit(self, connection: Connection, caller: Caller) -> bool:
        """False for a call that its client gave up on before it made others that were done: it would be too late."""
        if connection.client not in (None, caller.client):
            return False
        connection.client = caller.client
        known = self._clients.setdefault(caller.client, Client(caller.link, set()))
        known.connections.add(connection)
        if caller.link < known.link:
            return False
        known.link = caller.link
        return True

    def _do(self, connection: Connection, caller: Caller, call: Call) -> None:
        if isinstance(call, Grant):
            result: Result = Granted(self._grant(call.ttl_s, process_of(connection.socket)))
        elif isinstance(call, LongPoll) and call.after_revision < self._base:
            result = Refused("Compacted", f"changes up to revision {self._base} were seen by an earlier host")
        elif isinstance(call, LongPoll):
            result = carry_out(self, call)
            if isinstance(result, Changes) and not result.changes:
                until = self._clock() + PARKED_S
                connection.parked[caller] = Parked(call.scopes, call.after_revision, until)
                return
        elif isinstance(call, Transact):
            try:
                result, lasts = self._transact(call.compares, call.writes)
            except StoreClosed:
                raise
            except StoreError as error:
                result, lasts = refusal(error), False
            if lasts:
                connection.at_disk += 1
                done = result

                def on_disk(error: OSError | None) -> None:
                    known = done if error is None else refusal(self._not_kept(error))
                    self._from_disk.append((connection, caller, known))
                    self._wake_thread()

                self._journal.when_on_disk(on_disk)
                return
        else:
            result = carry_out(self, call)
        self._answer(connection, caller, result)

    def _answer_from_disk(self) -> None:
        while self._from_disk:
            connection, caller, result = self._from_disk.popleft()
            if connection in self._connections:
                connection.at_disk -= 1
                self._answer(connection, caller, result)
                self._advance(connection, 0)  # calls may have waited for this

    def _answer_parked(self) -> None:
        """Answer the parked calls for which something has changed, or that are due; look after what has no event."""
        now = self._clock()
        with self._changed:
            kv = self._open()
            if kv.expire(now):
                self._changed.notify_all()
            changed, self._parked_seen = kv.revision != self._parked_seen, kv.revision
        for connection in list(self._connections):
            if connection.begun_at is not None and connection.begun_at + MESSAGE_S <= now:
                self._report_dropped(f"a message was not whole after {MESSAGE_S:g} s")
                self._drop(connection)
                continue
            answers = [
                (caller, result)
                for caller, parked in connection.parked.items()
                if changed or parked.until <= now
                if (result := self._result_for(parked, now)) is not None
            ]
            for caller, result in answers:
                del connection.parked[caller]
                self._answer(connection, caller, result)
            if answers:
                self._advance(connection, 0)
        if self._accepts_again_at is not None and self._accepts_again_at <= now:
            self._accepts_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _result_for(self, parked: Parked, now: float) -> Result | None:
        with self._changed:
            kv = self._open()
            try:
                changes = kv.changes(parked.scopes, parked.after_revision)
            except Compacted as error:
                return refusal(error)
            parked.after_revision = max(parked.after_revision, kv.revision)
        if changes or parked.until <= now:
            return Changes(parked.after_revision, changes)
        return None

    def _answer(self, connection: Connection, caller: Caller, result: Result) -> None:
        encoded = encode_reply(Reply(caller.id, result))
        if len(encoded) > REPLY_LIMIT_BYTES:
            text = f"the answer has {len(encoded)} bytes, the store gives at most {REPLY_LIMIT_BYTES}"
            kind = "Compacted" if isinstance(result, Changes) else "StoreError"
            encoded = encode_reply(Reply(caller.id, Refused(kind, text)))
        self._send(connection, frame(encoded))

    def _send(self, connection: Connection, message: bytes) -> None:
        connection.to_send.append(memoryview(message))
        try:
            self._flush(connection)
            self._update_selector(connection)
        except OSError:
            self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        """Raises OSError."""
        waiting = connection.to_send
        with suppress(BlockingIOError):
            while waiting:
                sent = connection.socket.send(waiting[0])
                waiting[0] = waiting[0][sent:]
                if not waiting[0]:
                    waiting.popleft()

    def _update_selector(self, connection: Connection) -> None:
        """Have the selector report what this connection waits for."""
        if connection not in self._connections:
            return
        events = selectors.EVENT_WRITE if connection.to_send else 0
        events |= selectors.EVENT_READ if connection.reads else 0
        if events == connection.events:
            return
        if not events:
            self._selector.unregister(connection.socket)
        elif connection.events:
            self._selector.modify(connection.socket, events, connection)
        else:
            self._selector.register(connection.socket, events, connection)
        connection.events = events

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        if connection.events:
            self._selector.unregister(connection.socket)
        connection.socket.close()
        client = self._clients.get(connection.client or "")
        if client is not None:
            client.connections.discard(connection)
            if not client.connections:  # no call of it can come late any more
                del self._clients[connection.client or ""]

    def _report_dropped(self, text: str) -> None:
        """The first one as a warning, later ones for debugging: any process of this user can cause as many as it
        likes."""
        self.dropped += 1
        _log.log(logging.WARNING if self.dropped == 1 else logging.DEBUG, "local store: %s", text)

    # ---------------------------------------------------------------- the end

    def _end(self) -> None:
        """The next host may come when the last line is on disk."""
        with self._closing:
            if self._ended:
                return
            self._ended = True
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            self._listener.close()
            self._journal.close()
            with suppress(OSError):
                self._files.socket.unlink()
            self._lock.release()
            with self._waking:
                os.close(self._wake)
                self._wake = -1


def _listen(files: StoreFiles) -> socket.socket:
    """Raises OSError. A socket that is there belongs to a host that has ended, as this one holds the lock."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        files.socket.unlink(missing_ok=True)
        listener.bind(str(files.socket))
        files.socket.chmod(0o600)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
