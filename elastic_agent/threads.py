"""The one way in which the agent starts threads, so that none of them ends without being missed.

A thread *fails* when its work raises what the work was not made for. That calls the process' one listener, see
`listen`: a thread that has failed does not come back, and an agent without it would wait for ever for its events, while
its lease lives on. Without a listener, as in a program that only uses the stores, the failure is logged.

A start that the machine does not allow now (out of process ids, out of memory) is tried again where it is wanted, for
`START_WITHIN_S`. Then the part that wants the thread goes on without it, if it has passed
`otherwise`: one answer is missing. A thread without `otherwise` is one that the process cannot be without, and fails:
`NotStarted`.

`otherwise` runs after a failure, too: it ends the wait of a part for an answer of its own thread.
"""

from __future__ import annotations

import errno
import logging
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


def listen(listener: Listener | None = None) -> None:
    """From now on this is called for every thread that fails, those of other libraries included."""
    global _listener
    _listener = listener or _into_the_log
    threading.excepthook = _others_failed


def _others_failed(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        _listener(args.thread.name if args.thread is not None else "of a library", args.exc_value)


class Thread(threading.Thread):
    """A thread whose failure is reported. A daemon: one that a dead store holds for ever does not delay the end."""

    def __init__(
        self, work: Callable[[], object], name: str, otherwise: Callable[[], object] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._otherwise = otherwise

    def start(self) -> None:
        """Never raises."""
        given_up_at = time.monotonic() + START_WITHIN_S
        while True:
            try:
                super().start()
                return
            except (RuntimeError, MemoryError) as error:
                if time.monotonic() >= given_up_at:
                    self._not_started(NotStarted(error))
                    return
            time.sleep(_PAUSE_S)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._fail(error)

    def join(self, timeout: float | None = None) -> None:
        """Also of one that was never started."""
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
