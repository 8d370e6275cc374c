"""The daemon's main loop: one thread that owns the node's part in the pool and the job's agent that runs here."""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..agent.common.events import Event, Signalled, ThreadFailed, run_next
from ..agent.common.exits import ENDINGS, ExitCode, code_of_leave
from ..agent.configuration.values import CheckMode
from ..agent.rendezvous_io.store_link import StoreLink
from ..health.checks.finding import Finding
from ..health.checks.runner import BackgroundChecks, CheckRun, failed
from ..worker.wire.shared_progress import clock
from .job_agent import JobAgent, JobAgentEnded, NotTaken, seat_end
from .job_logs import JobFolders
from .member import Assignment, PoolMember
from .pages import DaemonSnapshot, PoolMetrics
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
        metrics: PoolMetrics,
        command: Callable[[Assignment], AgentCommand],
        events: queue.SimpleQueue[Any],
        on_turn: Callable[[str], None],
    ) -> None:
        """`command` is what starts the agent of a job here."""
        self._member, self._link, self._folders = member, link, folders
        self._standby, self._checks, self._metrics = standby, checks, metrics
        self._command, self._events, self._on_turn = command, events, on_turn
        self._agent: JobAgent | None = None
        self._assignment: Assignment | None = None
        self._leaving: ExitCode | None = None
        self._depart_by: float | None = None
        self._fatal: Ending | None = None
        self._shown = ""
        self._counted = -1
        """The version of the view whose records were counted."""
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
        if self._checks.judge(now) or self._unfinished:
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
        instants = (
            member.wake_at(now),
            self._standby.turn(now) if self._may_stand_by else None,
            self._checks.turn(now) if self._agent is None else None,
        )
        return min((at for at in instants if at is not None), default=None)

    @property
    def _may_stand_by(self) -> bool:
        return self._leaving is None and self._fatal is None and self._member.tracks

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
            agent.start(waiting)
        except OSError as error:
            self._cannot_start(due, error)
            return
        log.info(
            "job %s (%s): started%s, attempt %d; its output is in %s",
            job.job,
            job.name,
            " by the standby" if waiting is not None else "",
            due.run.attempt,
            output,
        )
        self._agent, self._assignment = agent, due

    def _cannot_start(self, due: Assignment, error: OSError) -> None:
        job = due.job
        log.error("job %s (%s) cannot be started here: %s", job.job, job.name, error)
        self._agent = self._assignment = None
        self._over(SeatEnd(job.job, due.seat.ticket, SeatOutcome.NOT_HERE, 0, str(error)))

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
        counts = self.snapshot.counts
        if member.view.version != self._counted:
            self._counted, counts = member.view.version, member.view.counts()
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
        elif isinstance(event, NotTaken):
            self._not_taken()
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
        self._metrics.pool_job_agents_ended_total.inc(outcome=end.outcome.value)
        self._member.ended(end)
        now = clock()
        self._standby.idle(now)
        if end.outcome in (SeatOutcome.NOT_HERE, SeatOutcome.REFUSED):
            self._checks.suspect(now)
        if self._member.tracks:
            view = self._member.view
            self._folders.tidy({*(job.job for job in view.jobs), *(one.job for one in view.results)})

    def _not_taken(self) -> None:
        agent, assignment = self._agent, self._assignment
        assert agent is not None, "only a job that is to run here can be handed over"
        assert assignment is not None, "it is that of a seat"
        if agent.leaves:
            self._ended(JobAgentEnded(ExitCode.STOPPED_BY_SIGTERM))
            return
        log.warning("job %s: the standby has ended without it; its agent starts cold", assignment.job.job)
        try:
            agent.start()
        except OSError as error:
            self._cannot_start(assignment, error)

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
AGAIN_S = 30.0
"""While one fails that keeps jobs away."""

NOT_YET = "its checks have not ended yet"


class IdleChecks:
    """For the main thread."""

    def __init__(
        self,
        mode: CheckMode,
        new_run: Callable[[], CheckRun],
        post: Callable[[Event], object],
        on_findings: Callable[[Sequence[Finding]], None],
    ) -> None:
        """`post` takes events from any thread, `on_findings` gets the findings of each run."""
        self._mode = mode
        self._checks = BackgroundChecks(new_run, post, errors=mode == "fail")
        self._on_findings = on_findings
        self._due_at = float("-inf") if mode != "off" else float("inf")
        self.problem = NOT_YET if mode == "fail" else ""
        """Why this node must not be given a job; empty when it may."""

    def turn(self, now: float) -> float | None:
        """Of a node without a job. Begins what is due; the instant of the next run."""
        if now >= self._due_at:
            self._due_at = now + EVERY_S
            self._checks.begin()
        return self._due_at if self._due_at < float("inf") else None

    def suspect(self, now: float) -> None:
        """A job could not run here: the next run is due."""
        self._due_at = min(self._due_at, now) if self._mode != "off" else self._due_at

    def judge(self, now: float) -> bool:
        """Whether a run has ended since the last turn, so that `problem` may be another."""
        findings = self._checks.take()
        if findings is None:
            return False
        self._on_findings(findings)
        if self._mode == "fail":
            failures = failed(findings)
            self.problem = "; ".join(
                f"check {finding.check} failed: {finding.summary}" for finding in failures
            )
            if failures:
                self._due_at = min(self._due_at, now + AGAIN_S)
        return True

    def close(self) -> None:
        self._checks.close()
