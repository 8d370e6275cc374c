"""From the first sign of a failure or hang on this node to the end of its generation: evidence, examination, report.

A crash waits until its last lines are read and NVML has answered, and is examined then: from what the worker left
behind, and what the machine says. Workers that are silent for too long, or that could not be started, fail without a
crash. Before workers that hang are ended, one *look* keeps evidence of what they do. The first failure
of a generation is told to the other nodes and ends it here; a later one is told only where the first was collateral,
and this one may be its root.

A stall is told to the other nodes, too. The detector (`agent/workers/hang_detector.py`) decides what a stall is, and
the coordinator whose fault it is; a node to which no verdict comes ends its workers by itself.

What stops the workers is a callable of the `Supervisor`. For the main thread; instants are seconds on the monotonic
clock.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...health.hang_report import HANG, HangProbe, HangSuspicion, Urgency
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Failure, Phase
from ..common.events import Event
from ..observability.observer import Observer
from .causes import SUMMARY_MAX, FailureCause, cause_named, describe_failure, shown_file
from .environment import Node, error_file
from .evidence import Evidence
from .generation import Crash, Generation, Processes
from .hang_detector import LOOK_EVERY_S
from .post_mortem import (
    RANK_PREFIX,
    ErrorReport,
    OomKills,
    PostMortem,
    clean,
    cut,
    find_counter,
    read_error_file,
)
from .stopping import HANG_SIGNAL

log = logging.getLogger(__name__)

KNOWN_WITHIN_S = 0.5
"""A failure is reported after so long without what is not known then: the rest of the worker's last lines, which are
read and written first, and what NVML says."""

SEEN_WITHIN_S = 2.0
"""Workers that hang are ended when the look at them is over, or when it takes longer than this."""

STILL_FOR_S = 8.0
"""From which on the workers' threads are looked at, too: steps are mostly shorter, and threads many."""


def _wake() -> None:
    """The main loop turns, and looks at the `Evidence` itself."""


@dataclass(slots=True, eq=False)
class FailureHandler:
    """The failures of one generation after the other; each `generation` that it is given is the newest here."""

    _node: Node
    _participant: Participant
    _observer: Observer
    _processes: Processes
    _stop: Callable[[signal.Signals], None]
    """Asks all workers here to end, by this signal, for a failure that the log has already."""
    _post: Callable[[Event], None]
    _clock: Callable[[], float]
    _oom_kills: OomKills = field(init=False, default_factory=lambda: OomKills(find_counter()))
    _samples_due_at: float = field(init=False, default=0.0)

    def update(self, now: float) -> None:
        """Call on each turn: out-of-memory kills are only known by when their counter changes."""
        self._oom_kills.update(now)

    # ---------------------------------------------------------------- looks at what the workers do

    def look(
        self, generation: Generation, why: str, then: Callable[[Evidence], None] | None = None
    ) -> Evidence:
        """Begin a look at what the running workers do; `then` is called in another thread when it is over."""
        targets = generation.targets(self._clock())
        return self._processes.evidence.look(why, targets, then or (lambda look: self._post(_wake)))

    # ---------------------------------------------------------------- crashes

    def crashed(
        self, generation: Generation, local_rank: int, returncode: int, at: float, *, asked: bool = False
    ) -> None:
        """A worker has ended as it should not: its last lines have the reason, and are on their way here."""
        crash = Crash(local_rank, returncode, at, self._clock() + KNOWN_WITHIN_S, asked)
        generation.crashes.append(crash)
        read = partial(self._lines_read, generation, crash)
        self._processes.logs.drain(
            generation.number, generation.group.ranks[local_rank], lambda: self._post(read)
        )
        self._processes.gpus.worker_failed()

    def _lines_read(self, generation: Generation, crash: Crash) -> None:
        crash.read = True
        if not generation.over:
            self.examine(generation, self._clock())

    def ended_as_asked(self, generation: Generation, local_rank: int, returncode: int, at: float) -> None:
        """A worker has ended as it was asked to; while the root of a failure is sought it is examined all the same."""
        if self._seeks_root(generation):
            # A killed process closes its connections before it has ended: it may be the root of what they see.
            by_another = returncode == -signal.SIGKILL and not generation.group.killed
            self.crashed(generation, local_rank, returncode, at, asked=not by_another)

    def examine(self, generation: Generation, now: float) -> None:
        """The crashes whose facts are here, and those that have waited for them too long, the first first."""
        crashes = generation.crashes
        if crashes and now >= crashes[0].due_at:
            self._processes.gpus.overdue()
        while crashes and (
            now >= crashes[0].due_at or (crashes[0].read and not self._processes.gpus.waiting)
        ):
            self._examine(generation, crashes.popleft(), now)

    def _examine(self, generation: Generation, crash: Crash, now: float) -> None:
        """Find out why this worker has failed, and end the generation with it."""
        failure = describe_failure(self._post_mortem(generation, crash, now))
        if crash.asked and (failure.exception is None or failure.collateral or failure.outside):
            return
        generation.failed.append(failure)
        self._observer.ended(crash.local_rank, failure.cause, crash.at)
        if not generation.stopping:
            self._report(generation, failure, f"rank {failure.rank} failed: {failure.summary}")
        elif not failure.collateral and self._seeks_root(generation):
            log.error(
                "rank %d failed before that, and the others because of it: %s", failure.rank, failure.summary
            )
            self.show(failure, generation)
            self._participant.workers_failed(failure)

    def _post_mortem(self, generation: Generation, crash: Crash, now: float) -> PostMortem:
        number, local_rank = generation.number, crash.local_rank
        rank = generation.group.ranks[local_rank]
        gpus, own_gpus = self._processes.gpus, self._node.machine.gpus_of(local_rank)
        gpus.reported(own_gpus)
        return PostMortem(
            *(self._node.name, number, rank, local_rank, crash.returncode),
            report=read_error_file(error_file(self._node, number, local_rank)) or ErrorReport(),
            log_tail=self._processes.logs.tail(number, rank),
            log_file=self._log_file(generation, local_rank),
            master_port=generation.world.master.port,
            asked=crash.asked,
            oom_killed=self._oom_kills.lately(now),
            own_gpus=tuple(f"NVML: {clean(fault.text)}" for fault in gpus.faults if fault.gpu in own_gpus),
        )

    def _log_file(self, generation: Generation, local_rank: int) -> Path | None:
        return self._processes.logs.log_file(generation.number, generation.group.ranks[local_rank])

    def fail(self, generation: Generation, cause: FailureCause, what: str) -> None:
        """The generation fails on this node without a worker to blame."""
        failure = Failure(generation.number, what[:200], what[:4000], cause=cause.name, action=cause.action)
        self._report(generation, failure, what)

    # ---------------------------------------------------------------- hangs

    def watch(self, generation: Generation, now: float) -> None:
        """Tell the others of a stall, and this node's log of a verdict. Where none comes, end the workers."""
        hang = generation.hang
        if (seen := self._processes.activity.seen()) is not None and seen[0] == generation.number:
            hang.sampled(*seen[1:])
        stall, before = generation.stalls(now), generation.stall
        limit_s = hang.limit_s()
        self._observer.node.hangs = hang.state(stall), limit_s
        if limit_s is not None:
            self._ask_for_samples(generation, now)
            inquiry = self._inquiry(generation.number)
            if (stall and stall.urgency) != (before and before.urgency):
                generation.stall = stall
                suspicion = HangSuspicion(generation.number, stall.why, stall.urgency) if stall else None
                self._participant.workers_suspected(suspicion)
                if suspicion is not None:
                    self._observer.suspects(suspicion)
                    level = logging.INFO if suspicion.urgency is Urgency.EARLY else logging.WARNING
                    log.log(level, "%s: asking all nodes what their workers do", suspicion.why)
            if self._hear(generation) and inquiry is not None and inquiry.finding is not None:
                log.warning("inquiry %d: %s: %s", inquiry.number, inquiry.finding.value, inquiry.why)
            if stall is not None and generation.ends_alone(stall, inquiry, now):
                steps = hang.steps
                at = ", ".join(
                    f"rank {generation.group.ranks[local]}: {steps[local]}" for local in sorted(steps)
                )
                why = f"hang: {stall.why}{at and f'; last steps: {at}'}"
                self._end_stuck(generation, stall.local_rank, why)
                return
        generation.last_look = None  # the workers have moved since

    def _end_stuck(self, generation: Generation, local_rank: int, why: str) -> None:
        """End workers that are silent for too long: first evidence is kept, then a signal makes each print its stacks
        and end. `local_rank` is the likeliest to be stuck by itself."""
        look = generation.last_look = generation.last_look or self.look(generation, "hang")
        if not look.over and self._clock() < look.began_at + SEEN_WITHIN_S:
            return
        generation.hung = True
        failure = Failure(
            *(generation.number, HANG, cut(why, SUMMARY_MAX), HANG, cause_named(HANG).action),
            node=self._node.name,
            rank=generation.group.ranks[local_rank],
            local_rank=local_rank,
            returncode=-HANG_SIGNAL,
            log_file=shown_file(self._log_file(generation, local_rank)),
        )
        self._report(generation, failure, failure.summary, HANG_SIGNAL)

    def _hear(self, generation: Generation) -> bool:
        """Note a verdict on this generation; False if there is none that was not noted yet."""
        inquiry = self._inquiry(generation.number)
        if inquiry is None or inquiry.finding is None or inquiry.number <= generation.heard:
            return False
        generation.heard = inquiry.number
        self._observer.heard_verdict(generation.number, inquiry)
        return True

    def blamed(self, generation: int) -> str | None:
        """The node that a verdict blames, empty if it blames none; None if no verdict ends this generation."""
        world = self._participant.world
        if world is None or world.generation != generation or world.phase is not Phase.STOPPING:
            return None
        failure = world.cause.failure
        hangs = failure is not None and failure.generation == generation and failure.cause == HANG
        return world.cause.node if hangs else None

    def _ask_for_samples(self, generation: Generation, now: float) -> None:
        """Not while steps come, which say that all is well."""
        stalled_s = generation.hang.stalled_s(generation.running, now)
        if now < self._samples_due_at or (generation.hang.steps and stalled_s < LOOK_EVERY_S):
            return
        self._samples_due_at = now + LOOK_EVERY_S
        number, group = generation.number, generation.group
        pids = {local_rank: group.pid(local_rank) for local_rank in generation.running}
        printed = {
            local_rank: self._processes.logs.printed(number, group.ranks[local_rank]) for local_rank in pids
        }
        self._processes.activity.look(number, pids, printed, threads=stalled_s >= STILL_FOR_S)

    def _inquiry(self, generation: int) -> HangProbe | None:
        world = self._participant.world
        return world.inquiry if world is not None and world.generation == generation else None

    # ---------------------------------------------------------------- reports

    def show(self, failure: Failure, generation: Generation | None) -> None:
        """Log it; the other nodes show what the failing one has put in the store."""
        if generation is not None and not generation.over:
            self._hear(generation)
        self._observer.failure_shown(failure)
        own = generation is not None and generation.number == failure.generation
        evidence = self._processes.evidence.where() if own else ""
        if failure.local_rank is None:
            log.error("generation %d failed: %s%s", failure.generation, failure.summary, _kept(evidence))
            return
        failed = generation.failed if generation is not None and own else []
        others = [mine for mine in failed if mine.rank != failure.rank]
        log.error("%s", summarize(failure, others, cause_named(failure.cause).hint, evidence))

    def _seeks_root(self, generation: Generation) -> bool:
        """As far as this node knows, this generation ends over a collateral failure, whose root is still unknown."""
        world = self._participant.world
        known = generation.told
        if known is None and world is not None and world.generation == generation.number:
            known = world.cause.failure
        return known is not None and known.generation == generation.number and known.collateral

    def _report(
        self,
        generation: Generation,
        failure: Failure,
        reason: str,
        asking: signal.Signals = signal.SIGTERM,
    ) -> None:
        """`reason`: for the log, in which the worker's own last lines stand above it."""
        log.error(
            "stopping generation %d: %s%s",
            failure.generation,
            reason,
            _kept(self._processes.evidence.where()),
        )
        generation.told = failure
        self._observer.failure_shown(failure)
        self._participant.workers_failed(failure)
        self._stop(asking)


# --- In words


def _kept(evidence: str) -> str:
    return f"; evidence: {evidence}" if evidence else ""


def summarize(first: Failure, others: Sequence[Failure], hint: str, evidence: str = "") -> str:
    """The failed generation in the log: which worker failed first, why, where to read on, and who else failed.

    `hint`: from the table of causes. `evidence`: the generation's folder of evidence, which has a folder for each
    node that writes to this disk; or why there is none.
    """
    rule = "=" * 80
    lines = [
        rule,
        f"Worker failure in generation {first.generation}: {_who(first)} failed first",
        f"  cause:    {first.summary}",
        f"  known as: {first.cause}: {hint}",
        f"  log file: {first.log_file or 'none (set --log-dir to keep one per rank)'}",
    ]
    if evidence:
        lines.append(f"  evidence: {evidence}")
    if first.exception is not None and "\n" in first.exception:
        lines += ["  exception:", *_indented(first.exception.split("\n"))]
    shown: set[str] = set()
    if first.traceback is not None:
        shown.update(first.traceback.split("\n"))
        lines += ["  traceback:", *_indented(first.traceback.split("\n"))]
    last = [line for line in first.log_tail if RANK_PREFIX.sub("", line) not in shown]
    if last:
        lines += ["  last lines of its output:", *_indented(last)]
    if others:
        lines.append("  failed after it, usually because of it:")
        lines += [f"    {_who(other)}: {other.summary}" for other in others]
    if first.collateral:
        lines.append(
            "  it follows from the end of another worker or from the network; no other cause is known"
        )
    return "\n".join([*lines, rule])


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} (local rank {failure.local_rank} on node {failure.node})"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
