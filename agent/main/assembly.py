"""Makes the parts of an agent from its configuration. What is started, and in which order, is up to `run`."""

from __future__ import annotations

import contextlib
import logging
import platform
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from ... import __version__
from ...health.checks.runner import CheckRun
from ...health.checks.table import RECHECKS, checks_for
from ...health.metrics import Build, Metrics
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Endpoint
from ...rendezvous.store.interface import Store
from ..checkpoints.disk_writer import DiskWriter
from ..checkpoints.folder import MemoryFolder
from ..checkpoints.memory_server import MemoryServer
from ..common.events import Event, IoThread
from ..common.exits import CannotStart, ExitCode
from ..common.folders import make_own
from ..configuration.config import NO_FILES, Config, LogConfig
from ..machine.gpus import GpuHealth, GpuMemory
from ..machine.inventory import Machine, needs_of
from ..machine.network import Network
from ..observability.observer import Observer
from ..observability.page import LOOKS_WITHIN_S, Board
from ..observability.sources import AgentsSource
from ..observability.status import NodeState
from ..output.console import Console
from ..output.journal import EventFile, Journal, Kind
from ..output.log_files import own_logs
from ..output.masking import masked, secrets_in
from ..rendezvous_io.node_checks import JoinChecks, Recheck
from ..rendezvous_io.store_link import PeerLink, StoreLink
from ..rendezvous_io.worker_links import ReportReceiver
from ..workers.causes import CauseTable
from ..workers.environment import Node
from ..workers.preloader.spares import Spares
from ..workers.processes.guard import Guard
from ..workers.processes.subreaper import Subreaper
from .heartbeat import Heartbeat, Probes
from .listeners import Listeners
from .prepared import Prepared, interpreter_of, new_spares
from .process import ServiceManager

log = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 10_000
"""Reports are dropped while so many events wait; everything else is bounded by what the loop itself has asked."""


class _Service(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=_Service)


@dataclass(slots=True)
class Agent:
    """One agent: what it is from its first moment on, and below that its parts, which `run` makes in their order."""

    config: Config
    name: str
    incarnation: str
    environment: Mapping[str, str]
    """What the workers inherit: the agent's own, as it was before the agent changed anything for itself."""
    events: queue.SimpleQueue[Event]
    io: IoThread
    manager: ServiceManager
    console: Console
    subreaper: Subreaper
    machine: Machine
    clock: Callable[[], float]
    run_directory: Path | None = None
    """The folder of the folders of runs, which hold events and evidence; None: no files are kept."""
    in_force: tuple[str, ...] = ()
    """The settings in force, for people."""
    started_at: float = field(init=False)
    ends: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)
    """What is to be closed at the end, the newest first."""

    network: Network = field(init=False)
    metrics: Metrics = field(init=False)
    journal: Journal = field(init=False)
    state: NodeState = field(init=False)
    memory: MemoryFolder | None = field(init=False)
    listeners: Listeners = field(init=False)
    node: Node = field(init=False)
    guard: Guard = field(init=False)
    gpu_memory: GpuMemory = field(init=False)
    gpu_health: GpuHealth = field(init=False)
    spares: Spares = field(init=False)
    checks: JoinChecks = field(init=False)
    recheck: Recheck = field(init=False)
    probes: Probes = field(init=False)
    http: tuple[str, int] = field(init=False)
    """Where this agent answers."""
    store: Store = field(init=False)
    participant: Participant = field(init=False)
    link: StoreLink = field(init=False)
    peers: PeerLink = field(init=False)
    heartbeat: Heartbeat = field(init=False)
    disk_writer: DiskWriter = field(init=False)
    memory_server: MemoryServer | None = field(init=False)
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def secrets(self) -> Collection[str]:
        """Known values, which nothing that others read may have."""
        return secrets_in(self.environment)

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
        except OSError as error:
            reason = (
                f"--log-dir {logs.directory} cannot be made: {error.strerror}; name another, or leave it out"
            )
            raise CannotStart(ExitCode.NOT_HERE, reason) from error
        return logs, logs.directory
    try:
        own = own_logs()
        make_own(own, readable=True)
    except OSError as error:
        log.warning(
            "all that workers print goes to the console, and none to files, nor do events and evidence of "
            "failures: %s; set --log-dir",
            error,
        )
        return logs, None
    if not logs.wants_files:
        return logs, own
    log.info("what workers print is in %s; --log-dir chooses another place", own)
    return replace(logs, directory=own), own


def journal_of(agent: Agent) -> Journal:
    secrets, count_lost = agent.secrets, partial(agent.metrics.dropped_total.inc, what="events")
    keeps = agent.run_directory is not None
    file = EventFile(count_lost, beside=about_node(agent.name, agent.in_force, secrets)) if keeps else None
    journal = Journal(agent.name, time.time, file, secrets=secrets)
    journal.note(Kind.AGENT_STARTED, f"agent {__version__} starts, incarnation {agent.incarnation}")
    return journal


def about_node(name: str, in_force: Sequence[str], secrets: Collection[str]) -> dict[str, str]:
    """The files about one node in the folder of a run: its settings."""
    return {f"configuration-{name}.toml": masked("\n".join(in_force), secrets)} if in_force else {}


def metrics_of(agent: Agent) -> Metrics:
    config, machine, clock = agent.config, agent.machine, agent.clock
    metrics = Metrics(
        config.rendezvous.job_id,
        agent.name,
        Build(
            version=__version__,
            torch_version=machine.software.torch or "",
            nccl_version=machine.software.nccl or "",
            python_version=platform.python_version(),
        ),
        workers=machine.workers,
        min_nodes=config.nodes.min,
        started_at_s=time.time() - (clock() - agent.started_at),  # the network may have taken its time
        causes=CauseTable(config.causes).names,
    )
    agent.console.count_lost(partial(metrics.dropped_total.inc, what="console_lines"))
    return metrics


def checks_of(agent: Agent) -> JoinChecks:
    needs = needs_of(agent.config, agent.machine)
    checks = checks_for(needs)
    return JoinChecks(
        agent.config.check,
        lambda: CheckRun(checks, needs, agent.environment),
        agent.events.put,
    )


def recheck_of(agent: Agent) -> Recheck:
    needs = needs_of(agent.config, agent.machine)
    checks = (*checks_for(needs), *RECHECKS)
    return Recheck(lambda: CheckRun(checks, needs, agent.environment), agent.events.put)


def spares_of(agent: Agent, prepared: Prepared) -> Spares:
    """Those that are prepared, where they are as this job needs them, or new ones; started, where they can be."""
    command, words, wanted = agent.config.command, agent.config.preload, agent.machine.workers + 1
    interpreter = interpreter_of(prepared, agent.environment)
    forks = bool(words) and command.kind != "binary" and not prepared.adoption_error
    if prepared.spares is not None:
        why_not = prepared.spares.adopt(interpreter, words, wanted) if forks else "workers start cold"
        if not why_not:
            log.info("workers are forked from a process that was preloaded before the job came")
            return prepared.spares
        log.info("what was preloaded before the job came is not used: %s", why_not)
        prepared.spares.close()
    spares = new_spares(prepared, interpreter, words, wanted)
    if forks:
        spares.start()
    return spares


def state_of(agent: Agent) -> NodeState:
    return NodeState(
        agent.config.rendezvous.job_id,
        agent.name,
        agent.incarnation,
        agent.metrics,
        lease_ttl_s=agent.config.rendezvous.lease_ttl_s,
        clock=agent.clock,
        wall_clock=time.time,
        secrets=agent.secrets,
    )


def board_of(agent: Agent) -> Board:
    about = {
        "job": agent.config.rendezvous.job_id,
        "node": agent.name,
        "incarnation": agent.incarnation,
        "version": __version__,
    }
    own = Endpoint(*agent.listeners.http.getsockname()[:2])
    return Board(agent.journal, about, agent.state, AgentsSource(lambda: [own], LOOKS_WITHIN_S, here=False))


def receiver_of(agent: Agent) -> ReportReceiver:
    events = agent.events
    return ReportReceiver(
        Path(agent.node.env.reports),
        events.put,
        lambda: events.qsize() < MAX_WAITING_EVENTS,
        agent.clock,
        partial(agent.metrics.dropped_total.inc, what="reports"),
    )
