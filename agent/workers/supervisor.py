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
from dataclasses import dataclass, field, replace
from functools import partial

from ...health.hang_report import HANG, HangReport, telling
from ...rendezvous.coordinator.restarts import STABLE_AFTER_S
from ...rendezvous.node.drain import Beyond, End
from ...rendezvous.node.node_actions import Drain, ReportHang
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Condition, Failure, Member, StopAt, World
from ...threads import Thread
from ...worker.wire.messages import FromGuard, ReplicationReport, Report, SaveReport
from ..common.events import Event
from ..common.exits import lack_in
from ..configuration.config import Config
from ..configuration.stopping import drain_timeout_s
from ..observability.observer import Observer
from ..output.log_files import FLIGHT_RECORDS
from ..rendezvous_io.worker_links import RefusedSaves
from .causes import NOT_STARTED, STORE_SERVER
from .environment import Node, WorkerPlace, bind_of_rank_0_failed, error_file, make_directory, worker_spec
from .evidence import Evidence
from .failure_handler import FailureHandler
from .generation import Generation, HowToStop, Processes, log_bad_state, master_away
from .hang_detector import Durations
from .processes.workers import WorkerGroup, WorkerSpec
from .rank_activity import StackFile
from .stopping import HANG_SIGNAL, Exit, Orders

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Supervisor:
    """Routes what happens to the generation that runs here, and carries out what follows."""

    _config: Config
    _node: Node
    _participant: Participant
    _observer: Observer
    _processes: Processes
    _post: Callable[[Event], None]
    _clock: Callable[[], float]
    _generation: Generation | None = field(init=False, default=None)
    """The newest, which stays until the next one begins: its failure may have to be shown."""
    _failures: FailureHandler = field(init=False)
    _learned: Durations = field(init=False, default_factory=Durations)
    """Of steps, over all generations."""
    _refused_saves: RefusedSaves = field(init=False, default_factory=RefusedSaves)

    def __post_init__(self) -> None:
        self._failures = FailureHandler(
            *(self._node, self._participant, self._observer, self._processes),
            *(self._stop_failed, self._post, self._clock),
        )
        self._processes.worker_store.on_failure = self._store_failed
        self._processes.subreaper.add_known(lambda: group.pids if (group := self.group) is not None else ())

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

    def prepared(self, world: World, member: Member) -> bool:
        """Whether there is no more to wait for before `start`: spares, as far as there will be any."""
        if self._config.command.kind == "binary":
            return True
        serves = world.members[0] == member
        return self._processes.spares.prepared(member.slots + serves)

    def start(self, world: World, member: Member, listener: socket.socket, now: float) -> str:
        """This node's workers of `world`; `listener` is where their store is served, if that is up to this node.

        Returns what this machine lacks for it: then this generation has failed, as none is started twice (I4).
        """
        self._participant.workers_suspected(None)
        log_bad_state(world)
        group = self._processes.new_group(world.generation, self.worker_exited)
        generation = self._generation = Generation(self._config, world, group, now, self._learned)
        self._observer.starting(world, member, now)
        self._processes.gpus.generation_begins()
        error = self._launch(generation, member, listener)
        self._participant.workers_started(world)
        generation.log_start(self._clock() - now)
        if error is not None:
            lack = lack_in(error)
            problem = f"a worker could not be started: {lack or error}"
            self._observer.stopping(now)
            self._failures.fail(generation, NOT_STARTED, problem)
            return problem if lack else ""
        if world.members[0] != member:
            ask = partial(self._ask_master, world, member.node)
            Thread(ask, "master-port", lambda: None).start()
        return ""

    def _ask_master(self, world: World, node: str) -> None:
        """In a thread of its own."""
        if away := master_away(world, node):
            self._post(partial(self._warn_of_master, world.generation, away))

    def _warn_of_master(self, number: int, away: str) -> None:
        if self.undisturbed == number:
            log.warning("%s", away)

    def turn(self, now: float) -> bool:
        """Do what is due. True: nothing of the generation is left here, and the participant knows."""
        self._look_after_processes(now)
        self._take_reports()
        generation = self._running
        if generation is None:
            return False
        self._look(generation)
        self._failures.examine(generation, now)
        self._send(generation, generation.just_in_time.turn(now))
        generation.stop_if_kept(now)
        if not generation.stopping and generation.drain.stopping:
            self._end_blocked(generation, now)
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
            return ()
        listens = self._participant.has(Condition.POLLING, generation.number)
        return generation.wake_at(self._clock(), listens=listens)

    def drain(self, order: Drain) -> bool:
        """Let the workers end by themselves. True when there is news for the others in how far that has come."""
        generation = self._running
        if generation is None or generation.stopping:
            return False
        if generation.drain.begin(self._clock(), stopping=order.stopping):
            log.info("generation %d pauses after this step: %s", generation.number, order.reason)
            self._fork_successors(generation)
            generation.pages.raise_flags()
        news = self._participant.workers_are(Condition.NOTIFIED, generation.number)
        self._look(generation)
        if generation.all_listen:
            news |= self._participant.workers_are(Condition.POLLING, generation.number)
        return news

    def report_hang(self, action: ReportHang) -> None:
        """Answer an inquiry: look at what the workers here do. They run on."""
        generation = self._running
        if generation is None or generation.stopping or generation.inquired >= action.inquiry:
            return
        generation.inquired = action.inquiry
        self._look(generation)
        generation.hang.asked(self._clock())
        number, inquiry = generation.number, action.inquiry

        def say(look: Evidence) -> None:
            if look.states:
                self._post(partial(self._looked_at, HangReport(number, inquiry, telling(look.states))))

        self._failures.look(generation, f"inquiry-{inquiry}", say)

    def stop(
        self, grace_s: float, *, gently: bool, reason: str | None, asking: signal.Signals = signal.SIGTERM
    ) -> None:
        """Ask the workers to end, if there are any; see `WorkerGroup.stop`. No reason: the log has it already."""
        generation = self._running
        if generation is None:
            return
        if not generation.stopping:
            self._look(generation)
            blamed = None if generation.hung else self._failures.blamed(generation.number)
            if blamed in ("", self._node.name):
                generation.hung, gently, asking = True, True, HANG_SIGNAL
            if reason is not None:
                log.info("stopping generation %d: %s", generation.number, reason)
            self._observer.stopping(self._clock())
            self._fork_successors(generation)
            # Where all others have kept the last step, or a worker must show where it stands, there is none to keep.
            if asking is not HANG_SIGNAL and generation.drain.drained <= generation.drain.finished:
                within_s = grace_s if gently else math.inf
                self._send(generation, generation.just_in_time.begin(self._clock(), within_s))
        now = self._clock()
        generation.stop(HowToStop(now + grace_s, gently, asking, now), now)

    def _fork_successors(self, generation: Generation) -> None:
        """While these end: the next workers, and the server of their store, if it is to be here."""
        self._processes.spares.fork(len(generation.group.ranks) + 1)

    def _stop_failed(self, asking: signal.Signals) -> None:
        """After a failure that is in the log."""
        gently = asking is HANG_SIGNAL  # the stack of a data loader does not show where training stands
        self.stop(self._config.stop.failure_grace_s, gently=gently, reason=None, asking=asking)

    def planned_grace_s(self) -> float:
        """How long the workers have after the signal of a planned stop: --stop-grace, of which a drain may have taken
        a part already."""
        generation, stop = self._running, self._config.stop
        if generation is None or generation.drain.since is None:
            return stop.grace_s
        return stop.grace_s - min(self._clock() - generation.drain.since, drain_timeout_s(stop))

    def stops_at(self, now: float) -> float | None:
        """When the next thing is to be done to end the workers here, if nothing more happens; None without any."""
        if self.undisturbed:
            return self._participant.good_until(now)
        return self.group.kill_at if self.group is not None else None

    def unkillable(self) -> str:
        """Why this node can never be done with its generation: what does not die, and where it stands."""
        generation = self._running
        return generation.unkillable() if generation is not None else ""

    def show_failure(self, failure: Failure) -> None:
        """Log it; the other nodes show what the failing one has put in the store."""
        self._failures.show(failure, self._generation)

    def lost_save(self, generation: int) -> str:
        """Which of its saves that workers here wrote themselves the disk has refused; empty: the last went well."""
        self._take_reports()
        return self._refused_saves.lost_in(generation)

    # ---------------------------------------------------------------- events

    # Of the workers that run here: those of another generation come too late.

    def _of(self, number: int) -> Generation | None:
        """The generation that runs here, if it is this one."""
        generation = self._running
        return generation if generation is not None and generation.number == number else None

    def worker_exited(self, number: int, local_rank: int, at: float) -> None:
        """The process of this worker has ended, which was seen at that instant, and can be reaped."""
        generation = self._of(number)
        if generation is None or local_rank in generation.group.returncodes:
            return
        group = generation.group
        returncode = group.reap(local_rank)
        self._send(generation, generation.just_in_time.gone(local_rank, at))
        self._look(generation)
        kind = generation.drain.exited(
            local_rank, returncode, at, stopping=generation.stopping, hung=generation.hung
        )
        if kind is Exit.ENDED:
            self._observer.ended(local_rank, "ok", at)
        elif kind is Exit.HUNG:
            self._observer.ended(local_rank, HANG, at)
        elif kind is Exit.UNDETERMINED:
            self._processes.answers.read_stop(number, self.stop_read)
        elif kind is Exit.FAILED:
            self._failures.crashed(generation, local_rank, returncode, at)
        elif kind is Exit.AS_ASKED:
            self._failures.ended_as_asked(generation, local_rank, returncode, at)

    def guard_sent(self, number: int, local_rank: int, message: FromGuard | None) -> None:
        generation, now = self._of(number), self._clock()
        if generation is None:
            return
        if message is None:
            self._send(generation, generation.just_in_time.gone(local_rank, now))
        else:
            self._send(generation, generation.just_in_time.received(local_rank, message, now))

    def worker_answered(self, number: int, local_rank: int, step: int, answer: End | Beyond) -> None:
        """The step that a worker has finished was the last one, or one before it should have been."""
        generation = self._of(number)
        if generation is None or generation.stopping:
            return
        if isinstance(answer, Beyond):
            reason = (
                f"rank {generation.group.ranks[local_rank]} has finished step {step}, and all were to end after step "
                f"{answer.step}: this training is not synchronous, its workers cannot end at the same step"
            )
            log.warning("%s", reason)
            self.stop(self.planned_grace_s(), gently=True, reason=reason)
            return
        if not generation.drain.finished:
            log.info("step %d is the last one of generation %d", step, number)
            self._observer.stopping(self._clock())
        generation.drain.finished.add(local_rank)

    def worker_kept(self, number: int, local_rank: int) -> None:
        if (generation := self._of(number)) is not None:
            generation.drain.kept.add(local_rank)

    def stop_read(self, number: int, stop: StopAt | None) -> None:
        """Where the workers of a draining generation are to end; None: the store gave no answer, or none."""
        generation = self._of(number)
        if generation is None or generation.stopping:
            return
        self._look(generation)
        for local_rank, (returncode, at) in generation.drain.looked(stop, generation.read).items():
            self._failures.crashed(generation, local_rank, returncode, at)

    def _take_reports(self) -> None:
        for report, at in self._processes.links.reports():
            if isinstance(report, ReplicationReport):
                self._observer.node.replicated(report)
            else:
                self._reported(report, at)

    def _reported(self, report: Report, at: float) -> None:
        if isinstance(report, SaveReport):
            self._refused_saves.add(report)
        generation = self._of(report.generation)
        if generation is None:
            if isinstance(report, SaveReport):  # the disk writer has its time
                self._observer.training.saved_later(report, at)
            return
        self._look(generation)
        self._observer.training.reported(report, at)
        generation.hang.reported(at)
        if report.result == "ok":
            self._participant.workers_advanced(report.step)

    def _looked_at(self, report: HangReport) -> None:
        """The answer to an inquiry: what the workers here do."""
        if (generation := self._of(report.generation)) is not None:
            self._look(generation)
            self._participant.workers_looked_at(generation.looked_at(report))

    def _store_failed(self, problem: str) -> None:
        generation = self._running
        if generation is not None and not generation.stopping:
            self._failures.fail(generation, STORE_SERVER, problem)

    # ---------------------------------------------------------------- parts of a turn

    def _look_after_processes(self, now: float) -> None:
        processes = self._processes
        processes.subreaper.reap(now)
        self._failures.update(now)
        processes.guard.check()
        processes.spares.turn(now)
        if processes.spares.loaded:
            self._participant.became_ready()

    def _look(self, generation: Generation) -> None:
        now, loads = self._clock(), generation.loads
        steps = generation.look(now)
        if steps is None:
            return
        self._observer.training.progressed(generation.read.values())
        if generation.loads != loads:
            self._participant.workers_load(generation.loads)
        for step in steps:
            self._participant.workers_advanced(step)

    def _send(self, generation: Generation, orders: Orders) -> None:
        for local_rank, message in orders:
            self._processes.links.send(generation.number, local_rank, message)

    def _end_blocked(self, generation: Generation, now: float) -> None:
        """In a planned change: workers that wait in a step for ranks which have ended."""
        drain, answers, running = generation.drain, self._processes.answers, generation.running
        if drain.wants_look(now, running):
            answers.read_stop(generation.number, self.stop_read)
        asking = [rank for rank in running if answers.asks(generation.number, rank)]
        if drain.blocked(now, running, generation.read, asking):
            drain.drained.update(running)
            reason = "the ranks that it waits for have ended after the last step"
            self.stop(self._config.stop.failure_grace_s, gently=True, reason=reason)

    def _watch(self, generation: Generation, now: float) -> None:
        """Undisturbed workers: have they lasted, do they hang?"""
        if now >= generation.started_at + STABLE_AFTER_S:
            self._participant.workers_are(Condition.STABLE, generation.number)
        if (paces := generation.paces.turn(now)) is not None:
            self._participant.workers_paced(paces)
        if generation.group.running and not generation.drain.finished:
            self._failures.watch(generation, now)

    def _finish(self, generation: Generation, now: float) -> None:
        """Nothing of the generation is left here."""
        number, succeeded = generation.number, generation.succeeded
        self._processes.worker_store.close()
        generation.log_end()
        if succeeded:
            self._participant.workers_are(Condition.SUCCEEDED, number)
        elif generation.drained:
            self._participant.workers_drained(number, kept=generation.kept)
        self._processes.logs.detach_generation(number)
        generation.finish()
        self._observer.gone(now)
        self._participant.workers_gone(number)

    # ---------------------------------------------------------------- starts

    def _launch(self, generation: Generation, member: Member, listener: socket.socket) -> OSError | None:
        """Start all workers. Returns why that was not possible."""
        world, number, logs = generation.world, generation.number, self._processes.logs
        logs.begin(world.job, world.run, number)
        self._processes.evidence.begin(world.job, world.run, number)
        logs.leave_out(bind_of_rank_0_failed(world.master.port))
        pages = generation.pages
        try:
            make_directory(self._node, number)
            specs = [self._spec(generation, member, local_rank) for local_rank in range(member.slots)]
            if world.members[0] == member:
                self._processes.worker_store.serve(listener)
            generation.group.start(self._config.command.started, specs, self._processes.spares)
            for spec in specs:
                pages.process_made(spec.local_rank, self._clock())
        except OSError as error:
            generation.stacks.clear()
            pages.close()  # what is scarce may be the very descriptors that they hold
            return error
        return None

    def _spec(self, generation: Generation, member: Member, local_rank: int) -> WorkerSpec:
        """With what this worker shares with the agent, which is made here."""
        node, logs, number = self._node, self._processes.logs, generation.number
        records = node.machine.software.has_nccl and logs.has_files
        stacks = generation.stacks[local_rank] = StackFile()
        place = WorkerPlace(
            *(generation.world, member, local_rank, error_file(node, number, local_rank)),
            env=replace(node.env, page=generation.pages.make(local_rank), stacks=stacks.path),
            flight_records=logs.folder(number, FLIGHT_RECORDS) if records else None,
        )
        return worker_spec(self._config, node, place)
