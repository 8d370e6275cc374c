"""Opens the store that the nodes of a job meet in, or hosts it; and how this node takes part there: its `policy_of`,
and what it would run, for others to compare (`program_of`).

Invariant: the kind that was chosen imports torch or gRPC here and not earlier, and for an agent in a thread: they take
seconds and tens of megabytes.

`StoreMemory` is what the agent that hosts a c10d store leaves for its next life on this machine: the newest world, in
a file in the machine's memory, in a folder of this user's alone. The store itself is gone with its agent. Its next host
must not give a generation's number away a second time, and must not let a world begin while members of the last one may
still train; the file has both. The next job at the endpoint may be another one of the same id: so number and members
count for every job, but restarts, step and run only where an agent of that world has joined again (`decide`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import socket
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from ...rendezvous.coordinator.restarts import RestartPolicy
from ...rendezvous.coordinator.view import Policy
from ...rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused
from ...rendezvous.messages import Program
from ...rendezvous.records import Endpoint, Phase, World
from ...rendezvous.store.interface import ScopedStore, Store, run_prefix
from ...rendezvous.store.store_kind import Access, Login, Tls
from ..common.events import Event, unless_stopped
from ..common.exits import CannotStart, ExitCode
from ..common.folders import make_own, own_name
from ..common.ports import PortError, bind_listener
from ..configuration.config import Command, Config
from ..configuration.rendezvous import (
    BACKEND,
    ENDPOINT,
    ETCD_INSECURE,
    JOB_ID,
    POOL,
    EtcdConfig,
    RendezvousConfig,
)
from ..configuration.stopping import drain_timeout_s
from ..machine.network import LOOPBACK, AddressError, default_source, endpoint_address

log = logging.getLogger(__name__)


def policy_of(config: Config) -> Policy:
    """A store that does not outlive the job has ended with a member's agent when it is away: no world is whole then."""
    kind = config.rendezvous.kind
    outlives_job = config.rendezvous.store_outlives_job
    grace_s = config.rendezvous.store_outage_grace_s if outlives_job else 0.0
    return Policy(
        job=config.rendezvous.job_id,
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        nodes_multiple_of=config.nodes_multiple_of,
        last_call_s=config.rendezvous.last_call_s,
        join_timeout_s=config.rendezvous.join_timeout_s,
        drain_timeout_s=drain_timeout_s(config.stop),
        store_outlives_job=outlives_job,
        runs_again=False,
        store_outage_grace_s=grace_s,
        unleased_s=config.rendezvous.lease_ttl_s if grace_s or kind.forgets_leases else 0.0,
        restarts=RestartPolicy(max_failures=config.max_restarts),
        cool_down_s=config.rendezvous.cool_down_s,
    )


def program_of(config: Config, outage_grace_s: float) -> Program:
    """A script is known by its content: paths may differ from node to node. What is no script is known by its name.

    `outage_grace_s`: how long this node goes on without the store.
    """
    command = config.command
    return Program(
        name=_name(command)[:256],
        digest=_digest(command),
        arguments=_salted(command.args, config.rendezvous.job_id)[:16],
        lease_ttl_s=config.rendezvous.lease_ttl_s,
        outage_grace_s=outage_grace_s,
    )


def _salted(words: Sequence[str], job_id: str) -> str:
    """A digest that no table of digests holds: every job has another one of the same words."""
    return hashlib.sha256("\0".join((job_id, *words)).encode(errors="surrogateescape")).hexdigest()


def _name(command: Command) -> str:
    if command.kind == "module":
        return f"-m {command.target}"
    return os.path.basename(command.target)


def _digest(command: Command) -> str:
    """Empty for a script that cannot be read: workers will say so."""
    if command.kind in ("module", "binary"):
        return hashlib.sha256(f"{command.kind} {_name(command)}".encode(errors="surrogateescape")).hexdigest()
    try:
        with open(command.target, "rb") as script:
            return hashlib.sha256(script.read()).hexdigest()
    except OSError:
        return ""


def http_listener(config: Config, address: str) -> socket.socket:
    """For metrics and probes. Raises PortError."""
    http = config.http_address
    if http is None and config.solitary:
        http = Endpoint(LOOPBACK, 0)
    if http is None:
        return bind_listener(address, config.port_range or 0, "metrics")
    return bind_listener(http.address, http.port, "metrics")


def store_listener(config: Config, endpoint: Endpoint | None, address: str) -> socket.socket | None:
    """The socket of the store, if this agent is to host it. Raises PortError.

    An agent that can bind the endpoint hosts: that is exact, where comparing host names is a guess. A port that is
    taken is another agent's store, or the connection to it will say what else it is.
    """
    if not config.rendezvous.may_host:
        return None
    if endpoint is None:
        return bind_listener(address, config.port_range or 0, "store")
    try:
        return bind_listener(endpoint.address, endpoint.port, "store", tries_for_s=0.0)
    except PortError:
        return None


def open_store(
    config: Config,
    endpoint: Endpoint | None,
    listener: socket.socket | None,
    events: queue.SimpleQueue[Event],
    on_wait: Callable[[], None] = lambda: None,
) -> Store:
    """The store for an agent: that which others serve, at `endpoint` if it was resolved, or its own on `listener`.

    Connecting may take as long as the other nodes do, so a thread waits for it and this one for signals; `on_wait` is
    called all the while, ten times a second.
    """
    rendezvous = config.rendezvous
    if not rendezvous.kind.shared:
        return connect_to_store(rendezvous)
    # Asked for now: the store takes the socket over.
    hosted_at = Endpoint(*listener.getsockname()[:2]) if listener is not None else None
    places = (endpoint,) if endpoint is not None else rendezvous.endpoints
    where = ", ".join(map(str, places)) or str(rendezvous.folder)
    looking = f"looking for the rendezvous store at {where}, for up to {rendezvous.join_timeout_s:.0f} s"
    doing = looking if listener is None else "preparing to host the rendezvous store: importing torch"

    def find() -> Store:
        if listener is None:
            return connect_to_store(rendezvous, places)
        return _host(rendezvous, listener, str(hosted_at) if endpoint is not None else None)

    try:
        requeues = config.stop.requeues
        store = unless_stopped(find, events, doing, on_wait, requeues=requeues)
    except StoreMismatch as error:
        raise CannotStart(ExitCode.MISMATCH, str(error)) from error
    except StoreRefused as error:
        raise CannotStart(ExitCode.BAD_CONFIG, str(error)) from error
    except StoreError as error:
        raise CannotStart(ExitCode.NO_ANSWER, str(error)) from error
    if hosted_at is not None and config.nodes.max > 1 and not rendezvous.endpoints:
        place = f"--rdzv-endpoint={hosted_at} --rdzv-id={rendezvous.job_id}"
        log.info("on each other node run the same command with %s", place)
    return store


def quiet_torch() -> None:
    """Of a store that does not answer torch writes pages of C++ frames; a command says it in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_to_look(rendezvous: RendezvousConfig, timeout_s: float) -> Store:
    """The store that the agents of a job meet in, for a process that is none of them. Raises StoreError."""
    quiet_torch()
    places = rendezvous.endpoints
    if not rendezvous.kind.cluster:
        try:
            found = ((endpoint_address(endpoint), endpoint.port) for endpoint in places)
            places = tuple(Endpoint(place or default_source() or LOOPBACK, port) for place, port in found)
        except AddressError as error:
            raise StoreRefused(
                f"--rdzv-endpoint: {error}: check the name, /etc/hosts and DNS here"
            ) from error
    return _connect(rendezvous, _access(rendezvous, places, timeout_s, None))


def connect_to_store(rendezvous: RendezvousConfig, places: tuple[Endpoint, ...] = ()) -> Store:
    """For an agent; tries for as long as the join timeout. A daemon makes a store of one machine where there is none.

    Raises StoreError.
    """
    access = _access(
        rendezvous, places or rendezvous.endpoints, rendezvous.join_timeout_s, rendezvous.lease_ttl_s
    )
    offer = rendezvous.kind.offer
    if offer is None or rendezvous.pool is not None:
        return _connect(rendezvous, access)
    assert rendezvous.folder is not None, "the configuration names one"
    try:
        make_own(rendezvous.folder, readable=True)  # all that is in it is for this user alone
    except OSError as error:
        raise StoreRefused(
            f"{error}: the store of this machine's pool needs a folder that no other user can write to; choose one "
            "with --rdzv-endpoint local:///FOLDER"
        ) from error
    return offer(access)


def _connect(rendezvous: RendezvousConfig, access: Access) -> Store:
    store = rendezvous.kind.connect(access)
    return store if rendezvous.pool is None else ScopedStore(store, run_prefix(rendezvous.job_id))


def _access(
    rendezvous: RendezvousConfig,
    endpoints: tuple[Endpoint, ...],
    timeout_s: float,
    lease_ttl_s: float | None,
) -> Access:
    etcd = rendezvous.etcd or EtcdConfig()
    return Access(
        endpoints,
        rendezvous.pool or rendezvous.job_id,
        timeout_s,
        lease_ttl_s,
        folder=rendezvous.folder,
        prefix=etcd.prefix,
        tls=Tls(etcd.ca, etcd.cert, etcd.key) if etcd.ca is not None else None,
        login=Login(etcd.user, lambda: etcd_password(etcd)) if etcd.user is not None else None,
    )


def _host(rendezvous: RendezvousConfig, listener: socket.socket, endpoint: str | None) -> Store:
    """`endpoint`: where hosts of this store come back. A port that the kernel chose is no such place: None."""
    host, job = rendezvous.kind.host, rendezvous.job_id
    assert host is not None, "else there is no listener"
    if endpoint is None:
        return host(listener, job, None, lambda world: None)
    memory = StoreMemory(job, endpoint)
    past = memory.recall()
    if past is not None:
        log.info(
            "an earlier host of this store has left generation %d: the next one begins as soon as its nodes are "
            "back or their leases have ended; where none of their agents comes back, as a new run",
            past.generation,
        )
    return host(listener, job, past, memory.remember)


def etcd_password(etcd: EtcdConfig) -> str:
    """As it is now: the file may have been replaced. Raises OSError, and StoreRefused for what is no text."""
    assert etcd.password_file is not None, "a user has a password"
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
    """The options by which another command on this machine finds the job's store; none for a memory store."""
    rendezvous, etcd = config.rendezvous, config.rendezvous.etcd
    if not rendezvous.kind.shared:
        return {}
    words = {BACKEND.name: rendezvous.backend, JOB_ID.name: rendezvous.job_id}
    if rendezvous.pool is not None:
        words[POOL.name] = rendezvous.pool
    if rendezvous.folder is not None:
        return {**words, ENDPOINT.name: f"{rendezvous.backend}://{rendezvous.folder}"}
    if etcd is None:
        place = Endpoint(*listener.getsockname()[:2]) if listener is not None else endpoint
        return {**words, ENDPOINT.name: str(place)}
    members = ",".join(map(str, rendezvous.endpoints))
    for field in fields(etcd):
        option, value = field.metadata.get("option"), getattr(etcd, field.name)
        if option is not None and value is not None:
            words[option.name] = str(value.absolute() if isinstance(value, Path) else value)
    words |= {ETCD_INSECURE.name: "true"} if etcd.ca is None else {}
    return {**words, ENDPOINT.name: f"{rendezvous.backend}://{members}{etcd.prefix}"}


SHARED_MEMORY = Path("/dev/shm")


class StoreMemory:
    """The newest world of one job at one endpoint, in a file."""

    def __init__(self, job: str, endpoint: str, place: Path = SHARED_MEMORY) -> None:
        """`place` is for tests."""
        name = hashlib.sha256(f"{endpoint} {job}".encode()).hexdigest()[:16]
        self.file = place / own_name("elastic_agent_store_") / f"{name}.json"
        self._failed = False

    def recall(self) -> World | None:
        """The newest world of an earlier host that did not end the job."""
        try:
            make_own(self.file.parent)
            world = World.from_json(self.file.read_text())
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, RecordInvalid) as error:
            log.warning("what an earlier host of the store knew cannot be used: %s: %s", self.file, error)
            return None
        return world if world.phase is not Phase.ENDED else None

    def remember(self, text: str) -> None:
        """`text` is the world that is about to be seen by all."""
        try:
            make_own(self.file.parent)
            if World.from_json(text).phase is Phase.ENDED:
                self.file.unlink(missing_ok=True)
            else:  # a reader sees all of it, or all of the one before
                scratch = self.file.with_suffix(".new")
                scratch.write_text(text)
                scratch.chmod(0o600)
                os.replace(scratch, self.file)
        except (OSError, RecordInvalid) as error:
            if not self._failed:
                log.warning(
                    "the next host of the store will not know of this world: %s: %s", self.file, error
                )
            self._failed = True
