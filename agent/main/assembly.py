"""What one agent is made of. Its parts are made and started by `run`, in their order.

`PreparedProcess` is what a process can have ready before it is the agent of any job: its threads' queue, its mark, and
preloaded modules. An agent makes this when it starts. A daemon's spare agent (`pool/job_agent.py`) has made it long
before, and preloads meanwhile what workers import: then the first workers of its job are forked at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from ...health.metrics import Metrics
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Endpoint
from ...rendezvous.store.interface import Store
from ...threads import listen
from ...worker.wire.environment import WorkerEnv
from ...worker.wire.shared_progress import clock
from ..checkpoints.folder import MemoryFolder
from ..checkpoints.processes import DiskWriter, MemoryServer
from ..common.events import Event, IoThread
from ..common.exits import CannotStart, ExitCode
from ..common.folders import make_own
from ..common.ports import PortError, bind_listener
from ..configuration.config import NO_FILES, Config, LogConfig
from ..machine.inventory import Machine
from ..machine.network import Network
from ..machine.nvml import GpuHealth, GpuMemory
from ..observability.observer import Observer
from ..observability.status import NodeState
from ..output.console import Console
from ..output.journal import Journal
from ..output.log_files import LogFiles, own_logs
from ..output.masking import masked, secrets_in
from ..rendezvous_io.node_checks import NodeChecks
from ..rendezvous_io.store_link import PeerLink, StoreLink
from ..rendezvous_io.store_opening import http_listener, store_listener
from ..workers.environment import Node
from ..workers.processes.guard import Guard, Subreaper, adopt_orphans
from ..workers.processes.spares import Spares
from .heartbeat import Heartbeat
from .process import ServiceManager, thread_failed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedProcess:
    incarnation: str
    events: queue.SimpleQueue[Event]
    io: IoThread
    """It runs."""
    subreaper: Subreaper
    adoption_error: str
    """Why orphans of workers are not adopted, and none can be forked; empty where they are."""
    spares: Spares | None = None
    """Those of an unknown job, which are being preloaded."""


def prepare_process() -> PreparedProcess:
    """To be called once, before this process has started any other. Raises OSError."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    listen(lambda thread, error: thread_failed(events, thread, error))
    subreaper, adoption_error, io = Subreaper(), adopt_orphans(), IoThread()
    io.start()
    return PreparedProcess(uuid.uuid4().hex[:12], events, io, subreaper, adoption_error)


def preload(
    prepared: PreparedProcess, words: Sequence[str], environment: Mapping[str, str]
) -> PreparedProcess:
    """With what these words of --preload name, in this environment, where that can be."""
    if prepared.adoption_error or not words:
        return prepared
    spares = new_spares(prepared, environment, words)
    spares.start()
    return replace(prepared, spares=spares)


def marked(prepared: PreparedProcess, environment: Mapping[str, str]) -> dict[str, str]:
    """By the mark the guard finds the fork server, too."""
    return {**environment, **WorkerEnv(incarnation=prepared.incarnation).variables()}


def new_spares(prepared: PreparedProcess, environment: Mapping[str, str], words: Sequence[str]) -> Spares:
    return Spares(marked(prepared, environment), words, prepared.io, prepared.events.put, clock)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound before anything is started: a port that cannot be had is refused by its number."""

    workers: socket.socket
    """For the store of the next generation's workers."""
    http: socket.socket
    store: socket.socket | None
    """For the rendezvous store, if this agent is to host it."""
    memory: socket.socket | None
    """For the memory servers and workers of other nodes, if there can be any."""


def bind_for_workers(config: Config, address: str) -> socket.socket:
    """On a port that the configuration allows. Raises PortError."""
    return bind_listener(address, config.port_range or 0, "master")


def bind_all(config: Config, endpoint: Endpoint | None, address: str, *, copies: bool) -> Listeners:
    """`copies`: of the workers' states, in memory; where no port is left for these the agent does without. Raises
    CannotStart."""
    memory = None
    try:
        workers, http = bind_for_workers(config, address), http_listener(config, address)
        store = store_listener(config, endpoint, address)
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error
    if copies and not config.solitary:
        try:
            memory = bind_listener(address, config.port_range or 0, "copies in memory", tries_for_s=0.0)
        except PortError as error:
            log.warning(
                "other nodes cannot read copies in this node's memory, nor keep replicas here: %s", error
            )
    return Listeners(workers, http, store, memory)


class _Service(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=_Service)


class Agent:
    """One agent: what it is from its first moment on, and below that its parts, which `run` makes in their order."""

    def __init__(
        self,
        config: Config,
        name: str,
        prepared: PreparedProcess,
        environment: Mapping[str, str],
        manager: ServiceManager,
        console: Console,
        machine: Machine,
        run_directory: Path | None = None,
        in_force: Sequence[str] = (),
    ) -> None:
        self.config, self.name, self.prepared = config, name, prepared
        self.environment = environment
        """What the workers inherit: the agent's own, as it was before the agent changed anything for itself."""
        self.manager, self.console, self.machine = manager, console, machine
        self.run_directory = run_directory
        """The folder of the folders of runs, which hold events and evidence; None: no files are kept."""
        self.in_force = in_force
        """The settings in force, for people."""
        self.incarnation, self.subreaper = prepared.incarnation, prepared.subreaper
        self.events, self.post, self.io = prepared.events, prepared.events.put, prepared.io
        self.clock = clock
        self.started_at = clock()
        self.ends = contextlib.ExitStack()
        """What is to be closed at the end, the newest first."""
        self.secrets = secrets_in(environment)
        """Known values, which nothing that others read may have."""

    network: Network
    metrics: Metrics
    log_files: LogFiles
    journal: Journal
    state: NodeState
    memory: MemoryFolder | None
    listeners: Listeners
    node: Node
    guard: Guard
    gpu_memory: GpuMemory
    gpu_health: GpuHealth
    spares: Spares
    checks: NodeChecks
    http: tuple[str, int]
    """Where this agent answers."""
    store: Store
    participant: Participant
    link: StoreLink
    peers: PeerLink
    heartbeat: Heartbeat
    disk_writer: DiskWriter
    memory_server: MemoryServer | None
    observer: Observer

    def started(self, service: _S) -> _S:
        """Until this agent ends."""
        service.start()
        self.ends.callback(service.close)
        return service


def choose_folders(logs: LogConfig) -> tuple[LogConfig, Path | None]:
    """With the place of what workers print, and beside that the folder of the runs' events and evidence: where no
    directory is given, one of this user's. They are there when this returns. Raises CannotStart for a directory that is
    given and cannot be made."""
    if logs.directory == NO_FILES:
        return replace(logs, directory=None), None
    if logs.directory is not None:
        try:
            logs.directory.mkdir(parents=True, exist_ok=True)
            return logs, logs.directory
        except OSError as error:
            reason = (
                f"--log-dir {logs.directory} cannot be made: {error.strerror}; name another, or leave it out"
            )
            raise CannotStart(ExitCode.NOT_HERE, reason) from error
    try:
        own = own_logs()
        make_own(own, readable=True)
    except OSError as error:
        log.warning(
            "what workers print goes to the console alone, and events and evidence nowhere: %s; set --log-dir",
            error,
        )
        return logs, None
    if not logs.wants_files:
        return logs, own
    log.info("what workers print is in %s; --log-dir chooses another place", own)
    return replace(logs, directory=own), own


def about_node(name: str, in_force: Sequence[str], secrets: Collection[str]) -> dict[str, str]:
    """The files about one node in the folder of a run: its settings."""
    return {f"configuration-{name}.toml": masked("\n".join(in_force), secrets)} if in_force else {}


def spares_of(agent: Agent) -> Spares:
    """Those that are prepared, where they are as this job needs them, or new ones; started, where they can be."""
    prepared = agent.prepared
    command, words = agent.config.command, agent.config.preload
    forks = bool(words) and command.kind != "binary" and not prepared.adoption_error
    if prepared.spares is not None:
        why_not = (
            prepared.spares.adopt(marked(prepared, agent.environment), words)
            if forks
            else "workers start cold"
        )
        if not why_not:
            log.info("workers are forked from a process that was preloaded before the job came")
            return prepared.spares
        log.info("what was preloaded before the job came is not used: %s", why_not)
        prepared.spares.close()
    spares = new_spares(prepared, agent.environment, words)
    if forks:
        spares.start()
    return spares
