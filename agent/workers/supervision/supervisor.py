"""Runs what trains on this node: the workers of one generation after the other, from start to end.

It reports to the `Participant` what the other nodes must know of them, and to the `Observer` what people want to see.
It decides only what depends on no other node: that a worker has failed, that all are silent for too long, that they
have lasted. When a generation starts and stops is the rendezvous' decision, and comes through the main loop.

Owned by the main thread. Instants are seconds on the monotonic clock.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ....rendezvous.coordinator.restarts import STABLE_AFTER_S
from ....rendezvous.node.drain import Beyond
from ....rendezvous.node.node_actions import Drain, Testify
from ....rendezvous.node.participant import Participant
from ....rendezvous.records import Condition, Failure, Member, World
from ....rendezvous.statements.inquiry import HANG, Testimony, telling
from ....rendezvous.text import counted
from ....worker.wire.messages import SaveReport
from ...common.events import (
    Event,
    GenerationEvent,
    GpuHealthMessage,
    JustInTimeMessage,
    Reported,
    SignsRead,
    StopRead,
    StoreServerMessage,
    TailReady,
    Testified,
    WorkerAnswered,
    WorkerExited,
    WorkerKept,
    WorkersSeen,
)
from ...configuration.config import Config
from ...machine.gpus.health import GpuHealth
from ...observability.accounting.observer import Observer
from ...output.log_folders import FLIGHT_RECORDS
from ...output.worker_logs import WorkerLogs
from ..environment.contract import bind_of_rank_0_failed
from ..evidence.collector import QUICK, THOROUGH, Depth
from ..evidence.keeper import EvidenceKeeper, Look
from ..failures.causes import NOT_STARTED, STORE_SERVER, Cause, CauseTable
from ..failures.examination import FailedWorker, hang_failure
from ..failures.worker_failure import HANG_SIGNAL, WorkerFailure
from ..hangs.signs import SignReader
from ..links.last_steps import LastSteps
from ..links.server import WorkerLinks
from ..preloader.spares import Spares
from ..processes.exit_words import describe_exit
from ..processes.guard import Guard
from ..processes.subreaper import Subreaper
from ..processes.unkillable import process_statuses
from ..processes.worker_store import WorkerStore
from ..processes.workers import WorkerGroup
from .exits import LEAVING, Exit
from .failure_reports import KNOWN_WITHIN_S, Crash, Examiner, report_of, show
from .generation import Generation, HowToStop, log_changed_terms
from .hang_watch import HangWatch
from .just_in_time_state import Orders
from .worker_spec import Node, make_directory, worker_spec

log = logging.getLogger(__name__)

SEEN_WITHIN_S = 2.0
"""Workers that hang are ended when the look at them is over, or when it takes longer than this."""

_STATE = {
    True: "and this node keeps the state after its last step",
    False: "and no Checkpointer keeps the state after its last step on this node",
}


@dataclass(frozen=True, slots=True)
class Processes:
    """What starts the processes of this node, reads what they print, answers them, and misses none of them."""

    new_group: Callable[[int], WorkerGroup]
    """The workers of this generation, which `start` starts."""
    guard: Guard
    subreaper: Subreaper
    spares: Spares
    worker_store: WorkerStore
    logs: WorkerLogs
    links: WorkerLinks
    last_steps: LastSteps
    evidence: EvidenceKeeper
    signs: SignReader
    gpus: GpuHealth


class Supervisor:
    """Routes what happens to the generation that runs here, and carries out what follows."""

    def __init__(
        self,
        config: Config,
        node: Node,
        participant: Participant,
        observer: Observer,
        processes: Processes,
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._node = node
        self._participant = participant
        self._observer = observer
        self._processes = processes
        self._clock = clock
        self._generation: Generation | None = None
        """The newest, which stays until the next one begins: its failure may have to be shown."""
        self._post = post
        self._tail_late = False
        """The log disk did not answer in time when it was last asked to: until it does, no crash waits for it."""
        self._spares_due_at: float | None = None
        self._causes = CauseTable(config.causes)
        self._examiner = Examiner(node, self._causes, processes.logs, processes.gpus)
        self._hangs = HangWatch(participant, observer, processes.signs, processes.logs, clock)
        processes.subreaper.add_known(lambda: group.pids if (group := self.group) is not None else ())

    @property
    def _running(self) -> Generation | None:
        generation = self._generation
        return generation if generation is not None and not generation.over else None

    @property
    def group(self) -> WorkerGroup | None:
        """The workers that exist here."""
        generation = self._running
        return generation.group if generation is not None else None

    @property
    def undisturbed(self) -> int:
        """The generation whose workers run here and have not been asked to stop; 0 when there is none."""
        group = self.group
        return group.generation if group is not None and not group.stopping else 0

    # ---------------------------------------------------------------- what the loop asks for

    def prepared(self, world: World, member: Member, now: float) -> bool:
        """Whether there is no more to wait for before `start`: spares, as far as there will be any."""
        if self._config.command.kind == "binary":
            return True
        holder = world.members[0] == member and not self._processes.worker_store.pids
        return self._processes.spares.prepared(member.slots + holder, now)

    def start(self, world: World, member: Member, listener: socket.socket, now: float) -> None:
        """This node's workers of `world`; `listener` is where their store is served, if that is up to this node."""
        self._participant.workers_started(world)
        self._hangs.generation_begins()
        log_changed_terms(self._generation.world if self._generation is not None else None, world)
        group = self._processes.new_group(world.generation)
        generation = self._generation = Generation(
            self._config, world, group, now, self._hangs.learned, self._hangs.patience(now)
        )
        self._observer.starting(world, member, now)
        self._examiner.generation_begins()
        problem = self._launch(generation, member, listener)
        self._processes.spares.workers_started(now)
        generation.log_start(self._clock() - now)
        self._observer.started(group.ranks)
        if problem:
            for ended, returncode in group.returncodes.items():
                self._observer.exited(ended, returncode, now, killed=True)
            self._fail(generation, NOT_STARTED, problem)
        elif world.members[0] != member:
            generation.check_master(member.node)

    def turn(self, now: float) -> bool:
        """Do what is due. True: nothing of the generation is left here, and the participant knows."""
        self._look_after_processes(now)
        generation = self._running
        if generation is None:
            return False
        self._look(generation)
        self._examine_crashes(generation, now)
        self._send(generation, generation.just_in_time.turn(now))
        generation.stop_if_kept(now)
        if not generation.stopping and generation.drain.stopping:
            self._end_who_waits(generation, now)
        if generation.gone():
            self._finish(generation, now)
            return True
        if not generation.stopping and not generation.crashes:
            self._watch(generation, now)
        return False

    def wake_at(self) -> tuple[float | None, ...]:
        """The instants at which `turn` may have something to do without any event."""
        generation = self._running
        if generation is None:
            return (self._spares_due_at,)
        listens = self._participant.polls(generation.number)
        return (self._spares_due_at, *generation.wake_at(self._clock(), listens=listens))

    def drain(self, order: Drain) -> bool:
        """Let the workers end by themselves. True when there is news for the others in how far that has come."""
        generation = self._running
        if generation is None or generation.stopping:
            return False
        if generation.drain.begin(self._clock(), stopping=order.stopping):
            log.info("generation %d is to end between two steps: %s", generation.number, order.reason)
            generation.pages.raise_flags()
        news = self._participant.workers_notified(generation.number)
        self._look(generation)
        if generation.all_listen:
            news |= self._participant.workers_polling(generation.number)
        return news

    def testify(self, action: Testify) -> None:
        """Answer an inquiry: look at what the workers here do. They run on."""
        generation = self._running
        if generation is None or generation.stopping or generation.inquired >= action.inquiry:
            return
        generation.inquired = action.inquiry
        self._look(generation)
        generation.hang.asked(self._clock())
        number, inquiry = generation.number, action.inquiry

        def say(look: Look) -> None:
            if look.states:
                self._post(Testified(Testimony(number, inquiry, telling(look.states))))

        self._look_at(generation, f"inquiry-{inquiry}", THOROUGH, say)

    def stop(
        self, grace_s: float, *, gently: bool, reason: str | None, asking: signal.Signals = signal.SIGTERM
    ) -> None:
        """Ask the workers to end, if there are any; see `WorkerGroup.stop`. No reason: the log has it already."""
        generation = self._running
        if generation is None:
            return
        if not generation.stopping:
            self._look(generation)
            blamed = None if generation.hung else self._hangs.blamed(generation.number)
            if blamed is not None:
                self._hangs.count(generation)
            if blamed in ("", self._node.name):
                generation.hung, gently, asking = True, True, HANG_SIGNAL
            if reason is not None:
                log.info("stopping generation %d: %s", generation.number, reason)
            self._observer.stopping(self._clock())
            if not gently:
                self._keep_evidence(generation)
            # Where all others have kept the last step, or a worker must show where it stands, there is none to keep.
            if asking is not HANG_SIGNAL and not generation.drain.excused:
                within_s = grace_s if gently else math.inf
                self._send(generation, generation.just_in_time.begin(self._clock(), within_s))
        generation.stop(HowToStop(grace_s, gently, asking, self._clock()))

    def planned_grace_s(self) -> float:
        """How long the workers have after the signal of a planned stop."""
        generation = self._running
        if generation is None:
            return self._config.stop.grace_s
        return generation.planned_grace_s(self._clock())

    def stops_at(self, now: float) -> float | None:
        """When the next thing is to be done to end the workers here, if nothing more happens; None without any."""
        if self.undisturbed:
            return self._participant.good_until(now)
        return self.group.kill_at if self.group is not None else None

    def unkillable(self) -> str:
        """Why this node can never be done with its generation: what does not die, and where it stands."""
        group, bound_s = self.group, self._config.stop.kill_timeout_s
        if group is None or group.kill_elapsed_s() < bound_s:
            return ""
        unkillable = group.unkillable()
        if group.running and not unkillable:
            return ""  # they have ended, and the event is still to come: this process stood still itself
        where = process_statuses(unkillable) or "nothing is known of what is left"
        return (
            f"generation {group.generation} does not end on this node, {bound_s:g} s after SIGKILL (--kill-timeout): "
            f"{where}. The others go on without this node; whatever device or disk these wait for must be repaired, "
            "or the machine started anew"
        )

    def show_failure(self, failure: Failure) -> WorkerFailure | None:
        """Log it; the other nodes show what the failing one has put in the store. Returns the worker to blame."""
        if self._running is not None:
            self._hangs.hear(self._running)
        self._observer.failure_shown(failure)
        generation = self._generation
        own = generation is not None and generation.number == failure.generation
        self._keep_evidence_once()
        evidence = self._processes.evidence.where() if own else ""
        failures = generation.failures if generation is not None and own else ()
        return show(failure, failures, self._causes, evidence)

    # ---------------------------------------------------------------- events

    def handle(self, event: GenerationEvent, now: float) -> None:
        """Of the workers that run here. Those of other generations are refused, but for what the disk writer saves."""
        if isinstance(event, TailReady):
            self._tail_late = False
        generation = self._running
        if generation is None or event.generation != generation.number:
            if isinstance(event, Reported) and isinstance(event.report, SaveReport):
                self._observer.training.saved_later(event.report, event.at)
        elif isinstance(event, WorkerExited):
            self._exited(generation, event)
        elif isinstance(event, TailReady):
            generation.crashes.read(event.local_rank)
            self._examine_crashes(generation, now)
        elif isinstance(event, Reported):
            self._reported(generation, event)
        elif isinstance(event, JustInTimeMessage):
            self._just_in_time_message(generation, event, now)
        elif isinstance(event, SignsRead):
            generation.signs(event.at, event.seen)
        elif isinstance(event, Testified):
            self._look(generation)
            self._participant.workers_looked_at(generation.looked_at(event.testimony))
        elif isinstance(event, WorkerKept):
            generation.drain.kept.add(event.local_rank)
        elif generation.stopping:
            pass  # the rest is of planned changes, and this generation ends otherwise
        elif isinstance(event, WorkerAnswered):
            self._answered(generation, event)
        elif isinstance(event, StopRead):
            self._stop_read(generation, event)

    def gpu_health_message(self, event: GpuHealthMessage) -> None:
        generation = self._running
        look = generation.look_before_end if generation is not None else None
        if self._processes.gpus.handle(event) and look is not None:
            self._processes.evidence.add(look, "nvml.txt", self._processes.gpus.text)

    def store_server_message(self, event: StoreServerMessage) -> None:
        problem = self._processes.worker_store.handle(event)
        generation = self._running
        if problem and generation is not None and not generation.stopping:
            self._fail(generation, STORE_SERVER, problem)

    def _exited(self, generation: Generation, event: WorkerExited) -> None:
        group, local_rank = generation.group, event.local_rank
        if local_rank in group.returncodes:
            return
        returncode = group.reap(local_rank)
        self._send(generation, generation.just_in_time.gone(local_rank, event.at))
        self._look(generation)
        self._observer.exited(local_rank, returncode, event.at, killed=group.killed)
        kind = generation.exited(local_rank, returncode, event.at)
        if kind is Exit.ENDED:
            self._observer.ended(local_rank, "ok", event.at)
        elif kind is Exit.HUNG:
            self._observer.ended(local_rank, HANG, event.at)
        elif kind is Exit.DRAINED and returncode not in LEAVING:
            log.warning(
                "rank %d has ended in its drain by an error of the script: %s; the state after its last step is kept",
                group.ranks[local_rank],
                describe_exit(returncode),
            )
        elif kind is Exit.DOUBTFUL:
            self._processes.last_steps.read_stop(generation.number)
        elif kind is Exit.FAILED:
            self._crashed(generation, local_rank, returncode, event.at)
        elif kind is Exit.AS_ASKED and self._seeks_root(generation):
            # A killed process closes its connections before it has ended: it may be the root of what they see.
            by_another = returncode == -signal.SIGKILL and not group.killed
            self._crashed(generation, local_rank, returncode, event.at, asked=not by_another)

    def _just_in_time_message(self, generation: Generation, event: JustInTimeMessage, now: float) -> None:
        if event.message is None:
            self._send(generation, generation.just_in_time.gone(event.local_rank, now))
        else:
            self._send(generation, generation.just_in_time.received(event.local_rank, event.message, now))

    def _answered(self, generation: Generation, event: WorkerAnswered) -> None:
        """The step that a worker has finished was the last one, or one before it should have been."""
        if isinstance(event.answer, Beyond):
            reason = (
                f"rank {generation.group.ranks[event.local_rank]} has finished step {event.step}, and all were to end "
                f"after step {event.answer.step}: this training is not synchronous, its workers cannot end at the "
                "same step"
            )
            log.warning("%s", reason)
            self.stop(self.planned_grace_s(), gently=True, reason=reason)
            return
        if not generation.drain.finished:
            log.info("step %d is the last one of generation %d", event.step, generation.number)
            self._observer.stopping(self._clock())
        generation.drain.finished.add(event.local_rank)

    def _stop_read(self, generation: Generation, event: StopRead) -> None:
        self._look(generation)
        for local_rank, (returncode, at) in generation.drain.looked(event.stop, generation.read).items():
            self._crashed(generation, local_rank, returncode, at)

    def _reported(self, generation: Generation, event: Reported) -> None:
        self._look(generation)
        self._observer.training.reported(event.report, event.at)
        generation.reported(event.at, saved=isinstance(event.report, SaveReport))
        if event.report.result == "ok":
            self._participant.workers_advanced(event.report.step)

    # ---------------------------------------------------------------- parts of a turn

    def _look_after_processes(self, now: float) -> None:
        processes = self._processes
        processes.subreaper.reap(now)
        self._examiner.update(now)
        processes.guard.check()
        self._spares_due_at = processes.spares.turn(now)
        if self._config.preload:
            self._observer.spares(processes.spares.ready)
        if processes.spares.loaded:
            self._participant.became_ready()

    def _look(self, generation: Generation) -> None:
        now = self._clock()
        progress = generation.look(now)
        if progress is None:
            return
        self._observer.training.progressed(generation.read.values(), now)
        if progress.load_known:
            self._participant.workers_load(progress.loads)
        for step in progress.steps:
            self._participant.workers_advanced(step)

    def _send(self, generation: Generation, orders: Orders) -> None:
        for local_rank, message in orders:
            self._processes.links.send(generation.number, local_rank, message)

    def _end_who_waits(self, generation: Generation, now: float) -> None:
        """In a planned change: workers that wait in a step for ranks which have ended."""
        drain, steps, running = generation.drain, self._processes.last_steps, generation.running
        if drain.wants_look(now, running):
            steps.read_stop(generation.number)
        asking = [rank for rank in running if steps.asks(generation.number, rank)]
        if drain.left_behind(now, running, generation.read, asking):
            drain.excused.update(running)
            reason = "the ranks that it waits for have ended after the last step"
            self.stop(self._config.stop.failure_grace_s, gently=True, reason=reason)

    def _watch(self, generation: Generation, now: float) -> None:
        """Undisturbed workers: have they lasted, do they hang, do some live on after others have ended?"""
        if now >= generation.started_at + STABLE_AFTER_S:
            self._participant.workers_stable(generation.number)
        if (paces := generation.paces.turn(now)) is not None:
            self._participant.workers_paced(paces)
        if generation.checks_master and self._some_node_succeeded(generation):
            generation.master_may_close()
        drain, group = generation.drain, generation.group
        if group.running and not drain.finished:
            stuck = self._hangs.turn(generation, now)
            if stuck is not None:
                self._end_stuck(generation, stuck.local_rank, stuck.why, HANG)
                return
        if not drain.under_way:
            world = self._participant.world
            if world is not None and world.generation == generation.number and world.finishing:
                generation.late_exits.others_ended(now)
            if cause := generation.late_cause(now):
                self._end_stuck(generation, min(generation.running), cause, "hang at the end")
                return
        generation.look_before_end = None  # it is out of date: the workers have moved since

    def _some_node_succeeded(self, generation: Generation) -> bool:
        """As far as this node follows the others."""
        done = Condition.SUCCEEDED, generation.number
        return any(node.has(*done) for node in self._participant.known_nodes)

    def _finish(self, generation: Generation, now: float) -> None:
        """Nothing of the generation is left here."""
        group, number = generation.group, generation.number
        self._processes.worker_store.close()
        succeeded = generation.succeeded
        if succeeded:
            ended = counted(len(group.ranks), "worker")
            log.info("generation %d: %s here ended with success", number, ended)
            self._participant.workers_succeeded(number)
        elif generation.drained:
            kept = generation.drain.keeps_all(group.returncodes)
            log.info("generation %d has ended here, %s", number, _STATE[kept])
            self._participant.workers_drained(number, kept=kept)
        self._processes.logs.detach_generation(number)
        generation.finish()
        self._observer.gone(now, succeeded=succeeded)
        self._participant.workers_gone(number)

    # ---------------------------------------------------------------- starts

    def _launch(self, generation: Generation, member: Member, listener: socket.socket) -> str:
        """Start all workers. Why that was not possible; empty if it was."""
        world, number, logs = generation.world, generation.number, self._processes.logs
        logs.begin(world.job, world.run, number)
        self._processes.evidence.begin(world.job, world.run, number)
        logs.leave_out(bind_of_rank_0_failed(world.master.port))
        has_nccl = self._node.machine.software.has_nccl
        records = logs.folder(number, FLIGHT_RECORDS) if has_nccl and logs.has_files else None
        pages = generation.pages
        try:
            make_directory(self._node, number)
            specs = [
                worker_spec(
                    self._config,
                    self._node,
                    world,
                    member,
                    local_rank,
                    pages.make(local_rank),
                    generation.stacks.make(local_rank),
                    records,
                )
                for local_rank in range(member.slots)
            ]
            if world.members[0] == member:
                self._processes.worker_store.serve(listener)
            generation.group.start(self._config.command.started, specs, self._processes.spares)
            for spec in specs:
                pages.process_made(spec.local_rank, self._clock())
        except OSError as error:
            generation.stacks.close()
            pages.close()  # what is scarce may be the very descriptors that they hold
            return f"a worker could not be started: {error}"
        return ""

    # ---------------------------------------------------------------- failures

    def _crashed(
        self, generation: Generation, local_rank: int, returncode: int, at: float, *, asked: bool = False
    ) -> None:
        """A worker has ended as it should not: its last lines have the reason, and are on their way here."""
        ready = TailReady(generation.number, local_rank)
        rank = generation.group.ranks[local_rank]
        self._processes.logs.drain(generation.number, rank, lambda: self._post(ready))
        self._processes.gpus.worker_failed()
        generation.crashes.add(Crash(local_rank, returncode, at, self._clock() + KNOWN_WITHIN_S, asked))
        if not generation.stopping and generation.look_before_end is None:
            generation.look_before_end = self._look_at(generation, "failure", QUICK)

    def _examine_crashes(self, generation: Generation, now: float) -> None:
        """Those whose facts are here, and those that have waited for them too long."""
        crashes, gpus = generation.crashes, self._processes.gpus
        if crashes.overdue(now):
            self._tail_late = self._tail_late or not crashes.first_is_read
            gpus.overdue()
        for crash in crashes.ready(now, lines=not self._tail_late, gpus=gpus.waiting):
            self._examine(generation, crash)

    def _examine(self, generation: Generation, crash: Crash) -> None:
        """Find out why this worker has failed, and end the generation with it."""
        group, drain, rank = generation.group, generation.drain, generation.group.ranks[crash.local_rank]
        not_kept = crash.local_rank in drain.finished - drain.kept
        port = generation.world.master.port
        failure = self._examiner.examine(group, crash, port, self._clock(), not_kept=not_kept)
        cause = self._causes.named(failure.cause)
        if crash.asked and (failure.exception is None or cause.collateral or cause.outside):
            return
        generation.failures.append(failure)
        self._observer.ended(crash.local_rank, failure.cause, crash.at)
        if not generation.stopping:
            self._report_failure(
                generation, report_of(failure, cause), f"rank {rank} failed: {failure.summary}"
            )
        elif not cause.collateral and self._seeks_root(generation):
            log.error("rank %d failed before that, and the others because of it: %s", rank, failure.summary)
            report = report_of(failure, cause)
            self.show_failure(report)
            self._participant.workers_failed(report)

    def _seeks_root(self, generation: Generation) -> bool:
        """As far as this node knows, this generation ends over a collateral failure, whose root is still unknown."""
        world = self._participant.world
        known = generation.told
        if known is None and world is not None and world.generation == generation.number:
            known = world.cause.failure
        return known is not None and known.generation == generation.number and known.collateral

    def _fail(self, generation: Generation, cause: Cause, what: str) -> None:
        """The generation fails on this node without a worker to blame."""
        action = self._causes.named(cause.name).action
        failure = Failure(generation.number, what[:200], what[:4000], cause=cause.name, action=action)
        self._report_failure(generation, failure, what)

    def _end_stuck(self, generation: Generation, local_rank: int, summary: str, known_as: str) -> None:
        """End workers that are silent for too long: first evidence is kept, then a signal makes each print its stacks
        and end."""
        look = generation.look_before_end
        if look is None:
            look = generation.look_before_end = self._look_at(generation, "hang", THOROUGH)
        if not look.over and self._clock() < look.began_at + SEEN_WITHIN_S:
            return  # `_watch` comes here again
        number, rank = generation.number, generation.group.ranks[local_rank]
        log_file = self._processes.logs.log_file(number, rank)
        self._hangs.count(generation)
        generation.hung = True
        failure = hang_failure(FailedWorker(self._node.name, number, rank, local_rank, log_file), summary)
        report = report_of(failure, self._causes.named(failure.cause), known_as)
        self._report_failure(generation, report, failure.summary, HANG_SIGNAL)

    def _look_at(
        self, generation: Generation, why: str, depth: Depth, then: Callable[[Look], None] | None = None
    ) -> Look:
        """Begin a look at what the running workers do; `then` is called in another thread when it is over."""
        targets = generation.targets(self._processes.logs.tail, self._clock())
        seen = WorkersSeen(generation.number)
        return self._processes.evidence.look(
            why,
            targets,
            depth,
            then or (lambda look: self._post(seen)),
            lambda path: self._observer.evidence_kept(str(path), generation.number),
        )

    def _keep_evidence(self, generation: Generation) -> None:
        """Look at the workers before they are ended for a failure, here or elsewhere; waits for QUICK.within_s."""
        look = generation.look_before_end
        if look is None:
            look = generation.look_before_end = self._look_at(generation, "failure", QUICK)
        look.wait(look.began_at + QUICK.within_s, self._clock)

    def _keep_evidence_once(self) -> None:
        """Before the log names it. Of workers that hang there was a look at the inquiry."""
        generation = self._running
        if generation is None or generation.stopping or generation.hung:
            return
        if self._hangs.blamed(generation.number) is None:
            self._keep_evidence(generation)

    def _report_failure(
        self,
        generation: Generation,
        failure: Failure,
        reason: str,
        asking: signal.Signals = signal.SIGTERM,
    ) -> None:
        """`reason`: for the log, in which the worker's own last lines stand above it."""
        self._keep_evidence_once()
        evidence = self._processes.evidence.where()
        kept = f"; evidence: {evidence}" if evidence else ""
        log.error("stopping generation %d: %s%s", failure.generation, reason, kept)
        generation.told = failure
        self._observer.failure_shown(failure)
        self._participant.workers_failed(failure)
        gently = asking is HANG_SIGNAL  # the stack of a data loader does not show where training stands
        self.stop(self._config.stop.failure_grace_s, gently=gently, reason=None, asking=asking)
