"""Puts one daemon together, lets it run, and takes it apart.

As in an agent, ports and folders are refused before anything is started, and the HTTP server answers before the store
is found."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import random
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..agent.common.events import unless_stopped
from ..agent.common.exits import CannotStart, ExitCode
from ..agent.common.folders import make_own
from ..agent.common.ports import PortError, bind_listener
from ..agent.configuration.config import HTTP_ADDRESS, MAX_NODES, Config
from ..agent.configuration.derive import Resolved
from ..agent.configuration.options import SECRET_VARIABLES
from ..agent.configuration.rendezvous import ENDPOINT, EtcdConfig
from ..agent.configuration.settings import Settings
from ..agent.machine.devices import probe
from ..agent.machine.network import NetworkChoice, reachable_at, unique_node_id, wait_for_network
from ..agent.main.listeners import http_listener
from ..agent.main.process import catch_signals, log_to, take_environment, thread_failed
from ..agent.main.service_manager import ServiceManager
from ..agent.output.console import take as take_console
from ..agent.output.log_folders import own_logs
from ..agent.rendezvous_io.store_link import StoreLink
from ..agent.rendezvous_io.store_opening import open_store, store_listener, store_options
from ..health.checks.finding import Finding, NodeNeeds
from ..health.checks.runner import CheckRun
from ..health.checks.table import checks_for
from ..health.http import Answers, HealthServer
from ..rendezvous.errors import StoreUnavailable
from ..rendezvous.records import Endpoint
from ..rendezvous.store.interface import LeaseId, Store
from ..rendezvous.store.requests import RETRY
from ..rendezvous.text import clean
from ..threads import Thread, listen
from ..worker.wire.shared_progress import clock
from .job_agent import agent_words, own_words
from .job_logs import JobFolders
from .loop import DaemonLoop, Ending, IdleChecks, Services
from .member import Assignment, PoolMember
from .pages import POOL_PATH, DaemonPages, LogPage, PoolMetrics, slow_pages
from .records import MOST_NODES, PoolNode, SeatEnd
from .standby import AgentCommand, Standby

log = logging.getLogger(__name__)

GIVE_UP_S = 1.0
"""To give up the lease: without it the pool misses this node until the lease ends."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a daemon has opened before it joins the pool."""

    network: NetworkChoice
    store: Store
    options: Mapping[str, str]
    """Of the agents of jobs, by name: the pool's store, and what else this daemon decides."""
    logs: Path
    """The folder for the folders of jobs."""
    token: str
    http: Endpoint | None
    """Where other nodes reach the pages; None when they cannot."""
    metrics: PoolMetrics
    pages: DaemonPages


def run_daemon(
    config: Config,
    name: str,
    settings: Settings,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Any],
    on_turn: Callable[[str], None],
) -> Ending:
    """One daemon's whole life. `events` gets this process' signals."""
    rng = random.SystemRandom()
    with contextlib.ExitStack() as parts:
        try:
            opened = _open(config, name, environment, events, on_turn, parts)
        except CannotStart as refusal:
            return Ending(refusal.code, str(refusal))
        lease_ttl_s, metrics = config.rendezvous.lease_ttl_s, opened.metrics
        member = PoolMember(
            _record(config, name, settings, opened),
            lease_ttl_s=lease_ttl_s,
            rng=rng,
            now=clock(),
            wall=time.time,
        )
        link = StoreLink(opened.store, member, lease_ttl_s, events.put, clock, rng)
        place = f"{config.rendezvous.job_id} at {opened.options[ENDPOINT.name]}"
        log.info("node %s offers itself to pool %s", name, place)
        standby = Standby(config.preload, config.rendezvous.kind.name, environment, clock)
        parts.callback(standby.close)

        def checked(findings: Sequence[Finding]) -> None:
            metrics.checked({finding.check: finding.outcome.severity for finding in findings})

        def ended(end: SeatEnd) -> None:
            metrics.pool_job_agents_ended_total.inc(outcome=end.outcome.value)

        checks = IdleChecks(config.check, _new_run(config, environment, opened.network), events.put, checked)
        parts.callback(checks.close)
        services = Services(link, JobFolders(opened.logs, place, name), standby, checks)
        command = _commands(config, name, settings, environment, opened)
        loop = DaemonLoop(member, services, command, events, clock, on_turn, ended)
        opened.pages.begin(lambda: loop.snapshot, opened.store)
        link.start()
        ending = loop.run()
        link.close()
        if member.lease is not None:
            _give_up(member.lease, opened.store, clock, rng)
        return ending


def _open(
    config: Config,
    name: str,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Any],
    on_turn: Callable[[str], None],
    parts: contextlib.ExitStack,
) -> _Opened:
    """Raises CannotStart."""
    pool, token = config.rendezvous.job_id, secrets.token_hex(16)
    starting, looking = "waiting for the network", "looking for the pool's store"
    network = unless_stopped(
        lambda: wait_for_network(config, environment), events, starting, lambda: on_turn(starting)
    )
    address = network.choice.address
    listener = store_listener(config, network.endpoint, address, _store_of_endpoint)
    http = _listen(config, address)
    served_at = http.getsockname()[:2]
    logs = _log_root(config)
    metrics = PoolMetrics(pool, name, clock)
    pages = DaemonPages(metrics, pool, name, clock)
    _serve(http, pages, LogPage(logs, name, token), parts)
    options = dict(store_options(config, network.endpoint, listener)) | dict(
        _http_of_jobs(config.http_address)
    )
    store = open_store(config, network.endpoint, listener, events, lambda: on_turn(looking))
    parts.callback(store.close)
    reachable = reachable_at(served_at, address)
    return _Opened(network.choice, store, options, logs, token, reachable, metrics, pages)


def _record(config: Config, name: str, settings: Settings, opened: _Opened) -> PoolNode:
    return PoolNode(
        name,
        uuid.uuid4().hex[:12],
        opened.network.address,
        most_nodes=MOST_NODES if settings[MAX_NODES].is_default else config.nodes.max,
        http=opened.http,
        token=opened.token,
        logs=str(opened.logs),
    )


def _commands(
    config: Config, name: str, settings: Settings, environment: Mapping[str, str], opened: _Opened
) -> Callable[[Assignment], AgentCommand]:
    """What starts the agent of a job on this node."""
    own, inherited = own_words(settings, os.getcwd()), _for_jobs(environment, config.rendezvous.etcd)

    def command(assignment: Assignment) -> AgentCommand:
        job = assignment.job
        words = agent_words(assignment, name, opened.options, own, str(opened.logs / job.job))
        return AgentCommand(tuple(words), {**inherited, **job.environment}, job.directory)

    return command


def _for_jobs(environment: Mapping[str, str], etcd: EtcdConfig | None) -> Mapping[str, str]:
    """What the agents of jobs inherit. They need the store's password, too, and keep it from their workers."""
    if etcd is None or etcd.password is None:
        return environment
    return {**environment, **dict.fromkeys(SECRET_VARIABLES, etcd.password.text)}


def _http_of_jobs(own: Endpoint | None) -> Iterator[tuple[str, str]]:
    """The port that a file or a variable names, which jobs' agents read, too, is the daemon's alone."""
    if own is not None:
        yield HTTP_ADDRESS.name, str(Endpoint(own.address, 0))


def _new_run(config: Config, environment: Mapping[str, str], choice: NetworkChoice) -> Callable[[], CheckRun]:
    """Looks at what any job may need here; what one needs of its own, its agent checks before it joins. Raises
    ConfigError for devices that are not there."""
    gpus = tuple(device.nvml_name for device in probe(environment).cuda)
    logs = config.logs.given_directory
    needs = NodeNeeds(
        ranks=config.nodes.max,
        log_directory=str(logs) if logs is not None else "",
        interface=choice.interface,
        address=choice.address,
        gpus=gpus,
        rdma=bool(gpus and choice.rdma_ports),
    )
    return lambda: CheckRun(checks_for(needs, at_join=True), needs, environment)


def _store_of_endpoint(address: str, port: int | None, purpose: str) -> socket.socket:
    raise AssertionError("a pool's store has an endpoint")


def _listen(config: Config, address: str) -> socket.socket:
    """Raises CannotStart."""

    def bind(address: str, port: int | None, purpose: str) -> socket.socket:
        return bind_listener(address, port if port is not None else config.port_range or 0, purpose)

    try:
        return http_listener(config, address, bind)
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error


def _serve(http: socket.socket, pages: DaemonPages, logs: LogPage, parts: contextlib.ExitStack) -> None:
    """Before the store is found: that takes as long as it takes, and is no reason to end this daemon."""
    json, slow = dict.fromkeys(("/", POOL_PATH), pages.pool), slow_pages(pages, logs)
    server = HealthServer(
        http, Answers(pages.metrics, pages.liveness, pages.readiness, json, slow=slow), Thread
    )
    server.start()
    parts.callback(server.close)
    log.info("metrics, /healthz, /readyz and /pool at http://%s", Endpoint(*server.address))


def _log_root(config: Config) -> Path:
    """The folder for the folders of jobs: absolute, as jobs run elsewhere; it is there when this returns. Raises
    CannotStart."""
    given = config.logs.given_directory
    try:
        if given is not None:
            root = given.absolute()
            if clean(str(root)) != str(root):
                raise OSError(f"{str(root)!r} has characters that no log shows")
            root.mkdir(parents=True, exist_ok=True)
            return root
        own = own_logs()
        make_own(own, readable=True)
        return own
    except OSError as error:
        raise CannotStart(
            ExitCode.NOT_HERE, f"no place for what jobs print: {error}; name one with --log-dir"
        ) from error


def _give_up(lease: LeaseId, store: Store, clock: Callable[[], float], rng: random.Random) -> None:
    """In a c10d pool the daemon that hosts the store may be leaving at the same instant: then another one, or this one,
    hosts it."""
    until = clock() + GIVE_UP_S
    for attempt in itertools.count():
        try:
            store.revoke(lease)
            return
        except Exception as error:
            wait_s = RETRY.wait_s(attempt, rng)
            if not isinstance(error, StoreUnavailable) or clock() + wait_s >= until:
                log.warning("left; could not sign off, the others notice when the lease ends: %s", error)
                return
            time.sleep(wait_s)


log = logging.getLogger(__name__)


def run(resolved: Resolved) -> int:
    """Returns when this node has left the pool: the exit code."""
    config = resolved.config
    name = config.node_id or unique_node_id()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listen(lambda thread, error: thread_failed(events, thread, error))
    console = take_console(name)
    log_to(console, name, config.logs)
    manager = ServiceManager.take(os.environ, os.getpid(), clock)
    environment = take_environment()
    catch_signals(events, config.stop.more_signals)
    manager.ready()
    ending = run_daemon(config, name, resolved.settings, environment, events, manager.turn)
    level = logging.INFO if ending.code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", ending.code, ending.reason)
    manager.stopping(f"ended with exit code {ending.code:d}: {ending.reason}")
    console.close()
    return ending.code
