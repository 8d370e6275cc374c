"""The main loop: one thread that owns this node's state, hears events and obeys the rendezvous.

A turn asks the `Participant` three things (what to ask of the store, what to watch, what to do with the workers),
carries that out without blocking, and waits for the next event or instant. Every other thread only posts events.
What a generation's workers do is heard here, told to the participant, and shown in log and metrics.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..health.hang import HangWatch
from ..health.http import Probe
from ..rendezvous.decide import Leave, Refusal, Start, Stop
from ..rendezvous.participant import Participant
from ..rendezvous.records import Failure, Member, Phase, Result, World
from ..rendezvous.restarts import LASTING_S
from ..worker.reports import LoadReport, SaveReport, StepReport
from .accounting.observer import Observer
from .commit_gate import CommitGate, Standing
from .configuration.config import Config
from .environment.contract import WorkerPlace, chosen_variables
from .environment.timeouts import WIDENING, widening
from .environment.variables import compose
from .events import (
    Event,
    HolderSpoke,
    Probed,
    ReaderSpoke,
    Reported,
    Signalled,
    StoreGone,
    WorkerExited,
)
from .exits import ExitCode
from .machine.examine import Machine
from .machine.gpu_memory import GpuMemory
from .peer_link import PeerLink
from .ports import PortError
from .processes.failures import HANG_SIGNAL, WorkerFailure, examine, fingerprint, hung, summarize
from .processes.guard import Guard
from .processes.logs import WorkerLogs
from .processes.worker_store import WorkerStore
from .processes.workers import WorkerGroup, WorkerSpec
from .service_manager import ServiceManager
from .store_link import StoreLink, pass_on

log = logging.getLogger(__name__)

DRAIN_LOGS_S = 0.5
"""How long the last words of a failed worker may take from its pipe to the failure summary."""

HEARTBEAT_S = 1.0
"""The loop turns at least this often, so that liveness can tell a waiting loop from a stuck one."""

STUCK_AFTER_S = 30.0

AS_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL)
"""How a worker ends that was told to: by the signal, by a handler or shell that says so, or when its grace is over."""

_EXITS = {
    Result.SUCCEEDED: ExitCode.SUCCESS,
    Result.RESTARTS_EXHAUSTED: ExitCode.WORKERS_FAILED,
    Result.CRASH_LOOP: ExitCode.CRASH_LOOP,
    Result.STORE_HOST_LEFT: ExitCode.STORE_LOST,
    Refusal.JOIN_TIMEOUT: ExitCode.JOIN_TIMEOUT,
    Refusal.DUPLICATE_NODE: ExitCode.BAD_CONFIG,
    Refusal.STORE_MISMATCH: ExitCode.STORE_MISMATCH,
    Refusal.ASKED: ExitCode.STOPPED_BY_SIGTERM,
}


@dataclass(frozen=True, slots=True)
class Ending:
    code: ExitCode
    reason: str


@dataclass(frozen=True, slots=True)
class Node:
    """This node as found at the start: it does not change while the agent lives."""

    name: str
    incarnation: str
    machine: Machine
    run_dir: Path
    reports: Path
    cgroup: Path | None
    """Below it each generation's workers have one of their own."""
    environment: Mapping[str, str]
    """What the workers inherit: the agent's own, as it was before the agent changed anything for itself."""


class Loop:
    """See the module's docstring."""

    def __init__(
        self,
        config: Config,
        node: Node,
        participant: Participant,
        link: StoreLink,
        peers: PeerLink,
        guard: Guard,
        worker_store: WorkerStore,
        gpu_memory: GpuMemory,
        logs: WorkerLogs,
        observer: Observer,
        manager: ServiceManager,
        commits: CommitGate,
        events: queue.SimpleQueue[Event],
        listener: socket.socket,
        new_listener: Callable[[], socket.socket],
        clock: Callable[[], float],
    ) -> None:
        """`listener` is the port that the participant has offered; `new_listener` binds another."""
        self._config = config
        self._node = node
        self._participant = participant
        self._link = link
        self._peers = peers
        self._guard = guard
        self._worker_store = worker_store
        self._gpu_memory = gpu_memory
        self._logs = logs
        self._observer = observer
        self._manager = manager
        self._commits = commits
        self._events = events
        self._listener = listener
        self._new_listener = new_listener
        self._clock = clock
        self._world: World | None = None
        self._group: WorkerGroup | None = None
        self._started_at = 0.0
        self._hang = HangWatch(None)
        self._hung = False
        self._failures: list[WorkerFailure] = []
        self._signals: list[signal.Signals] = []
        self._ending: Ending | None = None
        self._doom: Ending | None = None
        """Set when the agent must end as soon as its workers are gone, whatever the rendezvous says."""
        self._turned_at = clock()

    def run(self) -> Ending:
        """Until this node's part in the job is over; no worker is left then."""
        while True:
            wake_at = self._turn()
            if self._ending is not None:
                return self._ending
            now = self._clock()
            timeout_s = HEARTBEAT_S if wake_at is None else min(HEARTBEAT_S, max(0.0, wake_at - now))
            try:
                self._hear(self._events.get(timeout=timeout_s))
                while True:
                    self._hear(self._events.get_nowait())
            except queue.Empty:
                pass

    def liveness(self) -> Probe:
        """For any thread: is the loop turning? Says nothing about the store, whose outage is no reason to die."""
        silent_s = self._clock() - self._turned_at
        return Probe(silent_s < STUCK_AFTER_S, f"the main loop turned {silent_s:.1f} s ago")

    def readiness(self) -> Probe:
        """For any thread: does this node train, or stand ready to?"""
        world, group = self._participant.world, self._group
        if group is not None and not group.stopping:
            return Probe(True, f"running generation {group.generation}")
        if self._gpu_memory.waiting:
            return Probe(False, "waiting for the killed workers' GPU memory to be free")
        if world is not None and world.phase is Phase.RUNNING and self._participant.lease_good(self._clock()):
            return Probe(True, f"standing by: generation {world.generation} is running")
        return Probe(False, f"waiting: {self._participant.waiting_for}")

    def introduction(self) -> str:
        """For any thread: what this node answers a peer that asks who it is."""
        group = self._group
        generation = group.generation if group is not None and not group.stopping else 0
        return self._participant.introduction(self._clock(), generation).to_json()

    # ---------------------------------------------------------------- one turn

    def _turn(self) -> float | None:
        """Do all that can be done now; the instant at which there is more to do."""
        now = self._turned_at = self._clock()
        participant = self._participant
        self._observer.compare(participant)
        while True:
            request = participant.request(now)
            if request is not None:
                self._link.ask(request)
            for peer in participant.probes(now):
                self._peers.ask(peer)
            if participant.wants_port:
                self._renew_listener()
            elif not self._obey(now):
                break
        self._link.keep(participant.lease)
        self._commits.standing = Standing(participant.incarnation, participant.proven_until)
        self._link.follow(participant.subscription)
        self._observer.look(participant, self._group, now)
        self._manager.turn(self._observer.status(participant, self._group))
        wake_at = [participant.wake_at(now), self._manager.next_beat, self._gpu_memory.turn(now)]
        if self._group is not None:
            stopping = self._group.stopping
            wake_at += (
                [self._group.wake_at()] if stopping else [self._started_at + LASTING_S, self._hang.due_at]
            )
        return min((at for at in wake_at if at is not None and at > now), default=None)

    def _obey(self, now: float) -> bool:
        """True when something changed that may bring another order at once."""
        group = self._group
        if group is not None:
            if (group.stopping or group.succeeded) and group.gone():
                self._finish_group(group, now)
                return True
            if not group.stopping and now >= self._started_at + LASTING_S:
                self._participant.workers_lasting(group.generation)
            if (
                group.running
                and not group.stopping
                and self._hang.due_at is not None
                and now >= self._hang.due_at
            ):
                self._end_hang(group, self._hang)
        order = self._participant.order(now)
        if self._doom is not None:
            if group is None:
                self._ending = self._doom
            else:
                self._stop_workers(
                    group, self._config.stop.failure_grace_s, gently=False, reason=self._doom.reason
                )
        elif isinstance(order, Start):
            if self._gpu_memory.waiting:
                return False
            self._start_workers(order.world, order.member, now)
            return True
        elif isinstance(order, Stop) and group is not None:
            stop = self._config.stop
            grace_s = stop.grace_s if order.planned else stop.failure_grace_s
            self._stop_workers(group, grace_s, gently=order.planned, reason=order.reason)
        elif isinstance(order, Leave):
            self._observer.left(order.why)
            self._ending = self._end(order)
        return False

    def _end(self, order: Leave) -> Ending:
        world = self._participant.world
        if world is not None and world.cause.failure is not None and order.why is not Result.SUCCEEDED:
            self._show_failure(world.cause.failure)
        if self._signals and order.why is not Result.SUCCEEDED:
            first = self._signals[0]
            interrupted = first is signal.SIGINT
            code = ExitCode.STOPPED_BY_SIGINT if interrupted else ExitCode.STOPPED_BY_SIGTERM
            return Ending(code, f"stopped by {first.name}")
        return Ending(_EXITS[order.why], order.reason)

    def _renew_listener(self) -> None:
        """The port offered so far belongs to a past generation: nobody may meet there again."""
        self._listener.close()
        try:
            self._listener = self._new_listener()
        except PortError as error:
            log.error("no port for the workers' store: %s", error)
            self._doom = Ending(ExitCode.BAD_CONFIG, str(error))
            return
        self._participant.offer_port(self._listener.getsockname()[1])

    # ---------------------------------------------------------------- workers

    def _start_workers(self, world: World, member: Member, now: float) -> None:
        generation = world.generation
        self._participant.workers_started(world)
        before = widening(self._world) if self._world is not None else 0
        if widening(world) != before:
            log.warning(
                "network timeouts are widened by %d steps of %d, were by %d: %d failures in a row without progress",
                widening(world),
                WIDENING.most,
                before,
                world.restarts.fruitless,
            )
        self._world, self._started_at, self._failures = world, now, []
        self._hang, self._hung = HangWatch(self._config.timeouts.hang_s), False
        self._observer.starting(world, member, now)
        self._group = WorkerGroup(
            generation,
            self._node.incarnation,
            self._guard,
            self._logs,
            self._events.put,
            self._clock,
            self._node.cgroup / f"generation-{generation}" if self._node.cgroup is not None else None,
        )
        has_nccl = self._node.machine.software.has_nccl
        records = self._logs.folder(generation, "flight_records") if has_nccl else None
        specs = [self._spec(world, member, local_rank, records) for local_rank in range(member.slots)]
        try:
            if world.members[0] == member:
                self._worker_store.serve(self._listener)
            self._group.start(self._config.command, specs)
            problem = ""
        except OSError as error:
            problem = f"a worker could not be started: {error}"
        self._observer.started(self._group.ranks)
        if problem:
            for ended, returncode in self._group.returncodes.items():
                self._observer.exited(ended, returncode, now, killed=True)
            self._fail(problem)

    def _spec(self, world: World, member: Member, local_rank: int, flight_records: Path | None) -> WorkerSpec:
        directory = self._node.run_dir / f"gen{world.generation}"
        directory.mkdir(exist_ok=True)
        place = WorkerPlace(
            world,
            member,
            local_rank,
            error_file=directory / f"error-{local_rank}.json",
            reports=self._node.reports,
            commits=self._commits.path,
            flight_records=flight_records,
        )
        chosen = chosen_variables(
            self._config, self._node.machine, place, agent_incarnation=self._node.incarnation
        )
        environment = compose(self._node.environment, chosen)
        return WorkerSpec(place.rank, local_rank, environment, self._node.machine.shares[local_rank].cpus)

    def _stop_workers(
        self,
        group: WorkerGroup,
        grace_s: float,
        *,
        gently: bool,
        reason: str,
        asking: signal.Signals = signal.SIGTERM,
    ) -> None:
        if not group.stopping:
            log.info("stopping generation %d: %s", group.generation, reason)
            self._observer.stopping(self._clock())
        group.stop(grace_s, gently=gently, asking=asking)

    def _finish_group(self, group: WorkerGroup, now: float) -> None:
        """Nothing of the generation is left here."""
        self._worker_store.close()
        if group.succeeded:
            log.info(
                "generation %d: all %d workers here ended with success", group.generation, len(group.ranks)
            )
            self._participant.workers_succeeded(group.generation)
        self._logs.detach_generation(group.generation)
        self._group = None
        self._observer.gone(now, succeeded=group.succeeded)
        self._participant.workers_gone(group.generation, now)
        self._gpu_memory.workers_gone(now)

    def _worker_exited(self, generation: int, local_rank: int, at: float) -> None:
        group, world = self._group, self._world
        if group is None or world is None or group.generation != generation:
            return
        returncode = group.reap(local_rank)
        self._observer.exited(local_rank, returncode, at, killed=group.killed)
        if group.stopping and self._hung and returncode == -HANG_SIGNAL:
            self._observer.ended(local_rank, "hang", at)
            return
        if group.stopping and returncode in AS_ASKED:
            return
        if returncode == 0:
            self._observer.ended(local_rank, "ok", at)
            return
        rank = group.ranks[local_rank]
        self._logs.drain(generation, rank, DRAIN_LOGS_S)
        failure = examine(
            rank=rank,
            local_rank=local_rank,
            node=self._node.name,
            generation=generation,
            returncode=returncode,
            error_file=self._node.run_dir / f"gen{generation}" / f"error-{local_rank}.json",
            log_tail=self._logs.tail(generation, rank),
            log_file=self._logs.log_file(generation, rank),
        )
        self._failures.append(failure)
        self._observer.ended(local_rank, failure.reason, at)
        if not group.stopping:
            log.error("rank %d failed: %s", rank, failure.cause)
            self._report_failure(
                Failure(generation, fingerprint(failure), failure.cause, detail=failure.to_json())
            )

    def _fail(self, what: str) -> None:
        """The generation fails on this node without a worker to blame."""
        assert self._group is not None
        log.error("%s", what)
        self._report_failure(Failure(self._group.generation, what[:200], what[:4000]))

    def _end_hang(self, group: WorkerGroup, hang: HangWatch) -> None:
        """Workers that are silent for too long: each is made to say where it stands, and that is its end."""
        log_file = self._logs.log_file(group.generation, group.ranks[hang.hindmost])
        failure = hung(self._node.name, group.generation, group.ranks, hang, log_file)
        self._hung = True
        log.error("%s", failure.cause)
        told = Failure(group.generation, "hang", failure.cause, detail=failure.to_json())
        self._report_failure(told, asking=HANG_SIGNAL)

    def _report_failure(self, failure: Failure, asking: signal.Signals = signal.SIGTERM) -> None:
        assert self._group is not None
        self._participant.workers_failed(failure)
        grace_s = self._config.stop.failure_grace_s
        gently = asking is HANG_SIGNAL  # a data loader has nothing to say about where training stands
        self._stop_workers(self._group, grace_s, gently=gently, reason=failure.summary, asking=asking)

    def _show_failure(self, failure: Failure) -> None:
        """The block for a tired person; the other nodes show what the failing one has put in the store."""
        mine = [mine for mine in self._failures if mine.generation == failure.generation]
        first = WorkerFailure.from_json(failure.detail) if failure.detail else None
        if first is None:
            log.error("generation %d failed: %s", failure.generation, failure.summary)
            return
        here = next((own for own in mine if own.rank == first.rank), None)
        others = [own for own in mine if own.rank != first.rank]
        log.error("%s", summarize(here or first, others))

    # ---------------------------------------------------------------- events

    def _hear(self, event: Event) -> None:
        now = self._clock()
        if pass_on(event, self._participant, now):
            return
        if isinstance(event, StoreGone):
            self._store_gone(event)
        elif isinstance(event, Probed):
            self._participant.probed(event.peer, event.finding, event.asked_at, now)
        elif isinstance(event, WorkerExited):
            self._worker_exited(event.generation, event.local_rank, event.at)
        elif isinstance(event, HolderSpoke):
            problem = self._worker_store.heard(event)
            if problem and self._group is not None and not self._group.stopping:
                self._fail(problem)
        elif isinstance(event, ReaderSpoke):
            self._gpu_memory.heard(event, now)
        elif isinstance(event, Reported):
            self._reported(event)
        elif isinstance(event, Signalled):
            self._signalled(event, now)

    def _store_gone(self, event: StoreGone) -> None:
        world = self._participant.world
        over = world is not None and world.phase is Phase.ENDED
        if self._doom is None and not over:
            log.error("%s", event.error)
            self._doom = Ending(ExitCode.STORE_LOST, str(event.error))

    def _reported(self, event: Reported) -> None:
        report = event.report
        if self._group is None or report.generation != self._group.generation:
            return
        self._observer.reported(report, event.at)
        if isinstance(report, StepReport):
            silence_s = self._hang.stepped(report.local_rank, report.step, event.at)
        else:
            silence_s = self._hang.alive(event.at)
        if silence_s is not None:
            log.warning("%.1f s without a step: more than half of --hang-timeout, better raise it", silence_s)
        if isinstance(report, StepReport) or (
            isinstance(report, SaveReport | LoadReport) and report.result == "ok"
        ):
            self._participant.workers_advanced(report.step)

    def _signalled(self, event: Signalled, now: float) -> None:
        self._signals.append(signal.Signals(event.number))
        name = self._signals[-1].name
        if len(self._signals) == 1:
            log.info("%s: leaving the job; a second signal cuts the workers' grace short", name)
            self._participant.leave(now)
            self._observer.leaving()
            self._manager.stopping(f"leaving the job, as {name} asks")
        else:
            log.info("%s again: killing the workers now", name)
            if self._group is not None:
                self._stop_workers(self._group, 0.0, gently=False, reason="a second signal")
