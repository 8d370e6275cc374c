"""Puts one agent together, lets it run, and takes it apart: where its clock and its randomness come from.

The order matters. Everything that can be refused (ports, the address) is refused before anything is started; the
HTTP server answers before the store is found; and at the end the workers are gone before the lease is given up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from ...health.http import NODE_PATH, Answers, HealthServer
from ...health.metrics import Metrics
from ...rendezvous.liveness.lease_validity import LEASE_MARGIN
from ...rendezvous.node.participant import Participant
from ...rendezvous.node.snapshot import ANNOUNCED_AFTER_S, NodeSnapshot
from ...rendezvous.records import NODES_PREFIX, Endpoint, Introduction, NodeRecord
from ...rendezvous.store.interface import Store
from ...rendezvous.text import counted
from ...threads import Thread
from ...worker.wire.shared_progress import clock
from ..checkpoints.disk_writer import DiskWriter
from ..checkpoints.folder import MemoryFolder, make_folder
from ..checkpoints.memory_server import MemoryServer, ServerPlace
from ..common.exits import CannotStart, ExitCode, lack_in
from ..common.interruptible import unless_stopped
from ..common.ports import OfferedPort
from ..configuration.config import Config
from ..machine.cgroups import claim_cgroup, warn_of_group_kill
from ..machine.gpus import GpuHealth, GpuMemory
from ..machine.inventory import Machine
from ..machine.network import Network, NotReady, reachable_at, unique_node_id, wait_for_network
from ..machine.notices import NoticeWatch, source_for
from ..machine.preflight import refuse_bad_syntax
from ..observability.observer import Observer
from ..observability.page import OVERVIEW_PATH, PAGE_PATH, read_page
from ..observability.status import JOB_PATH, STATUS_PATH, StatusPages
from ..observability.steps import StepRate
from ..output.console import take as take_console
from ..output.journal import EVENTS_PATH, Journal
from ..output.masking import secrets_in
from ..output.worker_logs import WorkerLogs
from ..rendezvous_io.commit_fence import CommitFence
from ..rendezvous_io.last_steps import LastSteps
from ..rendezvous_io.measured_store import MeasuredStore
from ..rendezvous_io.node_checks import JoinChecks, Recheck
from ..rendezvous_io.store_link import PeerLink, StoreLink
from ..rendezvous_io.store_opening import Binder, open_store, store_options
from ..rendezvous_io.worker_links import WorkerLinks
from ..workers.environment import Node, worker_env
from ..workers.hangs.keeper import EvidenceKeeper
from ..workers.hangs.signs import SignReader
from ..workers.preloader.spares import Spares
from ..workers.processes.guard import Guard
from ..workers.processes.run_files import (
    RUN_DIR_PREFIX,
    announce,
    keep_from_tmpfiles,
    run_directory_parent,
    run_directory_parents,
)
from ..workers.processes.subreaper import Subreaper
from ..workers.processes.unkillable import await_end, file_for
from ..workers.processes.worker_store import WorkerStore
from ..workers.processes.workers import GroupHelpers, WorkerGroup, tied
from ..workers.supervisor import Processes, Supervisor
from .assembly import (
    Agent,
    board_of,
    checks_of,
    choose_log_directory,
    choose_run_directory,
    journal_of,
    metrics_of,
    pages_of,
    policy_of,
    program_of,
    receiver_of,
    recheck_of,
    send_spans,
    spares_of,
)
from .heartbeat import Heartbeat, Probes
from .listeners import Listeners, bind_all, binder
from .loop import Ending, Loop, Services
from .prepared import Prepared, prepare_process
from .process import catch_signals, end_in_time, end_stuck, log_to, take_environment, write_error_file
from .service_manager import ServiceManager

log = logging.getLogger(__name__)

HOST_LINGERS_S = 15.0
"""How long the node that hosts the store keeps it up for the others to read how the job ended: above their lease's
time to live, after which a silent one is known to be gone."""


def run(
    config: Config, machine: Machine, prepared: Prepared | None = None, in_force: Sequence[str] = ()
) -> int:
    """One agent's whole life on this machine. Returns its exit code. `in_force`: the settings, for people."""
    name = config.node_id or unique_node_id()
    prepared = prepared or prepare_process()
    console = take_console(name)
    log_to(console, name, config.logs)
    # What a service manager ends because its main thread is stuck (SIGABRT) shows where that is.
    faulthandler.enable(2)
    manager = ServiceManager.take(os.environ, os.getpid(), clock)
    environment = take_environment()
    try:
        refuse_bad_syntax(config.command, environment)
        agent = Agent(
            replace(config, logs=choose_log_directory(config.logs)),
            name,
            prepared.incarnation,
            environment,
            prepared.events,
            prepared.io,
            manager,
            console,
            clock=clock,
            run_directory=choose_run_directory(config.logs),
            in_force=tuple(in_force),
        )
        ending = _run(agent, machine, prepared)
    except CannotStart as refusal:
        ending = Ending(refusal.code, str(refusal))
    except Exception as error:
        if lack := lack_in(error):
            ending = Ending(ExitCode.NOT_HERE, lack)
        else:
            log.exception("the main thread has failed; please report this")
            ending = Ending(ExitCode.AGENT_FAILED, f"the main thread has failed: {error!r}")
    if ending.code is not ExitCode.SUCCESS:
        write_error_file(os.environ, ending.code, ending.reason, ending.failure, time.time())
    level = logging.INFO if ending.code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", ending.code, ending.reason)
    manager.stopping(f"ended with exit code {ending.code:d}: {ending.reason}")
    console.close()
    return ending.code


class _Service(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=_Service)
_T = TypeVar("_T")


def _started(stack: contextlib.ExitStack, service: _S) -> _S:
    """Until the stack is unwound."""
    service.start()
    stack.callback(service.close)
    return service


@dataclass(frozen=True, slots=True)
class Claimed:
    """What this agent has of the machine, and no other process can take from it."""

    node: Node
    network: Network
    memory: MemoryFolder | None
    listeners: Listeners
    new_port: Callable[[], socket.socket]
    """Binds another one in the place of `listeners.workers`. Raises PortError."""


@dataclass(frozen=True, slots=True)
class Helpers:
    """Processes that serve the workers of all generations."""

    subreaper: Subreaper
    guard: Guard
    gpu_memory: GpuMemory
    gpu_health: GpuHealth
    spares: Spares


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This node's part in the rendezvous."""

    participant: Participant
    link: StoreLink
    heartbeat: Heartbeat


def _run(agent: Agent, machine: Machine, prepared: Prepared) -> Ending:
    """In the order that the module's docstring explains."""
    catch_signals(agent.events, agent.config.stop.more_signals)
    end_in_time(agent.config.stop)
    if prepared.adoption_error:
        log.warning("what workers leave behind is not adopted: %s", prepared.adoption_error)
    _refuse_beside_remains(agent)
    network = _wait_for_network(agent, machine)
    machine = replace(machine, network=network)
    metrics = metrics_of(agent, machine, network)
    with contextlib.ExitStack() as parts:
        journal = _started(parts, journal_of(agent, metrics))
        log_to(agent.console, agent.name, agent.config.logs, lambda: journal.generation)
        claimed = _claim(agent, machine, network, binder(agent.config, metrics), parts)
        helpers = _start_helpers(agent, claimed, prepared, metrics, parts)
        checks, recheck = _check(agent, machine, helpers.subreaper, parts)
        pages = pages_of(agent)
        introduction = Introduction(agent.name, agent.incarnation, generation=0)
        probes = Probes(introduction, agent.clock, secrets_in(agent.environment))
        rate = StepRate(agent.started_at)
        http = _serve_http(agent, claimed, metrics, pages, probes, journal, rate, parts)
        agent.manager.ready()
        store = _find_store(agent, claimed, metrics, parts)
        rendezvous = _make_rendezvous(agent, claimed, helpers, http, store, checks.held_back)
        services = _serve_workers(agent, claimed, helpers, rendezvous.participant, store, metrics, parts)
        rendezvous.link.start()
        observer = Observer(
            metrics,
            pages,
            journal,
            rate,
            agent.run_directory,
            agent.config.max_restarts,
            agent.started_at,
            time.time,
        )
        send_spans(agent, journal, parts)
        loop = _make_loop(agent, claimed, helpers, rendezvous, observer, checks, recheck, *services)
        _watch_for_notices(agent, loop, parts)
        probes.begin(rendezvous.participant, rendezvous.heartbeat)
        hosts_store = claimed.listeners.store is not None
        return _live(agent, loop, rendezvous, observer, store, hosts_store=hosts_store)


# ---------------------------------------------------------------- refused before anything is started


def _refuse_beside_remains(agent: Agent) -> None:
    """Raises CannotStart when workers of an earlier agent of the job live on here, which SIGKILL has not ended."""
    where = dict.fromkeys(run_directory_parents())
    if given := run_directory_parent(os.environ):
        where[Path(given)] = None
    job, within_s = agent.config.rendezvous.job_id, agent.config.stop.kill_timeout_s
    _wait(
        agent,
        "waiting for the end of an earlier agent's workers",
        lambda: await_end(tuple(where), os.geteuid(), job, within_s),
    )


def _wait_for_network(agent: Agent, machine: Machine) -> Network:
    """As it was found before, or as soon as it is there."""
    found = machine.network
    if isinstance(found, NotReady):
        found = _wait(
            agent, "waiting for the network", lambda: wait_for_network(agent.config, agent.environment)
        )
    log.info("network: %s", found.choice)
    return found


def _wait(agent: Agent, doing: str, work: Callable[[], _T]) -> _T:
    requeues = agent.config.stop.requeues
    return unless_stopped(work, agent.events, doing, lambda: agent.manager.turn(doing), requeues=requeues)


def _claim(
    agent: Agent, machine: Machine, network: Network, bind: Binder, parts: contextlib.ExitStack
) -> Claimed:
    """Folders, ports and cgroup. Raises CannotStart."""
    # The guard removes it, too, if the agent cannot.
    place = run_directory_parent(os.environ)
    run_dir = Path(
        parts.enter_context(
            tempfile.TemporaryDirectory(prefix=RUN_DIR_PREFIX, dir=place, ignore_cleanup_errors=True)
        )
    )
    parts.callback(os.close, keep_from_tmpfiles(run_dir))
    memory = make_folder(agent.config.memory_checkpoints)
    if memory is not None:
        parts.callback(memory.close)
    address = network.choice.address
    listeners = bind_all(agent.config, network.endpoint, address, bind, copies=memory is not None)
    serves_at = listeners.memory.getsockname()[1] if listeners.memory is not None else None
    memory_address = str(Endpoint(address, serves_at)) if serves_at is not None else ""
    env = worker_env(agent.incarnation, run_dir, memory, agent.config, memory_address)
    cgroup = claim_cgroup(agent.incarnation)
    node = Node(agent.name, agent.incarnation, machine, run_dir, env, cgroup, agent.environment)
    return Claimed(node, network, memory, listeners, lambda: bind(address, None, "master"))


# ---------------------------------------------------------------- started before the store is found


def _start_helpers(
    agent: Agent, claimed: Claimed, prepared: Prepared, metrics: Metrics, parts: contextlib.ExitStack
) -> Helpers:
    warn_of_group_kill()
    parts.callback(agent.io.close)
    guard = Guard()
    run_dir = claimed.node.run_dir
    folders = [run_dir] if claimed.memory is None else [run_dir, claimed.memory.path]
    remains = file_for(run_dir), agent.config.rendezvous.job_id
    guard.start(agent.incarnation, folders, claimed.node.cgroup, remains)
    parts.callback(guard.close)
    watched, wait_s = claimed.node.machine.watched, agent.config.gpu_memory_wait_s
    gpu_memory = _started(
        parts, GpuMemory(watched, wait_s, agent.environment, agent.io, agent.events.put, agent.clock)
    )
    gpu_health = _started(
        parts,
        GpuHealth(
            claimed.node.machine.gpus,
            agent.environment,
            agent.io,
            agent.events.put,
            lambda result: metrics.diagnostics_dumps_total.inc(tool="nvml", result=result),
        ),
    )
    spares = spares_of(agent, claimed.node.machine, prepared)
    parts.callback(spares.close)
    return Helpers(prepared.subreaper, guard, gpu_memory, gpu_health, spares)


def _check(
    agent: Agent, machine: Machine, subreaper: Subreaper, parts: contextlib.ExitStack
) -> tuple[JoinChecks, Recheck]:
    """Beside all that follows."""
    checks, recheck = checks_of(agent, machine), recheck_of(agent, machine)
    for each in (checks, recheck):
        parts.callback(each.close)
    subreaper.add_known(lambda: [*checks.pids, *recheck.pids])
    checks.begin(agent.incarnation)
    return checks, recheck


def _serve_http(
    agent: Agent,
    claimed: Claimed,
    metrics: Metrics,
    pages: StatusPages,
    probes: Probes,
    journal: Journal,
    rate: StepRate,
    parts: contextlib.ExitStack,
) -> tuple[str, int]:
    own = claimed.listeners.http.getsockname()[:2]
    page, board = read_page(), board_of(agent, own, journal, pages, rate)
    answers = Answers(
        metrics.render,
        probes.liveness,
        probes.readiness,
        {NODE_PATH: probes.introduction, STATUS_PATH: pages.node, JOB_PATH: pages.job},
        queried={PAGE_PATH: lambda _: page, EVENTS_PATH: board.events},
        slow={OVERVIEW_PATH: board.state},
    )
    server = _started(parts, HealthServer(claimed.listeners.http, answers, Thread))
    log.info("metrics, /healthz, /readyz and /node at http://%s", Endpoint(*server.address))
    options = store_options(agent.config, claimed.network.endpoint, claimed.listeners.store)
    announce(claimed.node.run_dir, server.address, options)
    return server.address


def _find_store(agent: Agent, claimed: Claimed, metrics: Metrics, parts: contextlib.ExitStack) -> Store:
    """Raises CannotStart."""
    looking = "looking for the rendezvous store"
    found = open_store(
        agent.config,
        claimed.network.endpoint,
        claimed.listeners.store,
        agent.events,
        lambda: agent.manager.turn(looking),
    )
    store = MeasuredStore(found, metrics, agent.clock)
    parts.callback(store.close)
    return store


# ---------------------------------------------------------------- one node of the job


def _make_rendezvous(
    agent: Agent,
    claimed: Claimed,
    helpers: Helpers,
    http: tuple[str, int],
    store: Store,
    held_back: str,
) -> Rendezvous:
    """Nothing of it runs yet. `http` is where this agent answers; `held_back` is the participant's."""
    policy, rng, clock = policy_of(agent.config), random.SystemRandom(), agent.clock
    network = claimed.network.choice
    identity = NodeRecord(
        node=agent.name,
        incarnation=agent.incarnation,
        address=network.address,
        port=claimed.listeners.workers.getsockname()[1],
        slots=claimed.node.machine.workers,
        http=reachable_at(http, network.address),
        network=network.facts,
        limits=policy.limits,
        program=program_of(agent.config, policy.store_outage_grace_s),
        node_rank=agent.config.rendezvous.node_rank,
        hosts_store=claimed.listeners.store is not None,
        role=agent.config.role,
        memory=claimed.listeners.memory.getsockname()[1] if claimed.listeners.memory is not None else 0,
    )
    lease_ttl_s = agent.config.rendezvous.lease_ttl_s
    life_s = agent.config.rendezvous.kind.life_s(lease_ttl_s)
    participant = Participant(identity, policy, lease_ttl_s=life_s, rng=rng, now=clock(), held_back=held_back)
    heartbeat = Heartbeat(
        lease_ttl_s,
        lambda: link.confirmed_at + LEASE_MARGIN * lease_ttl_s,
        lambda problem: end_stuck(problem, helpers.guard, agent.console),
        clock,
    )
    link = StoreLink(store, participant, lease_ttl_s, agent.events.put, clock, rng, lambda: heartbeat.turning)
    return Rendezvous(participant, link, heartbeat)


def _serve_workers(
    agent: Agent,
    claimed: Claimed,
    helpers: Helpers,
    participant: Participant,
    store: Store,
    metrics: Metrics,
    parts: contextlib.ExitStack,
) -> tuple[Processes, DiskWriter, MemoryServer | None]:
    """What starts workers, what answers them, and what writes their checkpoints."""
    node, clock, post, io = claimed.node, agent.clock, agent.events.put, agent.io
    guard, subreaper, spares, env = helpers.guard, helpers.subreaper, helpers.spares, node.env

    def latest() -> NodeSnapshot:
        return participant.snapshot

    def new_group(generation: int, exited: Callable[[int, int, float], object]) -> WorkerGroup:
        cgroup = node.cgroup / f"generation-{generation}" if node.cgroup is not None else None
        lasting = GroupHelpers(guard, logs, io)
        return WorkerGroup(generation, lasting, exited, post, clock, cgroup, subreaper.unknown_children)

    worker_store = WorkerStore(agent.environment, spares, io, post)
    parts.callback(worker_store.end)
    lost = metrics.log_file_bytes_dropped_total.inc
    files = agent.config.logs.directory is not None
    logs = _started(
        parts,
        WorkerLogs(agent.run_directory, node.name, agent.console, metrics.printed, lost, files=files),
    )
    commits = CommitFence(store, latest, clock)
    last_steps = LastSteps(store, latest, post, clock)
    reports = receiver_of(agent, Path(env.reports), metrics)
    links = WorkerLinks(env, commits, last_steps, reports, io, post)
    parts.callback(links.close)
    disk_writer = _started(
        parts, DiskWriter(node.run_dir / "writes", env.socket, env.reports, agent.environment, io, post)
    )
    subreaper.add_known(
        lambda: (guard.pid, *helpers.gpu_memory.pids, *helpers.gpu_health.pids, *worker_store.pids)
    )
    memory_server = _serve_memory(agent, claimed, store, parts)
    subreaper.add_known(lambda: (*disk_writer.pids, *spares.pids))
    subreaper.add_known(lambda: memory_server.pids if memory_server is not None else ())
    subreaper.expect_sessions(lambda: spares.sessions)
    processes = Processes(
        new_group=new_group,
        guard=guard,
        subreaper=subreaper,
        spares=spares,
        worker_store=worker_store,
        logs=logs,
        links=links,
        last_steps=last_steps,
        evidence=_keep_evidence(agent, node, metrics, parts),
        signs=_started(parts, SignReader(post, clock)),
        gpus=helpers.gpu_health,
    )
    return processes, disk_writer, memory_server


def _keep_evidence(agent: Agent, node: Node, metrics: Metrics, parts: contextlib.ExitStack) -> EvidenceKeeper:
    def count(tool: str, result: str) -> None:
        metrics.diagnostics_dumps_total.inc(tool=tool, result=result)

    has_gpus = bool(node.machine.inventory.cuda)
    keeper = EvidenceKeeper(
        node.name,
        agent.run_directory,
        agent.clock,
        count,
        has_gpus=has_gpus,
        secrets=secrets_in(agent.environment),
    )
    parts.callback(keeper.close)
    return keeper


def _serve_memory(
    agent: Agent, claimed: Claimed, store: Store, parts: contextlib.ExitStack
) -> MemoryServer | None:
    """For other nodes, where there can be any."""
    listener, env, config = claimed.listeners.memory, claimed.node.env, agent.config
    if claimed.memory is None or listener is None:
        return None
    place = ServerPlace(
        claimed.memory,
        agent.name,
        Path(env.memory_server),
        env.reports,
        listener,
        config.memory_replica_rate or 0,
    )
    return _started(parts, MemoryServer(place, store, agent.environment, agent.io, agent.events.put))


def _make_loop(
    agent: Agent,
    claimed: Claimed,
    helpers: Helpers,
    rendezvous: Rendezvous,
    observer: Observer,
    checks: JoinChecks,
    recheck: Recheck,
    processes: Processes,
    disk_writer: DiskWriter,
    memory_server: MemoryServer | None,
) -> Loop:
    config, participant, events, clock = agent.config, rendezvous.participant, agent.events, agent.clock
    supervisor = Supervisor(config, claimed.node, participant, observer, processes, events.put, clock)
    processes.links.start(supervisor)
    services = Services(
        link=rendezvous.link,
        peers=PeerLink(participant.probed, events.put, clock),
        gpu_memory=helpers.gpu_memory,
        disk_writer=disk_writer,
        checks=checks,
        recheck=recheck,
        observer=observer,
        manager=agent.manager,
        heartbeat=rendezvous.heartbeat,
        memory_server=memory_server,
    )
    port = OfferedPort(claimed.listeners.workers, claimed.new_port)
    return Loop(config.stop, participant, supervisor, services, port, events, clock, time.time)


def _watch_for_notices(agent: Agent, loop: Loop, parts: contextlib.ExitStack) -> None:
    """Not before this node is about to join: until then it has nothing to lose."""
    wanted = agent.config.stop.notice
    source = source_for(wanted, agent.environment, tied, agent.clock)
    if source is not None:
        expected = wanted.kind != "auto"
        post, clock = agent.events.put, agent.clock
        _started(parts, NoticeWatch(source, loop.noticed, post, clock, time.time, expected=expected))


def _live(
    agent: Agent, loop: Loop, rendezvous: Rendezvous, observer: Observer, store: Store, *, hosts_store: bool
) -> Ending:
    """No worker is left when the loop ends. Only then the lease is given up."""
    rendezvous.heartbeat.start()
    ending = loop.run()
    observer.ended_with(ending.code, ending.reason, agent.clock())
    rendezvous.heartbeat.close()
    agent.manager.stopping("leaving the rendezvous")
    rendezvous.link.close()
    _depart(store, rendezvous.participant, ending, stays_for_others=hosts_store)
    return ending


def _depart(store: Store, participant: Participant, ending: Ending, *, stays_for_others: bool) -> None:
    """Give up the lease, so that no node waits for it to expire; keep a store that we host up until all have left."""
    if ending.code is ExitCode.STORE_LOST and not stays_for_others:
        return
    try:
        if participant.lease is not None:
            store.revoke(participant.lease)
        if not stays_for_others:
            return
        snapshot = store.read((NODES_PREFIX,))
        watch = store.watch((NODES_PREFIX,), snapshot.revision)
        began_at, said = time.monotonic(), False
        while snapshot.entries and (waited_s := time.monotonic() - began_at) < HOST_LINGERS_S:
            if waited_s >= ANNOUNCED_AFTER_S and not said:
                said = True
                others = counted(len(snapshot.entries), "node")
                log.info("the store stays up for %s to leave, up to %g s", others, HOST_LINGERS_S)
            watch.next(HOST_LINGERS_S - waited_s if said else ANNOUNCED_AFTER_S)
            snapshot = store.read((NODES_PREFIX,))
    except Exception as error:  # whatever it is, it does not change how this agent has ended
        log.warning("left; could not sign off, the others notice when the lease ends: %s", error)
