"""Keeps a disk writer at hand: the process is started when the first order comes, and anew after it has ended.

The agent listens, and the writer inherits the listening socket: an order that comes while there is no writer waits in
the socket until there is one, and a writer that dies takes only its present order with it: the rank 0 that gave it
sees the end of its connection.
"""

from __future__ import annotations

import logging
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from ...codec import Invalid
from ...worker.wire.channel import Lines, send
from ...worker.wire.messages import UNSAVED_STEPS, FinishWrites, UnsavedStep, UnsavedSteps
from ..common.events import Event, IoThread
from ..workers.processes.helper import Helper, end
from ..workers.processes.proc import reap_within

log = logging.getLogger(__name__)

_MODULE = f"{__name__.rpartition('.')[0]}.writer"
_ROOT = Path(__file__).parents[len(_MODULE.split(".")) - 1]
_PROGRAM = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {_MODULE} import main; main(*sys.argv[1:])"
"""Isolated, and with nothing but the standard library and this package to look through, it starts in no time."""

LOST = "; its save may not be on disk: check that disk"
PAUSE_S = 1.0
"""After a writer has ended, so that one that cannot start costs nothing."""


class DiskWriter:
    """For the main thread, which starts the process: it dies with the thread that does."""

    def __init__(
        self,
        path: Path,
        agent: str,
        reports: str,
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
    ) -> None:
        """`path` is where orders come, `agent` and `reports` are the agent's other sockets."""
        self.path = path
        self._command = [sys.executable, "-I", "-S", "-c", _PROGRAM, agent, reports]
        self._environment = environment
        self._io = io
        self._helper = Helper(io, lambda: post(self.ended))
        self._post = post
        self._closed = False
        self.departing = False
        """`finish` is to come, or at work in another thread: no process is started for what happens meanwhile."""
        self._unsaved: tuple[UnsavedStep, ...] | None = None
        """Of the writer's last message, while it finishes."""
        self._finishing_since = 0.0
        self._tried_again: set[tuple[str, str]] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def start(self) -> None:
        self._await_order()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._helper.pids

    def wanted(self) -> None:
        """There is an order to write a checkpoint, and no process to do it."""
        if not self.departing:
            self._launch()

    def ended(self) -> None:
        """The process has ended."""
        if not self.departing and (how := self._helper.reap()):
            log.warning("the disk writer has ended: %s; the next save starts another", how)
            self._io.later(PAUSE_S, self._await_order)

    def finish(self, within_s: float) -> str:
        """Let it do all that was ordered, and end; what it has not done within that time is left, and logged.

        The first of these errors; empty: there is none.
        """
        if not self._helper.runs and _has_come(self._socket):
            self._launch()
        self._closed = True
        process = self._helper.release()
        if process is None:
            return ""
        self._finishing_since = time.monotonic()
        deadline = self._finishing_since + within_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(within_s)
                connection.connect(str(self.path))
                send(connection, FinishWrites(), within_s)
                for message in _messages(connection, deadline):
                    self._report_unsaved(message.unsaved, within_s)
            if reap_within(process, deadline - time.monotonic()) is None:
                raise TimeoutError
        except (OSError, Invalid):
            if self._unsaved is None:
                log.warning("a save may not be on disk: it was not written within %g s", within_s)
            end(process, LOST)
        return next(iter(self._log_unsaved(within_s)), "")

    def _report_unsaved(self, unsaved: tuple[UnsavedStep, ...], within_s: float) -> None:
        """What the writer has not done yet, while it finishes."""
        self._unsaved = unsaved
        for one in unsaved:
            where = _name(one), one.directory
            if one.reason and not one.final and where not in self._tried_again:
                self._tried_again.add(where)
                log.warning(
                    "%s is not on disk in %s yet, it is tried again for up to %g s: %s",
                    *where, within_s, one.reason,
                )  # fmt: skip

    def _log_unsaved(self, within_s: float) -> list[str]:
        unsaved, self._unsaved = self._unsaved, None
        errors = [_error(one, within_s) for one in unsaved or ()]
        for error in errors:
            log.error("%s", error)
        return errors

    def close(self) -> None:
        """The agent is ending; see `finish`, which may have been cut short."""
        self._closed = True
        self._log_unsaved(round(time.monotonic() - self._finishing_since, 1))
        self._helper.end(LOST)
        self._io.forget(self._socket.fileno(), self._socket.close)

    def _launch(self) -> None:
        try:
            self._helper.start(self._command, self._environment, self._socket.fileno())
        except OSError as error:
            log.warning("the disk writer cannot be started, saves make training wait: %s", error)
            self._io.later(PAUSE_S, self._await_order)

    def _await_order(self) -> None:
        if not self._closed:
            self._io.watch(self._socket.fileno(), partial(self._ordered, self._socket.fileno()))

    def _ordered(self, descriptor: int) -> None:
        """In the io thread: the next order is waited for when a writer has ended."""
        self._io.forget(descriptor)
        self._post(self.wanted)


def _name(unsaved: UnsavedStep) -> str:
    if unsaved.rank is None:
        return f"step {unsaved.step}"
    return f"rank {unsaved.rank}'s part of step {unsaved.step}"


def _error(unsaved: UnsavedStep, within_s: float) -> str:
    name, directory = _name(unsaved), unsaved.directory
    if unsaved.reason:
        return f"{name} is NOT on disk in {directory}: {unsaved.reason}"
    return f"{name} is not known to be on disk in {directory}: it was not written within {within_s:g} s"


def _messages(connection: socket.socket, deadline: float) -> Iterator[UnsavedSteps]:
    """Until the other end closes. Raises Invalid; OSError, also when that is not before the deadline, monotonic."""
    lines = Lines(UNSAVED_STEPS)
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(UNSAVED_STEPS.most_bytes)
        if not chunk:
            return
        yield from lines.add(chunk)


def _has_come(connection: socket.socket) -> bool:
    """Whether there is something to read, or the end. select would refuse descriptors from 1024 on."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
