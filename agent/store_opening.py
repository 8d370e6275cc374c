"""Opens the store that the nodes of a job meet in, and finds the address under which they see this node.

Invariant: torch and gRPC are imported only here, only for the store that was chosen, and in a thread: they take
seconds and tens of megabytes.
"""

from __future__ import annotations

import logging
import queue
import shlex
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeAlias

from ..rendezvous.errors import StoreError, StoreMismatch
from ..rendezvous.memory import MemoryStore
from ..rendezvous.store import Store
from .config import Config, Endpoint
from .events import Event, Signalled
from .exits import CannotStart, ExitCode
from .network import LOOPBACK, AddressError, is_loopback, own_address, resolve
from .ports import ONE_TRY, PortError, bind_listener

log = logging.getLogger(__name__)

Binder: TypeAlias = Callable[[str, int | None, str], socket.socket]
"""Called with address, port (None: one that the configuration allows) and purpose."""


def c10d_endpoint(config: Config) -> Endpoint | None:
    """The c10d endpoint that the user gave, as an address."""
    given = config.rendezvous.endpoint
    if given is None:
        return None
    try:
        address = resolve(given.host, given.port)
    except AddressError as error:
        raise CannotStart(ExitCode.BAD_CONFIG, f"--rdzv-endpoint {given}: {error}") from error
    if is_loopback(address) and given.host not in ("localhost", address):
        # Debian's /etc/hosts gives a machine's own name a loopback address, where no other node can come.
        address = own_address(None)
    return Endpoint(address, given.port)


def node_address(config: Config, endpoint: Endpoint | None) -> str:
    """Where the other nodes reach this one."""
    if config.local_addr is not None:
        try:
            return resolve(config.local_addr, 0)
        except AddressError as error:
            raise CannotStart(ExitCode.BAD_CONFIG, f"--local-addr: {error}") from error
    if config.rendezvous.backend == "memory":
        return LOOPBACK
    return own_address((endpoint.host, endpoint.port) if endpoint is not None else None)


def c10d_listener(
    config: Config,
    endpoint: Endpoint | None,
    address: str,
    bind: Binder,
) -> socket.socket | None:
    """The socket of the c10d store, if this agent is to host it.

    Whoever can bind the endpoint hosts: that is exact, where comparing host names is a guess. A port that is
    taken is another agent's store, or the connection to it will say what else it is.
    """
    if config.rendezvous.backend == "memory":
        return None
    if endpoint is None:
        return bind(address, None, "store")
    try:
        return bind_listener(endpoint.host, endpoint.port, "store", policy=ONE_TRY)
    except PortError:
        return None


def open_store(
    config: Config,
    endpoint: Endpoint | None,
    listener: socket.socket | None,
    events: queue.SimpleQueue[Event],
) -> Store:
    """Connecting may take as long as the other nodes do, so a thread waits for it and this one for signals."""
    job = config.rendezvous.job_id
    if config.rendezvous.backend == "memory":
        return MemoryStore()
    opened: Future[Store] = Future()

    def work() -> None:
        try:
            if listener is not None:
                from ..rendezvous.c10d_host import C10dHost

                opened.set_result(C10dHost(listener, listener.getsockname()[0], job))
            else:
                from ..rendezvous.c10d import C10dStore

                assert endpoint is not None, "without an endpoint this agent hosts the store"
                timeout_s = config.rendezvous.join_timeout_s
                opened.set_result(C10dStore.connect(endpoint.host, endpoint.port, job, timeout_s))
        except BaseException as error:
            opened.set_exception(error)

    if listener is None:
        log.info(
            "looking for the rendezvous store at %s, for up to %.0f s",
            endpoint,
            config.rendezvous.join_timeout_s,
        )
    threading.Thread(target=work, name="store-open", daemon=True).start()
    while True:
        try:
            return opened.result(timeout=0.1)
        except FutureTimeout:
            if not events.empty():
                raise CannotStart(_stopped_by(events.get()), "stopped while looking for the store") from None
        except StoreMismatch as error:
            raise CannotStart(ExitCode.STORE_MISMATCH, str(error)) from error
        except StoreError as error:
            raise CannotStart(ExitCode.STORE_LOST, str(error)) from error


def _stopped_by(event: Event) -> ExitCode:
    interrupted = isinstance(event, Signalled) and event.number == signal.SIGINT
    return ExitCode.STOPPED_BY_SIGINT if interrupted else ExitCode.STOPPED_BY_SIGTERM


def invite(config: Config, hosted_at: Endpoint) -> None:
    """With the store on a port that nobody chose, somebody must tell the other nodes."""
    if config.nodes.max == 1 or config.rendezvous.endpoint is not None:
        return
    command, rendezvous, nodes = config.command, config.rendezvous, config.nodes
    how = {"script": [], "module": ["-m"], "binary": ["--no-python"]}[command.kind]
    words = [
        "elastic-agent",
        f"--min-nodes={nodes.min}",
        f"--max-nodes={nodes.max}",
        f"--nproc-per-node={config.nproc_per_node}",
        f"--rdzv-endpoint={hosted_at}",
        f"--rdzv-id={rendezvous.job_id}",
        *how,
        command.target,
        *command.args,
    ]
    log.info("on each other node run:\n    %s", shlex.join(words))
