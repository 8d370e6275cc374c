"""What other threads have the main loop do: calls on one queue, made one after the other, in the order of the posts.

A thread *posts* a method with its arguments, and forgets it. Two things may come before there is a main loop, and are
records: a signal, and the failure of a thread. Who runs the queue decides what follows from them:
`unless_stopped` does until there is a main loop, while a thread does what may take long.
"""

from __future__ import annotations

import errno
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ...rendezvous.node.snapshot import ANNOUNCED_AFTER_S
from ...threads import Thread
from .exits import REMEDIES, CannotStart, ExitCode, code_of_leave

T = TypeVar("T")

log = logging.getLogger(__name__)


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
    """What `work` returns or raises; CannotStart as soon as a signal is among the events.

    The others stay for the main loop. `on_wait` is called all the while, ten times a second. `requeues` as in
    `code_of_leave`. `doing` is logged when the work takes longer than `ANNOUNCED_AFTER_S`.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    lack = REMEDIES[errno.EAGAIN]
    failed = CannotStart(ExitCode.NOT_HERE, f"no thread could be started for {doing}: {lack}")
    Thread(run, doing.replace(" ", "-"), lambda: done.set_exception(failed)).start()
    kept: list[Event] = []
    try:
        announce_at, announced = time.monotonic() + ANNOUNCED_AFTER_S, False
        while True:
            try:
                return done.result(timeout=0.1)
            except FutureTimeout:
                on_wait()
                if not announced and time.monotonic() >= announce_at:
                    log.info("%s", doing)
                    announced = True
                while not events.empty():
                    event = events.get()
                    if isinstance(event, ThreadFailed):
                        raise CannotStart(event.code, event.reason) from None
                    if isinstance(event, Signalled):
                        code = code_of_leave(event.number, requeues=requeues)
                        raise CannotStart(code, f"stopped while {doing}") from None
                    kept.append(event)
    finally:
        for event in kept:
            events.put(event)
