"""Opens the store that the nodes of a job meet in, or hosts it.

Invariant: torch and gRPC are imported only here, only for the store that was chosen, and in a thread: they take
seconds and tens of megabytes.
"""

from __future__ import annotations

import logging
import queue
import shlex
import socket
from collections.abc import Callable
from typing import TypeAlias

from ...rendezvous.errors import StoreError, StoreMismatch, StoreRefused
from ...rendezvous.memory import MemoryStore
from ...rendezvous.records import Endpoint
from ...rendezvous.store import Store
from ..configuration.config import Config
from ..configuration.rendezvous import EtcdConfig, RendezvousConfig
from ..events import Event
from ..exits import CannotStart, ExitCode
from ..interruptible import unless_stopped
from ..ports import ONE_TRY, PortError, bind_listener
from .link import KEEP_ALIVES_PER_TTL
from .memory import StoreMemory

log = logging.getLogger(__name__)

LEAST_PATIENCE_S = 0.5
"""With the host of a c10d store that does not answer. A connection that was reset is found out only by asking again,
and there must be time for that before the lease is no proof any more."""

Binder: TypeAlias = Callable[[str, int | None, str], socket.socket]
"""Called with address, port (None: one that the configuration allows) and purpose."""


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
    if config.rendezvous.backend != "c10d":
        return None
    if endpoint is None:
        return bind(address, None, "store")
    try:
        return bind_listener(endpoint.address, endpoint.port, "store", policy=ONE_TRY)
    except PortError:
        return None


def open_store(
    config: Config,
    endpoint: Endpoint | None,
    listener: socket.socket | None,
    events: queue.SimpleQueue[Event],
    on_wait: Callable[[], None] = lambda: None,
) -> Store:
    """Connecting may take as long as the other nodes do, so a thread waits for it and this one for signals.

    `on_wait` is called all the while, ten times a second.
    """
    rendezvous = config.rendezvous
    if rendezvous.backend == "memory":
        return MemoryStore()
    # Asked for now: the store takes the socket over.
    hosted_at = Endpoint(*listener.getsockname()[:2]) if listener is not None else None

    def connect() -> Store:
        if rendezvous.backend == "etcd":
            return connect_to_etcd(rendezvous)
        memory = StoreMemory(rendezvous.job_id, str(hosted_at)) if hosted_at and endpoint else None
        return _host_or_join_c10d(rendezvous, endpoint, listener, memory)

    if listener is None:
        log.info(
            "looking for the rendezvous store at %s, for up to %.0f s",
            endpoint or ", ".join(map(str, rendezvous.endpoints)),
            rendezvous.join_timeout_s,
        )
    try:
        store = unless_stopped(connect, events, "looking for the store", on_wait)
    except StoreMismatch as error:
        raise CannotStart(ExitCode.STORE_MISMATCH, str(error)) from error
    except StoreRefused as error:
        raise CannotStart(ExitCode.BAD_CONFIG, str(error)) from error
    except StoreError as error:
        raise CannotStart(ExitCode.STORE_LOST, str(error)) from error
    if hosted_at is not None:
        _invite(config, hosted_at)
    return store


def _host_or_join_c10d(
    rendezvous: RendezvousConfig,
    endpoint: Endpoint | None,
    listener: socket.socket | None,
    memory: StoreMemory | None,
) -> Store:
    """`memory`: of the hosts at this endpoint. A port that the kernel chose is no place where one comes back."""
    if listener is not None:
        from ...rendezvous.c10d.host import C10dHost

        address, job = listener.getsockname()[0], rendezvous.job_id
        if memory is None:
            return C10dHost(listener, address, job)
        past = memory.recall()
        if past is not None:
            log.info(
                "an earlier host of this store has left generation %d: the next one begins as soon as its nodes are "
                "back or their leases have ended; where none of their agents comes back, as a new run",
                past.generation,
            )
        return C10dHost(listener, address, job, past=past, remember=memory.remember)
    from ...rendezvous.c10d.store import C10dStore

    assert endpoint is not None, "without an endpoint this agent hosts the store"
    patience_s = max(LEAST_PATIENCE_S, rendezvous.lease_ttl_s / KEEP_ALIVES_PER_TTL)
    return C10dStore.connect(
        endpoint.address, endpoint.port, rendezvous.job_id, rendezvous.join_timeout_s, patience_s
    )


def connect_to_etcd(rendezvous: RendezvousConfig, *, only_to_read: bool = False) -> Store:
    """Tries for as long as the join timeout. Raises StoreError."""
    from ...rendezvous.etcd.store import EtcdAccess, EtcdLogin, EtcdStore, EtcdTls

    etcd = rendezvous.etcd
    assert etcd is not None, "the backend is etcd"
    access = EtcdAccess(
        tuple((endpoint.address, endpoint.port) for endpoint in rendezvous.endpoints),
        etcd.prefix,
        EtcdTls(etcd.ca, etcd.cert, etcd.key) if etcd.ca is not None else None,
        EtcdLogin(etcd.user, lambda: etcd_password(etcd)) if etcd.user is not None else None,
    )
    return EtcdStore.connect(
        access,
        rendezvous.job_id,
        lease_ttl_s=rendezvous.lease_ttl_s,
        timeout_s=rendezvous.join_timeout_s,
        only_to_read=only_to_read,
    )


def etcd_password(etcd: EtcdConfig) -> str:
    """As it is now: the file may have been replaced. Raises OSError, and StoreRefused for what is no text."""
    if etcd.password_file is None:
        assert etcd.password is not None, "a user has a password"
        return etcd.password.text
    content = etcd.password_file.read_bytes()
    try:
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        # Not "from": that error carries the content along.
        raise StoreRefused(
            f"--etcd-password-file {etcd.password_file} holds no UTF-8 text: correct it"
        ) from None


def store_options(
    config: Config, endpoint: Endpoint | None, listener: socket.socket | None
) -> dict[str, str]:
    """What another command on this machine must be told to find the job's store; nothing of a memory store."""
    rendezvous, etcd = config.rendezvous, config.rendezvous.etcd
    if rendezvous.backend == "memory":
        return {}
    words = {"rdzv-backend": rendezvous.backend, "rdzv-id": rendezvous.job_id}
    if etcd is None:
        place = Endpoint(*listener.getsockname()[:2]) if listener is not None else endpoint
        return {**words, "rdzv-endpoint": str(place)}
    members = ",".join(map(str, rendezvous.endpoints))
    files = {
        "etcd-ca": etcd.ca,
        "etcd-cert": etcd.cert,
        "etcd-key": etcd.key,
        "etcd-password-file": etcd.password_file,
    }
    words |= {name: str(path.absolute()) for name, path in files.items() if path is not None}
    words |= {"etcd-user": etcd.user} if etcd.user is not None else {}
    words |= {"etcd-insecure": "true"} if etcd.ca is None else {}
    return {**words, "rdzv-endpoint": f"etcd://{members}{etcd.prefix}"}


def _invite(config: Config, hosted_at: Endpoint) -> None:
    """With the store on a port that nobody chose, somebody must tell the other nodes."""
    if config.nodes.max == 1 or config.rendezvous.endpoints:
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
