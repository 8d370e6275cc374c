"""What trains on this node: the workers of one generation, from the order to start them until nothing of them is left.

Of what they do it tells the `Participant` what the other nodes must know, and the `Observer` what people want to see.
It decides only what needs nobody else: that a worker has failed, that all are silent for too long, that they have
lasted. When to start and when to stop a generation is the rendezvous', and reaches it through the main loop.

Owned by the main thread. Instants are seconds on the monotonic clock.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..health.hang import HangWatch
from ..rendezvous.drain import Beyond, Present
from ..rendezvous.follow import Drain
from ..rendezvous.participant import Participant
from ..rendezvous.records import Failure, Member, World
from ..rendezvous.restarts import LASTING_S
from ..worker.drain import DRAINED
from ..worker.page import Reading
from ..worker.reports import SaveReport
from .accounting.observer import Observer
from .configuration.config import Config
from .configuration.timeouts import drain_timeout_s
from .drain_gate import DrainGate
from .draining import Draining
from .environment.contract import bind_of_rank_0_failed
from .environment.widening import WIDENING, widening
from .events import (
    Event,
    HolderSpoke,
    JustInTimeMessage,
    Reported,
    Stirred,
    StopRead,
    TailReady,
    WorkerAnswered,
    WorkerExited,
    WorkerKept,
)
from .late_exits import LateExits
from .machine.oom import OomKills, find_counter
from .node import Node, error_file, make_directory, worker_spec
from .preloader.spares import Spares
from .processes.children import Children
from .processes.failures import (
    HANG_SIGNAL,
    FailureInvalid,
    WorkerFailure,
    examine,
    fingerprint,
    hung,
    is_final,
    stuck,
    summarize,
)
from .processes.guard import Guard
from .processes.logs import WorkerLogs
from .processes.standing import standings
from .processes.worker_pages import WorkerPages
from .processes.worker_store import WorkerStore
from .processes.workers import WorkerGroup
from .salvage import Orders, Salvage
from .salvage_gate import SalvageGate

log = logging.getLogger(__name__)

TAIL_WITHIN_S = 0.5
"""A failure whose worker's last lines have not been read and written after so long is reported without the rest."""

LISTEN_PAUSE_S = 0.02
"""Between two looks whether all workers have finished a step, while a planned change waits for that."""

AS_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL)
"""How a worker ends that was told to: by the signal, by a handler or shell that says so, or when its grace is over."""


_STATE = {
    True: "and this node keeps the state after its last step",
    False: "and this node does not keep the state after its last step",
}


@dataclass(frozen=True, slots=True)
class _Crash:
    """A worker that has failed. It is examined when its last lines have been read, or when that takes too long."""

    local_rank: int
    returncode: int
    at: float
    due_at: float


@dataclass(frozen=True, slots=True)
class _Stopping:
    """How the workers are to be asked to end."""

    grace_s: float
    gently: bool
    asking: signal.Signals


class Training:
    """See the module's docstring."""

    def __init__(
        self,
        config: Config,
        node: Node,
        participant: Participant,
        guard: Guard,
        worker_store: WorkerStore,
        spares: Spares,
        logs: WorkerLogs,
        observer: Observer,
        children: Children,
        salvage_gate: SalvageGate,
        drain_gate: DrainGate,
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self.group: WorkerGroup | None = None
        """The workers that exist here."""
        self._config = config
        self._node = node
        self._participant = participant
        self._guard = guard
        self._worker_store = worker_store
        self._spares = spares
        self._logs = logs
        self._observer = observer
        self._children = children
        self._salvage_gate = salvage_gate
        self._drain_gate = drain_gate
        children.knows(lambda: self.group.pids if self.group is not None else ())
        self._post = post
        self._clock = clock
        self._world: World | None = None
        self._pages = WorkerPages(0)
        self._read: Mapping[int, Reading] = {}
        """What the pages said at the last look."""
        self._started_at = 0.0
        self._hang = HangWatch(None)
        self._hung = False
        self._late_exits = LateExits(None)
        self._crashes: deque[_Crash] = deque()
        """Those that are not examined yet, the first first."""
        self._tails_late = False
        """The log disk did not answer in time when it was last asked to."""
        self._failures: list[WorkerFailure] = []
        self._salvage = Salvage(0, 0.0)
        self._draining = Draining(0)
        self._postponed: _Stopping | None = None
        """What the workers are told once their last step has been kept."""
        self._spares_due_at: float | None = None
        self._oom_kills = OomKills(find_counter())

    @property
    def undisturbed(self) -> int:
        """The generation whose workers run here and have not been asked to stop; 0 when there is none."""
        return self.group.generation if self.group is not None and not self.group.stopping else 0

    def start(self, world: World, member: Member, listener: socket.socket, now: float) -> None:
        """This node's workers of `world`; `listener` is where their store is served, if that is up to this node."""
        generation = world.generation
        self._participant.workers_started(world)
        self._say_if_widened(world)
        self._say_if_set_back(world)
        self._world, self._started_at, self._failures = world, now, []
        self._crashes.clear()
        self._hang, self._hung = HangWatch(self._config.timeouts.hang_s), False
        self._late_exits = LateExits(self._config.timeouts.exit_s or None)
        self._pages, self._read = WorkerPages(generation), {}
        self._salvage = Salvage(generation, self._config.stop.just_in_time_grace_s)
        self._draining = Draining(generation)
        self._postponed = None
        self._observer.starting(world, member, now)
        self.group = WorkerGroup(
            generation,
            self._node.incarnation,
            self._guard,
            self._logs,
            self._post,
            self._clock,
            self._node.cgroup / f"generation-{generation}" if self._node.cgroup is not None else None,
            self._children.strangers,
        )
        self._logs.begin(world.job, world.run, generation)
        self._logs.leave_out(bind_of_rank_0_failed(world.master.port))
        has_nccl = self._node.machine.software.has_nccl
        records = self._logs.folder(generation, "flight_records") if has_nccl else None
        try:
            make_directory(self._node, generation)
            specs = [
                worker_spec(
                    self._config, self._node, world, member, local_rank, self._pages.make(local_rank), records
                )
                for local_rank in range(member.slots)
            ]
            if world.members[0] == member:
                self._worker_store.serve(listener)
            self.group.start(self._config.command, specs, self._spares)
            for spec in specs:
                self._pages.process_made(spec.local_rank, self._clock())
            problem = ""
        except OSError as error:
            problem = f"a worker could not be started: {error}"
            self._pages.close()  # what is scarce may be the very descriptors that they hold
        self._spares.workers_started(now)
        self._say_how_started(self.group, self._clock() - now)
        self._observer.started(self.group.ranks)
        if problem:
            for ended, returncode in self.group.returncodes.items():
                self._observer.exited(ended, returncode, now, killed=True)
            self._fail(self.group, problem)

    def prepared(self, world: World, member: Member, now: float) -> bool:
        """Whether there is no more to wait for before `start`: spares, as far as there will be any."""
        if self._config.command.kind == "binary":
            return True
        holder = world.members[0] == member and not self._worker_store.pids
        return self._spares.prepared(member.slots + holder, now)

    def turn(self, now: float) -> bool:
        """Do what is due. True: nothing of the generation is left here, and the participant knows."""
        self._children.bury(now)
        self._oom_kills.look(now)
        self._guard.look()
        self._spares_due_at = self._spares.turn(now)
        if self._config.preload:
            self._observer.spares(self._spares.ready)
        if self._spares.loaded:
            self._participant.warmed()
        group = self.group
        if group is None:
            return False
        self._look()
        self._drain_gate.present = Present(self._participant.world, self._participant.world_revision)
        self._examine_overdue(group, now)
        self._tell(self._salvage.turn(now))
        if self._postponed is not None and not self._salvage.under_way:
            group.stop(self._postponed.grace_s, gently=self._postponed.gently, asking=self._postponed.asking)
            self._postponed = None
        if not group.stopping and self._draining.stopping:
            self._end_who_waits(group, now)
        ended = group.stopping or group.succeeded or (not group.running and self._drained(group))
        if ended and group.gone() and not self._crashes:
            self._finish(group, now)
            return True
        if not group.stopping and not self._crashes:
            if now >= self._started_at + LASTING_S:
                self._participant.workers_lasting(group.generation)
            silent = group.running and not self._draining.told
            if silent and self._hang.due_at is not None and now >= self._hang.due_at:
                self._end_hang(group, self._hang)
            elif not self._draining.under_way:
                self._watch_ends(group, now)
        return False

    def wake_at(self) -> tuple[float | None, ...]:
        """The instants at which `turn` may have something to do without any event."""
        due_at = self._spares_due_at
        if self.group is None:
            return (due_at,)
        examine_at = self._crashes[0].due_at if self._crashes else None
        if self.group.stopping:
            return (due_at, examine_at, self.group.wake_at(), self._salvage.wake_at())
        return (
            due_at,
            examine_at,
            self._started_at + LASTING_S,
            self._hang.due_at,
            self._salvage.wake_at(),
            *self._wake_in_drain(self.group),
        )

    def drain(self, order: Drain) -> bool:
        """Let the workers end by themselves. True when there is news for the others in how far that has come."""
        group, now = self.group, self._clock()
        if group is None or group.stopping:
            return False
        if self._draining.begin(now, stopping=order.stopping):
            log.info("generation %d is to end between two steps: %s", group.generation, order.reason)
            self._pages.raise_flags()
        news = self._participant.workers_told(group.generation)
        self._look()
        if len(self._read) == len(group.ranks) and all(
            reading.step is not None for reading in self._read.values()
        ):
            news |= self._participant.workers_listen(group.generation)
        return news

    def stop(
        self, grace_s: float, *, gently: bool, reason: str | None, asking: signal.Signals = signal.SIGTERM
    ) -> None:
        """Ask the workers to end, if there are any; see `WorkerGroup.stop`. No reason: the log has it already."""
        group = self.group
        if group is None:
            return
        if not group.stopping:
            self._look()
            if reason is not None:
                log.info("stopping generation %d: %s", group.generation, reason)
            self._observer.stopping(self._clock())
            if not gently and asking is not HANG_SIGNAL:
                self._tell(self._salvage.begin(self._clock()))
        if self._salvage.under_way:
            group.expect_end()
            self._postponed = _Stopping(grace_s, gently, asking)
        else:
            group.stop(grace_s, gently=gently, asking=asking)

    def stops_at(self, now: float) -> float | None:
        """When the next thing is to be done to end the workers here, if nothing more is heard; None without any."""
        if self.undisturbed:
            return self._participant.good_until(now)
        return self.group.kill_at if self.group is not None else None

    def unkillable(self) -> str:
        """Why this node can never be done with its generation: what does not die, and where it stands."""
        group, bound_s = self.group, self._config.stop.kill_timeout_s
        if group is None or group.killing_s() < bound_s:
            return ""
        undying = group.undying()
        if group.running and not undying:
            return ""  # they have ended, and it is not heard yet: this process stood still itself
        where = standings(undying) or "nothing is known of what is left"
        return (
            f"generation {group.generation} does not end on this node, {bound_s:g} s after SIGKILL (--kill-timeout): "
            f"{where}. The others go on without this node; whatever device or disk these wait for must be repaired, "
            "or the machine started anew"
        )

    def show_failure(self, failure: Failure) -> WorkerFailure | None:
        """The block for a tired person; the other nodes show what the failing one has put in the store.

        Returns the worker that is to blame, if one is.
        """
        self._observer.failure_shown(failure)
        return show(failure, [mine for mine in self._failures if mine.generation == failure.generation])

    # ---------------------------------------------------------------- what is heard of them

    def exited(self, event: WorkerExited) -> None:
        group = self.group
        if group is None or group.generation != event.generation or event.local_rank in group.returncodes:
            return
        returncode = group.reap(event.local_rank)
        self._tell(self._salvage.gone(event.local_rank, event.at))
        self._look()
        self._observer.exited(event.local_rank, returncode, event.at, killed=group.killed)
        if group.stopping and self._hung and returncode == -HANG_SIGNAL:
            self._observer.ended(event.local_rank, "hang", event.at)
        elif group.stopping and returncode in (*AS_ASKED, DRAINED):
            pass
        elif not group.stopping and self._draining.exited(event.local_rank, returncode, event.at):
            if event.local_rank in self._draining.doubtful:
                self._drain_gate.look(group.generation)
            elif event.local_rank not in self._draining.told:
                self._observer.ended(event.local_rank, "ok", event.at)
                self._late_exits.ended(group.ranks[event.local_rank], event.at)
        elif returncode == 0:
            self._observer.ended(event.local_rank, "ok", event.at)
        else:
            self._failed(group, event.local_rank, returncode, event.at)

    def tail_ready(self, event: TailReady) -> None:
        self._tails_late = False
        group = self.group
        if group is not None and group.generation == event.generation:
            while self._crashes and any(crash.local_rank == event.local_rank for crash in self._crashes):
                self._examine(group, self._crashes.popleft())

    def just_in_time_message(self, event: JustInTimeMessage, now: float) -> None:
        if event.generation != self._salvage.generation:
            return
        if event.message is None:
            self._tell(self._salvage.gone(event.local_rank, now))
        else:
            self._tell(self._salvage.heard(event.local_rank, event.message, now))

    def stirred(self, event: Stirred, now: float) -> None:
        self._spares.heard(event, now)

    def answered(self, event: WorkerAnswered) -> None:
        """At the end of a step a worker was told that it was the last one, or should have been."""
        group, rank = self.group, event.local_rank
        if group is None or group.generation != event.generation or group.stopping:
            return
        if isinstance(event.answer, Beyond):
            reason = (
                f"rank {group.ranks[rank]} has finished step {event.step}, and all were to end after step "
                f"{event.answer.step}: this training is not synchronous, its workers cannot end at the same step"
            )
            log.warning("%s", reason)
            self.stop(self.planned_grace_s(), gently=True, reason=reason)
            return
        if not self._draining.told:
            log.info("step %d is the last one of generation %d", event.step, group.generation)
            self._observer.stopping(self._clock())
        self._draining.told.add(rank)

    def kept(self, event: WorkerKept) -> None:
        if event.generation == self._draining.generation:
            self._draining.kept.add(event.local_rank)

    def stop_read(self, event: StopRead) -> None:
        group = self.group
        if group is None or group.generation != event.generation or group.stopping:
            return
        self._look()
        for local_rank, (returncode, at) in self._draining.looked(event.stop, self._read).items():
            self._failed(group, local_rank, returncode, at)

    def holder_spoke(self, event: HolderSpoke) -> None:
        problem = self._worker_store.heard(event)
        if problem and self.group is not None and not self.group.stopping:
            self._fail(self.group, problem)

    def reported(self, event: Reported) -> None:
        report = event.report
        if self.group is None or report.generation != self.group.generation:
            if isinstance(report, SaveReport):  # the disk writer goes on after the generation that ordered it
                self._observer.saved_later(report)
            return
        self._look()
        self._observer.reported(report, event.at)
        self._warn_of_silence(self._hang.alive(event.at))
        self._late_exits.watch.alive(event.at)
        if report.result == "ok":
            self._participant.workers_advanced(report.step)

    def _look(self) -> None:
        """At the workers' pages. Before anything else that one does is judged: they tell what was before it."""
        now, before, read = self._clock(), self._read, self._pages.read()
        self._read = read
        if read == before:
            self._hang.silent(now)
            return
        self._observer.trained(read.values(), now)
        chosen = _chosen_step(read)
        if (
            chosen is not None or _chosen_step(before) is not None
        ):  # which is withdrawn when the load is refused
            self._participant.workers_load(chosen)
        stepped = [
            (reading.stepped_at, reading.step, local_rank)
            for local_rank, reading in read.items()
            if reading.stepped_at is not None
            and reading.step is not None
            and (local_rank not in before or before[local_rank].stepped_at != reading.stepped_at)
        ]
        for at, step, local_rank in sorted(stepped):
            self._warn_of_silence(self._hang.stepped(local_rank, step, at))
            self._late_exits.watch.alive(at)
            self._participant.workers_advanced(step)

    def _warn_of_silence(self, silence_s: float | None) -> None:
        if silence_s is not None:
            log.warning("%.1f s without a step: more than half of --hang-timeout, better raise it", silence_s)

    def _tell(self, orders: Orders) -> None:
        for local_rank, message in orders:
            self._salvage_gate.tell(self._salvage.generation, local_rank, message)

    # ---------------------------------------------------------------- a planned change

    def planned_grace_s(self) -> float:
        """What is left of --stop-grace for a signal, of which a drain may have taken a part already."""
        stop, since = self._config.stop, self._draining.since
        taken_s = self._clock() - since if since is not None else 0.0
        return stop.grace_s - min(taken_s, drain_timeout_s(stop))

    def _drained(self, group: WorkerGroup) -> bool:
        """All workers here have ended as they were told, or wait for those that have."""
        return self._draining.complete(group.returncodes)

    def _end_who_waits(self, group: WorkerGroup, now: float) -> None:
        running = [rank for rank in group.ranks if rank not in group.returncodes]
        if self._draining.wants_look(now, running):
            self._drain_gate.look(group.generation)
        asking = [rank for rank in running if self._drain_gate.asks(group.generation, rank)]
        if self._draining.left_behind(now, running, self._read, asking):
            self._draining.excused.update(running)
            reason = "the ranks that it waits for have ended after the last step"
            group_grace_s = self._config.stop.failure_grace_s
            self.stop(group_grace_s, gently=True, reason=reason)

    def _wake_in_drain(self, group: WorkerGroup) -> tuple[float | None, ...]:
        if not self._draining.under_way:
            return ()
        listens = self._participant.listening == group.generation
        return (self._draining.look_at(), None if listens else self._clock() + LISTEN_PAUSE_S)

    # ---------------------------------------------------------------- start, failure, end

    def _say_if_widened(self, world: World) -> None:
        before = widening(self._world) if self._world is not None else 0
        if widening(world) != before:
            log.warning(
                "network timeouts are widened by %d steps of %d, were by %d: %d failures in a row without progress",
                widening(world),
                WIDENING.most,
                before,
                world.restarts.fruitless,
            )

    def _say_if_set_back(self, world: World) -> None:
        bad = world.restarts.bad_state
        if bad is not None:
            log.warning(
                "generation %d does not load the state of step %d, or what came of it: %d times in a row workers that "
                "had loaded it failed in the same way before they came to another step (%s). It goes on from an older "
                "one, if there is any",
                world.generation,
                bad.step,
                world.restarts.at_load,
                world.cause.detail,
            )

    def _say_how_started(self, group: WorkerGroup, took_s: float) -> None:
        warm = len(group.ranks) - len(group.cold)
        if warm:
            log.info("generation %d: %d workers from spares in %.3f s", group.generation, warm, took_s)
        if group.cold and self._config.preload:
            reasons = "; ".join(dict.fromkeys(group.cold.values()))
            log.info("generation %d: %d workers start cold: %s", group.generation, len(group.cold), reasons)

    def _failed(self, group: WorkerGroup, local_rank: int, returncode: int, at: float) -> None:
        """A worker has ended as it should not: its last lines say why, and are on their way here."""
        due_at = self._clock() + (0.0 if self._tails_late else TAIL_WITHIN_S)
        self._crashes.append(_Crash(local_rank, returncode, at, due_at))
        ready = TailReady(group.generation, local_rank)
        self._logs.drain(group.generation, group.ranks[local_rank], lambda: self._post(ready))

    def _examine_overdue(self, group: WorkerGroup, now: float) -> None:
        while self._crashes and now >= self._crashes[0].due_at:
            self._tails_late = True
            self._examine(group, self._crashes.popleft())

    def _examine(self, group: WorkerGroup, crash: _Crash) -> None:
        """Find out why this worker has failed, and end the generation with it."""
        rank = group.ranks[crash.local_rank]
        failure = examine(
            rank=rank,
            local_rank=crash.local_rank,
            node=self._node.name,
            generation=group.generation,
            returncode=crash.returncode,
            error_file=error_file(self._node, group.generation, crash.local_rank),
            log_tail=self._logs.tail(group.generation, rank),
            log_file=self._logs.log_file(group.generation, rank),
            oom_killed=self._oom_kills.lately(self._clock()),
        )
        self._failures.append(failure)
        self._observer.ended(crash.local_rank, failure.reason, crash.at)
        if not group.stopping:
            told = Failure(
                group.generation,
                fingerprint(failure),
                failure.cause,
                detail=failure.to_json(),
                final=is_final(failure),
            )
            self._report_failure(told, f"rank {rank} failed: {failure.cause}")

    def _fail(self, group: WorkerGroup, what: str) -> None:
        """The generation fails on this node without a worker to blame."""
        self._report_failure(Failure(group.generation, what[:200], what[:4000]), what)

    def _end_hang(self, group: WorkerGroup, hang: HangWatch) -> None:
        """Workers that are silent for too long: each is made to say where it stands, and that is its end."""
        log_file = self._logs.log_file(group.generation, group.ranks[hang.hindmost])
        self._end_stuck(hung(self._node.name, group.generation, group.ranks, hang, log_file), "hang")

    def _end_stuck(self, failure: WorkerFailure, fingerprint: str) -> None:
        self._hung = True
        told = Failure(failure.generation, fingerprint, failure.cause, detail=failure.to_json())
        self._report_failure(told, failure.cause, HANG_SIGNAL)

    def _watch_ends(self, group: WorkerGroup, now: float) -> None:
        """Workers that live on after others have ended with success, here or on other nodes."""
        world = self._participant.world
        if world is not None and world.generation == group.generation and world.finishing:
            self._late_exits.others_ended(now)
        running = {group.ranks[local]: local for local in group.ranks if local not in group.returncodes}
        mute = [group.pid(local) for local in running.values() if self._reports_no_step(local)]
        cause = self._late_exits.turn(now, running, mute)
        if cause:
            rank = min(running)
            log_file = self._logs.log_file(group.generation, rank)
            failure = stuck(self._node.name, group.generation, rank, running[rank], cause, log_file)
            self._end_stuck(failure, "hang at the end")

    def _reports_no_step(self, local_rank: int) -> bool:
        reading = self._read.get(local_rank)
        return reading is None or reading.step is None

    def _report_failure(self, failure: Failure, said: str, asking: signal.Signals = signal.SIGTERM) -> None:
        """`said`: for the log, in which the worker's own last words stand above it."""
        log.error("stopping generation %d: %s", failure.generation, said)
        self._observer.failure_shown(failure)
        self._participant.workers_failed(failure)
        grace_s = self._config.stop.failure_grace_s
        gently = asking is HANG_SIGNAL  # a data loader has nothing to say about where training stands
        self.stop(grace_s, gently=gently, reason=None, asking=asking)

    def _finish(self, group: WorkerGroup, now: float) -> None:
        """Nothing of the generation is left here."""
        self._worker_store.close()
        # Whoever was asked to end may end as if all were done.
        succeeded = group.succeeded and not group.stopping and not self._draining.told
        if succeeded:
            log.info(
                "generation %d: all %d workers here ended with success", group.generation, len(group.ranks)
            )
            self._participant.workers_succeeded(group.generation)
        elif self._drained(group):
            kept = self._draining.keeps_all(group.returncodes)
            log.info("generation %d has ended here, %s", group.generation, _STATE[kept])
            self._participant.workers_drained(group.generation, kept=kept)
        self._logs.detach_generation(group.generation)
        self._pages.close()
        self.group = None
        self._observer.gone(now, succeeded=succeeded)
        self._participant.workers_gone(group.generation)


def _chosen_step(read: Mapping[int, Reading]) -> int | None:
    """Of the state that the workers load."""
    chosen = [reading.chosen_step for reading in read.values() if reading.chosen_step is not None]
    return max(chosen, default=None)


def show(failure: Failure, own: Sequence[WorkerFailure]) -> WorkerFailure | None:
    """`own`: the failures on this node in the same generation. Any agent may have written `failure.detail`."""
    try:
        first = WorkerFailure.from_json(failure.detail) if failure.detail else None
    except FailureInvalid as error:
        log.warning("the failure's details in the store are not usable: %s", error)
        first = None
    if first is None:
        log.error("generation %d failed: %s", failure.generation, failure.summary)
        return None
    here = next((mine for mine in own if mine.rank == first.rank), None)
    others = [mine for mine in own if mine.rank != first.rank]
    log.error("%s", summarize(here or first, others))
    return here or first
