"""Metrics and log lines of what this node's workers report: their progress, their steps and their checkpoints.

What has a memory is a pure state machine elsewhere: `goodput` (which cause each second has), `node_progress` (how far
the workers have come together) and `steps` (which steps are new, and which are lost).

Some jobs copy their state into memory at every step: saves are summed up into events, one of each tier with each
account of seconds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

from ...health.metrics import Metrics
from ...rendezvous.records import CauseKind, World
from ...worker.wire.messages import LoadReport, Report, SaveReport, Tier
from ...worker.wire.shared_progress import Reading
from ..output.journal import Journal, Kind
from .goodput import PARTS, STARTUP, Activity, GoodputAccount, Recovery, TrainingEvent
from .status import StatusPages
from .steps import Counted, NodeProgress, Step, StepCount, StepRate, node_progress

log = logging.getLogger(__name__)

ACCOUNTING_EVERY_S = 60.0
"""How often the journal gets an account of all seconds, besides when workers begin or cease to train."""

_RECOVERIES = {
    CauseKind.FAILURE: "process",
    CauseKind.LOST: "node",
    CauseKind.WITHDRAWN: "node",
    CauseKind.JOIN: "join",
    CauseKind.LEAVE: "leave",
}


class TrainingAccount:
    """For the main thread. `now` and `at` are monotonic; `wall_clock` is for dashboards."""

    def __init__(
        self,
        metrics: Metrics,
        pages: StatusPages,
        journal: Journal,
        rate: StepRate,
        started_at: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._pages = pages
        self._journal = journal
        self._rate = rate
        self._saves = SaveEvents(journal)
        self._accounted_at = started_at
        self._done = Counter(steps=0, steps_redone=0)
        """Since the start of this agent."""
        self._wall_clock = wall_clock
        self._goodput = GoodputAccount(started_at)
        self._steps = StepCount()
        self._recovers_from: CauseKind | None = None
        self._saved_at: float | None = None
        self._begin(0, "")

    def _begin(self, generation: int, because: str) -> None:
        self._generation, self._because = generation, because
        self._progress = NodeProgress()
        self._load_noted: tuple[str, int] | None = None

    @property
    def began(self) -> bool:
        """The script of each worker of this generation runs."""
        return self._progress.began_at is not None

    @property
    def newest(self) -> Step | None:
        return self._progress.newest

    def started(self, world: World, because: str, now: float) -> None:
        """Workers are to run; `because` says what ended the generation before."""
        self._begin(world.generation, because)
        self._steps.begin(world.step)
        if self._goodput.recovering and self._recovers_from is None:
            self._recovers_from = world.cause.kind
        self.record(TrainingEvent.STARTED, now)

    def record(self, event: TrainingEvent, at: float) -> Recovery | None:
        before = self._goodput.activity
        recovery = self._goodput.record(event, at)
        if PARTS.get(before) is not PARTS.get(self._goodput.activity):
            self.account(at)
        if recovery is not None and self._recovers_from in _RECOVERIES:
            phases_s = {phase.value: seconds for phase, seconds in recovery.phases.items()}
            self._metrics.recovered(_RECOVERIES[self._recovers_from], phases_s)
            text = f"training resumed after {recovery.duration_s:.3g} s"
            if not self._goodput.reports_steps:
                text = f"workers started again after {recovery.duration_s:.3g} s (no steps reported)"
                log.info("generation %d: %s", self._generation, text)
            self._journal.note(
                Kind.RECOVERY,
                text,
                cause=_RECOVERIES[self._recovers_from],
                seconds=phases_s,
            )
        if not self._goodput.recovering:
            self._recovers_from = None
        return recovery

    def advance(self, now: float) -> None:
        """Publish what all seconds until now went into."""
        self._goodput.advance(now)
        if now - self._accounted_at >= ACCOUNTING_EVERY_S:
            self.account(now)
        lost_s = {activity.value: seconds for activity, seconds in self._goodput.seconds.items()}
        productive_s = lost_s.pop(Activity.PRODUCTIVE.value)
        lost_s["startup"] = sum(lost_s.pop(activity.value) for activity in STARTUP)
        self._metrics.account(productive_s, lost_s, reports_steps=self._goodput.reports_steps)

    def account(self, now: float) -> None:
        """Write an account of all seconds until now into the journal."""
        self._accounted_at = now
        self._goodput.advance(now)
        self._saves.flush()
        seconds = {activity.value: spent_s for activity, spent_s in self._goodput.seconds.items()}
        done = self._done
        productive_s, all_s = seconds[Activity.PRODUCTIVE.value], sum(seconds.values())
        text = f"{done['steps']} steps, {productive_s:.0f} s of {all_s:.0f} s were productive"
        self._journal.note(Kind.ACCOUNTING, text, seconds=seconds, counts=done)

    def progressed(self, readings: Collection[Reading], now: float) -> None:
        """The shared progress of each worker of this generation as it is now."""
        before, here = self._progress, node_progress(readings)
        self._progress = here
        if before == here:
            return
        if before.began_at is None and here.began_at is not None:
            self.record(TrainingEvent.BEGAN, here.began_at)
        if before.load_at is None and here.load_at is not None:
            self.record(TrainingEvent.LOADING, here.load_at)
        if before.loaded is None and here.loaded is not None:
            self._count(self._steps.resumed(here.loaded.number))
            self.record(TrainingEvent.LOADED, here.loaded.at)
        if before.first is None and here.first is not None:
            self._began_to_step(here.first)
        if here.newest is not None and here.newest != before.newest:
            self._stepped(here.newest)
            self._pages.stepped(here.newest.number, here.newest.at)
            self._metrics.progress(here.newest.number, self._wall_clock() - (now - here.newest.at))

    def _began_to_step(self, first: Step) -> None:
        recovery = self._stepped(first)
        if recovery is None:
            log.info("generation %d: first step is %d", self._generation, first.number)
            return
        log.info(
            "generation %d: first step is %d, after %.3f s without training (%s)%s",
            self._generation,
            first.number,
            recovery.duration_s,
            ", ".join(f"{phase.value} {seconds:.3f}" for phase, seconds in recovery.phases.items()),
            f" because {self._because}" if self._because else "",
        )

    def _stepped(self, step: Step) -> Recovery | None:
        counted = self._steps.done(step.number, step.at)
        if counted.timed:
            since = step.at - counted.timed * counted.mean_s
            self._rate.add(since, step.at, counted.new, counted.timed - counted.new)
        self._count(counted)
        if counted.caught_up_at is not None:
            self.record(TrainingEvent.STEPPED, counted.caught_up_at)
        return self.record(
            TrainingEvent.STEPPED_AGAIN if self._steps.catching_up else TrainingEvent.STEPPED, step.at
        )

    def _count(self, counted: Counted) -> None:
        self._done.update(steps=counted.new, steps_redone=counted.lost)
        self._metrics.count_steps(
            new=counted.new, lost=counted.lost, timed=counted.timed, mean_s=counted.mean_s
        )

    def reported(self, report: Report, at: float) -> None:
        self._pages.reported(report, at)
        if isinstance(report, SaveReport):
            self._saves.add(report)
            self._saved(report, at)
        else:
            self._note_load(report)
            self._loaded(report)

    def _saved(self, report: SaveReport, at: float) -> None:
        metrics = self._metrics
        metrics.checkpoint_blocked_seconds_total.inc(report.blocked_s)
        if report.result != "ok":
            metrics.checkpoint_saves_total.inc(tier=report.tier, result="error")
            if report.tier == "local":  # the worker says it once of its memory
                log.warning("checkpoint of step %d failed; training goes on", report.step)
            return
        if report.tier != "part":  # one part of a step makes no step safe
            self._count(self._steps.saved(report.step))
        self._count_saved(report)
        if report.tier != "local":
            return
        if self._saved_at is not None:
            metrics.checkpoint_interval_seconds.set(at - self._saved_at)
        self._saved_at = at

    def saved_later(self, report: SaveReport, at: float) -> None:
        """The generation that ordered it has gone: `DiskWriter` logs a failure when it is final."""
        self._saves.add(report)
        if report.result == "ok":
            self._count_saved(report)
        else:
            self._metrics.checkpoint_saves_total.inc(tier=report.tier, result="error")

    def _count_saved(self, report: SaveReport) -> None:
        self._metrics.checkpoint_saved(
            tier=report.tier,
            step=report.step,
            duration_s=report.duration_s,
            at_s=self._wall_clock(),
        )

    def _note_load(self, report: LoadReport) -> None:
        """Note a load once for all workers of a generation with the same result."""
        found = report.result, report.step
        if found == self._load_noted:
            return
        self._load_noted = found
        place = "memory" if report.tier == "memory" else "disk"
        text = {
            "ok": f"training goes on from step {report.step}, from {place}",
            "none": "there is no checkpoint: training begins at step 0",
            "corrupt": f"the checkpoint of step {report.step} in {place} is damaged",
            "error": "no checkpoint could be loaded",
        }[report.result]
        self._journal.note(
            Kind.LOAD,
            text,
            cause=report.tier if report.result == "ok" else report.result,
            seconds={"duration": report.duration_s},
            counts={"step": report.step},
        )

    def _loaded(self, report: LoadReport) -> None:
        if report.result == "corrupt":
            self._metrics.checkpoint_verify_failures_total.inc()


_PLACES: dict[Tier, str] = {"memory": "in memory", "local": "on disk", "part": "on disk in part"}


class SaveEvents:
    """For the main thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._counts: dict[Tier, Counter[str]] = {}
        self._seconds: dict[Tier, dict[str, float]] = {}

    def add(self, report: SaveReport) -> None:
        good = report.result == "ok"
        counts = self._counts.setdefault(report.tier, Counter())
        counts.update(saves=int(good), failed=int(not good), bytes=report.bytes if good else 0)
        if good or not counts["saves"]:
            counts["step"] = report.step
        seconds = self._seconds.setdefault(report.tier, {"duration": 0.0, "blocked": 0.0})
        seconds["duration"] += report.duration_s
        seconds["blocked"] += report.blocked_s

    def flush(self) -> None:
        """Write the events of all saves that have none yet."""
        for tier, counts in self._counts.items():
            saves, failed = counts["saves"], counts["failed"]
            text = f"step {counts['step']} is {'' if saves else 'not '}{_PLACES[tier]}"
            text += f" ({saves} saves)" if saves > 1 else ""
            text += f", {failed} failed" if failed else ""
            self._journal.note(Kind.SAVE, text, cause=tier, seconds=self._seconds[tier], counts=counts)
        self._counts, self._seconds = {}, {}
