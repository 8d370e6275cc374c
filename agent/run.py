"""Puts one agent together, lets it run, and takes it apart: the only place that makes clocks, randomness and threads.

The order matters. Everything that can be refused (ports, the address) is refused before anything is started; the
HTTP server answers before the store is found; and at the end the workers are gone before the lease is given up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import platform
import queue
import random
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from .. import __version__
from ..health.http import NODE_PATH, HealthServer, Probe
from ..health.metrics import Metrics
from ..rendezvous.decide import Policy, limits_of
from ..rendezvous.participant import Participant
from ..rendezvous.proof import LEASE_MARGIN
from ..rendezvous.records import NODES_PREFIX, Endpoint, Introduction, NodeRecord
from ..rendezvous.restarts import RestartPolicy
from ..rendezvous.snapshot import NodeSnapshot
from ..rendezvous.store import Store
from ..rendezvous.threads import Thread, listen
from ..worker.available_memory import read_memory
from ..worker.wire.environment import WorkerEnv
from .accounting.measured_store import MeasuredStore
from .accounting.observer import Observer
from .checkpoints.disk_writer import DiskWriter
from .checkpoints.folder import make_folder
from .commit_gate import CommitGate
from .configuration.config import Config
from .configuration.log_level import log_level
from .configuration.options import SECRET_VARIABLES
from .configuration.timeouts import drain_timeout_s
from .drain_gate import DrainGate
from .environment.contract import worker_env
from .error_file import write_error_file
from .events import Event, Signalled, ThreadFailed
from .exits import CannotStart, ExitCode
from .heartbeat import Heartbeat
from .interruptible import unless_stopped
from .loop import WARNINGS, Ending, Loop, Services
from .machine.addresses import LOOPBACK, reachable_at, unique_node_id
from .machine.cgroups import claim_cgroup
from .machine.examine import Machine
from .machine.gpu_memory import GpuMemory
from .machine.network import NetworkChoice, NotYet
from .machine.network_search import Network, wait_for_network
from .machine.oom import warn_of_group_kill
from .peer_link import PeerLink
from .port_owner import find_owner
from .ports import FIXED_PORT, OfferedPort, PortError, bind_listener
from .preloader.spares import Spares
from .processes.children import Children, adopt_orphans
from .processes.console import Console, ConsoleHandler
from .processes.console import take as take_console
from .processes.guard import Guard
from .processes.logs import WorkerLogs
from .processes.remains import await_end, file_for
from .processes.reports import ReportReceiver
from .processes.run_files import RUN_DIR_PREFIX, announce, place_of_run_directory, places
from .processes.worker_store import WorkerStore
from .processes.workers import WorkerGroup, first_on_path, job_python
from .program import program_of
from .salvage_gate import SalvageGate
from .service_manager import ServiceManager
from .status.pages import JOB_PATH, STATUS_PATH, StatusPages
from .store.link import StoreLink
from .store.opening import Binder, open_store, store_listener, store_options
from .supervision.supervisor import Gates, Processes, Supervisor
from .supervision.worker_spec import Node

log = logging.getLogger(__name__)

HOST_LINGERS_S = 15.0
"""How long the node that hosts the store keeps it up for the others to read how the job ended: above their lease's
time to live, after which a silent one is known to be gone."""

MAX_WAITING_EVENTS = 10_000
"""Reports are dropped while so many events wait; everything else is bounded by what the loop itself has asked."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *WARNINGS)


def run(config: Config, machine: Machine) -> int:
    """One agent's whole life on this machine. Returns its exit code."""
    name = config.node_id or unique_node_id()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    listen(lambda thread, error: _thread_failed(events, thread, error))
    console = take_console(name)
    _log_to(console, name)
    # What a service manager ends because its main thread is stuck (SIGABRT) shows where that is.
    faulthandler.enable(2)
    manager = ServiceManager.take(os.environ, os.getpid(), time.monotonic)
    try:
        ending = _run(config, machine, name, events, manager, console)
    except CannotStart as refusal:
        ending = Ending(refusal.code, str(refusal))
    except Exception as error:
        log.exception("the main thread has failed; please report this")
        ending = Ending(ExitCode.AGENT_FAILED, f"the main thread has failed: {error!r}")
    if ending.code is not ExitCode.SUCCESS:
        write_error_file(os.environ, ending.code, ending.reason, ending.failure, time.time())
    level = logging.INFO if ending.code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", ending.code, ending.reason)
    manager.stopping(f"ended with exit code {ending.code:d}: {ending.reason}")
    console.close()
    return ending.code


def _run(
    config: Config,
    machine: Machine,
    name: str,
    events: queue.SimpleQueue[Event],
    manager: ServiceManager,
    console: Console,
) -> Ending:
    for secret in SECRET_VARIABLES:
        os.environ.pop(secret, None)  # neither the guard nor any worker inherits it (I15)
    environment = dict(os.environ)
    # A store that ends makes torch write pages of C++ frames; what happened is said by us in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    clock = time.monotonic
    started_at = clock()
    rng = random.SystemRandom()
    incarnation = uuid.uuid4().hex[:12]
    _catch_signals(events)
    children = Children()
    if alone := adopt_orphans():
        log.warning("what workers leave behind is not adopted: %s", alone)
    _look_for_remains(config, events, manager)
    network = _network(config, machine, environment, events, manager)
    machine = replace(machine, network=network)
    address, endpoint = network.choice.address, network.endpoint
    metrics = _metrics(config, name, machine, network.choice, started_at, clock)
    console.count_lost(metrics.console_lines_dropped_total.inc)
    metrics.hang_timeout_seconds.set(config.timeouts.hang_s)
    bind = _binder(config, metrics)

    with contextlib.ExitStack() as stack:
        run_dir = Path(stack.enter_context(_run_directory()))
        memory = make_folder(config.memory_checkpoints)
        if memory is not None:
            stack.callback(memory.close)
        listener, http, store_listener = _listeners(config, endpoint, address, bind)
        cgroup = claim_cgroup(incarnation)
        warn_of_group_kill()
        guard = Guard()
        folders = [run_dir] if memory is None else [run_dir, memory.path]
        guard.start(incarnation, folders, cgroup, (file_for(run_dir), config.rendezvous.job_id, name))
        stack.callback(guard.close)
        gpu_memory = _started(
            stack, GpuMemory(machine.watched, config.gpu_memory_wait_s, environment, events.put, clock)
        )
        spares = _spares(config, machine, incarnation, environment, events, clock)
        stack.callback(spares.close)
        if config.preload and config.command.kind != "binary" and not alone:
            spares.start()
        pages = _pages(config, name, incarnation, clock)
        probes = _Probes(Introduction(name, incarnation, generation=0))
        server = _started(stack, _server(http, metrics, probes, pages))
        log.info("metrics, /healthz, /readyz and /node at http://%s", _url(server.address))
        announce(run_dir, server.address, store_options(config, endpoint, store_listener))

        manager.ready()
        looking = "looking for the rendezvous store"
        found = open_store(config, endpoint, store_listener, events, lambda: manager.turn(looking))
        store = MeasuredStore(found, metrics, clock)
        stack.callback(store.close)
        policy = _policy(config)
        identity = NodeRecord(
            node=name,
            incarnation=incarnation,
            address=address,
            port=listener.getsockname()[1],
            slots=machine.workers,
            http=reachable_at(server.address, address),
            network=network.choice.facts,
            limits=limits_of(policy),
            program=program_of(config, policy.store_outage_grace_s),
            hosts_store=store_listener is not None,
        )
        lease_ttl_s = config.rendezvous.lease_ttl_s
        participant = Participant(identity, policy, lease_ttl_s=lease_ttl_s, rng=rng, now=clock())
        heartbeat = Heartbeat(
            lease_ttl_s,
            lambda: link.confirmed_at + LEASE_MARGIN * lease_ttl_s,
            lambda problem: _end_stuck(problem, guard, console),
            clock,
        )
        link = StoreLink(store, lease_ttl_s, events.put, clock, rng, lambda: heartbeat.turning)
        worker_store = WorkerStore(environment, spares, events.put)
        stack.callback(worker_store.end)
        lost = metrics.log_file_bytes_dropped_total.inc
        logs = _started(stack, WorkerLogs(config.log_dir, name, console, metrics.printed, lost))

        def latest() -> NodeSnapshot:
            return participant.snapshot

        env = worker_env(incarnation, run_dir, memory)
        _started(stack, _receiver(Path(env.reports), events, metrics, clock))
        _started(stack, CommitGate(Path(env.commits), store, latest, clock))
        drain_gate = _started(stack, DrainGate(Path(env.drain), store, latest, events.put, clock))
        salvage_gate = _started(stack, SalvageGate(Path(env.salvage), events.put))
        disk_writer = _started(
            stack, DiskWriter(run_dir / "writes", env.commits, env.reports, environment, events.put)
        )
        children.knows(lambda: (guard.pid, *gpu_memory.pids, *worker_store.pids))
        children.knows(lambda: (*disk_writer.pids, *spares.pids))
        children.expects(lambda: spares.sessions)
        link.start()
        node = Node(
            name,
            incarnation,
            machine,
            run_dir,
            env,
            cgroup,
            environment,
        )

        def new_group(generation: int) -> WorkerGroup:
            group_cgroup = cgroup / f"generation-{generation}" if cgroup is not None else None
            strangers = children.strangers
            return WorkerGroup(
                generation, incarnation, guard, logs, events.put, clock, group_cgroup, strangers
            )

        observer = Observer(metrics, pages, config.max_restarts, started_at, time.time)
        loop = Loop(
            config.stop,
            participant,
            Supervisor(
                config,
                node,
                participant,
                observer,
                Processes(
                    new_group=new_group,
                    guard=guard,
                    children=children,
                    spares=spares,
                    worker_store=worker_store,
                    logs=logs,
                ),
                Gates(just_in_time=salvage_gate, drain=drain_gate),
                events.put,
                clock,
            ),
            Services(
                link, PeerLink(events.put, clock), gpu_memory, disk_writer, observer, manager, heartbeat
            ),
            OfferedPort(listener, lambda: bind(address, None, "master")),
            events,
            clock,
        )
        probes.loop = loop
        heartbeat.start()
        ending = loop.run()
        heartbeat.close()
        manager.stopping("leaving the rendezvous")
        link.close()
        _depart(store, participant, ending, stays_for_others=store_listener is not None)
        return ending


def _look_for_remains(config: Config, events: queue.SimpleQueue[Event], manager: ServiceManager) -> None:
    """Raises CannotStart when workers of an earlier agent of the job live on here, which SIGKILL has not ended."""
    where = dict.fromkeys(places())
    if given := place_of_run_directory(os.environ):
        where[Path(given)] = None
    waiting = "waiting for the end of an earlier agent's workers"
    job, within_s = config.rendezvous.job_id, config.stop.kill_timeout_s
    unless_stopped(
        lambda: await_end(tuple(where), os.geteuid(), job, within_s),
        events,
        waiting,
        lambda: manager.turn(waiting),
    )


def _network(
    config: Config,
    machine: Machine,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Event],
    manager: ServiceManager,
) -> Network:
    """As it was found before, or as soon as it is there."""
    found = machine.network
    if isinstance(found, NotYet):
        waiting = "waiting for the network"
        found = unless_stopped(
            lambda: wait_for_network(config, environment), events, waiting, lambda: manager.turn(waiting)
        )
    log.info("network: %s", found.choice)
    return found


class _Service(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=_Service)


def _started(stack: contextlib.ExitStack, service: _S) -> _S:
    """Until the stack is unwound."""
    service.start()
    stack.callback(service.close)
    return service


def _metrics(
    config: Config,
    name: str,
    machine: Machine,
    network: NetworkChoice,
    started_at: float,
    clock: Callable[[], float],
) -> Metrics:
    return Metrics(
        config.rendezvous.job_id,
        name,
        __version__,
        slots=machine.workers,
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        started_at_s=time.time() - (clock() - started_at),  # the network may have taken its time
        clock=clock,
        interface=network.interface,
        address=network.address,
        gpus=len(machine.inventory.cuda),
        torch_version=machine.software.torch or "",
        nccl_version=machine.software.nccl or "",
        python_version=platform.python_version(),
    )


def _spares(
    config: Config,
    machine: Machine,
    incarnation: str,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Event],
    clock: Callable[[], float],
) -> Spares:
    """By its mark the guard finds the preloaded process, too."""
    return Spares(
        job_python(environment),
        config.preload.words,
        machine.workers + 1,
        {**environment, **WorkerEnv(incarnation=incarnation).variables()},
        events.put,
        clock,
        read_memory,
        first_on_path(config.command, os.getcwd()),
    )


def _pages(config: Config, name: str, incarnation: str, clock: Callable[[], float]) -> StatusPages:
    return StatusPages(
        config.rendezvous.job_id,
        name,
        incarnation,
        __version__,
        lease_ttl_s=config.rendezvous.lease_ttl_s,
        max_restarts=config.max_restarts,
        clock=clock,
    )


def _server(bind: socket.socket, metrics: Metrics, probes: _Probes, pages: StatusPages) -> HealthServer:
    json = {NODE_PATH: probes.introduction, STATUS_PATH: pages.node, JOB_PATH: pages.job}
    return HealthServer(bind, metrics.render, probes.liveness, probes.readiness, json, Thread)


def _receiver(
    path: Path, events: queue.SimpleQueue[Event], metrics: Metrics, clock: Callable[[], float]
) -> ReportReceiver:
    return ReportReceiver(
        path,
        events.put,
        lambda: events.qsize() < MAX_WAITING_EVENTS,
        clock,
        metrics.reports_dropped_total.inc,
    )


def _binder(config: Config, metrics: Metrics) -> Binder:
    """Binds a port for a purpose, `None` for one that the configuration allows, and tells how that goes."""

    def bind(address: str, port: int | None, purpose: str) -> socket.socket:
        ports = port if port is not None else config.port_range or 0
        waiting = False

        def attempted(purpose: str, ok: bool) -> None:
            nonlocal waiting
            metrics.port_bind_attempts_total.inc(purpose=purpose)
            if ok:
                return
            metrics.port_bind_failures_total.inc(purpose=purpose)
            if not waiting:
                waiting = True
                owner = find_owner(address, ports if isinstance(ports, int) else ports.first)
                log.info(
                    "waiting up to %g s for port %s of %s, for %s: it is taken (%s)",
                    FIXED_PORT.timeout_s,
                    ports,
                    address,
                    purpose,
                    owner.words,
                )

        return bind_listener(address, ports, purpose, on_attempt=attempted)

    return bind


def _policy(config: Config) -> Policy:
    """A store that does not outlive the job has ended with a member's agent when it is away: no world is whole then."""
    kind = config.rendezvous.kind
    grace_s = config.rendezvous.store_outage_grace_s if kind.outlives_job else 0.0
    return Policy(
        job=config.rendezvous.job_id,
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        last_call_s=config.rendezvous.last_call_s,
        join_timeout_s=config.rendezvous.join_timeout_s,
        drain_timeout_s=drain_timeout_s(config.stop),
        store_outlives_job=kind.outlives_job,
        runs_again=config.run_again,
        store_outage_grace_s=grace_s,
        unheard_s=config.rendezvous.lease_ttl_s if grace_s or kind.host is not None else 0.0,
        restarts=RestartPolicy(max_failures=config.max_restarts),
    )


def _run_directory() -> tempfile.TemporaryDirectory[str]:
    """Sockets and error files of this agent. The guard removes it, too, if the agent cannot."""
    place = place_of_run_directory(os.environ)
    return tempfile.TemporaryDirectory(prefix=RUN_DIR_PREFIX, dir=place, ignore_cleanup_errors=True)


class _Probes:
    """What the HTTP server says before there is a loop, and then what the loop says."""

    def __init__(self, before: Introduction) -> None:
        self.loop: Loop | None = None
        self._before = before

    def liveness(self) -> Probe:
        return self.loop.liveness() if self.loop is not None else Probe(True, "starting")

    def readiness(self) -> Probe:
        return (
            self.loop.readiness()
            if self.loop is not None
            else Probe(False, "looking for the rendezvous store")
        )

    def introduction(self) -> str:
        return self.loop.introduction() if self.loop is not None else self._before.to_json()


def _log_to(console: Console, name: str) -> None:
    handler = ConsoleHandler(console)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d [{name}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger("elastic_agent")
    root.handlers[:] = [handler]
    root.setLevel(log_level(os.environ) or logging.INFO)
    root.propagate = False


def _thread_failed(events: queue.SimpleQueue[Event], name: str, error: BaseException) -> None:
    events.put(ThreadFailed(name, repr(error)))
    log.error("the thread %s has failed", name, exc_info=error)


def _end_stuck(problem: str, guard: Guard, console: Console) -> None:
    """In the thread that watches the main one, which can do none of this any more."""
    guard.let_loose()
    log.critical("%s\nended with exit code %d", problem, ExitCode.LOOP_STUCK)
    # Its disk may be what holds the main thread.
    write_error_file(os.environ, ExitCode.LOOP_STUCK, problem, None, time.time())
    console.close()
    os._exit(ExitCode.LOOP_STUCK)


def _catch_signals(events: queue.SimpleQueue[Event]) -> None:
    """A handler runs between any two bytecodes: it may only put an event, which SimpleQueue allows at any moment.

    A signal that this process was started to ignore stays ignored: `nohup` and a shell's `trap '' USR1` mean it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: events.put(Signalled(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # blocked since the process began


def _url(address: tuple[str, int]) -> str:
    return str(Endpoint(*address))


def _listeners(
    config: Config, endpoint: Endpoint | None, address: str, bind: Binder
) -> tuple[socket.socket, socket.socket, socket.socket | None]:
    """For the workers' store, for metrics and probes, and for the rendezvous store if this agent is to host it."""
    http = config.http_address
    if http is None and config.solitary:
        http = Endpoint(LOOPBACK, 0)
    try:
        return (
            bind(address, None, "master"),
            bind(http.address, http.port, "metrics") if http is not None else bind(address, None, "metrics"),
            store_listener(config, endpoint, address, bind),
        )
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error


def _depart(store: Store, participant: Participant, ending: Ending, *, stays_for_others: bool) -> None:
    """Give up the lease, so that nobody waits for it to expire; keep a store that we host up until all have left."""
    if ending.code is ExitCode.STORE_LOST and not stays_for_others:
        return
    try:
        if participant.lease is not None:
            store.revoke(participant.lease)
        if not stays_for_others:
            return
        snapshot = store.read((NODES_PREFIX,))
        watch = store.watch((NODES_PREFIX,), snapshot.revision)
        deadline = time.monotonic() + HOST_LINGERS_S
        while snapshot.entries and time.monotonic() < deadline:
            watch.next(deadline - time.monotonic())
            snapshot = store.read((NODES_PREFIX,))
    except Exception as error:  # whatever it is, it does not change how this agent has ended
        log.warning("left without saying goodbye: %s", error)
