"""Tells metrics and log what the main loop does: one place where a transition becomes numbers and words.

Called by the loop, never asked by it. A restart's *timeline* is kept here: the instants at which the workers were
told to stop, were gone, were started again and reported their first step; with the last one it is logged.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from ..health.metrics import FAILURE_REASONS, Metrics
from ..rendezvous.participant import Participant
from ..rendezvous.records import CauseKind, Member, Phase, World
from ..worker.reports import LoadReport, Report, SaveReport, StepReport
from .failures import FailureInvalid, WorkerFailure
from .workers import WorkerGroup

log = logging.getLogger(__name__)

_CHANGES = {
    CauseKind.JOIN: "join",
    CauseKind.LEAVE: "leave",
    CauseKind.LOST: "lost",
    CauseKind.WITHDRAWN: "lost",
}


@dataclass(slots=True)
class Timeline:
    """Instants of one restart on this node, monotonic; None where it has not come to that."""

    stop: float | None = None
    gone: float | None = None
    start: float | None = None
    first_step: bool = False


class Observer:
    """See the module's docstring. For the main thread."""

    def __init__(self, metrics: Metrics, max_failures: int | None, now: float) -> None:
        self._metrics = metrics
        self._max_failures = max_failures
        self._timeline = Timeline()
        self._waiting_since = now
        self._leaving = False
        self._described = ""
        self._state = ""
        self._training = ""
        self._step: int | None = None

    def look(self, participant: Participant, group: WorkerGroup | None, now: float) -> None:
        """After every turn: states and counts as they are now; the log says what is new."""
        self._enter(self._state_of(participant, group))
        self._explain_waiting(participant, group)
        self._metrics.count_workers(
            running=group.running if group is not None and not group.stopping else 0,
            stopped=group.running if group is not None and group.stopping else 0,
        )
        self._metrics.backoff_seconds.set(participant.backoff_s)
        self._count_nodes(participant)

    def _count_nodes(self, participant: Participant) -> None:
        world = participant.world
        self._metrics.coordinator.set(participant.coordinates)
        running = world is not None and world.phase is Phase.RUNNING
        members = {member.incarnation for member in world.members} if world is not None else set()
        active = len(members) if running else 0
        if not participant.coordinates:
            self._metrics.count_nodes(active=active)
            return
        here = {node.incarnation for node in participant.known_nodes}
        self._metrics.count_nodes(
            active=active,
            standby=len(here - members) if running else 0,
            waiting=0 if running else len(here),
            lost=len(members - here),
        )

    def status(self, participant: Participant, group: WorkerGroup | None) -> str:
        """One line for whoever asks the service manager how this node is."""
        if group is None:
            return f"{self._state}: {participant.waiting_for}"
        step = f", step {self._step}" if self._step is not None else ""
        return f"{self._state}: {self._training}{step}"

    def _explain_waiting(self, participant: Participant, group: WorkerGroup | None) -> None:
        world = participant.world
        over = world is not None and world.phase is Phase.ENDED
        if group is None and not over and participant.waiting_for != self._described:
            self._described = participant.waiting_for
            log.info("waiting: %s", self._described)

    def _state_of(self, participant: Participant, group: WorkerGroup | None) -> str:
        world = participant.world
        if self._leaving:
            return "draining"
        if group is not None:
            if group.stopping:
                return "stopping"
            return "running" if self._timeline.first_step else "starting"
        if world is None or world.phase is Phase.RUNNING:
            return "joining"
        if world.phase is Phase.ENDED:
            return "succeeded" if world.cause.kind is CauseKind.SUCCESS else "failed"
        return "backoff" if participant.backoff_s else "joining"

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._metrics.enter_state(state)

    def starting(self, world: World, member: Member, now: float) -> None:
        metrics, restarts = self._metrics, world.restarts
        self._timeline.start = now
        self._training = f"generation {world.generation}, {len(world.members)} nodes, world size {world.size}"
        self._step = None
        metrics.enter_world(
            generation=world.generation,
            world_size=world.size,
            group_world_size=len(world.members),
            duration_s=now - self._waiting_since,
        )
        if world.generation > 1:
            metrics.restarts_total.inc(reason=self._reason(world))
        remaining = math.inf if self._max_failures is None else self._max_failures - restarts.failures
        metrics.restart_budget_remaining.set(remaining, kind="failure")
        first, last = member.first_rank, member.first_rank + member.slots - 1
        log.info(
            "generation %d (%s): %d nodes, %d workers, ranks %d-%d here, master %s:%d, %d failures so far%s",
            world.generation,
            world.cause.kind.value,
            len(world.members),
            world.size,
            first,
            last,
            world.master.address,
            world.master.port,
            restarts.failures,
            f"; because {world.cause.detail}" if world.cause.detail else "",
        )

    def _reason(self, world: World) -> str:
        change = _CHANGES.get(world.cause.kind)
        if change is not None:
            return change
        try:
            detail = world.cause.failure.detail if world.cause.failure is not None else ""
            reason: str = WorkerFailure.from_json(detail).reason
        except FailureInvalid:
            return "unknown"
        return reason if reason in FAILURE_REASONS else "unknown"

    def stopping(self, now: float) -> None:
        self._timeline = Timeline(stop=now)
        self._waiting_since = now

    def gone(self, now: float) -> None:
        self._timeline.gone = now
        self._metrics.leave_world()

    def leaving(self) -> None:
        self._leaving = True

    def exited(self, local_rank: int, reason: str) -> None:
        self._metrics.worker_exits_total.inc(local_rank=str(local_rank), reason=reason)

    def reported(self, report: Report, now: float) -> None:
        metrics, wall = self._metrics, time.time()
        if isinstance(report, StepReport):
            self._step = report.step
            metrics.progress(report.step, wall)
            if not self._timeline.first_step:
                self._timeline.first_step = True
                self._tell_timeline(report, now)
        elif isinstance(report, SaveReport):
            if report.result == "ok":
                metrics.checkpoint_saved(
                    tier="local",
                    step=report.step,
                    size_bytes=report.bytes,
                    duration_s=report.duration_s,
                    at_s=wall,
                )
            else:
                metrics.checkpoint_saves_total.inc(tier="local", result="error")
                log.warning("checkpoint of step %d failed; training goes on", report.step)
        elif isinstance(report, LoadReport) and report.result != "none":
            metrics.checkpoint_loads_total.inc(tier="local", result=report.result)
            if report.result == "corrupt":
                metrics.checkpoint_verify_failures_total.inc()

    def _tell_timeline(self, report: StepReport, now: float) -> None:
        line = self._timeline
        if line.stop is None or line.gone is None or line.start is None:
            log.info("generation %d: first step is %d", report.generation, report.step)
            return
        log.info(
            "generation %d: first step is %d, %.2f s after the stop (stop %.2f s, rendezvous %.2f s, start %.2f s)",
            report.generation,
            report.step,
            now - line.stop,
            line.gone - line.stop,
            line.start - line.gone,
            now - line.start,
        )
