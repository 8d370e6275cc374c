"""Who owns each second of an agent's life: useful training, or one of the reasons why there was none.

Words: an *activity* is what this node's time goes into, one at any instant. A *recovery* is the time for which training
stood still: from the first failure or stop order to the first step of a later generation, however many generations
were tried in between. What a coordinator of other nodes knows does not come in here: it is this node's time.

Time is *booked* once, when it is known what it went into. While workers step that is at the next step: only finished
steps are worth something. What was spent since the last one when a stop cuts it short was lost before that was known: a
hang, a peer that died and let the others wait, a step thrown away.

Invariants: the seconds of all activities add up to the time from the start to `booked_until`, none ever falls, and the
phases of a recovery add up to its duration. All hold by construction: `booked_until` is the only hand of the clock, and
each of its moves is booked once.

The table below is the whole state machine. An event that it does not list for an activity changes nothing: steps that
are seen while workers are being stopped, a second worker that fails because the first one did.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Activity(enum.Enum):
    """The values are those of the metrics' labels; those of STARTUP are one cause of lost time."""

    WAITING = "waiting"
    """Nothing ran here before that is to go on: before the first world, next to a world without us, after the last."""
    START = "start"
    """Processes are made, or spares take their place, until the script of each has begun."""
    INIT = "init"
    """The scripts run, and say nothing: they import, meet each other, build the model, or never use our library."""
    LOAD = "load"
    """They load a checkpoint."""
    FIRST_STEP = "step"
    """They have loaded and are at the first step of this generation."""
    PRODUCTIVE = "productive"
    RECOMPUTE = "recompute"
    """Steps are done again that an earlier generation had done."""
    DETECT = "detect"
    """Something is wrong and the workers are not yet ordered to stop."""
    STOP = "stop"
    RENDEZVOUS = "rendezvous"
    """No worker is left, and the next world is being formed."""
    BACKOFF = "backoff"


class TrainingEvent(enum.Enum):
    """What happens to the workers of a node, and to its part in the job."""

    STARTED = enum.auto()
    """Workers are to run."""
    BEGAN = enum.auto()
    """The script of each worker runs."""
    LOADING = enum.auto()
    LOADED = enum.auto()
    STEPPED = enum.auto()
    """A step is done, and the one after it is new."""
    STEPPED_AGAIN = enum.auto()
    """A step is done, and the one after it was done before."""
    FAILED = enum.auto()
    """A worker has failed here."""
    STOPPING = enum.auto()
    """The workers are ordered to stop."""
    GONE = enum.auto()
    """No worker is left; if they were not ordered to stop, they were successful."""
    HELD_BACK = enum.auto()
    """The next world is ready but for a pause."""
    RELEASED = enum.auto()
    SET_ASIDE = enum.auto()
    """The job goes on without this node, or is over."""


STARTUP = (Activity.START, Activity.INIT, Activity.LOAD, Activity.FIRST_STEP)
"""Workers run, and this generation has not finished a step."""

STEPPING = (Activity.PRODUCTIVE, Activity.RECOMPUTE)

TRAINING = (*STARTUP, *STEPPING)
"""Workers run undisturbed."""

STANDSTILL = (Activity.DETECT, Activity.STOP, Activity.RENDEZVOUS, Activity.BACKOFF)

PHASES = (*STANDSTILL, *STARTUP)
"""What a recovery consists of."""

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
    without steps a recovery is over when they start; without a load all until the first step is INIT."""

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
        """A worker has ever finished one that could be seen."""
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
        elif self.activity in TRAINING and not (self.activity in STARTUP and self.reports_steps):
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
