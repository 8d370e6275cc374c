"""The main loop: one thread that owns this node's state, handles events and obeys the rendezvous.

A turn asks the `Participant` three things (what to ask of the store, what to watch, what to do with the workers),
carries that out without blocking, and waits for the next event or instant. Every other thread only posts events.
What the workers are and do is the matter of the `Supervisor`.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...rendezvous.node.driver import Driver
from ...rendezvous.node.node_actions import Action, Drain, Leave, Refusal, ReportHang, Start, Stop
from ...rendezvous.records import Condition, Failure, Result
from ...threads import Thread
from ..common.events import Signalled, ThreadFailed, run_next
from ..common.exits import ENDINGS, ExitCode, code_of_leave, lack_in
from ..common.ports import OfferedPort, PortError, PortLacking
from ..configuration.stopping import last_saves_s, leaves_in_s, obeys_before_s
from ..workers.supervisor import Supervisor

if TYPE_CHECKING:
    from ..checkpoints.handover import Handover
    from .assembly import Agent

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""The loop turns at least this often, so that liveness can tell a waiting loop from a stuck one."""

TRIES_AGAIN_S = 5.0
"""After a try to have something for the next workers has shown that this machine lacks it."""

JOBS_END = "SLURM_JOB_END_TIME"

NOTICE = "a notice"

_EXITS = {
    Result.SUCCEEDED: ExitCode.SUCCESS,
    Result.RESTARTS_EXHAUSTED: ExitCode.FAILED,
    Result.CRASH_LOOP: ExitCode.CRASH_LOOP,
    Result.FINAL_FAILURE: ExitCode.FAILED,
    Result.STORE_HOST_LEFT: ExitCode.NO_ANSWER,
    Refusal.JOIN_TIMEOUT: ExitCode.LATER,
    Refusal.STORE_AWAY: ExitCode.NO_ANSWER,
    Refusal.DUPLICATE_NODE: ExitCode.NOT_HERE,
    Refusal.STORE_MISMATCH: ExitCode.MISMATCH,
    Refusal.UNLIKE_THE_JOB: ExitCode.UNLIKE_THE_JOB,
    Refusal.UNFIT: ExitCode.NOT_HERE,
    Refusal.ASKED: ExitCode.STOPPED_BY_SIGTERM,
}


@dataclass(frozen=True, slots=True)
class AgentEnd:
    code: ExitCode
    reason: str
    failure: Failure | None = None
    """The worker that failed first, where one ended the job."""


@dataclass(frozen=True, slots=True)
class KnownEnd:
    """Of the job here, or of this machine."""

    why: str
    leaves_at: float
    """When this node begins to leave because of it."""
    deadline: float


@dataclass(frozen=True, slots=True)
class Departure:
    """What made this node leave the job, and how this agent ends then."""

    asked_by: str
    code: ExitCode


@dataclass(frozen=True, slots=True)
class Handing:
    """What is in this node's memory is brought to others."""

    handover: Handover
    since: float
    """The last saves have the rest of that time; infinite: it began with them."""


@dataclass(frozen=True, slots=True)
class Lack:
    """What this machine lacks for `of`, as the newest try has shown."""

    of: str
    what: str
    again_at: float
    """When there may be another try."""


class Loop:
    """Runs one agent in the thread that calls `run`."""

    def __init__(
        self,
        agent: Agent,
        supervisor: Supervisor,
        port: OfferedPort,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._agent = agent
        self._stop = agent.config.stop
        self._participant = agent.participant
        self._supervisor = supervisor
        self._port = port
        self._events = agent.events
        self._clock = agent.clock
        self._driver = Driver(agent.participant, agent.link, agent.peers.ask, self)
        self.start_waits_for = ""
        """What keeps the workers of the present world from being started here; empty where nothing does."""
        self._signalled_once = False
        """To end."""
        self._left: Departure | None = None
        self._ends: dict[str, KnownEnd] = {}
        """As they are known now, by who says so: `JOBS_END`, `NOTICE`."""
        if self._stop.job_ends_at is not None and (left_s := self._stop.job_ends_at - wall_clock()) > 0:
            now, leaves_s = self._clock(), leaves_in_s(left_s, self._stop.grace_s)
            self._ends[JOBS_END] = KnownEnd(JOBS_END, now + leaves_s, now + left_s)
        self._handing: Handing | None = None
        self._departing: AgentEnd | None = None
        """How this agent ends, as soon as the last saves are on disk."""
        self._ending: AgentEnd | None = None
        self._lack: Lack | None = None
        self._fatal: AgentEnd | None = None
        """Set when the agent must end as soon as its workers are gone, whatever the rendezvous says."""

    def run(self) -> AgentEnd:
        """Until this node's part in the job is over; no worker is left then."""
        while True:
            wake_at = self._turn()
            if self._ending is not None:
                return self._ending
            now = self._clock()
            timeout_s = HEARTBEAT_S if wake_at is None else min(HEARTBEAT_S, max(0.0, wake_at - now))
            run_next(self._events, timeout_s, self._handle)

    # ---------------------------------------------------------------- one turn

    def _turn(self) -> float | None:
        """Do all that can be done now; the instant at which there is more to do."""
        now = self._clock()
        participant, supervisor = self._participant, self._supervisor
        observer, manager = self._agent.observer, self._agent.manager
        first = min(self._ends.values(), key=lambda end: end.leaves_at, default=None)
        if first is not None and now >= first.leaves_at and self._left is None:
            log.info("%s: leaving the job before something ends it", first.why)
            self._leave(first.why, now, None)
        if (findings := self._agent.checks.take(participant, now)) is not None:
            self._agent.state.findings = findings
        observer.compare(participant)
        again_at = self._driver.turn(now)
        snapshot = participant.snapshot
        observer.update(snapshot, supervisor.group, now)
        manager.turn(observer.status(snapshot, supervisor.group))
        self._agent.heartbeat.turned(supervisor.stops_at(now))
        wake_at = (
            again_at,
            first.leaves_at if first is not None else None,
            self._lack.again_at if self._lack is not None else None,
            self._agent.gpu_memory.turn(now),
            self._agent.checks.turn(participant, now),
            *supervisor.wake_at(),
        )
        return min((at for at in wake_at if at is not None and at > now), default=None)

    # ---------------------------------------------------------------- effects, for the driver

    @property
    def undisturbed(self) -> int:
        return self._supervisor.undisturbed

    def new_port(self) -> int | None:
        now = self._clock()
        if self._lacks_until(now):
            return None
        try:
            port = self._port.renew()
        except PortLacking as error:
            self._lacks("a port", str(error), now)
        except PortError as error:
            log.error("no port for the workers' store: %s", error)
            self._fatal = self._fatal or AgentEnd(ExitCode.NOT_HERE, str(error))
        else:
            self._has("a port")
            return port
        return None

    def _lacks_until(self, now: float) -> str:
        """What this machine lacks, while it is not to be tried again; empty: nothing."""
        return self._lack.what if self._lack is not None and now < self._lack.again_at else ""

    def _has(self, of: str) -> None:
        if self._lack is not None and self._lack.of == of:
            self._lack = None

    def _lacks(self, of: str, what: str, now: float) -> None:
        """That is no failure of the script. It is tried once more: a start in vain is a failed generation for all
        nodes, and free of cost only twice (`coordinator/restarts`)."""
        before, self._lack = self._lack, Lack(of, what, now + TRIES_AGAIN_S)
        if before is None or before.of != of or now >= before.again_at + TRIES_AGAIN_S:
            log.warning("%s: trying again in %g s", what, TRIES_AGAIN_S)
            return
        log.error("%s: that lasts, and this node leaves", what)
        self._fatal = self._fatal or AgentEnd(ExitCode.NOT_HERE, what)

    def advance(self, now: float) -> bool:
        try:
            workers_gone = self._supervisor.turn(now)
        except OSError as error:
            lack = lack_in(error)
            if lack and not self._lacks_until(now):
                self._lacks("a look at workers that end", lack, now)
            if not lack or self._fatal is not None:
                raise
            return False
        if workers_gone:
            self._agent.gpu_memory.workers_gone(now)
        if self._participant.hands_over and self._handing is None:
            self._hand_over(now)
        return workers_gone

    def carry_out(self, action: Action, now: float) -> bool:
        supervisor, grace_s = self._supervisor, self._stop.failure_grace_s
        self.start_waits_for = ""
        if self._departing is not None:
            return False
        if unkillable := supervisor.unkillable():
            self._ending = AgentEnd(ExitCode.UNKILLABLE, unkillable)
            return False
        if self._fatal is not None:
            supervisor.stop(grace_s, gently=False, reason=self._fatal.reason)
            if supervisor.group is None:
                self._ending = self._fatal
        elif isinstance(action, Start):
            self.start_waits_for = self._not_ready_for(action, now)
            if self.start_waits_for:
                return False
            if self._agent.memory_server is not None:
                self._agent.memory_server.renew_key()
            if lack := supervisor.start(action.world, action.member, self._port.listener, now):
                self._lacks("workers", lack, now)
            else:
                self._has("workers")
            return True
        elif isinstance(action, Drain):
            return supervisor.drain(action)
        elif isinstance(action, ReportHang):
            supervisor.report_hang(action)
        elif isinstance(action, Stop):
            if action.planned:
                grace_s = supervisor.planned_grace_s()
                self._log_lost_steps(now)
            grace_s = min(grace_s, max(0.0, self._participant.leave_times.stopped_by - now))
            self._show_failure_elsewhere()
            supervisor.stop(grace_s, gently=action.planned, reason=action.reason)
        elif isinstance(action, Leave):
            self._finish_saves(action)
        return False

    def _not_ready_for(self, start: Start, now: float) -> str:
        """What keeps this node from starting its workers; empty where nothing does."""
        if lacking := self._lacks_until(now):
            return lacking
        if self._agent.gpu_memory.waiting:
            return "the killed workers' GPU memory to be free"
        if not self._supervisor.prepared(start.world, start.member):
            return "what all workers import to be loaded once for them (--preload)"
        return ""

    def _show_failure_elsewhere(self) -> None:
        """Log why this node's workers are stopped. The node of the failed one has logged it already."""
        world = self._participant.world
        failure = world.cause.failure if world is not None else None
        if failure is not None and failure.generation == self._supervisor.undisturbed:
            self._supervisor.show_failure(failure)

    def _log_lost_steps(self, now: float) -> None:
        """Before it is: the workers here have not come to a common last step while there was time."""
        if self._supervisor.undisturbed and now >= self._participant.leave_times.drained_by:
            log.error(
                "%s: the workers have not ended between two steps in time, and are stopped now. The job goes on from "
                "the newest state that another node has in memory, or that is on disk, and does again what came after "
                "it",
                self._left.asked_by if self._left is not None else "",
            )

    def _hand_over(self, now: float) -> None:
        """The time for it is that of the last saves, which go on meanwhile."""
        participant, world, server = self._participant, self._participant.world, self._agent.memory_server
        if server is None or world is None:
            participant.handed_over()
            return
        handing = self._handing = Handing(server.new_handover(), now)
        within_s = self._last_saves_s(now, rescues=True)
        kept = participant.has(Condition.STATE_SAVED, world.generation)
        handing.handover.begin(
            world, now + within_s, lambda: self._events.put(participant.handed_over), kept=kept
        )

    def _last_saves_s(self, now: float, *, rescues: bool) -> float:
        return last_saves_s(
            now,
            self._stop.grace_s,
            rescues=rescues,
            handing_since=self._handing.since if self._handing is not None else math.inf,
            saved_by=self._participant.leave_times.saved_by,
        )

    def _finish_saves(self, action: Leave) -> None:
        """Nothing is left to do here but what the disk writer does. The lease is kept meanwhile: a commit needs it."""
        self._departing = self._end(action)
        self._agent.disk_writer.departing = True
        world = self._participant.world
        rescues = world is not None and world.final_saver == self._participant.incarnation
        now, server = self._clock(), self._agent.memory_server
        late: Callable[[], None] | None = None
        within_s = round(self._last_saves_s(now, rescues=rescues), 1)
        leaves = world is not None and self._participant.leaves_memory(world.generation)
        if self._handing is None and server is not None and world is not None and leaves:
            self._handing = Handing(server.new_handover(), math.inf)
            kept = self._participant.has(Condition.STATE_SAVED, world.generation)
            late = partial(self._handing.handover.run, world, now + within_s, kept=kept)
        handing = self._handing

        def finish() -> None:
            lost = self._agent.disk_writer.finish(within_s)
            if late is not None:
                late()
            if handing is not None:
                handing.handover.report_lost()
            self._events.put(partial(self._saves_finished, lost))

        Thread(finish, "last-saves", lambda: self._events.put(partial(self._saves_finished, ""))).start()

    def _end(self, action: Leave) -> AgentEnd:
        world = self._participant.world
        failure = world.cause.failure if world is not None and action.why is not Result.SUCCEEDED else None
        if failure is not None:
            self._supervisor.show_failure(failure)
        if self._left is not None and action.why is not Result.SUCCEEDED:
            return AgentEnd(self._left.code, f"stopped by {self._left.asked_by}")
        return AgentEnd(_EXITS[action.why], action.reason, failure)

    # ---------------------------------------------------------------- events

    def _handle(self, event: Signalled | ThreadFailed) -> None:
        if isinstance(event, Signalled):
            self._signalled(event.number, self._clock())
        else:
            self._thread_failed(event)

    def _saves_finished(self, lost: str) -> None:
        """The disk writer has done what was ordered, or has had its time. `lost`: why the last save is not on disk."""
        self._ending = departing = self._departing
        if departing is None or departing.code is not ExitCode.SUCCESS:
            return
        world = self._participant.world
        if not lost and world is not None:
            lost = self._supervisor.lost_save(world.generation)
        if lost:
            self._ending = AgentEnd(ExitCode.NOT_ON_DISK, f"{departing.reason}, but {lost}")

    def _thread_failed(self, event: ThreadFailed) -> None:
        """What it did is not done any more, and the others may wait for it: they are better off without this node."""
        if self._fatal is None:
            log.error("this agent ends: %s", event.reason)
            self._fatal = AgentEnd(event.code, event.reason)
            if self._departing is not None:
                self._departing = self._fatal  # the last saves may not be on disk

    def _signalled(self, number: int, now: float) -> None:
        if number not in ENDINGS:
            self._warned(number, now)
            return
        name = signal.Signals(number).name
        if not self._signalled_once:
            self._signalled_once = True
            cut = "" if self._repeats(number) else "; a second signal cuts the workers' grace short"
            log.info("%s: leaving the job%s", name, cut)
            self._leave(name, now, number)
        elif self._repeats(number):
            log.info("%s again: leaving the job already", name)
        else:
            log.info("%s again: killing the workers now", name)
            self._supervisor.stop(0.0, gently=False, reason="a second signal")
            if self._handing is not None:
                self._handing.handover.cut()
            self._ending = self._departing

    def _repeats(self, number: int) -> bool:
        """Slurm sends SIGTERM at the beginning and at the end of a preemption's grace, and kills by itself."""
        return self._stop.requeues and number == signal.SIGTERM

    def _warned(self, number: int, now: float) -> None:
        """It may be repeated, and the real end follows it: neither cuts anything short."""
        name = signal.Signals(number).name
        if self._left is not None:
            log.info("%s: leaving the job already, because of %s", name, self._left.asked_by)
            return
        log.info("%s: leaving the job before something ends it", name)
        self._leave(name, now, number)

    def noticed(self, text: str, deadline: float | None) -> None:
        """This machine goes away at `deadline`, or earlier than was known, or later: see `NoticeWatch`. None: the
        notice is withdrawn."""
        now = self._clock()
        self._agent.observer.noticed(text, deadline)
        if deadline is None:
            log.warning("the notice is withdrawn")
            self._ends.pop(NOTICE, None)
            return
        leaves_at = deadline - obeys_before_s(self._stop.grace_s)
        self._ends[NOTICE] = KnownEnd(f"{NOTICE}: {text}", leaves_at, deadline)
        log.warning("%s: %.1f s are left", text, deadline - now)
        if self._left is not None:
            self._divide_leave(now)

    def _divide_leave(self, now: float) -> None:
        """By what is known of the end of this machine and of the job here."""
        self._participant.leave(now, min((end.deadline for end in self._ends.values()), default=math.inf))
        if self._handing is not None:
            self._handing.handover.hurry(self._participant.leave_times.saved_by)

    def _leave(self, asked_by: str, now: float, number: int | None = signal.SIGTERM) -> None:
        """`number` as in `code_of_leave`."""
        if self._left is not None:
            return
        if self._agent.memory_server is not None:
            self._agent.memory_server.expect_handover()
        self._left = Departure(asked_by, code_of_leave(number, requeues=self._stop.requeues))
        self._divide_leave(now)
        self._agent.observer.leaving(asked_by)
        self._agent.manager.stopping(f"leaving the job, as {asked_by} asks")
