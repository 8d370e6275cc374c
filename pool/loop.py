"""The daemon's main loop: one thread that owns the node's part in the pool and the job's agent that runs here."""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..agent.common.events import Event, Signalled, ThreadFailed, run_next
from ..agent.common.exits import ENDINGS, ExitCode, code_of_leave
from ..agent.configuration.values import CheckMode
from ..agent.rendezvous_io.store_link import StoreLink
from ..health.checks.runner import BackgroundChecks, CheckRun, failed
from ..worker.wire.shared_progress import clock
from .job_agent import JobAgent, JobAgentEnded, seat_end
from .job_logs import JobFolders
from .member import Assignment, PoolMember
from .pages import DaemonSnapshot
from .records import SeatEnd, SeatOutcome
from .standby import AgentCommand, Standby

log = logging.getLogger(__name__)

TURN_S = 1.0
DEPARTURE_S = 2.0
"""From the end of the last process here: to have the pool know of it, so that a planned leave does not look like a
loss."""


@dataclass(frozen=True, slots=True)
class Ending:
    code: ExitCode
    reason: str


class DaemonLoop:
    """Runs one daemon in the thread that calls `run`."""

    def __init__(
        self,
        member: PoolMember,
        link: StoreLink,
        folders: JobFolders,
        standby: Standby,
        checks: IdleChecks,
        command: Callable[[Assignment], AgentCommand],
        events: queue.SimpleQueue[Any],
        on_turn: Callable[[str], None],
    ) -> None:
        """`command` is what starts the agent of a job here."""
        self._member, self._link, self._folders = member, link, folders
        self._standby, self._checks = standby, checks
        self._command, self._events, self._on_turn = command, events, on_turn
        self._agent: JobAgent | None = None
        self._assignment: Assignment | None = None
        self._leaving: ExitCode | None = None
        self._depart_by: float | None = None
        self._fatal: Ending | None = None
        self._shown = ""
        self.snapshot = DaemonSnapshot(clock())
        """Of the newest turn; for any thread."""
        self._unfinished: tuple[str, ...] = ()
        """Jobs of an earlier daemon that have processes here still."""
        self._report_problem()

    def run(self) -> Ending:
        """Until this node has left the pool; no process of a job is left here then."""
        while True:
            now = clock()
            wake_at = self._turn(now)
            if self._fatal is not None and (self._agent is None or self._agent.has_ended):
                return self._fatal
            if self._leaving is not None and self._has_departed(now):
                return Ending(self._leaving, "asked to leave the pool")
            timeout_s = TURN_S if wake_at is None else min(TURN_S, max(0.0, wake_at - now))
            run_next(self._events, timeout_s, self._told)

    def _has_departed(self, now: float) -> bool:
        if self._agent is not None:
            return False
        self._depart_by = self._depart_by or now + DEPARTURE_S
        return self._member.has_departed or now >= self._depart_by

    def _report_problem(self) -> None:
        """Why this node must not be given a job. What a daemon has started that was killed leaves its job by plan,
        which takes its time."""
        self._unfinished = self._folders.unfinished()
        jobs = ", ".join(self._unfinished)
        earlier = f"job {jobs}, which an earlier daemon of this node has started, is ending" if jobs else ""
        self._member.report_problem("; ".join(filter(None, (earlier, self._checks.problem))))

    def _turn(self, now: float) -> float | None:
        member = self._member
        if self._checks.turn(now, idle=self._agent is None) or self._unfinished:
            self._report_problem()
        if member.mismatch is not None and self._fatal is None:
            self._fatal = Ending(ExitCode.MISMATCH, member.mismatch)
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
        if self._leaving is None and self._fatal is None and member.tracks:
            self._standby.turn(now)
        return member.wake_at(now)

    def _start(self, due: Assignment) -> None:
        job = due.job
        self._member.started(due.seat.ticket)
        become = self._command(due)
        try:
            output = self._folders.begin(job.job)
            if not os.path.isdir(job.directory):
                raise NotADirectoryError(f"the job's directory {job.directory} is not there on this node")
            agent = JobAgent(become, output, self._events.put)
            waiting = self._standby.take(become.environment, become.directory)
            taken = agent.start(waiting)
        except OSError as error:
            log.error("job %s (%s) cannot be started here: %s", job.job, job.name, error)
            self._over(SeatEnd(job.job, due.seat.ticket, SeatOutcome.NOT_HERE, 0, str(error)))
            return
        if waiting is not None and not taken:
            log.warning("job %s: the standby has ended without it; its agent starts cold", job.job)
        how = " by the standby" if taken else ""
        log.info(
            "job %s (%s): started%s, attempt %d; its output is in %s",
            job.job,
            job.name,
            how,
            due.run.attempt,
            output,
        )
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
        if status != self._shown:
            self._shown = status
            log.info("%s", status)
        counts = member.view.counts()
        self.snapshot = DaemonSnapshot(
            clock(), is_current, member.coordinates, status, self._assignment, counts
        )
        self._on_turn(status)

    # ---------------------------------------------------------------- events

    def _told(self, event: object) -> None:
        if isinstance(event, ThreadFailed):
            self._fatal = self._fatal or Ending(event.code, event.reason)
        elif isinstance(event, JobAgentEnded):
            self._ended(event)
        elif isinstance(event, Signalled):
            self._signalled(event)

    def _ended(self, event: JobAgentEnded) -> None:
        assignment = self._assignment
        assert assignment is not None, "only a job that runs here can end"
        end = seat_end(assignment, event.code, event.error)
        log.info("job %s: ended here: %s", assignment.job.job, end.reason)
        self._agent = self._assignment = None
        self._over(end)

    def _over(self, end: SeatEnd) -> None:
        self._member.ended(end)
        self._standby.idle(clock())
        if self._member.tracks:
            view = self._member.view
            self._folders.tidy({*(job.job for job in view.jobs), *(one.job for one in view.results)})

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
    """The checks of a daemon's node, as it starts and every `EVERY_S` while no job is here. For the main thread."""

    def __init__(
        self, mode: CheckMode, new_run: Callable[[], CheckRun], post: Callable[[Event], object]
    ) -> None:
        """`post` takes events from any thread."""
        self._fails = mode == "fail"
        self._checks = BackgroundChecks(new_run, post)
        self._due_at = float("-inf") if mode != "off" else float("inf")
        self.problem = NOT_YET if self._fails else ""
        """Why this node must not be given a job; empty when it may."""

    def turn(self, now: float, *, idle: bool) -> bool:
        """Begins what is due. Whether a run has ended since the last turn, so that `problem` may be another."""
        if idle and now >= self._due_at:
            self._due_at = now + EVERY_S
            self._checks.begin()
        findings = self._checks.take()
        if findings is None:
            return False
        if self._fails:
            self.problem = "; ".join(f"check {one.check} failed: {one.summary}" for one in failed(findings))
        return True

    def close(self) -> None:
        self._checks.close()
