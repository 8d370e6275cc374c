"""What all seconds of an agent go into, and the steps and checkpoints that its workers report.

*Steps* are those of this node's workers together, by the shared progress of each. A generation's scripts have begun
when the last one has, and the same goes for loading. A step is done when the first worker has finished it; one that is
still loading then is not waited for. Steps are counted: which are new, which were lost and are done again. The
*position* is the newest step that the state in the workers' memory contains. It goes up with each step that is done,
and down when a generation begins at an older checkpoint; what lies between was lost. The *highest* step is the highest
position that the job has ever had, on any node as far as this one knows; only steps beyond it are new. A reading shows
only the newest of several steps; all since the reading before count as equally long.

Each second is useful training, or has one of the causes of lost time. Words: an *activity* is what this node's time
goes into, one at any instant. A *recovery* is the time for which training stood still: from the first failure or stop
order to the first step of a later generation, however many generations were tried in between.

Time is *booked* once, when it is known what it went into. While workers step that is at the next step: only finished
steps count. The time from the last one to a stop was lost: a hang, a dead peer that the others waited for, a step
thrown away.

Invariants: the seconds of all activities add up to the time from the start to `booked_until`, none ever falls, and the
phases of a recovery add up to its duration: only `_book` moves `booked_until`, and books the difference.

`NEXT` is the whole state machine. An event that it does not list for an activity changes nothing: steps that are seen
while workers are being stopped, a second worker that fails because the first one did.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...health.metrics import Metrics
from ...rendezvous.records import CauseKind, World
from ...worker.wire.messages import LoadReport, Report, SaveReport
from ...worker.wire.shared_progress import Reading
from ..output.journal import EventKind, Journal
from .status import NodeState

log = logging.getLogger(__name__)

ACCOUNTING_EVERY_S = 60.0
"""How often the journal gets an account of all seconds, besides when workers begin or cease to train."""


# --- Seconds


class Activity(enum.Enum):
    """The values are those of the metrics' labels; those of STARTUP are one cause of lost time."""

    WAITING = "waiting"
    """Before the first world, beside a world without this node, after the last."""
    START = "start"
    """Processes are made, or spares take their place, until the script of each has begun."""
    INIT = "init"
    """The scripts run and report nothing: they import, initialize, build the model, or never use our library."""
    LOAD = "load"
    FIRST_STEP = "step"
    """The checkpoint is loaded, and the first step of this generation is not done."""
    PRODUCTIVE = "productive"
    RECOMPUTE = "recompute"
    """Steps are done again that an earlier generation had done."""
    DETECT = "detect"
    """A failure is known, and the workers are not yet ordered to stop."""
    STOP = "stop"
    RENDEZVOUS = "rendezvous"
    """No worker is left, and the next world is being formed."""
    BACKOFF = "backoff"


class TrainingEvent(enum.Enum):
    """What happens to the workers of a node, and to its part in the job."""

    STARTED = enum.auto()
    BEGAN = enum.auto()
    """The script of each worker runs."""
    LOADING = enum.auto()
    LOADED = enum.auto()
    STEPPED = enum.auto()
    """A step is done, and the one after it is new."""
    STEPPED_AGAIN = enum.auto()
    """A step is done, and the one after it was done before."""
    FAILED = enum.auto()
    STOPPING = enum.auto()
    GONE = enum.auto()
    """No worker is left; if they were not ordered to stop, they were successful."""
    HELD_BACK = enum.auto()
    """The next world is ready but for a pause."""
    RELEASED = enum.auto()
    SET_ASIDE = enum.auto()
    """The job goes on without this node, or is over."""


STARTUP = (Activity.START, Activity.INIT, Activity.LOAD, Activity.FIRST_STEP)
"""Workers run, and this generation has not finished a step."""

BEGUN = STARTUP[1:]
"""The script of each worker runs, too."""

STEPPING = (Activity.PRODUCTIVE, Activity.RECOMPUTE)

TRAINING = (*STARTUP, *STEPPING)
"""Workers run undisturbed."""

STANDSTILL = (Activity.DETECT, Activity.STOP, Activity.RENDEZVOUS, Activity.BACKOFF)

PHASES = (*STANDSTILL, *STARTUP)
"""What a recovery consists of."""


PARTS = {activity: group for group in (STARTUP, STEPPING, STANDSTILL) for activity in group}
"""What an event file can tell apart: an account is written whenever the part changes. WAITING is in none."""

NEXT: Mapping[TrainingEvent, Mapping[Activity, Activity]] = {
    TrainingEvent.STARTED: dict.fromkeys(
        (Activity.WAITING, Activity.RENDEZVOUS, Activity.BACKOFF), Activity.START
    ),
    TrainingEvent.BEGAN: {Activity.START: Activity.INIT},
    TrainingEvent.LOADING: dict.fromkeys((Activity.START, Activity.INIT), Activity.LOAD),
    TrainingEvent.LOADED: {Activity.LOAD: Activity.FIRST_STEP},
    TrainingEvent.STEPPED: dict.fromkeys(TRAINING, Activity.PRODUCTIVE),
    TrainingEvent.STEPPED_AGAIN: dict.fromkeys(TRAINING, Activity.RECOMPUTE),
    TrainingEvent.FAILED: dict.fromkeys(TRAINING, Activity.DETECT),
    TrainingEvent.STOPPING: dict.fromkeys((*TRAINING, Activity.DETECT), Activity.STOP),
    TrainingEvent.GONE: {Activity.STOP: Activity.RENDEZVOUS, **dict.fromkeys(TRAINING, Activity.WAITING)},
    TrainingEvent.HELD_BACK: {Activity.RENDEZVOUS: Activity.BACKOFF},
    TrainingEvent.RELEASED: {Activity.BACKOFF: Activity.RENDEZVOUS},
    TrainingEvent.SET_ASIDE: dict.fromkeys((Activity.RENDEZVOUS, Activity.BACKOFF), Activity.WAITING),
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of each of PHASES that there was, in their order. Those of STARTUP depend on what the workers report:
    without steps a recovery is over when their scripts begin; without a load all until the first step is INIT."""

    phases: Mapping[Activity, float]

    @property
    def duration_s(self) -> float:
        return sum(self.phases.values())


class GoodputAccount:
    """The seconds of each activity, and the present one. Instants are seconds, monotonic."""

    def __init__(self, now: float) -> None:
        self.activity = Activity.WAITING
        self.seconds = dict.fromkeys(Activity, 0.0)
        self.booked_until = now
        self.reports_steps = False
        self._before_recovery: Mapping[Activity, float] | None = None
        self._passed: set[Activity] = set()
        """What this recovery has left behind."""

    @property
    def recovering(self) -> bool:
        return self._before_recovery is not None

    def spent(self) -> dict[str, float]:
        """The seconds so far, by the labels of the metrics: STARTUP is one cause of lost time."""
        seconds = {activity.value: spent_s for activity, spent_s in self.seconds.items()}
        seconds["startup"] = sum(seconds.pop(activity.value) for activity in STARTUP)
        return seconds

    def advance(self, now: float) -> None:
        """Book what is known to have gone into the present activity."""
        if self.activity not in STEPPING:
            self._book(self.activity, now)

    def record(self, event: TrainingEvent, at: float) -> Recovery | None:
        """What happened at `at`. The recovery that is over with it, if one is."""
        self.advance(at)
        before, self.activity = self.activity, NEXT[event].get(self.activity, self.activity)
        if self.activity is not before:
            self._passed.add(before)
        if before in STEPPING:
            if self.activity in STEPPING and event in (TrainingEvent.STEPPED, TrainingEvent.STEPPED_AGAIN):
                self._book(before, at)
            elif self.activity not in STEPPING:
                self._book(Activity.STOP if event is TrainingEvent.GONE else Activity.DETECT, at)
        self.reports_steps |= event in (TrainingEvent.STEPPED, TrainingEvent.STEPPED_AGAIN)
        if self.activity in (Activity.DETECT, Activity.STOP):
            if self._before_recovery is None:
                self._before_recovery, self._passed = dict(self.seconds), set()
        elif self.activity is Activity.WAITING:
            self._before_recovery = None
        elif self.activity in (STEPPING if self.reports_steps else (*BEGUN, *STEPPING)):
            return self._recovered()
        return None

    def _book(self, activity: Activity, until: float) -> None:
        """An instant that is booked already stays booked: events of several threads overtake each other."""
        if until > self.booked_until:
            self.seconds[activity] += until - self.booked_until
            self.booked_until = until

    def _recovered(self) -> Recovery | None:
        before, self._before_recovery = self._before_recovery, None
        if before is None:
            return None
        there = (phase for phase in PHASES if phase in STANDSTILL or phase in self._passed)
        return Recovery({phase: self.seconds[phase] - before[phase] for phase in there})


# --- Steps


class Step(NamedTuple):
    number: int
    at: float


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Instants are seconds, monotonic. None: not yet."""

    began_at: float | None = None
    """The script of each worker had begun."""
    load_at: float | None = None
    """Each had asked for its checkpoint."""
    loaded: Step | None = None
    """Each had loaded this step's checkpoint; step 0 is that there was none."""
    first: Step | None = None
    """The first that any worker finished."""
    newest: Step | None = None


def node_progress(readings: Collection[Reading]) -> NodeProgress:
    firsts = [
        Step(reading.first_step, reading.first_at)
        for reading in readings
        if reading.first_step is not None and reading.first_at is not None
    ]
    steps = [
        Step(reading.step, reading.stepped_at)
        for reading in readings
        if reading.step is not None and reading.stepped_at is not None
    ]
    first = min(firsts, key=lambda step: step.at, default=None)

    def all_at(instant: Callable[[Reading], float | None]) -> float | None:
        known = [at for reading in readings if (at := instant(reading)) is not None]
        if not known or (first is None and len(known) < len(readings)):
            return None
        return max(known) if first is None else min(max(known), first.at)

    loaded_at = all_at(lambda reading: reading.loaded_at)
    loaded_step = max((each.loaded_step for each in readings if each.loaded_step is not None), default=0)
    return NodeProgress(
        began_at=all_at(lambda reading: reading.script_at),
        load_at=all_at(lambda reading: reading.load_at),
        loaded=Step(loaded_step, loaded_at) if loaded_at is not None else None,
        first=first,
        newest=max(steps, key=lambda step: (step.number, -step.at), default=None),
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """What one reading adds."""

    new: int = 0
    lost: int = 0
    timed: int = 0
    """Steps of which it is known how long they took."""
    mean_s: float = 0.0
    """Seconds that each of these took."""
    caught_up_at: float | None = None
    """The instant, before that of the reading, when the highest step had been done again."""


class StepCount:
    """The position and the highest step of this node. Instants are seconds, monotonic."""

    def __init__(self) -> None:
        self.highest = 0
        self.stepped = False
        """A worker of this generation has finished a step."""
        self._position: int | None = None
        self._resumed = False
        self._seen: tuple[int, float] | None = None

    @property
    def catching_up(self) -> bool:
        """The step after the newest one has been done before."""
        return self._position is not None and self._position < self.highest

    def begin(self, highest: int) -> None:
        """Another generation starts; `highest` is the highest step that any node had done before."""
        self.highest = max(self.highest, highest)
        self.stepped = self._resumed = False
        self._seen = None

    def resumed(self, step: int) -> Counted:
        """The generation goes on from here: it has loaded the checkpoint of this step."""
        if self._resumed:
            return Counted()
        self._resumed = True
        lost = max(0, self._position - step) if self._position is not None else 0
        self._position = step
        self.highest = max(self.highest, step)
        return Counted(lost=lost)

    def done(self, step: int, at: float) -> Counted:
        """A worker finished this step at `at`. The first step of a generation must be among the calls."""
        lost = self.resumed(max(0, step - 1)).lost
        self.stepped = True
        seen, highest = self._seen, self.highest
        if seen is not None and step <= seen[0]:
            return Counted(lost=lost)
        self._seen = (step, at)
        new = self._reach(step)
        if seen is None:
            return Counted(new, lost)
        timed = step - seen[0]
        mean_s = max(0.0, at - seen[1]) / timed
        caught_up_at = seen[1] + (highest - seen[0]) * mean_s if seen[0] < highest < step else None
        return Counted(new, lost, timed, mean_s, caught_up_at)

    def saved(self, step: int) -> Counted:
        """A checkpoint of this step was committed: the step is done, also where no reading has shown it yet."""
        return Counted(self._reach(step) if self.stepped else 0)

    def _reach(self, step: int) -> int:
        self._position = max(step, self._position or 0)
        new = max(0, step - self.highest)
        self.highest += new
        return new


# --- Both, as they are told


_RECOVERIES = {
    CauseKind.FAILURE: "process",
    CauseKind.LOST: "node",
    CauseKind.WITHDRAWN: "node",
    CauseKind.JOIN: "join",
    CauseKind.LEAVE: "leave",
}


class TrainingAccount:
    """For the main thread. Instants are monotonic."""

    def __init__(self, metrics: Metrics, node: NodeState, journal: Journal, started_at: float) -> None:
        self._metrics = metrics
        self._node = node
        self._journal = journal
        self._accounted_at = started_at
        self._done = Counter(steps=0, steps_redone=0, saves=0, saves_failed=0)
        self._blocked_s = 0.0
        """Since the start of this agent."""
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
                EventKind.RECOVERY,
                text,
                cause=_RECOVERIES[self._recovers_from],
                seconds=phases_s,
            )
        if not self._goodput.recovering:
            self._recovers_from = None
        return recovery

    def advance(self, now: float) -> None:
        """Until now."""
        self._goodput.advance(now)
        if now - self._accounted_at >= ACCOUNTING_EVERY_S:
            self.account(now)
        self._node.spent = self._goodput.spent()

    def account(self, now: float) -> None:
        """Write an account of all seconds until now into the journal."""
        self._accounted_at = now
        self._goodput.advance(now)
        seconds = {activity.value: spent_s for activity, spent_s in self._goodput.seconds.items()}
        seconds["blocked"] = self._blocked_s
        done = self._done
        productive_s = seconds[Activity.PRODUCTIVE.value]
        all_s = sum(self._goodput.seconds.values())
        text = f"{done['steps']} steps, {productive_s:.0f} s of {all_s:.0f} s were productive"
        self._journal.note(EventKind.ACCOUNTING, text, seconds=seconds, counts=done)

    def progressed(self, readings: Collection[Reading]) -> None:
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
            self._node.stepped(here.newest.number, here.newest.at)

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
            self._node.rate.add(since, step.at, counted.new, counted.timed - counted.new)
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
        """A worker of this generation has saved or loaded."""
        self._node.reported(report, at)
        if isinstance(report, LoadReport):
            self._loaded(report)
            return
        self._count_save(report)
        self._blocked_s += report.blocked_s
        self._metrics.checkpoint_blocked_seconds_total.inc(report.blocked_s)
        if report.result != "ok":
            if report.tier == "local":  # the worker says it once of its memory
                log.warning("checkpoint of step %d failed; training goes on", report.step)
            return
        if report.tier != "part":  # one part of a step makes no step safe
            self._count(self._steps.saved(report.step))
        if report.tier == "local":
            if self._saved_at is not None:
                self._metrics.checkpoint_interval_seconds.set(at - self._saved_at)
            self._saved_at = at

    def saved_later(self, report: SaveReport, at: float) -> None:
        """The generation that ordered it has gone: `DiskWriter` logs a failure when it is final."""
        self._node.reported(report, at)
        self._count_save(report)

    def _count_save(self, report: SaveReport) -> None:
        good = report.result == "ok"
        if report.tier == "local":
            self._done["saves" if good else "saves_failed"] += 1
        self._metrics.checkpoint_saves_total.inc(tier=report.tier, result="ok" if good else "error")
        if good:
            self._metrics.checkpoint_save_duration_seconds.observe(report.duration_s, tier=report.tier)

    def _loaded(self, report: LoadReport) -> None:
        """Noted once for all workers of a generation with the same result."""
        if report.result == "corrupt":
            self._metrics.checkpoint_verify_failures_total.inc()
        if (found := (report.result, report.step)) == self._load_noted:
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
            EventKind.LOAD,
            text,
            cause=report.tier if report.result == "ok" else report.result,
            seconds={"duration": report.duration_s},
            counts={"step": report.step},
        )
