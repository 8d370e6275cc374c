"""The one way in which the agent starts threads, so that none of them ends without being missed.

A thread *fails* when its work raises what the work was not made for. That calls the process' one listener, see
`listen`: a thread that has failed does not come back, and an agent without it would wait for ever for its events, while
its lease lives on. Without a listener, as in a program that only uses the stores, the failure is logged.

A start that the machine does not allow now (out of process ids, out of memory) is tried again for `START_WITHIN_S`, by
a thread that `listen` has started. Then the part that wants the thread goes on without it, if it has passed
`otherwise`: one answer is missing. A thread without `otherwise` is one that the process cannot be without, and fails:
`NotStarted`.

`otherwise` runs after a failure, too: it ends the wait of a part for an answer of its own thread.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

log = logging.getLogger(__name__)

START_WITHIN_S = 4.0
_PAUSE_S = 0.1
"""Between two tries."""

Listener: TypeAlias = Callable[[str, BaseException], None]
"""Called in the thread that failed, or that could not start it, with its name and why."""


class NotStarted(OSError):
    """The machine does not let this process have another thread."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(errno.EAGAIN, f"no thread could be started within {START_WITHIN_S:g} s: {why}")


def _into_the_log(name: str, error: BaseException) -> None:
    log.error("the thread %s has failed: %r", name, error, exc_info=error)


_listener: Listener = _into_the_log
_late_starts: queue.SimpleQueue[Thread] | None = None
_process = 0
"""In which they are served."""


def listen(listener: Listener | None = None) -> None:
    """From now on this is called for every thread that fails, those of other libraries included, and starts are tried
    again. Raises NotStarted."""
    global _listener, _late_starts, _process
    _listener = listener or _into_the_log
    threading.excepthook = _others_failed
    if _process != os.getpid():
        waiting: queue.SimpleQueue[Thread] = queue.SimpleQueue()
        _start(threading.Thread(target=_start_late, args=(waiting,), name="late-starts", daemon=True).start)
        _late_starts, _process = waiting, os.getpid()


def _others_failed(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        _listener(args.thread.name if args.thread is not None else "of a library", args.exc_value)


def _start_late(waiting: queue.SimpleQueue[Thread]) -> None:
    while True:
        waiting.get().start_late()


def _start(start: Callable[[], None], since: float | None = None) -> None:
    """Raises NotStarted. `since`, monotonic: it has been tried from then on."""
    give_up_at = (time.monotonic() if since is None else since) + START_WITHIN_S
    while True:
        try:
            start()
            return
        except (RuntimeError, MemoryError) as error:
            if time.monotonic() >= give_up_at:
                raise NotStarted(error) from error
        time.sleep(_PAUSE_S)


class Thread(threading.Thread):
    """A thread whose failure is reported. A daemon: one that a dead store holds for ever does not delay the end."""

    def __init__(
        self, work: Callable[[], object], name: str, otherwise: Callable[[], object] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._otherwise = otherwise
        self._tried_at = 0.0
        self._late: threading.Event | None = None
        """Of a start that is tried again: set as it is over."""

    def start(self) -> None:
        """Never raises, and never waits."""
        self._tried_at = time.monotonic()
        try:
            super().start()
        except (RuntimeError, MemoryError) as error:
            if _late_starts is not None and _process == os.getpid():
                log.warning("the thread %s cannot be started now, trying again: %s", self.name, error)
                self._late = threading.Event()
                _late_starts.put(self)
            else:
                self._not_started(NotStarted(error))

    def start_late(self) -> None:
        """In the thread for that."""
        try:
            _start(super().start, self._tried_at)
        except NotStarted as error:
            self._not_started(error)
        finally:
            if self._late is not None:
                self._late.set()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._fail(error)

    def join(self, timeout: float | None = None) -> None:
        """Also of one that was never started."""
        if self._late is not None:
            self._late.wait(timeout)
        if self.ident is not None:
            super().join(timeout)

    def _not_started(self, error: NotStarted) -> None:
        if self._otherwise is None:
            self._fail(error)
            return
        log.warning("going on without the thread %s: %s", self.name, error.strerror)
        self._otherwise()

    def _fail(self, error: BaseException) -> None:
        try:
            _listener(self.name, error)
        finally:
            if self._otherwise is not None:
                self._otherwise()
