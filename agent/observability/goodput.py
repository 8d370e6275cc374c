"""The account of an agent's time: each second is useful training, or has one of the causes of lost time.

Words: an *activity* is what this node's time goes into, one at any instant. A *recovery* is the time for which training
stood still: from the first failure or stop order to the first step of a later generation, however many generations
were tried in between.

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
from collections.abc import Mapping
from dataclasses import dataclass


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
