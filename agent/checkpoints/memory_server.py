"""Keeps a memory server at hand: the process is started when the first request or order comes, and anew when it ends.

The agent listens, and the server inherits the listening sockets: what comes while there is no server waits there. A job
without sharded state starts one only where a node that leaves hands its state over.

A thread of its own asks the job's store for the key by which the servers know each other, at the start and again with
each generation: the store of a job without etcd may be another one then.
"""

from __future__ import annotations

import logging
import queue
import random
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...rendezvous.errors import StoreError, StoreUnavailable
from ...rendezvous.node.transactions import RETRY
from ...rendezvous.store.interface import Compare, Put, Store
from ...threads import Thread
from ...worker.storage.replication.key_file import KEY_BYTES, write_key
from ..common.events import Event, IoThread
from ..workers.processes.helper import Helper
from .folder import MemoryFolder

if TYPE_CHECKING:
    from .handover import Handover

log = logging.getLogger(__name__)

_MODULE = f"{__name__.rpartition('.')[0]}.server"
_ROOT = Path(__file__).parents[len(_MODULE.split(".")) - 1]
_PROGRAM = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {_MODULE} import main; main(*sys.argv[1:])"
"""Isolated, as the disk writer is."""

BACKLOG = 1024
"""Orders that wait for the server: of one that is starting, those of all workers."""
PAUSE_S = 1.0
"""After a server has ended, so that one that cannot start costs nothing."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """`orders` is where this node's workers send orders, `listener` where other nodes connect."""

    memory: MemoryFolder
    node: str
    orders: Path
    reports: str
    listener: socket.socket


class MemoryServer:
    """For the main thread, which starts the process: it dies with the thread that does."""

    def __init__(
        self,
        place: ServerPlace,
        store: Store,
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
    ) -> None:
        listener = place.listener.fileno()
        self._command = [
            sys.executable, "-I", "-S", "-c", _PROGRAM,
            str(place.memory.path), str(place.memory.limit), place.node, place.reports, str(listener),
        ]  # fmt: skip
        self._place = place
        self._store = store
        self._environment = environment
        self._io = io
        self._helper = Helper(io, lambda: post(self.ended))
        self._post = post
        self._closed = threading.Event()
        self._leaving = False
        self._asks: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._orders.bind(str(place.orders))
        self._orders.listen(BACKLOG)

    def start(self) -> None:
        Thread(self._keep_key, "memory-key").start()
        self.renew_key()
        self._await_work()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._helper.pids

    def wanted(self) -> None:
        """There is something to do for the process, and perhaps no process."""
        if not self._helper.runs and not self._closed.is_set():
            self._launch()

    def ended(self) -> None:
        """The process has ended."""
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
        self._closed.set()
        self._asks.put(None)
        self._helper.end()
        for listener in (self._orders, self._place.listener):
            self._io.forget(listener.fileno(), listener.close)

    # ---------------------------------------------------------------- the process

    def _launch(self) -> None:
        try:
            self._helper.start(
                self._command, self._environment, self._orders.fileno(), (self._place.listener.fileno(),)
            )
        except OSError as error:
            log.warning("the memory server cannot be started, replicas and copies wait for it: %s", error)
            self._io.later(PAUSE_S, self._want)

    def _want(self) -> None:
        """In the io thread."""
        if not self._closed.is_set():
            self._post(self.wanted)

    def _await_work(self) -> None:
        descriptors = self._orders.fileno(), self._place.listener.fileno()

        def come() -> None:
            for descriptor in descriptors:
                self._io.forget(descriptor)
            self._want()

        for descriptor in descriptors:
            self._io.watch(descriptor, come)

    # ---------------------------------------------------------------- memory-key

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
