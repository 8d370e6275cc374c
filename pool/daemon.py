"""Puts one daemon together, lets it run, and takes it apart.

As in an agent, ports and folders are refused before anything is started, and the HTTP server answers before the store
is found."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..agent.common.events import unless_stopped
from ..agent.common.exits import CannotStart, ExitCode
from ..agent.common.folders import make_own
from ..agent.common.ports import PortError
from ..agent.configuration.config import HTTP_ADDRESS, MAX_NODES, Config
from ..agent.configuration.derive import Resolved
from ..agent.configuration.rendezvous import ENDPOINT
from ..agent.configuration.settings import Settings
from ..agent.machine.devices import probe
from ..agent.machine.network import NetworkChoice, reachable_at, unique_node_id, wait_for_network
from ..agent.main.listeners import http_listener
from ..agent.main.process import ServiceManager, catch_signals, log_to, take_environment, thread_failed
from ..agent.output.console import take as take_console
from ..agent.output.log_files import own_logs
from ..agent.rendezvous_io.store_link import StoreLink
from ..agent.rendezvous_io.store_opening import open_store, store_listener, store_options
from ..health.checks.finding import NodeNeeds
from ..health.checks.runner import CheckRun
from ..health.checks.table import checks_for
from ..health.http import Answers, HealthServer
from ..rendezvous.errors import StoreError
from ..rendezvous.records import Endpoint
from ..threads import listen
from ..worker.wire.shared_progress import clock
from .job_agent import agent_words, own_words
from .job_logs import PATH as LOGS_PATH
from .job_logs import JobFolders
from .loop import DaemonLoop, Ending, IdleChecks
from .member import Assignment, PoolMember
from .pages import POOL_PATH, DaemonPages, LogPage, PoolMetrics
from .records import MOST_NODES, PoolNode
from .standby import AgentCommand, Standby

log = logging.getLogger(__name__)


def run(resolved: Resolved) -> int:
    """Returns when this node has left the pool: the exit code."""
    config = resolved.config
    name = config.node_id or unique_node_id()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listen(lambda thread, error: thread_failed(events, thread, error))
    console = take_console(name)
    log_to(console, name, config.logs)
    manager = ServiceManager(os.environ, clock)
    environment = take_environment()
    catch_signals(events, config.stop.more_signals)
    manager.ready()
    with contextlib.ExitStack() as parts:
        try:
            ending = _run(config, name, resolved.settings, environment, events, manager.turn, parts)
        except CannotStart as refusal:
            ending = Ending(refusal.code, str(refusal))
    level = logging.INFO if ending.code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", ending.code, ending.reason)
    manager.stopping(f"ended with exit code {ending.code:d}: {ending.reason}")
    console.close()
    return ending.code


def _run(
    config: Config,
    name: str,
    settings: Settings,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Any],
    on_turn: Callable[[str], None],
    parts: contextlib.ExitStack,
) -> Ending:
    """One daemon's whole life. `events` gets this process' signals. Raises CannotStart."""
    rng, token = random.SystemRandom(), secrets.token_hex(16)
    pool, lease_ttl_s = config.rendezvous.job_id, config.rendezvous.lease_ttl_s
    starting, looking = "waiting for the network", "looking for the pool's store"
    network = unless_stopped(lambda: wait_for_network(config), events, starting, lambda: on_turn(starting))
    address = network.choice.address
    listener, http = _listen(config, network.endpoint, address)
    served_at = http.getsockname()[:2]
    logs = _log_root(config)
    metrics = PoolMetrics(pool, name)
    pages = DaemonPages(metrics, pool, name, clock)
    _serve(http, pages, LogPage(logs, name, token), parts)
    options = store_options(config, network.endpoint, listener)
    store = open_store(config, network.endpoint, listener, events, lambda: on_turn(looking))
    parts.callback(store.close)
    record = PoolNode(
        name,
        uuid.uuid4().hex[:12],
        address,
        most_nodes=MOST_NODES if settings[MAX_NODES].is_default else config.nodes.max,
        http=reachable_at(served_at, address),
        token=token,
    )
    member = PoolMember(record, lease_ttl_s=lease_ttl_s, rng=rng, now=clock(), wall=time.time)
    link = StoreLink(store, member, lease_ttl_s, events.put, clock, rng)
    place = f"{pool} at {options[ENDPOINT.name]}"
    log.info("node %s offers itself to pool %s", name, place)
    standby = Standby(config.preload, config.rendezvous.kind.name, environment, clock)
    parts.callback(standby.close)
    checks = IdleChecks(config.check, _new_run(config, environment, network.choice), events.put)
    parts.callback(checks.close)
    loop = DaemonLoop(
        member,
        link,
        JobFolders(logs, place, name),
        standby,
        checks,
        _commands(config, name, settings, environment, options, logs),
        events,
        on_turn,
    )
    pages.begin(lambda: loop.snapshot, store)
    link.start()
    ending = loop.run()
    link.close()
    if member.lease is not None:
        try:
            store.revoke(member.lease)
        except StoreError as error:
            log.warning("left; could not sign off, the others notice when the lease ends: %s", error)
    return ending


def _listen(
    config: Config, endpoint: Endpoint | None, address: str
) -> tuple[socket.socket | None, socket.socket]:
    """For the pool's store, if this daemon may host it, and for the pages. Raises CannotStart."""
    try:
        return store_listener(config, endpoint, address), http_listener(config, address)
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error


def _commands(
    config: Config,
    name: str,
    settings: Settings,
    environment: Mapping[str, str],
    store: Mapping[str, str],
    logs: Path,
) -> Callable[[Assignment], AgentCommand]:
    """What starts the agent of a job on this node. `store`: the options of the pool's, by name."""
    own, inherited, options = own_words(settings, os.getcwd()), dict(environment), dict(store)
    http = config.http_address
    if http is not None:
        # The port that a file or a variable names, which jobs' agents read, too, is the daemon's alone.
        options[HTTP_ADDRESS.name] = str(Endpoint(http.address, 0))

    def command(assignment: Assignment) -> AgentCommand:
        job = assignment.job
        words = agent_words(assignment, name, options, own, str(logs / job.job))
        return AgentCommand(tuple(words), {**inherited, **job.environment}, job.directory)

    return command


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
    return lambda: CheckRun(checks_for(needs), needs, environment)


def _serve(http: socket.socket, pages: DaemonPages, logs: LogPage, parts: contextlib.ExitStack) -> None:
    """Before the store is found: that takes as long as it takes, and is no reason to end this daemon."""
    json = dict.fromkeys(("/", POOL_PATH), pages.pool)
    slow = {"/metrics": pages.all_metrics, LOGS_PATH: logs.answer}  # they wait for another process or a disk
    server = HealthServer(http, Answers(pages.metrics, pages.liveness, pages.readiness, json, slow=slow))
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
            root.mkdir(parents=True, exist_ok=True)
            return root
        own = own_logs()
        make_own(own, readable=True)
        return own
    except OSError as error:
        raise CannotStart(
            ExitCode.NOT_HERE, f"no place for what jobs print: {error}; name one with --log-dir"
        ) from error
