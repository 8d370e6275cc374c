"""Work that may take long before the main loop runs: done in a thread, while this one handles signals."""

from __future__ import annotations

import errno
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from ...rendezvous.node.snapshot import ANNOUNCED_AFTER_S
from ...threads import Thread
from .events import Event, Signalled, ThreadFailed
from .exits import REMEDIES, CannotStart, ExitCode, code_of_leave

T = TypeVar("T")

log = logging.getLogger(__name__)


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
