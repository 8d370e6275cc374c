"""Watches the workers here for hangs: tells the other nodes of a stall, hears their verdict, and finds when this node
has to end its workers without one.

The detector (`agent/workers/hangs/detector.py`) decides what a stall is, and the coordinator whose fault it is. For
the main thread; instants are monotonic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Phase
from ...rendezvous.statements.inquiry import HANG, Inquiry, Stage, Suspicion, Urgency
from ..observability.observer import Observer
from .generation import Generation, Processes
from .hangs.detector import Learned, patience
from .hangs.signs import LOOK_EVERY_S, Signs

log = logging.getLogger(__name__)

STILL_FOR_S = 8.0
"""From which on the workers' threads are looked at, too: steps are mostly shorter, and threads many."""

HANGS_KEPT = 16
"""Instants of the newest hangs; each makes the limits that are learned longer for a while."""


class HangWatch:
    """The search for hangs on this node, over all generations."""

    def __init__(
        self,
        participant: Participant,
        observer: Observer,
        processes: Processes,
        clock: Callable[[], float],
    ) -> None:
        self._participant = participant
        self._observer = observer
        self._signs = processes.signs
        self._logs = processes.logs
        self._clock = clock
        self._hangs: list[float] = []
        """When generations were ended because of a hang."""
        self._signs_due_at = 0.0
        self.learned = Learned()

    def patience(self, now: float) -> float:
        """How many times longer than learned the limits of a generation that starts now are."""
        return patience(self._hangs, now)

    def generation_begins(self) -> None:
        self._participant.workers_suspected(None)

    def turn(self, generation: Generation, now: float) -> tuple[int, str] | None:
        """Tell the others of a stall, and this node's log of a verdict. Where none comes and this node has to end its
        workers: the local rank that is the likeliest to be stuck by itself, and why."""
        hang, running = generation.hang, generation.running
        stall, before = generation.stalls(now), generation.stall
        limit_s = hang.limit_s(running)
        self._observer.watches(hang.state(stall).value, hang.stalled_s(running, now), limit_s)
        if limit_s is None:
            return None
        self._ask_for_signs(generation, now)
        inquiry = self._inquiry(generation.number)
        if (stall and (stall.stage, stall.urgency)) != (before and (before.stage, before.urgency)):
            generation.stall = stall
            suspicion = Suspicion(generation.number, stall.stage, stall.why, stall.urgency) if stall else None
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

    def count(self, generation: Generation) -> None:
        """The workers of this generation are ended because of a hang."""
        self._observer.hung(generation.stall.stage if generation.stall is not None else Stage.STEPS)
        self._hangs = [*self._hangs[-HANGS_KEPT:], self._clock()]

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
                generation.signs(at, seen)

        self._signs.look(read, pids, printed, threads=stalled_s >= STILL_FOR_S)

    def _inquiry(self, generation: int) -> Inquiry | None:
        world = self._participant.world
        return world.inquiry if world is not None and world.generation == generation else None
