"""The two processes that work on checkpoints beside the workers: disk writer (`writer`), memory server (`server`).

Each is started when the first order or request comes, and anew after it has ended. The agent listens, and the process
inherits the listening sockets: what comes while there is none waits there. A disk writer that dies takes only its
present order with it: the rank 0 that gave it sees the end of its connection. A job without sharded state starts a
memory server only where a node that leaves hands its state over.

A thread of its own asks the job's store for the key by which the memory servers know each other, at the start and again
with each generation: the store of a job without etcd may be another one then.
"""

from __future__ import annotations

import logging
import queue
import random
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...codec import Invalid
from ...rendezvous.errors import StoreError, StoreUnavailable
from ...rendezvous.node.transactions import RETRY
from ...rendezvous.store.interface import Compare, Put, Store
from ...threads import Thread
from ...worker.storage.replication.key_file import KEY_BYTES, write_key
from ...worker.wire.channel import Lines, send
from ...worker.wire.messages import UNSAVED_STEPS, FinishWrites, UnsavedStep, UnsavedSteps
from ..common.events import Event, IoThread
from ..workers.processes.helper import Helper, end
from ..workers.processes.proc import reap_within
from .folder import MemoryFolder

if TYPE_CHECKING:
    from .handover import Handover

log = logging.getLogger(__name__)

_PACKAGE = __name__.rpartition(".")[0]
_ROOT = Path(__file__).parents[len(__name__.split(".")) - 1]

LOST = "; its save may not be on disk: check that disk"
BACKLOG = 1024
"""Orders that wait for a process: of one that is starting, those of all workers."""
PAUSE_S = 1.0
"""After a process has ended, so that one that cannot start costs nothing."""


class _OnDemand:
    """For the main thread, which starts the process: it dies with the thread that does."""

    what = ""
    without = ""
    """What is so when it cannot be started."""

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        sockets: tuple[socket.socket, ...],
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
    ) -> None:
        """The first of `sockets` is the standard input of `module`, the others are inherited."""
        # Isolated, and with nothing but the standard library and this package to look through, it starts in no time.
        program = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
            f"from {_PACKAGE}.{module} import main; main(*sys.argv[1:])"
        )
        self._command = [sys.executable, "-I", "-S", "-c", program, *arguments]
        self._sockets = sockets
        self._environment = environment
        self._io = io
        self._post = post
        self._helper = Helper(io, lambda: post(self.ended))
        self._closed = threading.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._helper.pids

    def start(self) -> None:
        self._await_work()

    def wanted(self) -> None:
        """There is something to do for the process, and perhaps no process."""
        if not self._helper.runs and not self._closed.is_set():
            self._launch()

    def ended(self) -> None:
        """The process has ended."""
        raise NotImplementedError

    def _launch(self) -> None:
        first, *others = (one.fileno() for one in self._sockets)
        try:
            self._helper.start(self._command, self._environment, first, tuple(others))
        except OSError as error:
            log.warning("the %s cannot be started, %s: %s", self.what, self.without, error)
            self._io.later(PAUSE_S, self._want)

    def _await_work(self) -> None:
        """When something has come the process is started. In any thread."""
        if not self._closed.is_set():
            for descriptor in (descriptors := [one.fileno() for one in self._sockets]):
                self._io.watch(descriptor, lambda: self._come(descriptors))

    def _come(self, descriptors: list[int]) -> None:
        """In the io thread."""
        for descriptor in descriptors:
            self._io.forget(descriptor)
        self._want()

    def _want(self) -> None:
        if not self._closed.is_set():
            self._post(self.wanted)

    def _close(self, consequence: str = "") -> None:
        self._closed.set()
        self._helper.end(consequence)
        for listener in self._sockets:
            self._io.forget(listener.fileno(), listener.close)


def _listener(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(path))
    found.listen(BACKLOG)
    return found


# ---------------------------------------------------------------- the disk writer


class DiskWriter(_OnDemand):
    what = "disk writer"
    without = "saves make training wait"

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
        super().__init__("writer", (agent, reports), (_listener(path),), environment, io, post)
        self.departing = False
        """`finish` is to come, or at work in another thread: no process is started for what happens meanwhile."""
        self._unsaved: tuple[UnsavedStep, ...] | None = None
        """Of the writer's last message, while it finishes."""
        self._finishing_since = 0.0
        self._tried_again: set[tuple[str, str]] = set()

    def wanted(self) -> None:
        if not self.departing:
            super().wanted()

    def ended(self) -> None:
        if not self.departing and (how := self._helper.reap()):
            log.warning("the disk writer has ended: %s; the next save starts another", how)
            self._io.later(PAUSE_S, self._await_work)

    def finish(self, within_s: float) -> str:
        """Let it do all that was ordered, and end; what it has not done within that time is left, and logged.

        The first of these errors; empty: there is none.
        """
        if not self._helper.runs and _has_come(self._sockets[0]):
            self._launch()
        self._closed.set()
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
        self._log_unsaved(round(time.monotonic() - self._finishing_since, 1))
        self._close(LOST)


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


# ---------------------------------------------------------------- the memory server


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """`orders` is where this node's workers send orders, `listener` where other nodes connect."""

    memory: MemoryFolder
    node: str
    orders: Path
    reports: str
    listener: socket.socket


class MemoryServer(_OnDemand):
    what = "memory server"
    without = "replicas and copies wait for it"

    def __init__(
        self,
        place: ServerPlace,
        store: Store,
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
    ) -> None:
        memory, listener = place.memory, place.listener
        arguments = str(memory.path), str(memory.limit), place.node, place.reports, str(listener.fileno())
        super().__init__("server", arguments, (_listener(place.orders), listener), environment, io, post)
        self._place = place
        self._store = store
        self._leaving = False
        self._asks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        Thread(self._keep_key, "memory-key").start()
        self.renew_key()
        super().start()

    def ended(self) -> None:
        if how := self._helper.reap():
            log.warning("the memory server has ended, another is started: %s", how)
            self._io.later(PAUSE_S, self._want)  # its orders are kept: it has work to do

    def renew_key(self) -> None:
        """A generation begins."""
        self._asks.put(None)

    def expect_handover(self) -> None:
        """This node leaves: let `new_handover` find its modules loaded. Until then they are not worth an agent's time
        to start."""
        self._leaving = True
        self._asks.put(None)

    def new_handover(self) -> Handover:
        return _handover_type()(str(self._place.memory.path), self._place.node, self._store)

    def close(self) -> None:
        """The agent is ending."""
        self._close()
        self._asks.put(None)

    def _keep_key(self) -> None:
        key: bytes | None = None
        rng = random.Random()
        while True:
            self._asks.get()
            if self._leaving:
                _handover_type()
            attempt = 0
            while not self._closed.is_set():
                try:
                    found = key_of_job(self._store, key)
                except StoreUnavailable:
                    self._closed.wait(RETRY.wait_s(attempt, rng))
                    attempt += 1
                    continue
                except (StoreError, NoKey) as error:
                    log.warning("no replicas in other nodes' memory, for want of the job's key: %s", error)
                    break
                key = self._written(found, key)
                break
            if self._closed.is_set():
                return

    def _written(self, found: bytes, key: bytes | None) -> bytes | None:
        """The key that the folder has from now on."""
        if found == key:
            return key
        try:
            write_key(str(self._place.memory.path), found)
        except OSError as error:
            log.warning("no replicas in other nodes' memory, the job's key cannot be kept: %s", error)
            return key
        return found


def _handover_type() -> type[Handover]:
    from .handover import Handover

    return Handover


# ---------------------------------------------------------------- the key of the job

KEY = "memory-key"
"""In the store, beside the job's other keys: 64 hexadecimal digits."""


class NoKey(Exception):
    """What the store holds is no key; the text does not show it."""


def key_of_job(store: Store, own: bytes | None = None) -> bytes:
    """Puts `own`, or a new one, where there is none: of agents that come at the same time one is first.

    Raises StoreError, NoKey.
    """
    entries = store.read((KEY,)).entries
    if not entries:
        made = own or secrets.token_bytes(KEY_BYTES)
        outcome = store.transact((Compare(KEY, 0),), (Put(KEY, made.hex()),))
        if outcome.succeeded:
            return made
        entries = tuple(entry for entry in outcome.entries if entry is not None)
    try:
        key = bytes.fromhex(entries[0].value)
    except (IndexError, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise NoKey(f"what the store holds under {KEY!r} is no key of this version: delete it")
    return key
