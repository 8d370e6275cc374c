"""Makes the parts of an agent from its configuration. What is started, and in which order, is up to `run`."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import queue
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...health.checks.node.runner import CheckRun
from ...health.checks.node.table import checks_for, rechecks_for
from ...health.metrics import Build, Metrics, Place
from ...rendezvous.coordinator.restarts import RestartPolicy
from ...rendezvous.coordinator.view import Policy
from ...rendezvous.records import Endpoint
from ..common.events import Event
from ..common.exits import CannotStart, ExitCode
from ..common.io_thread import IoThread
from ..common.own_folder import make_own
from ..configuration.config import NO_FILES, Config, LogConfig
from ..configuration.parse import ENVIRONMENT
from ..configuration.stopping import drain_timeout_s
from ..machine.inventory import Machine, needs_of
from ..machine.network.discovery import Network
from ..observability.job_report import JobReport, Watch
from ..observability.otel import SpanSender
from ..observability.page import Board, Source, overview
from ..observability.sources import AgentsSource
from ..observability.status import StatusPages
from ..observability.steps import StepRate
from ..output.console import Console
from ..output.events import Kind
from ..output.journal import EventFile, Journal
from ..output.log_folders import log_directory
from ..output.masking import masked, secrets_in
from ..rendezvous_io.join_checks import JoinChecks
from ..rendezvous_io.recheck import Recheck
from ..workers.failures.causes import CauseTable
from ..workers.links.reports import ReportReceiver
from ..workers.preloader.spares import Spares
from ..workers.processes.workers import first_on_path
from .prepared import Prepared, interpreter_of, new_spares
from .service_manager import ServiceManager

log = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 10_000
"""Reports are dropped while so many events wait; everything else is bounded by what the loop itself has asked."""


@dataclass(frozen=True, slots=True)
class Agent:
    """What this agent is from its first moment on."""

    config: Config
    name: str
    incarnation: str
    environment: Mapping[str, str]
    """What the workers inherit: the agent's own, as it was before the agent changed anything for itself."""
    events: queue.SimpleQueue[Event]
    io: IoThread
    manager: ServiceManager
    console: Console
    clock: Callable[[], float]
    run_directory: Path | None = None
    """The folder of the folders of runs, which hold events and evidence; None: no files are kept."""
    in_force: tuple[str, ...] = ()
    """The settings in force, for people."""
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "started_at", self.clock())


def choose_log_directory(logs: LogConfig) -> LogConfig:
    """Takes one of this user's, where files are wanted and no directory is given. It is there when this returns. Raises
    CannotStart for a directory that is given and cannot be made."""
    given = logs.given_directory
    try:
        directory = log_directory(given, own=logs.in_own_folder)
        if given is not None:
            given.mkdir(parents=True, exist_ok=True)
        elif directory is not None:
            make_own(directory, readable=True)
    except OSError as error:
        if given is not None:
            reason = f"--log-dir {given} cannot be made: {error.strerror}; name another, or leave it out"
            raise CannotStart(ExitCode.NOT_HERE, reason) from error
        log.warning("all that workers print goes to the console, and none to files: %s; set --log-dir", error)
        return logs
    if directory not in (None, logs.directory):
        log.info("what workers print is in %s; --log-dir chooses another place", directory)
    return replace(logs, directory=directory)


def choose_run_directory(logs: LogConfig) -> Path | None:
    """The folder of --log-dir, or this user's own; None: no files are wanted, or there is no place for them."""
    if logs.directory == NO_FILES:
        return None
    try:
        directory = log_directory(logs.directory, own=logs.directory is None)
        if directory is not None and directory != logs.directory:
            make_own(directory, readable=True)
    except OSError as error:
        log.warning("events and evidence of failures are in no files: %s; set --log-dir", error)
        return None
    return directory


def journal_of(agent: Agent, metrics: Metrics) -> Journal:
    secrets, count_lost = secrets_in(agent.environment), metrics.events_dropped_total.inc
    keeps = agent.run_directory is not None
    file = EventFile(count_lost, beside=about_node(agent.name, agent.in_force, secrets)) if keeps else None
    journal = Journal(agent.name, time.time, file, secrets=secrets)
    journal.note(Kind.AGENT_STARTED, f"agent {__version__} starts, incarnation {agent.incarnation}")
    return journal


def about_node(name: str, in_force: Sequence[str], secrets: Collection[str]) -> dict[str, str]:
    """The files about one node in the folder of a run: its settings."""
    return {f"configuration-{name}.toml": masked("\n".join(in_force), secrets)} if in_force else {}


def metrics_of(agent: Agent, machine: Machine, network: Network) -> Metrics:
    config, clock = agent.config, agent.clock
    metrics = Metrics(
        config.rendezvous.job_id,
        agent.name,
        Build(
            version=__version__,
            torch_version=machine.software.torch or "",
            nccl_version=machine.software.nccl or "",
            python_version=platform.python_version(),
        ),
        Place(
            interface=network.choice.interface,
            address=network.choice.address,
            workers=machine.workers,
            gpus=len(machine.inventory.cuda),
        ),
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        started_at_s=time.time() - (clock() - agent.started_at),  # the network may have taken its time
        clock=clock,
        causes=CauseTable(config.causes).names,
    )
    agent.console.count_lost(metrics.console_lines_dropped_total.inc)
    return metrics


def checks_of(agent: Agent, machine: Machine) -> JoinChecks:
    needs = needs_of(agent.config, machine)
    checks = checks_for(needs, at_join=True)
    return JoinChecks(
        agent.config.check,
        lambda: CheckRun(checks, needs, agent.environment),
        agent.events.put,
        random.SystemRandom(),
    )


def send_spans(agent: Agent, journal: Journal, parts: contextlib.ExitStack) -> None:
    """The spans of each recovery that the journal has from now on, if a collector is configured."""
    endpoint = agent.config.otlp_endpoint
    if endpoint is None:
        return
    resource = {
        "service.name": "elastic-agent",
        "service.version": __version__,
        "service.instance.id": agent.incarnation,
        "elastic_agent.job": agent.config.rendezvous.job_id,
        "elastic_agent.node": agent.name,
    }
    sender = SpanSender(None if endpoint == ENVIRONMENT else endpoint, resource, journal)
    sender.start()
    parts.callback(sender.close)


def recheck_of(agent: Agent, machine: Machine) -> Recheck:
    needs = needs_of(agent.config, machine)

    def new_run(peers: Sequence[str]) -> CheckRun:
        now_needs = replace(needs, peers=tuple(peers))
        return CheckRun(rechecks_for(now_needs), now_needs, agent.environment)

    return Recheck(new_run, agent.events.put)


def spares_of(agent: Agent, machine: Machine, prepared: Prepared) -> Spares:
    """Those that are prepared, where they are as this job needs them, or new ones; started, where they can be."""
    command, words, wanted = agent.config.command, agent.config.preload, machine.workers + 1
    interpreter = interpreter_of(prepared, agent.environment, first_on_path(command.started, os.getcwd()))
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


def pages_of(agent: Agent) -> StatusPages:
    return StatusPages(
        agent.config.rendezvous.job_id,
        agent.name,
        agent.incarnation,
        __version__,
        lease_ttl_s=agent.config.rendezvous.lease_ttl_s,
        max_restarts=agent.config.max_restarts,
        clock=agent.clock,
        secrets=secrets_in(agent.environment),
    )


LOOKS_WITHIN_S = 3.0
"""How long other nodes may take to answer for the page."""
ASKS_AT_ONCE = 16


def board_of(
    agent: Agent, own: tuple[str, int], journal: Journal, pages: StatusPages, rate: StepRate
) -> Board:
    """`own`: host and port of this agent."""
    here = AgentsSource(lambda: [Endpoint(*own)], LOOKS_WITHIN_S, here=False)
    watch = Watch(here, LOOKS_WITHIN_S, agent.clock, ASKS_AT_ONCE)

    secrets = secrets_in(agent.environment)

    def describe(job: JobReport | None, problem: str) -> dict[str, Any]:
        return overview(job, problem, pages.failure, rate.read(agent.clock()), time.time(), secrets)

    about = {
        "job": agent.config.rendezvous.job_id,
        "node": agent.name,
        "incarnation": agent.incarnation,
        "version": __version__,
    }
    return Board(journal, about, Source(watch.look, describe), agent.clock)


def receiver_of(agent: Agent, path: Path, metrics: Metrics) -> ReportReceiver:
    events = agent.events
    return ReportReceiver(
        path,
        events.put,
        lambda: events.qsize() < MAX_WAITING_EVENTS,
        agent.clock,
        metrics.reports_dropped_total.inc,
    )


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
        expected_nodes=config.rendezvous.expected_nodes,
        join_timeout_s=config.rendezvous.join_timeout_s,
        drain_timeout_s=drain_timeout_s(config.stop),
        store_outlives_job=outlives_job,
        runs_again=config.run_again,
        store_outage_grace_s=grace_s,
        unleased_s=config.rendezvous.lease_ttl_s if grace_s or kind.forgets_leases else 0.0,
        restarts=RestartPolicy(max_failures=config.max_restarts),
        cool_down_s=config.rendezvous.cool_down_s,
        exclude_stragglers_s=config.rendezvous.exclude_stragglers_s,
    )
