"""From the first sign of a failure or hang on this node to the end of its generation: evidence, examination, report.

A crash waits until its last lines are read and NVML has answered, and is examined then: from what the worker left
behind, and what the machine says. Workers that are silent for too long, or that could not be started, fail without a
crash. Before workers that hang are ended, one *look* keeps evidence of what they do. The first failure
of a generation is told to the other nodes and ends it here; a later one is told only where the first was collateral,
and this one may be its root.

`HangWatch` tells the other nodes of a stall, hears their verdict, and finds when this node has to end its workers
without one. The detector (`agent/workers/hangs/detector.py`) decides what a stall is, and the coordinator whose fault
it is.

What stops the workers is a callable of the `Supervisor`. For the main thread; instants are seconds on the monotonic
clock.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Failure, Phase
from ...rendezvous.statements.inquiry import HANG, Inquiry, Suspicion, Urgency
from ..common.events import Event
from ..configuration.config import Config
from ..machine.cgroups import OomKills, find_counter
from ..observability.observer import Observer
from .environment import Node, error_file
from .failures.causes import Cause, CauseTable
from .failures.failure import HANG_SIGNAL, describe_failure, failure_of, small, summarize
from .failures.post_mortem import ErrorReport, PostMortem, gpu_events, read_error_file
from .generation import Crash, Generation, Processes
from .hangs.detector import Durations
from .hangs.keeper import Look
from .hangs.signs import LOOK_EVERY_S, Signs

log = logging.getLogger(__name__)

KNOWN_WITHIN_S = 0.5
"""A failure is reported after so long without what is not known then: the rest of the worker's last lines, which are
read and written first, and what NVML says."""

SEEN_WITHIN_S = 2.0
"""Workers that hang are ended when the look at them is over, or when it takes longer than this."""


STILL_FOR_S = 8.0
"""From which on the workers' threads are looked at, too: steps are mostly shorter, and threads many."""


class HangWatch:
    """The search for hangs on this node, over all generations."""

    def __init__(self, participant: Participant, observer: Observer, processes: Processes) -> None:
        self._participant = participant
        self._observer = observer
        self._signs = processes.signs
        self._logs = processes.logs
        self._signs_due_at = 0.0
        self.learned = Durations()

    def generation_begins(self) -> None:
        self._participant.workers_suspected(None)

    def turn(self, generation: Generation, now: float) -> tuple[int, str] | None:
        """Tell the others of a stall, and this node's log of a verdict. Where none comes and this node has to end its
        workers: the local rank that is the likeliest to be stuck by itself, and why."""
        hang = generation.hang
        stall, before = generation.stalls(now), generation.stall
        limit_s = hang.limit_s()
        self._observer.node.hangs = hang.state(stall).value, limit_s
        if limit_s is None:
            return None
        self._ask_for_signs(generation, now)
        inquiry = self._inquiry(generation.number)
        if (stall and stall.urgency) != (before and before.urgency):
            generation.stall = stall
            suspicion = Suspicion(generation.number, stall.why, stall.urgency) if stall else None
            self._participant.workers_suspected(suspicion)
            if stall is not None and suspicion is not None:
                self._observer.suspects(suspicion)
                level = logging.INFO if stall.urgency is Urgency.EARLY else logging.WARNING
                log.log(level, "%s: asking all nodes what their workers do", stall.why)
        if self.hear(generation) and inquiry is not None and inquiry.finding is not None:
            log.warning("inquiry %d: %s: %s", inquiry.number, inquiry.finding.value, inquiry.why)
        if stall is None or not generation.ends_alone(stall, inquiry, now):
            return None
        steps = hang.steps
        at = ", ".join(f"rank {generation.group.ranks[local]}: {steps[local]}" for local in sorted(steps))
        return stall.local_rank, f"hang: {stall.why}{at and f'; last steps: {at}'}"

    def hear(self, generation: Generation) -> bool:
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

    def _ask_for_signs(self, generation: Generation, now: float) -> None:
        if now < self._signs_due_at:
            return
        self._signs_due_at = now + LOOK_EVERY_S
        number, group = generation.number, generation.group
        pids = {local_rank: group.pid(local_rank) for local_rank in generation.running}
        printed = {local_rank: self._logs.printed(number, group.ranks[local_rank]) for local_rank in pids}
        stalled_s = generation.hang.stalled_s(generation.running, now)

        def read(at: float, seen: Mapping[int, Signs]) -> None:
            if not generation.over:
                generation.hang.signs(at, seen)

        self._signs.look(read, pids, printed, threads=stalled_s >= STILL_FOR_S)

    def _inquiry(self, generation: int) -> Inquiry | None:
        world = self._participant.world
        return world.inquiry if world is not None and world.generation == generation else None


def _wake() -> None:
    """The main loop turns, and looks at the `Look` itself."""


class FailureHandler:
    """The failures of one generation after the other; each `generation` that it is given is the newest here."""

    def __init__(
        self,
        config: Config,
        node: Node,
        participant: Participant,
        observer: Observer,
        processes: Processes,
        hangs: HangWatch,
        stop: Callable[[signal.Signals], None],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """`stop` asks all workers here to end, by this signal, for a failure that the log has already."""
        self._node = node
        self._participant = participant
        self._observer = observer
        self._logs = processes.logs
        self._gpus = processes.gpus
        self._evidence = processes.evidence
        self._hangs = hangs
        self._stop = stop
        self._post = post
        self._clock = clock
        self._causes = CauseTable(config.causes)
        self._oom_kills = OomKills(find_counter())
        self.failed: list[Failure] = []
        """The workers of the newest generation that have failed, as they were examined."""
        self._told: Failure | None = None
        """The first failure of the newest generation that this node has told the others."""
        self._before_end: Look | None = None

    def update(self, now: float) -> None:
        """Call on each turn: out-of-memory kills are only known by when their counter changes."""
        self._oom_kills.update(now)

    def generation_begins(self) -> None:
        """What NVML has said until now concerns earlier workers."""
        self.failed, self._told, self._before_end = [], None, None
        self._gpus.generation_begins()

    # ---------------------------------------------------------------- looks at what the workers do

    def forget_look(self) -> None:
        """The look before the end is out of date: the workers have moved since."""
        self._before_end = None

    def look(self, generation: Generation, why: str, then: Callable[[Look], None] | None = None) -> Look:
        """Begin a look at what the running workers do; `then` is called in another thread when it is over."""
        targets = generation.targets(self._clock())
        return self._evidence.look(
            why,
            targets,
            then or (lambda look: self._post(_wake)),
            lambda path: self._observer.evidence_kept(str(path), generation.number),
        )

    # ---------------------------------------------------------------- crashes

    def crashed(
        self, generation: Generation, local_rank: int, returncode: int, at: float, *, asked: bool = False
    ) -> None:
        """A worker has ended as it should not: its last lines have the reason, and are on their way here."""
        crash = Crash(local_rank, returncode, at, self._clock() + KNOWN_WITHIN_S, asked)
        generation.crashes.append(crash)
        read = partial(self._lines_read, generation, crash)
        self._logs.drain(generation.number, generation.group.ranks[local_rank], lambda: self._post(read))
        self._gpus.worker_failed()

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
            self._gpus.overdue()
        while crashes and (now >= crashes[0].due_at or (crashes[0].read and not self._gpus.waiting)):
            self._examine(generation, crashes.popleft(), now)

    def _examine(self, generation: Generation, crash: Crash, now: float) -> None:
        """Find out why this worker has failed, and end the generation with it."""
        failure = describe_failure(self._post_mortem(generation, crash, now), self._causes)
        if crash.asked and (failure.exception is None or failure.collateral or failure.outside):
            return
        self.failed.append(failure)
        self._observer.ended(crash.local_rank, failure.cause, crash.at)
        if not generation.stopping:
            self._report(generation, failure, f"rank {failure.rank} failed: {failure.summary}")
        elif not failure.collateral and self._seeks_root(generation):
            log.error(
                "rank %d failed before that, and the others because of it: %s", failure.rank, failure.summary
            )
            told = small(failure)
            self.show(told, generation)
            self._participant.workers_failed(told)

    def _post_mortem(self, generation: Generation, crash: Crash, now: float) -> PostMortem:
        group, drain, local_rank = generation.group, generation.drain, crash.local_rank
        faults, own_gpus = self._gpus.faults, self._node.machine.gpus_of(local_rank)
        self._gpus.told(own_gpus)
        return replace(
            self._worker(generation, local_rank, crash.returncode),
            report=read_error_file(error_file(self._node, group.generation, local_rank)) or ErrorReport(),
            log_tail=self._logs.tail(group.generation, group.ranks[local_rank]),
            master_port=generation.world.master.port,
            asked=crash.asked,
            not_kept=local_rank in drain.finished - drain.kept,
            oom_killed=self._oom_kills.lately(now),
            own_gpus=gpu_events(faults, own_gpus),
        )

    def _worker(self, generation: Generation, local_rank: int, returncode: int) -> PostMortem:
        number, rank = generation.number, generation.group.ranks[local_rank]
        log_file = self._logs.log_file(number, rank)
        return PostMortem(self._node.name, number, rank, local_rank, returncode, log_file=log_file)

    # ---------------------------------------------------------------- failures without a crash

    def fail(self, generation: Generation, cause: Cause, what: str) -> None:
        """The generation fails on this node without a worker to blame."""
        action = self._causes.named(cause.name).action
        failure = Failure(generation.number, what[:200], what[:4000], cause=cause.name, action=action)
        self._report(generation, failure, what)

    def end_stuck(self, generation: Generation, local_rank: int, summary: str, known_as: str) -> None:
        """End workers that are silent for too long: first evidence is kept, then a signal makes each print its stacks
        and end. Call it on each turn, until they are stopping. `known_as`: the fingerprint."""
        look = self._before_end = self._before_end or self.look(generation, "hang")
        if not look.over and self._clock() < look.began_at + SEEN_WITHIN_S:
            return
        generation.hung = True
        worker = self._worker(generation, local_rank, -HANG_SIGNAL)
        failure = failure_of(worker, self._causes.named(HANG), known_as, summary)
        self._report(generation, failure, failure.summary, HANG_SIGNAL)

    # ---------------------------------------------------------------- reports

    def show(self, failure: Failure, generation: Generation | None) -> Failure | None:
        """Log it; the other nodes show what the failing one has put in the store. Returns the worker to blame, with
        all that this node knows of it."""
        if generation is not None and not generation.over:
            self._hangs.hear(generation)
        self._observer.failure_shown(failure)
        own = generation is not None and generation.number == failure.generation
        evidence = self._evidence.where() if own else ""
        if failure.local_rank is None:
            kept = f"; evidence: {evidence}" if evidence else ""
            log.error("generation %d failed: %s%s", failure.generation, failure.summary, kept)
            return None
        failed = self.failed if own else []
        first = next((mine for mine in failed if mine.rank == failure.rank), failure)
        others = [mine for mine in failed if mine.rank != failure.rank]
        log.error("%s", summarize(first, others, self._causes.named(first.cause).hint, evidence))
        return first

    def _seeks_root(self, generation: Generation) -> bool:
        """As far as this node knows, this generation ends over a collateral failure, whose root is still unknown."""
        world = self._participant.world
        known = self._told
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
        evidence = self._evidence.where()
        kept = f"; evidence: {evidence}" if evidence else ""
        log.error("stopping generation %d: %s%s", failure.generation, reason, kept)
        self._told = told = small(failure)
        self._observer.failure_shown(told)
        self._participant.workers_failed(told)
        self._stop(asking)
