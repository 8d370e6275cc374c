"""Tells what the main loop does with worlds and workers: lines of the log, events of the journal, counters.

The loop calls it and gets nothing back that steers. `training_account` has what the workers themselves report; levels
are shown from the state of the node (`status`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ...health.hang_report import HangProbe, HangSuspicion
from ...health.metrics import Metrics
from ...health.stragglers import PaceComparison, Straggler, in_words
from ...rendezvous.coordinator import exclusions
from ...rendezvous.messages import Exclusion
from ...rendezvous.node.participant import Participant
from ...rendezvous.node.session import NodeSnapshot
from ...rendezvous.records import Cause, CauseKind, Failure, Member, Phase, World
from ...rendezvous.text import counted
from ..common.events import ANNOUNCED_AFTER_S
from ..output.journal import EventKind, Journal
from ..output.log_files import run_folder
from ..workers.processes.workers import WorkerGroup
from .status import NodeState
from .training_account import TrainingAccount, TrainingEvent

log = logging.getLogger(__name__)

_CHANGES = {
    CauseKind.START: "start",
    CauseKind.JOIN: "join",
    CauseKind.LEAVE: "leave",
    CauseKind.LOST: "lost",
    CauseKind.WITHDRAWN: "lost",
}


def reason(cause: Cause) -> str:
    """Why the generation before this one ended: the cause of its root failure, or the kind of change."""
    failed = cause.failure.cause if cause.failure is not None else "unknown"
    return _CHANGES.get(cause.kind, failed)


def because(world: World, shown: Failure | None = None) -> str:
    """Why the generation before this one ended; `shown` is what the log of this node has in full already."""
    cause, failure = world.cause, world.cause.failure
    if failure is None or failure.local_rank is None or cause.detail != failure.summary:
        return cause.detail
    named = f"rank {failure.rank} on node {cause.node} failed"
    return named if failure == shown else f"{named}: {cause.detail}"


class Observer:
    """For the main thread. Instants are monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        node: NodeState,
        journal: Journal,
        run_directory: Path | None,
        started_at: float,
    ) -> None:
        """`started_at`: when the agent started. `run_directory`: the folder of runs, for the journal's file; None: the
        journal has no file."""
        self.journal = journal
        self.node = node
        self.training = TrainingAccount(metrics, node, journal, started_at)
        self._run_directory = run_directory
        self._metrics = metrics
        self._world: World | None = None
        """The newest that was looked at, as were the next two."""
        self._excluded: Mapping[str, Exclusion] = {}
        self._comparison: PaceComparison | None = None
        self._shown: Failure | None = None
        self._other_limits: tuple[str, ...] = ()
        self._leaving = False
        self._waits_for = ""
        self._waits_since = started_at
        self._explained = False

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
        """After every turn: what has changed is told."""
        self.node.update(snapshot, group, self._state_of(snapshot, group))
        self._explain_waiting(snapshot, group, now)
        self._note_world(snapshot.world)
        self._note_stragglers(snapshot)
        if group is None:
            self._account_for_waiting(snapshot, now)
        self.training.advance(now)

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

    def _note_world(self, world: World | None) -> None:
        """Note each generation once, its planned change, its exclusions, and the end of the job."""
        before, self._world = self._world, world
        if world is None or world is before:
            return
        self.journal.run = world.run or self.journal.run
        if self._run_directory is not None and world.run:
            self.journal.begin(run_folder(self._run_directory, world.job, world.run))
        number, counts = world.generation, {"nodes": len(world.members), "workers": world.size}
        why = because(world) or "the job starts"
        about = world.cause.node if world.cause.kind is not CauseKind.START else ""
        if world.phase is Phase.ENDED:
            result = world.result.value if world.result is not None else ""
            self.journal.note(
                EventKind.JOB_ENDED, why, generation=number, about=about, cause=result, counts=counts
            )
            return
        noted = before if before is not None and before.generation == number else None
        # Of one that an agent sees late, in another phase, the cause is that of its end.
        if noted is None and world.phase is Phase.RUNNING:
            cause = reason(world.cause)
            self.journal.note(
                EventKind.WORLD, why, generation=number, about=about, cause=cause, counts=counts
            )
        if world.drains and (noted is None or not noted.drains):
            self.journal.note(
                EventKind.DRAIN, why, generation=number, about=about, cause=world.cause.kind.value
            )
        self._note_exclusions(exclusions.left_out(world.exclusions))

    def _note_exclusions(self, out: Mapping[str, Exclusion]) -> None:
        before, self._excluded = self._excluded, out
        for name, one in out.items():
            if name not in before or before[name].times < one.times:
                why = f"node {name} is {exclusions.in_words(one)}"
                log.warning("%s", why)
                counts = {"times": one.times}
                self.journal.note(EventKind.EXCLUSION, why, about=name, cause=one.cause, counts=counts)
        for name in (name for name in before if name not in out):
            log.warning("node %s is readmitted: worlds may include it again", name)
            self.journal.note(EventKind.READMISSION, f"node {name} is readmitted", about=name)

    def _note_stragglers(self, snapshot: NodeSnapshot) -> None:
        """Each rank once when it becomes slow, and once when it no longer is, but for one that has ended."""
        before, now = self._comparison, snapshot.comparison
        if now is None or now == before:
            return
        known = before.stragglers if before is not None and before.generation == now.generation else ()
        self._comparison = now
        slow, were_slow = ({one.rank: one for one in stragglers} for stragglers in (now.stragglers, known))
        for rank, one in slow.items():
            if rank not in were_slow:
                text = in_words(one, now.usual_us)
                log.warning("%s", text)
                self._note_straggler(one, text, "slow")
        for rank, one in were_slow.items():
            if rank not in slow:
                text = f"rank {rank} on node {one.node} is as fast as the others again"
                log.info("%s", text)
                self._note_straggler(one, text, "recovered")

    def _note_straggler(self, one: Straggler, text: str, cause: str) -> None:
        self.journal.note(EventKind.STRAGGLER, text, rank=one.rank, about=one.node, cause=cause)

    def _account_for_waiting(self, snapshot: NodeSnapshot, now: float) -> None:
        """No worker is here: the time is the rendezvous', the pause's, or that of a job without this node."""
        world, started = snapshot.world, self.node.started
        if world is not None and not world.stops:
            ours = world.member(snapshot.incarnation) is not None
            ours = ours or (started is not None and world.generation <= started.generation)
            if world.phase is Phase.ENDED or not ours:
                self.training.record(TrainingEvent.SET_ASIDE, now)
        if self._leaving:
            self.training.record(TrainingEvent.SET_ASIDE, now)
        self.training.record(TrainingEvent.HELD_BACK if snapshot.backoff_s else TrainingEvent.RELEASED, now)

    def status(self, snapshot: NodeSnapshot, group: WorkerGroup | None) -> str:
        """One line on this node, which the service manager shows."""
        world, newest = self.node.started, self.training.newest
        if group is None or world is None:
            return f"{self.node.state}: {snapshot.waiting_for}"
        nodes, step = counted(len(world.members), "node"), f", step {newest.number}" if newest else ""
        return f"{self.node.state}: generation {world.generation}, {nodes}, world size {world.size}{step}"

    # ---------------------------------------------------------------- hangs

    def suspects(self, suspicion: HangSuspicion) -> None:
        """The workers here seem to hang."""
        about, cause = self.journal.node, suspicion.urgency.value
        self.journal.note(
            EventKind.SUSPICION, suspicion.why, generation=suspicion.generation, about=about, cause=cause
        )

    def heard_verdict(self, generation: int, inquiry: HangProbe) -> None:
        """An inquiry has ended with a finding."""
        assert inquiry.finding is not None
        self.journal.note(
            EventKind.VERDICT,
            inquiry.why,
            generation=generation,
            rank=inquiry.rank,
            about=inquiry.node,
            cause=inquiry.finding.value,
        )

    # ---------------------------------------------------------------- workers

    def starting(self, world: World, member: Member, now: float) -> None:
        self._note_world(world)
        self.node.started, self.node.trains = world, True
        why = because(world, self._shown)
        self.training.started(world, why, now)
        if world.cause.kind is not CauseKind.START:
            self._metrics.restarted(reason(world.cause))
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
            counted(world.restarts.failures, "failure"),
            f"; because {why}" if why else "",
        )

    def ended(self, local_rank: int, reason: str, at: float) -> None:
        """A worker ended by itself, and this is why."""
        self._metrics.worker_exits_total.inc(local_rank=local_rank, reason=reason)
        if reason != "ok":
            self.training.record(TrainingEvent.FAILED, at)

    def failure_shown(self, failure: Failure) -> None:
        """The log has its cause: what follows from it is logged without."""
        if failure != self._shown:
            self.journal.note(
                EventKind.FAILURE,
                failure.summary,
                generation=failure.generation,
                rank=failure.rank,
                about=failure.node,
                cause=failure.cause,
            )
        self._shown = failure

    def stopping(self, now: float) -> None:
        self.training.record(TrainingEvent.STOPPING, now)

    def gone(self, now: float) -> None:
        self.node.trains = False
        self.training.record(TrainingEvent.GONE, now)

    # ---------------------------------------------------------------- this node

    def noticed(self, text: str, deadline: float | None) -> None:
        """This machine goes away at `deadline`; None: at no known instant. Without a text it stays."""
        self.node.notice = text, deadline
        self.journal.note(EventKind.NOTICE, text or "the notice is withdrawn")

    def leaving(self, asked_by: str) -> None:
        self._leaving = True
        why = f"this node leaves the job: {asked_by}"
        self.journal.note(EventKind.DRAIN, why, about=self.journal.node, cause="leave")

    def ended_with(self, code: int, reason: str, now: float) -> None:
        """The main loop has ended, and so does this agent."""
        self.training.account(now)
        self.journal.note(EventKind.AGENT_ENDED, reason, counts={"code": code})
