"""From the first sign of a failure on this node to the end of its generation: evidence, examination, report.

A crash waits until its facts are here, and is examined then (`failure_reports.py`). Workers that are silent for too
long, or that could not be started, fail without a crash. Before the workers that are left are asked to end, one *look*
keeps evidence of what they do. The first failure of a generation is told to the other nodes and ends it here; a later
one is told only where the first was collateral, and this one may be its root.

What stops the workers is a callable of the `Supervisor`. For the main thread; instants are seconds on the monotonic
clock.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial

from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Failure
from ..common.events import Event
from ..observability.observer import Observer
from ..output.worker_logs import WorkerLogs
from .failure_reports import KNOWN_WITHIN_S, Crash, Examiner, show
from .failures.causes import Cause
from .failures.failure import HANG_SIGNAL, small
from .generation import Generation
from .hang_watch import HangWatch
from .hangs.keeper import EvidenceKeeper, Look
from .hangs.stacks import QUICK, THOROUGH, Depth

log = logging.getLogger(__name__)

SEEN_WITHIN_S = 2.0
"""Workers that hang are ended when the look at them is over, or when it takes longer than this."""


def _wake() -> None:
    """The main loop turns, and looks at the `Look` itself."""


class EvidenceLooks:
    """Looks at what the workers here do, of which one is the look before they are ended."""

    def __init__(
        self,
        keeper: EvidenceKeeper,
        logs: WorkerLogs,
        observer: Observer,
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._keeper = keeper
        self._logs = logs
        self._observer = observer
        self._post = post
        self._clock = clock
        self._before_end: Look | None = None

    def forget(self) -> None:
        """The look before the end is out of date: the workers have moved since, or are others."""
        self._before_end = None

    def begin(
        self, generation: Generation, why: str, depth: Depth, then: Callable[[Look], None] | None = None
    ) -> Look:
        """Begin a look at what the running workers do; `then` is called in another thread when it is over."""
        targets = generation.targets(self._logs.tail, self._clock())
        return self._keeper.look(
            why,
            targets,
            depth,
            then or (lambda look: self._post(_wake)),
            lambda path: self._observer.evidence_kept(str(path), generation.number),
        )

    def before_end(self, generation: Generation, why: str, depth: Depth) -> Look:
        """The look before the workers are ended; it begins now if it has not yet."""
        if self._before_end is None:
            self._before_end = self.begin(generation, why, depth)
        return self._before_end

    def keep(self, generation: Generation) -> None:
        """Look at the workers before they are ended for a failure, here or elsewhere; waits for QUICK.within_s."""
        look = self.before_end(generation, "failure", QUICK)
        look.wait(look.began_at + QUICK.within_s, self._clock)

    def add(self, name: str, text: str) -> None:
        """A file beside those of the look before the end, if that has begun."""
        if self._before_end is not None:
            self._keeper.add(self._before_end, name, text)

    def where(self) -> str:
        """See `EvidenceKeeper.where`."""
        return self._keeper.where()


class FailureHandler:
    """The failures of one generation after the other; each `generation` that it is given is the newest here."""

    def __init__(
        self,
        examiner: Examiner,
        looks: EvidenceLooks,
        participant: Participant,
        observer: Observer,
        hangs: HangWatch,
        stop: Callable[[signal.Signals], None],
        clock: Callable[[], float],
    ) -> None:
        """`stop` asks all workers here to end, by this signal, for a failure that the log has already."""
        self._examiner = examiner
        self._looks = looks
        self._participant = participant
        self._observer = observer
        self._hangs = hangs
        self._stop = stop
        self._clock = clock
        self.failed: list[Failure] = []
        """The workers of the newest generation that have failed, as they were examined."""
        self._told: Failure | None = None
        """The first failure of the newest generation that this node has told the others."""

    def generation_begins(self) -> None:
        self.failed, self._told = [], None
        self._looks.forget()
        self._examiner.generation_begins()

    def crashed(
        self, generation: Generation, local_rank: int, returncode: int, at: float, *, asked: bool = False
    ) -> None:
        """A worker has ended as it should not: its last lines have the reason, and are on their way here."""
        ready = partial(self._tail_ready, generation, local_rank)
        self._examiner.prepare(generation.group, local_rank, ready)
        generation.crashes.add(Crash(local_rank, returncode, at, self._clock() + KNOWN_WITHIN_S, asked))
        if not generation.stopping:
            self._looks.before_end(generation, "failure", QUICK)

    def _tail_ready(self, generation: Generation, local_rank: int) -> None:
        self._examiner.log_disk_answers()
        if not generation.over:
            generation.crashes.read(local_rank)
            self.examine(generation, self._clock())

    def ended_as_asked(self, generation: Generation, local_rank: int, returncode: int, at: float) -> None:
        """A worker has ended as it was asked to; while the root of a failure is sought it is examined all the same."""
        if self._seeks_root(generation):
            # A killed process closes its connections before it has ended: it may be the root of what they see.
            by_another = returncode == -signal.SIGKILL and not generation.group.killed
            self.crashed(generation, local_rank, returncode, at, asked=not by_another)

    def examine(self, generation: Generation, now: float) -> None:
        """The crashes whose facts are here, and those that have waited for them too long."""
        for crash in self._examiner.ready(generation.crashes, now):
            self._examine(generation, crash)

    def fail(self, generation: Generation, cause: Cause, what: str) -> None:
        """The generation fails on this node without a worker to blame."""
        action = self._examiner.causes.named(cause.name).action
        failure = Failure(generation.number, what[:200], what[:4000], cause=cause.name, action=action)
        self._report(generation, failure, what)

    def end_stuck(self, generation: Generation, local_rank: int, summary: str, known_as: str) -> None:
        """End workers that are silent for too long: first evidence is kept, then a signal makes each print its stacks
        and end. Call it on each turn, until they are stopping."""
        look = self._looks.before_end(generation, "hang", THOROUGH)
        if not look.over and self._clock() < look.began_at + SEEN_WITHIN_S:
            return
        self._hangs.count(generation)
        generation.hung = True
        failure = self._examiner.hang(generation.group, local_rank, summary, known_as)
        self._report(generation, failure, failure.summary, HANG_SIGNAL)

    def show(self, failure: Failure, generation: Generation | None) -> Failure | None:
        """Log it; the other nodes show what the failing one has put in the store. Returns the worker to blame."""
        if generation is not None and not generation.over:
            self._hangs.hear(generation)
        self._observer.failure_shown(failure)
        if generation is not None and not generation.over:
            self._keep_evidence_once(generation)
        own = generation is not None and generation.number == failure.generation
        evidence = self._looks.where() if own else ""
        return show(failure, self.failed if own else (), self._examiner.causes, evidence)

    def _examine(self, generation: Generation, crash: Crash) -> None:
        """Find out why this worker has failed, and end the generation with it."""
        group, drain, rank = generation.group, generation.drain, generation.group.ranks[crash.local_rank]
        not_kept = crash.local_rank in drain.finished - drain.kept
        port = generation.world.master.port
        failure = self._examiner.examine(group, crash, port, self._clock(), not_kept=not_kept)
        if crash.asked and (failure.exception is None or failure.collateral or failure.outside):
            return
        self.failed.append(failure)
        self._observer.ended(crash.local_rank, failure.cause, crash.at)
        if not generation.stopping:
            self._report(generation, failure, f"rank {rank} failed: {failure.summary}")
        elif not failure.collateral and self._seeks_root(generation):
            log.error("rank %d failed before that, and the others because of it: %s", rank, failure.summary)
            told = small(failure)
            self.show(told, generation)
            self._participant.workers_failed(told)

    def _seeks_root(self, generation: Generation) -> bool:
        """As far as this node knows, this generation ends over a collateral failure, whose root is still unknown."""
        world = self._participant.world
        known = self._told
        if known is None and world is not None and world.generation == generation.number:
            known = world.cause.failure
        return known is not None and known.generation == generation.number and known.collateral

    def _keep_evidence_once(self, generation: Generation) -> None:
        """Before the log names it. Of workers that hang there was a look at the inquiry."""
        if generation.stopping or generation.hung:
            return
        if self._hangs.blamed(generation.number) is None:
            self._looks.keep(generation)

    def _report(
        self,
        generation: Generation,
        failure: Failure,
        reason: str,
        asking: signal.Signals = signal.SIGTERM,
    ) -> None:
        """`reason`: for the log, in which the worker's own last lines stand above it."""
        self._keep_evidence_once(generation)
        evidence = self._looks.where()
        kept = f"; evidence: {evidence}" if evidence else ""
        log.error("stopping generation %d: %s%s", failure.generation, reason, kept)
        self._told = told = small(failure)
        self._observer.failure_shown(told)
        self._participant.workers_failed(told)
        self._stop(asking)
