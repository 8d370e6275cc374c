"""After how long workers that are still are suspected, per stage of their training: learned from what they did so far.

A limit is a multiple of the 99th percentile of the durations of that stage, and never below a floor. Until enough is
known another limit holds, which is far beyond what a stage takes: an import, a download, a compilation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....rendezvous.statements.inquiry import LOOK_S, Stage, Urgency
from .signs import LOOK_EVERY_S

REMEMBERED = 512
"""Durations of one stage; the oldest are forgotten."""

PERCENTILE = 0.99


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without any sign of life from which on a suspicion is as urgent as that."""

    early_s: float
    overdue_s: float
    last_s: float

    def urgency(self, still_s: float) -> Urgency | None:
        """None: that is nothing unusual."""
        passed = [
            urgency
            for urgency, limit_s in (
                (Urgency.EARLY, self.early_s),
                (Urgency.OVERDUE, self.overdue_s),
                (Urgency.LAST, self.last_s),
            )
            if still_s >= limit_s
        ]
        return passed[-1] if passed else None

    def next_s(self, still_s: float) -> float:
        """The next of them; infinity beyond the last."""
        return min((s for s in (self.early_s, self.overdue_s, self.last_s) if s > still_s), default=math.inf)

    def patient(self, factor: float) -> Limits:
        """After hangs that came one after the other: what was taken for one may be how this job works."""
        return Limits(self.early_s, self.overdue_s * factor, self.last_s * factor)


@dataclass(frozen=True, slots=True)
class Rule:
    """How the limits of one stage follow from its durations."""

    unlearned: Limits
    floor: Limits
    enough: int | None
    """Durations that must be known; None: the stage is never learned."""
    times: Limits
    """So many of their percentile."""
    ahead_s: float = 0.0
    """The first of them holds so much sooner: the look and the inquiry take as long, and the rank is to be named by
    then."""

    def has_learned(self, durations: Durations) -> bool:
        return self.enough is not None and len(durations) >= self.enough

    def limits(self, durations: Durations) -> Limits:
        if not self.has_learned(durations):
            return self.unlearned
        usual_s, floor, times = durations.percentile(), self.floor, self.times
        return Limits(
            max(floor.early_s, times.early_s * usual_s) - self.ahead_s,
            max(floor.overdue_s, times.overdue_s * usual_s),
            max(floor.last_s, times.last_s * usual_s),
        )


_UNKNOWN = Limits(60.0, 600.0, 1800.0)
_TIMES = Limits(3.0, 5.0, 5.0)

RULES: Mapping[Stage, Rule] = {
    Stage.INITIALIZATION: Rule(_UNKNOWN, _UNKNOWN, None, _TIMES),
    Stage.FIRST_STEP: Rule(Limits(120.0, 1800.0, 3600.0), _UNKNOWN, None, _TIMES),
    Stage.STEPS: Rule(Limits(30.0, 600.0, 1800.0), Limits(5.0, 30.0, 600.0), 10, _TIMES, LOOK_S),
    Stage.EVALUATION: Rule(_UNKNOWN, Limits(30.0, 60.0, 600.0), 2, _TIMES),
    Stage.SAVE: Rule(_UNKNOWN, Limits(30.0, 60.0, 600.0), 2, _TIMES),
}
"""Of workers that report steps. The first two stages happen once, and are never learned."""

FROM_OUTSIDE = Rule(
    _UNKNOWN, Limits(30.0, 300.0, 600.0), 0, Limits(5.0, 5.0, 5.0), ahead_s=LOOK_EVERY_S + LOOK_S
)
"""Of workers that report no steps: durations are pauses in which nothing was seen of them. The last sign of life may be
as old as the pause between two looks when it is seen. A rank is named soon, and ended late: what looks like a hang may
be a rank that waits for a service, in a part of the script that comes once."""


class Durations:
    """The newest of one kind."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=REMEMBERED)
        self._percentile: float | None = None

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        self._percentile = None

    def percentile(self) -> float:
        """0 without any."""
        if self._percentile is None:
            ordered = sorted(self._newest)
            self._percentile = ordered[math.ceil(PERCENTILE * len(ordered)) - 1] if ordered else 0.0
        return self._percentile


@dataclass(slots=True)
class Learned:
    """What an agent has learned of its job, over all generations."""

    durations: dict[Stage, Durations] = field(default_factory=lambda: {stage: Durations() for stage in Stage})
    pauses: Durations = field(default_factory=Durations)

    def limits(self, stage: Stage, *, reports_steps: bool) -> Limits:
        if stage is Stage.STEPS and not reports_steps:
            return FROM_OUTSIDE.limits(self.pauses)
        return RULES[stage].limits(self.durations[stage])


PATIENCE_WINDOW_S = 3600.0
MOST_PATIENCE = 16.0


def patience(hangs: list[float], now: float) -> float:
    """How many times longer the limits are, after hangs at these instants: twice for each within an hour."""
    lately = sum(at > now - PATIENCE_WINDOW_S for at in hangs)
    return min(MOST_PATIENCE, 2.0**lately)
