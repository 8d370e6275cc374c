"""Metrics, status pages and log lines of what the main loop does with worlds and workers.

The loop calls it and gets nothing back that steers. `training_account` has what the workers themselves report.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...health.checks.finding import Finding
from ...health.metrics import Metrics
from ...rendezvous.coordinator.exclusions import in_words, left_out
from ...rendezvous.node.participant import Participant
from ...rendezvous.node.snapshot import ANNOUNCED_AFTER_S, NodeSnapshot
from ...rendezvous.records import Cause, CauseKind, Failure, Member, NodeRecord, Phase, World
from ...rendezvous.statements.exclusion import Exclusion
from ...rendezvous.statements.inquiry import Inquiry, Suspicion
from ...rendezvous.text import counted
from ...worker.wire.messages import ReplicationReport
from ..output.journal import Journal, Kind
from ..output.log_files import run_folder
from ..workers.processes.workers import WorkerGroup
from .goodput import TrainingEvent
from .status import StatusPages
from .steps import StepRate
from .straggler_watch import StragglerWatch
from .training_account import TrainingAccount

log = logging.getLogger(__name__)

_CHANGES = {
    CauseKind.JOIN: "join",
    CauseKind.LEAVE: "leave",
    CauseKind.LOST: "lost",
    CauseKind.WITHDRAWN: "lost",
}


def reason(cause: Cause) -> str:
    """Why the generation before this one ended: the cause of its root failure, or the kind of change."""
    change = _CHANGES.get(cause.kind)
    if change is not None:
        return change
    return cause.failure.cause if cause.failure is not None else "unknown"


def because(world: World, shown: Failure | None) -> str:
    """Why the generation before this one ended; `shown` is what the log of this node has in full already."""
    cause, failure = world.cause, world.cause.failure
    if failure is None or failure.local_rank is None or cause.detail != failure.summary:
        return cause.detail
    named = f"rank {failure.rank} on node {cause.node} failed"
    return named if failure == shown else f"{named}: {cause.detail}"


@dataclass(slots=True)
class _Generation:
    """What is remembered of the workers that were started last. Instants are monotonic."""

    number: int = 0
    described: str = ""
    because: str = ""
    """What ended the one before."""
    failed: int = 0
    failed_at: float | None = None
    stopped_at: float | None = None


class Observer:
    """For the main thread. `now` and `at` are monotonic; `wall_clock` is for dashboards."""

    def __init__(
        self,
        metrics: Metrics,
        pages: StatusPages,
        journal: Journal,
        rate: StepRate,
        run_directory: Path | None,
        max_failures: int | None,
        started_at: float,
        wall_clock: Callable[[], float],
    ) -> None:
        """`started_at`: when the agent started. `run_directory`: the folder of runs, for the journal's file; None: the
        journal has no file."""
        self.journal = journal
        self._run_directory = run_directory
        self._metrics = metrics
        self._pages = pages
        self._max_failures = max_failures
        self.training = TrainingAccount(metrics, pages, journal, rate, started_at, wall_clock)
        self._noted: World | None = None
        self._excluded: Mapping[str, Exclusion] = {}
        self._shown: Failure | None = None
        self._generation = _Generation()
        self._seen: tuple[World | None, tuple[NodeRecord, ...], bool] | None = None
        self._stragglers = StragglerWatch(metrics, journal)
        self._other_limits: tuple[str, ...] = ()
        self._leaving = False
        self._waits_for = ""
        self._waits_since = started_at
        self._explained = False
        self._state = ""

    def compare(self, participant: Participant) -> None:
        """Before a world is acted on: each node warns once of what it was started with and the job does not have."""
        world, otherwise = participant.world, participant.differs_from_job
        if world is not None and otherwise and otherwise != self._other_limits:
            log.warning(
                "this node was started with %s. What the job has is node %s's, and holds until all nodes of the job "
                "have been stopped",
                "; ".join(otherwise),
                world.limits_of,
            )
        self._other_limits = otherwise or self._other_limits

    def update(self, snapshot: NodeSnapshot, group: WorkerGroup | None, now: float) -> None:
        """After every turn: states and counts as they are now; changes are logged."""
        metrics = self._metrics
        self._enter(self._state_of(snapshot, group))
        self._pages.update(snapshot, group, self._state, now)
        self._explain_waiting(snapshot, group, now)
        running = group.running if group is not None else 0
        stopping = group is not None and group.stopping
        metrics.count_workers(
            running=0 if stopping else running,
            stopped=running if stopping else 0,
            failed=self._generation.failed if group is not None else 0,
        )
        metrics.backoff_seconds.set(snapshot.backoff_s)
        metrics.lease_age_seconds.set(snapshot.confirmed_at)
        self._count_nodes(snapshot)
        self._stragglers.update(snapshot)
        if group is None:
            self._account_for_waiting(snapshot, now)
        self.training.advance(now)

    def _count_nodes(self, snapshot: NodeSnapshot) -> None:
        world, nodes, coordinates = snapshot.world, snapshot.known_nodes, snapshot.coordinates
        if self._seen is not None and self._seen[0] is world and self._seen[1:] == (nodes, coordinates):
            return  # a thousand nodes need not be counted at every turn
        self._seen = world, nodes, coordinates
        self._note_world(world)
        if world is not None and world.phase is not Phase.ENDED:
            self._show_exclusions(world.exclusions, snapshot.node)
        running = world is not None and world.trains
        members = {member.incarnation for member in world.members} if world is not None else set()
        here = {node.incarnation for node in nodes}
        self._metrics.coordinator.set(coordinates)
        self._metrics.count_nodes(
            active=len(members) if running else 0,
            standby=(len(here - members) if running else 0) if coordinates else None,
            waiting=(0 if running else len(here)) if coordinates else None,
            lost=len(members - here) if coordinates else None,
        )

    def _note_world(self, world: World | None) -> None:
        """Note each generation once, its planned change, and the end of the job."""
        before, self._noted = self._noted, world
        if world is None or world is before:
            return
        self.journal.run = world.run or self.journal.run
        if self._run_directory is not None and world.run:
            self.journal.begin(run_folder(self._run_directory, world.job, world.run))
        number, counts = world.generation, {"nodes": len(world.members), "workers": world.size}
        why = because(world, None) or "the job starts"
        about = world.cause.node if world.cause.kind is not CauseKind.START else ""
        if world.phase is Phase.ENDED:
            result = world.result.value if world.result is not None else ""
            self.journal.note(
                Kind.JOB_ENDED, why, generation=number, about=about, cause=result, counts=counts
            )
            return
        noted = before if before is not None and before.generation == number else None
        if (
            noted is None and world.phase is Phase.RUNNING
        ):  # else the cause is that of its end: this agent came late
            started = world.cause.kind is CauseKind.START
            cause = "start" if started else reason(world.cause)
            self.journal.note(Kind.WORLD, why, generation=number, about=about, cause=cause, counts=counts)
        if world.drains and (noted is None or not noted.drains):
            self.journal.note(Kind.DRAIN, why, generation=number, about=about, cause=world.cause.kind.value)

    def _show_exclusions(self, rows: Sequence[Exclusion], node: str) -> None:
        out, before = left_out(rows), self._excluded
        self._excluded = out
        self._metrics.node_excluded.set(node in out)
        for name in out:
            if name not in before or before[name].times < out[name].times:
                why = f"node {name} is {in_words(out[name])}"
                log.warning("%s", why)
                counts = {"times": out[name].times}
                self.journal.note(Kind.EXCLUSION, why, about=name, cause=out[name].cause, counts=counts)
        for name in before:
            if name not in out:
                log.warning("node %s is readmitted: worlds may include it again", name)
                self.journal.note(Kind.READMISSION, f"node {name} is readmitted", about=name)

    def _account_for_waiting(self, snapshot: NodeSnapshot, now: float) -> None:
        """No worker is here: the time is the rendezvous', the pause's, or that of a job without this node."""
        world = snapshot.world
        if world is not None and not world.stops:
            ours = world.generation <= self._generation.number or world.member(snapshot.incarnation)
            if world.phase is Phase.ENDED or not ours:
                self.training.record(TrainingEvent.SET_ASIDE, now)
        if self._leaving:
            self.training.record(TrainingEvent.SET_ASIDE, now)
        self.training.record(TrainingEvent.HELD_BACK if snapshot.backoff_s else TrainingEvent.RELEASED, now)

    def status(self, snapshot: NodeSnapshot, group: WorkerGroup | None) -> str:
        """One line on this node, which the service manager shows."""
        if group is None:
            return f"{self._state}: {snapshot.waiting_for}"
        newest = self.training.newest
        step = f", step {newest.number}" if newest is not None else ""
        return f"{self._state}: {self._generation.described}{step}"

    def _explain_waiting(self, snapshot: NodeSnapshot, group: WorkerGroup | None, now: float) -> None:
        """One line for each reason that lasts."""
        world = snapshot.world
        over = world is not None and world.phase is Phase.ENDED
        waits_for = "" if group is not None or over else snapshot.waiting_for
        if waits_for != self._waits_for:
            self._waits_for, self._waits_since, self._explained = waits_for, now, False
        if waits_for and not self._explained and now - self._waits_since >= ANNOUNCED_AFTER_S:
            self._explained = True
            log.info("waiting: %s", snapshot.waiting_for)

    def _state_of(self, snapshot: NodeSnapshot, group: WorkerGroup | None) -> str:
        world = snapshot.world
        if self._leaving:
            return "draining"
        if group is not None:
            if group.stopping:
                return "stopping"
            return "running" if self.training.began else "starting"
        if world is None or world.trains:
            return "joining"
        if world.phase is Phase.ENDED:
            return "succeeded" if world.cause.kind is CauseKind.SUCCESS else "failed"
        return "backoff" if snapshot.backoff_s else "joining"

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._metrics.enter_state(state)

    # ---------------------------------------------------------------- hangs

    def watches(self, state: str, limit_s: float | None) -> None:
        """`state`: of the hang detector (`HANG_STATES`); `limit_s`: None without a limit."""
        self._metrics.watch_hangs(state, limit_s)

    def suspects(self, suspicion: Suspicion) -> None:
        """The workers here seem to hang."""
        self.journal.note(
            Kind.SUSPICION,
            suspicion.why,
            generation=suspicion.generation,
            about=self.journal.node,
            cause=suspicion.urgency.value,
        )

    def heard_verdict(self, generation: int, inquiry: Inquiry) -> None:
        """An inquiry has ended with a finding."""
        assert inquiry.finding is not None
        self.journal.note(
            Kind.VERDICT,
            inquiry.why,
            generation=generation,
            rank=inquiry.rank,
            about=inquiry.node,
            cause=inquiry.finding.value,
        )

    # ---------------------------------------------------------------- workers

    def starting(self, world: World, member: Member, now: float) -> None:
        metrics, restarts = self._metrics, world.restarts
        self._note_world(world)
        described = (
            f"generation {world.generation}, {counted(len(world.members), 'node')}, world size {world.size}"
        )
        self._generation = _Generation(world.generation, described, because(world, self._shown))
        self.training.started(world, self._generation.because, now)
        metrics.enter_world(
            generation=world.generation,
            world_size=world.size,
            group_world_size=len(world.members),
        )
        if world.cause.kind is not CauseKind.START:
            metrics.restarted(reason(world.cause))
        limit = world.max_restarts(self._max_failures)
        remaining = math.inf if limit is None else limit - restarts.failures
        metrics.restart_budget_remaining.set(remaining, kind="failure")
        first, last = member.first_rank, member.first_rank + member.slots - 1
        log.info(
            "generation %d (%s): %s, %s, %s here, master %s:%d, %s so far%s",
            world.generation,
            world.cause.kind.value,
            counted(len(world.members), "node"),
            counted(world.size, "worker"),
            f"rank {first}" if first == last else f"ranks {first}-{last}",
            world.master.address,
            world.master.port,
            counted(restarts.failures, "failure"),
            f"; because {self._generation.because}" if self._generation.because else "",
        )

    def started(self, local_ranks: Collection[int]) -> None:
        """The processes of these workers exist."""
        self.journal.note(
            Kind.WORKERS_STARTED,
            f"{counted(len(local_ranks), 'worker')} started here",
            generation=self._generation.number,
            counts={"workers": len(local_ranks)},
        )

    def ended(self, local_rank: int, reason: str, at: float) -> None:
        """A worker ended by itself, and this is why."""
        self._metrics.worker_exits_total.inc(local_rank=local_rank, reason=reason)
        if reason == "ok":
            return
        generation = self._generation
        generation.failed += 1
        if generation.stopped_at is None and generation.failed_at is None:
            generation.failed_at = at
            self.training.record(TrainingEvent.FAILED, at)

    def failure_shown(self, failure: Failure) -> None:
        """The log has its cause: what follows from it is logged without."""
        if failure != self._shown:
            self.journal.note(
                Kind.FAILURE,
                failure.summary,
                generation=failure.generation,
                rank=failure.rank,
                about=failure.node,
                cause=failure.cause,
            )
        self._shown = failure

    def evidence_kept(self, path: str, generation: int) -> None:
        """Evidence of the workers of `generation` is in the folder `path`. For any thread."""
        self.journal.note(Kind.EVIDENCE, path, generation=generation)

    def stopping(self, now: float) -> None:
        generation = self._generation
        generation.stopped_at = now
        self.training.record(TrainingEvent.STOPPING, now)

    def gone(self, now: float) -> None:
        self.training.record(TrainingEvent.GONE, now)
        self._metrics.leave_world()

    def noticed(self, text: str, deadline: float | None) -> None:
        """This machine goes away at `deadline`; None: at no known instant."""
        self._pages.noticed(text, deadline)
        self.journal.note(Kind.NOTICE, text)

    def checked(self, findings: Sequence[Finding]) -> None:
        """The checks of this node have run, before it joins."""
        self._metrics.checked({finding.check: finding.outcome.severity for finding in findings})
        self._pages.checked(findings)

    def replicated(self, report: ReplicationReport) -> None:
        """The memory server has brought copies to other nodes, or taken some, or cannot."""
        self._metrics.replicated(step=report.step, unreachable=len(report.unreachable))
        self._pages.replicated(report)

    def notice_withdrawn(self) -> None:
        self._pages.noticed("", None)
        self.journal.note(Kind.NOTICE, "the notice is withdrawn")

    def leaving(self, asked_by: str) -> None:
        self._leaving = True
        self.journal.note(
            Kind.DRAIN, f"this node leaves the job: {asked_by}", about=self.journal.node, cause="leave"
        )

    def ended_with(self, code: int, reason: str, now: float) -> None:
        """The main loop has ended, and so does this agent."""
        self.training.account(now)
        self.journal.note(Kind.AGENT_ENDED, reason, counts={"code": code})
