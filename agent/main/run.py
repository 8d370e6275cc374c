"""Puts one agent together, lets it run, and takes it apart: where its clock and its randomness come from.

The order matters. Everything that can be refused (ports, the address) is refused before anything is started; the
HTTP server answers before the store is found; and at the end the workers are gone before the lease is given up.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ... import __version__
from ...health.checks.runner import RECHECKS, CheckRun, checks_for
from ...health.http import NODE_PATH, Answers, HealthServer, json_page, rested
from ...health.metrics import Build, Metrics
from ...rendezvous.liveness import LEASE_MARGIN
from ...rendezvous.node.participant import Participant
from ...rendezvous.node.session import NodeSnapshot
from ...rendezvous.records import NODES_PREFIX, Endpoint, NodeRecord
from ...rendezvous.store.interface import Store
from ...rendezvous.text import counted
from ...worker.wire.shared_progress import clock
from ..checkpoints.folder import make_folder
from ..checkpoints.processes import DiskWriter, MemoryServer, ServerPlace
from ..common.events import unless_stopped
from ..common.exits import CannotStart, ExitCode, lack_in
from ..common.ports import OfferedPort
from ..configuration.config import Config
from ..machine.agents_here import (
    RUN_DIR_PREFIX,
    announce,
    keep_from_tmpfiles,
    run_directory_parent,
)
from ..machine.inventory import Machine, needs_of
from ..machine.network import NotReady, reachable_at, unique_node_id, wait_for_network
from ..machine.notices import NoticeWatch, source_for
from ..machine.nvml import GpuHealth, GpuMemory, NvmlReader
from ..observability.job_report import LOOKS_WITHIN_S, OVERVIEW_PATH, PAGE_PATH, Board, read_page
from ..observability.observer import Observer
from ..observability.sources import AgentsSource
from ..observability.status import JOB_PATH, STATUS_PATH, NodeState
from ..output.console import take as take_console
from ..output.journal import EVENTS_PATH, EventKind, Journal
from ..output.log_files import LogFiles
from ..output.worker_logs import WorkerLogs
from ..rendezvous_io.node_checks import NodeChecks
from ..rendezvous_io.store_link import PeerLink, StoreLink
from ..rendezvous_io.store_opening import open_store, policy_of, program_of, store_options
from ..rendezvous_io.worker_answers import WorkerAnswers
from ..rendezvous_io.worker_links import WorkerLinks
from ..workers import causes
from ..workers.environment import Node, worker_env
from ..workers.evidence import EvidenceKeeper
from ..workers.generation import Processes
from ..workers.hang_detector import ActivityReader
from ..workers.processes.guard import Guard
from ..workers.processes.spares import WorkerStore
from ..workers.processes.workers import WorkerGroup
from ..workers.supervisor import Supervisor
from .assembly import (
    Agent,
    PreparedProcess,
    about_node,
    bind_all,
    bind_for_workers,
    choose_folders,
    prepare_process,
    spares_of,
)
from .heartbeat import Heartbeat
from .loop import AgentEnd, Loop
from .process import (
    ServiceManager,
    catch_signals,
    end_stuck,
    log_to,
    take_environment,
    write_error_file,
)

log = logging.getLogger(__name__)

HOST_LINGERS_S = 15.0
"""How long the node that hosts the store keeps it up for the others to read how the job ended: above their lease's
time to live, after which a silent one is known to be gone."""


def run(
    config: Config, machine: Machine, prepared: PreparedProcess | None = None, in_force: Sequence[str] = ()
) -> int:
    """One agent's whole life on this machine. Returns its exit code. `in_force`: the settings, for people."""
    name = config.node_id or unique_node_id()
    prepared = prepared or prepare_process()
    console = take_console(name)
    log_to(console, name, config.logs)
    # What a service manager ends because its main thread is stuck (SIGABRT) shows where that is.
    faulthandler.enable(2)
    manager = ServiceManager(os.environ, clock)
    environment = take_environment()
    try:
        logs, directory = choose_folders(config.logs)
        config = replace(config, logs=logs)
        ending = _run(
            Agent(config, name, prepared, environment, manager, console, machine, directory, in_force)
        )
    except CannotStart as refusal:
        ending = AgentEnd(refusal.code, str(refusal))
    except Exception as error:
        if lack := lack_in(error):
            ending = AgentEnd(ExitCode.NOT_HERE, lack)
        else:
            log.exception("the main thread has failed; please report this")
            ending = AgentEnd(ExitCode.AGENT_FAILED, f"the main thread has failed: {error!r}")
    if ending.code is not ExitCode.SUCCESS:
        write_error_file(os.environ, ending.code, ending.reason, ending.failure, time.time())
    level = logging.INFO if ending.code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", ending.code, ending.reason)
    manager.stopping(f"ended with exit code {ending.code:d}: {ending.reason}")
    console.close()
    return ending.code


def _run(agent: Agent) -> AgentEnd:
    """In the order that the module's docstring explains."""
    catch_signals(agent.events, agent.config.stop.more_signals)
    if agent.prepared.adoption_error:
        log.warning("what workers leave behind is not adopted: %s", agent.prepared.adoption_error)
    _wait_for_network(agent)
    with agent.ends:
        _keep_books(agent)
        _claim(agent)
        _start_helpers(agent)
        _check(agent)
        _serve_http(agent)
        agent.manager.ready()
        _find_store(agent)
        _make_rendezvous(agent)
        processes = _serve_workers(agent)
        agent.link.start()
        loop = _make_loop(agent, processes)
        _watch_for_notices(agent, loop)
        return _live(agent, loop)


# ---------------------------------------------------------------- refused before anything is started


def _wait_for_network(agent: Agent) -> None:
    """As it was found before, or as soon as it is there."""
    found, config, doing = agent.machine.network, agent.config, "waiting for the network"
    if isinstance(found, NotReady):
        turn = partial(agent.manager.turn, doing)
        found = unless_stopped(
            lambda: wait_for_network(config), agent.events, doing, turn, requeues=config.stop.requeues
        )
    log.info("network: %s", found)
    agent.network, agent.machine = found, replace(agent.machine, network=found)


def _keep_books(agent: Agent) -> None:
    """Metrics, the journal of events, and what others see of this node."""
    config, machine, secrets, job = agent.config, agent.machine, agent.secrets, agent.config.rendezvous.job_id
    software = machine.software
    metrics = agent.metrics = Metrics(
        job,
        agent.name,
        Build(
            version=__version__,
            torch_version=software.torch or "",
            nccl_version=software.nccl or "",
            python_version=platform.python_version(),
        ),
        workers=machine.workers,
        min_nodes=config.nodes.min,
        started_at_s=time.time() - (agent.clock() - agent.started_at),  # the network may have taken its time
        causes=causes.NAMES,
    )
    agent.console.count_lost(partial(metrics.dropped_total.inc, what="console_lines"))
    files = agent.log_files = agent.started(LogFiles())
    journal = agent.journal = Journal(
        agent.name,
        time.time,
        files,
        secrets=secrets,
        beside=about_node(agent.name, agent.in_force, secrets),
        count_lost=partial(metrics.dropped_total.inc, what="events"),
    )
    journal.note(EventKind.AGENT_STARTED, f"agent {__version__} starts, incarnation {agent.incarnation}")
    log_to(agent.console, agent.name, config.logs, lambda: journal.generation)
    agent.state = NodeState(
        job,
        agent.name,
        agent.incarnation,
        metrics,
        lease_ttl_s=config.rendezvous.lease_ttl_s,
        clock=agent.clock,
        wall_clock=time.time,
        secrets=secrets,
    )
    agent.observer = Observer(metrics, agent.state, journal, agent.run_directory, agent.started_at)


def _claim(agent: Agent) -> None:
    """Folders and ports. Raises CannotStart."""
    # The guard removes it, too, if the agent cannot.
    place = run_directory_parent(os.environ)
    run_dir = Path(
        agent.ends.enter_context(
            tempfile.TemporaryDirectory(prefix=RUN_DIR_PREFIX, dir=place, ignore_cleanup_errors=True)
        )
    )
    agent.ends.callback(os.close, keep_from_tmpfiles(run_dir))
    memory = agent.memory = make_folder(agent.config.memory_checkpoints)
    if memory is not None:
        agent.ends.callback(memory.close)
    network, address = agent.network, agent.network.address
    listeners = agent.listeners = bind_all(agent.config, network.endpoint, address, copies=memory is not None)
    serves_at = listeners.memory.getsockname()[1] if listeners.memory is not None else None
    memory_address = str(Endpoint(address, serves_at)) if serves_at is not None else ""
    env = worker_env(agent.incarnation, run_dir, memory, agent.config, memory_address)
    agent.node = Node(agent.name, agent.incarnation, agent.machine, run_dir, env, agent.environment)


# ---------------------------------------------------------------- started before the store is found


def _start_helpers(agent: Agent) -> None:
    """Processes that serve the workers of all generations."""
    agent.ends.callback(agent.io.close)
    guard = agent.guard = Guard()
    run_dir = agent.node.run_dir
    folders = [run_dir] if agent.memory is None else [run_dir, agent.memory.path]
    guard.start(agent.incarnation, folders)
    agent.ends.callback(guard.close)
    reader = agent.started(NvmlReader(agent.machine.gpus, agent.environment, agent.io, agent.post))
    agent.subreaper.add_known(lambda: reader.pids)
    agent.gpu_memory = GpuMemory(reader, agent.config.gpu_memory_wait_s, agent.clock)
    agent.gpu_memory.start()
    agent.gpu_health = GpuHealth(reader)
    agent.gpu_health.start()
    agent.spares = spares_of(agent)
    agent.ends.callback(agent.spares.close)


def _check(agent: Agent) -> None:
    """Beside all that follows."""
    needs = needs_of(agent.config, agent.machine)

    def new_run(of_excluded: bool) -> CheckRun:
        checks = (*checks_for(needs), *(RECHECKS if of_excluded else ()))
        return CheckRun(checks, needs, agent.environment)

    checks = agent.checks = NodeChecks(agent.config.check, new_run, agent.post)
    agent.ends.callback(checks.runs.close)
    agent.subreaper.add_known(lambda: checks.runs.pids)
    checks.begin(agent.incarnation)


def _serve_http(agent: Agent) -> None:
    state, job = agent.state, agent.config.rendezvous.job_id
    lease_ttl_s = agent.config.rendezvous.lease_ttl_s
    heartbeat = agent.heartbeat = Heartbeat(
        lease_ttl_s,
        lambda: agent.link.confirmed_at + LEASE_MARGIN * lease_ttl_s,
        lambda problem: end_stuck(problem, agent.guard, agent.console),
        agent.clock,
    )
    own = Endpoint(*agent.listeners.http.getsockname()[:2])
    about = {"job": job, "node": agent.name, "incarnation": agent.incarnation, "version": __version__}
    board = Board(agent.journal, about, state, AgentsSource(lambda: [own], LOOKS_WITHIN_S, here=False))
    page = read_page()
    answers = Answers(
        state.metrics,
        heartbeat.liveness,
        state.readiness,
        {
            NODE_PATH: json_page(state.introduction),
            STATUS_PATH: json_page(state.node),
            JOB_PATH: rested(json_page(state.job), agent.clock),
            PAGE_PATH: lambda _: page,
            EVENTS_PATH: board.events,
        },
        slow={OVERVIEW_PATH: rested(board.overview, agent.clock)},
    )
    server = agent.started(HealthServer(agent.listeners.http, answers))
    agent.http = server.address
    log.info("metrics, /healthz, /readyz and /node at http://%s", Endpoint(*server.address))
    options = store_options(agent.config, agent.network.endpoint, agent.listeners.store)
    announce(agent.node.run_dir, server.address, options)


def _find_store(agent: Agent) -> None:
    """Raises CannotStart."""
    looking = "looking for the rendezvous store"
    agent.store = open_store(
        agent.config,
        agent.network.endpoint,
        agent.listeners.store,
        agent.events,
        lambda: agent.manager.turn(looking),
    )
    agent.ends.callback(agent.store.close)


# ---------------------------------------------------------------- one node of the job


def _make_rendezvous(agent: Agent) -> None:
    """This node's part in it. Nothing of it runs yet."""
    policy, rng, clock = policy_of(agent.config), random.SystemRandom(), agent.clock
    network, listeners = agent.network, agent.listeners
    identity = NodeRecord(
        node=agent.name,
        incarnation=agent.incarnation,
        address=network.address,
        port=listeners.workers.getsockname()[1],
        slots=agent.machine.workers,
        http=reachable_at(agent.http, network.address),
        limits=policy.limits,
        program=program_of(agent.config, policy.store_outage_grace_s),
        node_rank=agent.config.rendezvous.node_rank,
        hosts_store=listeners.store is not None,
        role=agent.config.role,
        memory=listeners.memory.getsockname()[1] if listeners.memory is not None else 0,
    )
    lease_ttl_s = agent.config.rendezvous.lease_ttl_s
    life_s = agent.config.rendezvous.kind.life_s(lease_ttl_s)
    held_back = agent.checks.held_back
    participant = agent.participant = Participant(
        identity, policy, lease_ttl_s=life_s, rng=rng, now=clock(), held_back=held_back
    )
    heartbeat = agent.heartbeat

    def asked(operation: str, took_s: float | None) -> None:
        if took_s is None:
            agent.metrics.store_errors_total.inc(operation=operation)
        else:
            agent.metrics.store_request_duration_seconds.observe(took_s, operation=operation)

    agent.link = StoreLink(
        agent.store, participant, lease_ttl_s, agent.post, clock, rng, lambda: heartbeat.turning, asked
    )
    agent.peers = PeerLink(participant.probed, agent.post, clock)


def _serve_workers(agent: Agent) -> Processes:
    """What starts workers, what answers them, and what writes their checkpoints."""
    node, clock, post, io = agent.node, agent.clock, agent.post, agent.io
    guard, subreaper, spares, env = agent.guard, agent.subreaper, agent.spares, node.env
    dropped = agent.metrics.dropped_total

    def latest() -> NodeSnapshot:
        return agent.participant.snapshot

    def new_group(generation: int, exited: Callable[[int, int, float], object]) -> WorkerGroup:
        return WorkerGroup(generation, guard, logs, io, exited, post, clock, subreaper.unknown_children)

    worker_store = WorkerStore(agent.environment, spares, io, post)
    agent.ends.callback(worker_store.close)
    has_files, lost = agent.config.logs.directory is not None, partial(dropped.inc, what="log_bytes")
    logs = agent.started(
        WorkerLogs(
            *(agent.run_directory, node.name, agent.console, agent.log_files, lost), has_files=has_files
        )
    )
    answers = WorkerAnswers(agent.store, latest, post, clock)
    links = WorkerLinks(
        env,
        answers,
        io,
        post,
        clock,
        partial(dropped.inc, what="reports"),
    )
    agent.ends.callback(links.close)
    disk_writer = agent.disk_writer = agent.started(
        DiskWriter(node.run_dir / "writes", env.socket, env.reports, agent.environment, io, post)
    )
    memory_server, listener = None, agent.listeners.memory
    if agent.memory is not None and listener is not None:  # there can be other nodes
        place = ServerPlace(agent.memory, agent.name, Path(env.memory_server), env.reports, listener)
        memory_server = agent.started(MemoryServer(place, agent.store, agent.environment, io, post))
    agent.memory_server = memory_server
    evidence = EvidenceKeeper(agent.name, agent.run_directory, clock, agent.secrets)
    agent.ends.callback(evidence.close)
    subreaper.add_known(lambda: (guard.pid, *worker_store.pids))
    subreaper.add_known(lambda: (*disk_writer.pids, *spares.sessions))
    subreaper.add_known(lambda: memory_server.pids if memory_server is not None else ())
    subreaper.expect_sessions(lambda: spares.sessions)
    return Processes(
        new_group=new_group,
        guard=guard,
        subreaper=subreaper,
        spares=spares,
        worker_store=worker_store,
        logs=logs,
        links=links,
        answers=answers,
        evidence=evidence,
        activity=agent.started(ActivityReader(clock)),
        gpus=agent.gpu_health,
    )


def _make_loop(agent: Agent, processes: Processes) -> Loop:
    supervisor = Supervisor(
        agent.config, agent.node, agent.participant, agent.observer, processes, agent.post, agent.clock
    )
    processes.links.start(supervisor)
    config, address = agent.config, agent.network.address
    port = OfferedPort(agent.listeners.workers, lambda: bind_for_workers(config, address))
    return Loop(agent, supervisor, port)


def _watch_for_notices(agent: Agent, loop: Loop) -> None:
    """Not before this node is about to join: until then it has nothing to lose."""
    source = source_for(agent.config.stop.notice)
    if source is not None:
        agent.started(NoticeWatch(source, loop.noticed, agent.events.put, agent.clock, time.time))


def _live(agent: Agent, loop: Loop) -> AgentEnd:
    """No worker is left when the loop ends. Only then the lease is given up."""
    agent.heartbeat.start()
    ending = loop.run()
    agent.observer.ended_with(ending.code, ending.reason, agent.clock())
    agent.heartbeat.close()
    agent.manager.stopping("leaving the rendezvous")
    agent.link.close()
    _depart(agent.store, agent.participant, ending, stays_for_others=agent.listeners.store is not None)
    return ending


def _depart(store: Store, participant: Participant, ending: AgentEnd, *, stays_for_others: bool) -> None:
    """Give up the lease, so that no node waits for it to expire; keep a store that we host up until all have left."""
    if ending.code is ExitCode.NO_ANSWER and not stays_for_others:
        return
    try:
        if participant.lease is not None:
            store.revoke(participant.lease)
        if not stays_for_others:
            return
        snapshot = store.read((NODES_PREFIX,))
        watch = store.watch((NODES_PREFIX,), snapshot.revision)
        if snapshot.entries:
            others = counted(len(snapshot.entries), "node")
            log.info("the store stays up for %s to leave, up to %g s", others, HOST_LINGERS_S)
        ends_at = time.monotonic() + HOST_LINGERS_S
        while snapshot.entries and (left_s := ends_at - time.monotonic()) > 0:
            watch.next(left_s)
            snapshot = store.read((NODES_PREFIX,))
    except Exception as error:  # whatever it is, it does not change how this agent has ended
        log.warning("left; could not sign off, the others notice when the lease ends: %s", error)
