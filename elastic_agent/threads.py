"""The one way in which the agent starts threads, so that none of them ends without being missed.

A thread *fails* when its work raises what the work was not made for, or when the machine does not let it start (out of
process ids, out of memory). Either calls the process' one listener, see `listen`: a thread that has failed does not
come back, and an agent without it would wait for ever for its events, while its lease lives on. Without a listener, as
in a program that only uses the stores, the failure is logged.

A part that waits for an answer of its own thread passes `otherwise`, which runs after a failure and ends that wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

log = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[str, BaseException], None]
"""Called in the thread that failed, or that could not start it, with its name and why."""


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
        self, work: Callable[[], object], name: str, otherwise: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._otherwise = otherwise

    def start(self) -> None:
        """Never raises: that it cannot be started is a failure like any other."""
        try:
            super().start()
        except (RuntimeError, MemoryError) as error:
            self._fail(error)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._fail(error)

    def join(self, timeout: float | None = None) -> None:
        """Also of one that was never started."""
        if self.ident is not None:
            super().join(timeout)

    def _fail(self, error: BaseException) -> None:
        try:
            _listener(self.name, error)
        finally:
            self._otherwise()
