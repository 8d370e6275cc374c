"""The daemon of one node: puts its parts together, and turns the main loop, one thread that owns the node's part in the
pool and the job's agent that runs here.

As in an agent, ports and folders are refused before anything is started, and the HTTP server answers before the store
is found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import secrets
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..agent.common.events import Event, Signalled, ThreadFailed, run_next, unless_stopped
from ..agent.common.exits import ENDINGS, CannotStart, ExitCode, code_of_leave
from ..agent.common.folders import make_own
from ..agent.common.ports import PortError
from ..agent.configuration.config import HTTP_ADDRESS, MAX_NODES, CheckMode, Config
from ..agent.configuration.derive import Resolved
from ..agent.configuration.rendezvous import ENDPOINT
from ..agent.machine.agents_here import keep_from_tmpfiles
from ..agent.machine.devices import probe
from ..agent.machine.network import Network, reachable_at, unique_node_id, wait_for_network
from ..agent.main.process import ServiceManager, catch_signals, log_to, take_environment, thread_failed
from ..agent.output.console import take as take_console
from ..agent.output.log_files import own_logs
from ..agent.rendezvous_io.store_link import StoreLink
from ..agent.rendezvous_io.store_opening import http_listener, open_store, store_listener, store_options
from ..agent.workers.processes.spare_wire import BecomeAgent
from ..health.checks.finding import NodeNeeds
from ..health.checks.runner import BackgroundChecks, CheckRun, checks_for, failed
from ..health.http import Answers, HealthServer
from ..rendezvous.errors import StoreError
from ..rendezvous.records import Endpoint
from ..threads import listen
from ..worker.wire.shared_progress import clock
from .job_agent import JobAgent, SpareAgent, agent_words, allocation_end, own_words
from .logs import LOGS_PATH, JobLogs
from .member import Assignment, PoolMember
from .pages import DaemonPages, DaemonSnapshot, PoolMetrics
from .records import MOST_NODES, AllocationEnd, Outcome, PoolNode

log = logging.getLogger(__name__)

TURN_S = 1.0
DEPARTURE_S = 2.0
"""From the end of the last process here: to have the pool know of it, so that a planned leave does not look like a
loss."""


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
            code, reason = _run(resolved, name, environment, events, manager.turn, parts)
        except CannotStart as refusal:
            code, reason = refusal.code, str(refusal)
    level = logging.INFO if code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", code, reason)
    manager.stopping(f"ended with exit code {code:d}: {reason}")
    console.close()
    return code


def _run(
    resolved: Resolved,
    name: str,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Any],
    on_turn: Callable[[str], None],
    parts: contextlib.ExitStack,
) -> tuple[ExitCode, str]:
    """One daemon's whole life. `events` gets this process' signals. Raises CannotStart."""
    config, rng, token = resolved.config, random.SystemRandom(), secrets.token_hex(16)
    pool, lease_ttl_s = config.rendezvous.job_id, config.rendezvous.lease_ttl_s
    starting, looking = "waiting for the network", "looking for the pool's store"
    network = unless_stopped(lambda: wait_for_network(config), events, starting, lambda: on_turn(starting))
    address = network.address
    try:
        listener, http = store_listener(config, network.endpoint, address), http_listener(config, address)
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error
    root = _log_root(config)
    logs = JobLogs(root, name, token)
    pages = DaemonPages(PoolMetrics(pool, name), name, clock)
    slow = {"/metrics": pages.all_metrics, LOGS_PATH: logs.page}  # they wait for another process or a disk
    server = HealthServer(http, Answers(pages.metrics, pages.liveness, pages.readiness, slow=slow))
    server.start()  # before the store is found: that takes as long as it takes, and is no reason to end here
    parts.callback(server.close)
    log.info("metrics, /healthz and /readyz at http://%s", Endpoint(*server.address))
    options = store_options(config, network.endpoint, listener)

    def looks() -> None:
        on_turn(looking)
        pages.snapshot = DaemonSnapshot(clock())

    store = pages.store = open_store(config, network.endpoint, listener, events, looks)
    parts.callback(store.close)
    if config.rendezvous.folder is not None:
        parts.callback(os.close, keep_from_tmpfiles(config.rendezvous.folder.resolve()))
    record = PoolNode(
        name,
        uuid.uuid4().hex[:12],
        most_nodes=MOST_NODES if resolved.settings[MAX_NODES].is_default else config.nodes.max,
        http=reachable_at(server.address, address),
        token=token,
    )
    member = PoolMember(record, lease_ttl_s=lease_ttl_s, rng=rng, now=clock(), wall=time.time)
    link = StoreLink(store, member, lease_ttl_s, events.put, clock, rng)
    log.info("node %s offers itself to pool %s at %s", name, pool, options[ENDPOINT.name])
    spare = SpareAgent(config.preload, config.rendezvous.kind.name, environment, clock)
    parts.callback(spare.close)
    checks = IdleChecks(config.check, _new_run(config, environment, network), events.put)
    parts.callback(checks.close)
    own = own_words(resolved.settings, os.getcwd())
    if config.http_address is not None:
        # The port that a file or a variable names, which jobs' agents read, too, is the daemon's alone.
        options[HTTP_ADDRESS.name] = str(Endpoint(config.http_address.address, 0))

    def command(assignment: Assignment) -> BecomeAgent:
        job = assignment.job
        words = agent_words(assignment, name, options, own, str(root))
        return BecomeAgent(tuple(words), {**environment, **job.environment}, job.directory)

    loop = DaemonLoop(member, link, logs, pages, spare, checks, command, events, on_turn)
    link.start()
    ending = loop.run()
    link.close()
    if member.lease is not None:
        with contextlib.suppress(StoreError):  # the others notice when the lease ends
            store.revoke(member.lease)
    return ending


def _new_run(config: Config, environment: Mapping[str, str], network: Network) -> Callable[[], CheckRun]:
    """Looks at what any job may need here; what one needs of its own, its agent checks before it joins. Raises
    ConfigError for devices that are not there."""
    gpus = tuple(device.nvml_name for device in probe(environment).cuda)
    logs = config.logs.given_directory
    needs = NodeNeeds(
        ranks=config.nodes.max,
        log_directory=str(logs) if logs is not None else "",
        address=network.address,
        gpus=gpus,
        rdma=bool(gpus and network.rdma_ports),
    )
    return lambda: CheckRun(checks_for(needs), needs, environment)


def _log_root(config: Config) -> Path:
    """The folder for what jobs print: absolute, as jobs run elsewhere; it is there when this returns. Raises
    CannotStart."""
    given = config.logs.given_directory
    try:
        if given is None:
            root = own_logs()
            make_own(root, readable=True)
        else:
            root = given.absolute()
            root.mkdir(parents=True, exist_ok=True)
        return root
    except OSError as error:
        raise CannotStart(
            ExitCode.NOT_HERE, f"no place for what jobs print: {error}; name one with --log-dir"
        ) from error


# ---------------------------------------------------------------- its main loop


class DaemonLoop:
    """Runs one daemon in the thread that calls `run`."""

    def __init__(
        self,
        member: PoolMember,
        link: StoreLink,
        logs: JobLogs,
        pages: DaemonPages,
        spare: SpareAgent,
        checks: IdleChecks,
        command: Callable[[Assignment], BecomeAgent],
        events: queue.SimpleQueue[Any],
        on_turn: Callable[[str], None],
    ) -> None:
        """`command` is what starts the agent of a job here."""
        self._member, self._link, self._logs, self._pages = member, link, logs, pages
        self._spare, self._checks = spare, checks
        self._command, self._events, self._on_turn = command, events, on_turn
        self._agent: JobAgent | None = None
        self._assignment: Assignment | None = None
        self._leaving: ExitCode | None = None
        self._depart_by: float | None = None
        self._fatal: tuple[ExitCode, str] | None = None
        member.report_problem(checks.problem)

    def run(self) -> tuple[ExitCode, str]:
        """Until this node has left the pool, and why; no process of a job is left here then."""
        while True:
            now = clock()
            wake_at = self._turn(now)
            if self._fatal is not None and (self._agent is None or self._agent.has_ended):
                return self._fatal
            if self._leaving is not None and self._has_departed(now):
                return self._leaving, "asked to leave the pool"
            timeout_s = TURN_S if wake_at is None else min(TURN_S, max(0.0, wake_at - now))
            run_next(self._events, timeout_s, self._told)

    def _has_departed(self, now: float) -> bool:
        if self._agent is not None:
            return False
        self._depart_by = self._depart_by or now + DEPARTURE_S
        return self._member.has_departed or now >= self._depart_by

    def _turn(self, now: float) -> float | None:
        member = self._member
        self._checks.turn(now, idle=self._agent is None)
        member.report_problem(self._checks.problem)
        if member.mismatch is not None and self._fatal is None:
            self._fatal = ExitCode.MISMATCH, member.mismatch
        if self._fatal is not None:
            self._stop()
        elif (due := member.to_start) is not None:
            self._start(due)
        elif member.must_leave:
            self._stop()
        if (request := member.request(now)) is not None:
            self._link.ask(request)
        self._link.keep(member.lease)
        self._link.follow(member.subscription)
        self._show(now)
        if self._agent is None and self._leaving is None and self._fatal is None and member.tracks:
            self._spare.turn()
        return member.wake_at(now)

    def _start(self, due: Assignment) -> None:
        job, command = due.job, self._command(due)
        self._member.started(due.allocation.id)
        try:
            if not os.path.isdir(job.directory):
                raise NotADirectoryError(f"the job's directory {job.directory} is not there on this node")
            with self._logs.begin(job.job) as output:
                agent = JobAgent(command, output, self._spare, self._agent_ended)
        except OSError as error:
            log.error("job %s (%s) cannot be started here: %s", job.job, job.name, error)
            self._member.ended(AllocationEnd(job.job, due.allocation.id, Outcome.UNABLE, 0, str(error)))
            return
        how = " by the spare agent" if agent.was_spare else ""
        started = "job %s (%s): started%s, attempt %d; its output is in %s"
        log.info(started, job.job, job.name, how, due.run.attempt, output.name)
        self._agent, self._assignment = agent, due

    def _stop(self) -> None:
        if self._agent is not None and not self._agent.leaves:
            log.info("job %s: asking it to leave this node", self._assignment and self._assignment.job.job)
            self._agent.leave()

    def _show(self, now: float) -> None:
        """What this daemon does, for people."""
        member = self._member
        is_current = member.is_current(now)
        if not member.tracks:
            status = f"waiting for {member.waiting_for}"
        elif not is_current:
            status = "waiting for the pool's store, which does not answer"
        elif self._assignment is not None:
            status = f"running job {self._assignment.job.job} ({self._assignment.job.name})"
        elif self._leaving is not None:
            status = "leaving the pool"
        elif member.record.problem:
            status = f"takes no job: {member.record.problem}"
        else:
            status = "idle: waiting for a job"
        if status != self._pages.snapshot.status:
            log.info("%s", status)
        running = self._assignment.job.job if self._assignment is not None else None
        self._pages.snapshot = DaemonSnapshot(clock(), is_current, status, running, member.view.counts())
        self._on_turn(status)

    # ---------------------------------------------------------------- events

    def _told(self, event: object) -> None:
        if isinstance(event, ThreadFailed):
            self._fatal = self._fatal or (event.code, event.reason)
        elif isinstance(event, Signalled):
            self._signalled(event)

    def _agent_ended(self, code: int, error: str) -> None:
        """In the thread that waits for it."""
        self._events.put(partial(self._ended, code, error))

    def _ended(self, code: int, error: str) -> None:
        assignment = self._assignment
        assert assignment is not None, "only a job that runs here can end"
        end = allocation_end(assignment, code, error)
        log.info("job %s: ended here: %s", assignment.job.job, end.reason)
        self._agent = self._assignment = None
        self._member.ended(end)

    def _signalled(self, event: Signalled) -> None:
        if event.number not in ENDINGS:
            return
        name = signal.Signals(event.number).name
        if self._leaving is None:
            log.info("%s: leaving the pool; a second signal cuts the job's grace short", name)
            self._leaving = code_of_leave(event.number, requeues=False)
            self._member.leave()
            self._stop()
        elif self._agent is not None:
            self._agent.leave()


EVERY_S = 300.0

NOT_YET = "its checks have not ended yet"


class IdleChecks:
    """With --check fail: the checks of a daemon's node, as it starts and every `EVERY_S` while no job is here. What one
    finds otherwise is in the log of the next job's agent. For the main thread."""

    def __init__(
        self, mode: CheckMode, new_run: Callable[[], CheckRun], post: Callable[[Event], object]
    ) -> None:
        """`post` takes events from any thread."""
        self._checks = BackgroundChecks(new_run, post)
        self._due_at = float("-inf") if mode == "fail" else float("inf")
        self.problem = NOT_YET if mode == "fail" else ""
        """Why this node must not be given a job; empty when it may."""

    def turn(self, now: float, *, idle: bool) -> None:
        """Begins what is due, and sees what has ended."""
        if idle and now >= self._due_at:
            self._due_at = now + EVERY_S
            self._checks.begin()
        findings = self._checks.take()
        if findings is not None:
            self.problem = "; ".join(f"check {one.check} failed: {one.summary}" for one in failed(findings))

    def close(self) -> None:
        self._checks.close()
