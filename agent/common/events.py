"""Threads of an agent and what they hand to each other: the calls that the main loop makes, the io thread, a backlog.

A thread *posts* a method with its arguments to the main loop's queue, and forgets it: calls are made one after
the other, in the order of the posts. Two things may come before there is a main loop, and are records: a signal, and
the failure of a thread. Who runs the queue decides what follows from them: `unless_stopped` does until there is a main
loop, while a thread does what may take long.

`IoThread` waits for file descriptors and for pauses to end, and calls the function that belongs to each. An agent has
one, `io`, for what its processes report by themselves: exits, sockets, pipes of helpers. So what it calls must never
wait: not for a disk, a network, a lock that is held over either, or another thread. What may wait has a thread of its
own, such as a `Backlog`.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import math
import os
import queue
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from ...threads import Thread
from .exits import REMEDIES, CannotStart, ExitCode, code_of_leave

T = TypeVar("T")

log = logging.getLogger(__name__)

ANNOUNCED_AFTER_S = 1.0
"""A wait that is longer is logged."""


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread of this process has ended as it should not, or could not be started."""

    name: str
    problem: str
    code: ExitCode = ExitCode.AGENT_FAILED

    @property
    def reason(self) -> str:
        """Of this process' end, and what to do about it."""
        report = "; report it with the traceback above" if self.code is ExitCode.AGENT_FAILED else ""
        return f"the thread {self.name} has failed: {self.problem}{report}"


Event: TypeAlias = Callable[[], object] | Signalled | ThreadFailed


def run_next(events: queue.SimpleQueue[Any], timeout_s: float, otherwise: Callable[[Any], object]) -> None:
    """Make the next call, if one comes within that time, and all that wait behind it; `otherwise` gets the records."""
    try:
        event = events.get(timeout=timeout_s)
        while True:
            if callable(event):
                event()
            else:
                otherwise(event)
            event = events.get_nowait()
    except queue.Empty:
        pass


def unless_stopped(
    work: Callable[[], T],
    events: queue.SimpleQueue[Event],
    doing: str,
    on_wait: Callable[[], None] = lambda: None,
    *,
    requeues: bool = False,
) -> T:
    """What `work` returns or raises; CannotStart as soon as there is a signal.

    Calls are made meanwhile, and `on_wait` ten times a second. `requeues` as in `code_of_leave`. `doing` is logged when
    the work takes longer than `ANNOUNCED_AFTER_S`.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    def refuse(event: Signalled | ThreadFailed) -> None:
        if isinstance(event, ThreadFailed):
            raise CannotStart(event.code, event.reason)
        raise CannotStart(code_of_leave(event.number, requeues=requeues), f"stopped while {doing}")

    lack = REMEDIES[errno.EAGAIN]
    failed = CannotStart(ExitCode.NOT_HERE, f"no thread could be started for {doing}: {lack}")
    done.add_done_callback(lambda _: events.put(lambda: None))  # so that it is not waited for
    Thread(run, doing.replace(" ", "-"), lambda: done.set_exception(failed)).start()
    announce_at = time.monotonic() + ANNOUNCED_AFTER_S
    while not done.done():
        on_wait()
        run_next(events, 0.1, refuse)
        if time.monotonic() >= announce_at:
            log.info("%s", doing)
            announce_at = math.inf
    return done.result()


class IoThread:
    """All methods are for any thread. From another thread they take effect soon, in the order of the calls, and until
    then the function of a descriptor may still be called. So another thread never closes a descriptor that is watched,
    but passes `forget` what closes it: a number that was closed first may belong to a new descriptor when it is
    forgotten, and a descriptor of which a duplicate lives would be reported without end.
    """

    def __init__(self, name: str = "io") -> None:
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._pauses: list[tuple[float, int, Callable[[], None]]] = []
        """A heap: the end of each pause, monotonic, and what follows it."""
        self._numbers = itertools.count()
        """So that of two pauses with the same end the first comes first."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._act)
        self._closing = False
        self._closed = False
        self._lock = threading.Lock()
        """Held while something is posted, and for the end: nothing is written to `_wake` once it is closed."""
        self._thread = Thread(self._serve, name)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """The thread ends when all is done that was posted."""
        self.post(self._stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive() and not self._closed:
            self._stop()
            self._closed = True
            self._selector.close()
            os.close(self._wake)

    def post(self, action: Callable[[], object]) -> bool:
        """Have the thread call it, after all that was posted before. False when the thread is ending, or has failed:
        nothing is done then."""
        with self._lock:
            if not self._closing:
                self._posted.put(action)
                os.eventfd_write(self._wake, 1)
            return not self._closing

    def watch(self, descriptor: int, then: Callable[[], object]) -> None:
        """From now on call `then` while there is something to read. It takes the place of what was called before."""
        self._do(partial(self._watch, descriptor, then))

    def forget(self, descriptor: int, then: Callable[[], object] = lambda: None) -> None:
        """Call nothing for it any more; `then` may close it. After the thread's end, `then` is called at once."""
        if not self._do(partial(self._forget, descriptor, then)):
            then()

    def later(self, pause_s: float, then: Callable[[], None]) -> None:
        self._do(partial(self._pause, time.monotonic() + pause_s, then))

    def _do(self, action: Callable[[], object]) -> bool:
        if threading.current_thread() is not self._thread:
            return self.post(action)
        action()
        return True

    # Everything below runs in the thread.

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            self._stop()

    def _turn(self) -> None:
        left_s = max(0.0, self._pauses[0][0] - time.monotonic()) if self._pauses else None
        for key, _ in self._selector.select(left_s):
            if self._selector.get_map().get(key.fd) is key:  # not forgotten by the one before
                key.data()
        while self._pauses and self._pauses[0][0] <= time.monotonic():
            heapq.heappop(self._pauses)[2]()

    def _act(self) -> None:
        os.eventfd_read(self._wake)
        while not self._posted.empty():
            self._posted.get()()

    def _watch(self, descriptor: int, then: Callable[[], object]) -> None:
        self._remove(descriptor)
        if descriptor < 0:
            return  # of a socket that is closed
        try:
            self._selector.register(descriptor, selectors.EVENT_READ, then)
        except OSError as error:  # without it an exit, or a connection, would never be noticed
            if error.errno != errno.EBADF:  # closed before it was watched
                raise

    def _forget(self, descriptor: int, then: Callable[[], object]) -> None:
        self._remove(descriptor)
        then()

    def _remove(self, descriptor: int) -> None:
        if descriptor >= 0 and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def _pause(self, until: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._pauses, (until, next(self._numbers), then))

    def _stop(self) -> None:
        with self._lock:
            self._closing = True


class Backlog(ABC, Generic[T]):
    """Work for a thread that may stand still, in a queue that is bounded: who brings it waits for room once at most.

    A console that is not read and a disk that does not answer hold their writers, for any time. So a thread that does
    nothing else does it, and all others bring what is to be done. What finds no room is refused and never comes; the
    first that finds none may wait for a while, the next do not, until the thread goes on.

    All methods are for any thread. The `_do` of each item comes in the order in which they were put.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[T, int]] = deque()
        self._size = 0  # of what waits or is being done
        self._stuck = False
        self._closing = False
        self._thread = Thread(self._serve, name)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: T, size: int, most: float, patience_s: float = 0.0) -> bool:
        """Whether it will be done: if less than `most` is waiting. This caller may wait for `patience_s` for room."""
        with self._changed:
            if patience_s and not self._stuck:
                self._stuck = not self._changed.wait_for(lambda: self._size < most, patience_s)
            if (patience_s and self._stuck) or self._size >= most:
                self._refused(item)
                return False
            self._waiting.append((item, size))
            self._size += size
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """The thread ends when all is done; see `join`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Whether all is done within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _do(self, item: T) -> None:
        """In the thread; may take any time."""

    @abstractmethod
    def _refused(self, item: T) -> None:
        """It will not be done. No other item comes in or is done meanwhile."""

    @abstractmethod
    def _moved(self) -> None:
        """One was done. No other item comes in or is done meanwhile, but this may put some."""

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item, size = self._waiting.popleft()
            self._do(item)
            with self._changed:
                self._size -= size
                self._stuck = False
                self._changed.notify_all()
                self._moved()
