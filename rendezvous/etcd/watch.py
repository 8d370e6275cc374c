"""Watches on etcd: one stream with a watcher for each scope, made again where it left off when it breaks.

A thread of each stream reads it into a queue, because gRPC cannot wait for an answer with a timeout. The stream
moves together with the calls: when they leave a member, it is closed with their channel, and `next` raises. What has
been delivered is remembered for each scope on its own, since etcd lets one watcher of a stream run ahead of
another that still catches up. Nothing here waits between two tries: that is the caller's part.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from ...threads import Thread
from ..errors import Compacted, StoreClosed, StoreError
from ..store.interface import Change, Watch
from .channel import WATCH, Connection

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
