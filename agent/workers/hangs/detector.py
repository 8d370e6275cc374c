"""Do the workers of one generation on this node hang? Judged from what they report and from what is seen of them.

Where they report steps, a stall is a time without a step, a checkpoint or a `poll`. Where they do not, it is one in
which a worker uses no processor, moves no bytes and prints nothing. Either is only a suspicion: workers elsewhere may
be the reason for it, or be at work while these wait. So an early one costs no more than a question: what do all of them
do?

Pure but for its own state: readings and instants are arguments, seconds on the monotonic clock.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ....rendezvous.statements.inquiry import ANSWER_S, LOOK_S, Finding, Inquiry, Stage, Urgency
from .signs import LOOK_EVERY_S, Signs, Stillness

HangTimeout: TypeAlias = float | Literal["auto"] | None
"""The user's own limit, learned limits, or none at all."""

VERDICT_S = 5.0
"""How long a node whose user's own limit is over waits for the verdict of all, before it ends its workers by itself."""
ALONE_S = 60.0
"""And one with learned limits, when the last of them is over."""


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


UNKNOWN = Limits(60.0, 300.0, 1800.0)
"""Until enough is known, far beyond what a stage takes: an import, a download, a compilation."""
TIMES = Limits(3.0, 5.0, 5.0)
"""So many of what is usual: of the 99th percentile of the durations of a stage."""


@dataclass(frozen=True, slots=True)
class Row:
    """The limits of one stage, once `enough` of its durations are known."""

    least: Limits
    enough: int
    ahead_s: float = 0.0
    """The first of them holds so much sooner: the look and the inquiry take as long, and the rank is to be named by
    then."""

    def limits(self, durations: Durations) -> Limits:
        if len(durations) < self.enough:
            return UNKNOWN
        usual_s, least = durations.percentile(), self.least
        return Limits(
            max(least.early_s, TIMES.early_s * usual_s) - self.ahead_s,
            max(least.overdue_s, TIMES.overdue_s * usual_s),
            max(least.last_s, TIMES.last_s * usual_s),
        )


ROWS: Mapping[Stage, Row] = {
    Stage.STEPS: Row(Limits(5.0, 30.0, 600.0), 10, LOOK_S),
    Stage.EVALUATION: Row(Limits(30.0, 60.0, 600.0), 2),
    Stage.SAVE: Row(Limits(30.0, 60.0, 600.0), 2),
}
"""Of workers that report steps. What happens once, before the first step, is never learned."""
FROM_OUTSIDE = Row(Limits(30.0, 300.0, 600.0), 0, LOOK_EVERY_S + LOOK_S)
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
        return ROWS[stage].limits(self.durations[stage]) if stage in ROWS else UNKNOWN


PATIENCE_WINDOW_S = 3600.0
MOST_PATIENCE = 16.0


def patience(hangs: list[float], now: float) -> float:
    """How many times longer the limits are, after hangs at these instants: twice for each within an hour."""
    lately = sum(at > now - PATIENCE_WINDOW_S for at in hangs)
    return min(MOST_PATIENCE, 2.0**lately)


class State(enum.Enum):
    OFF = "off"
    LEARNING = "learning"
    WATCHING = "watching"
    SUSPECTING = "suspecting"


@dataclass(frozen=True, slots=True)
class Stall:
    """What is unusual now."""

    stage: Stage
    urgency: Urgency
    still_s: float
    limit_s: float
    """The one that was passed."""
    local_rank: int
    """The likeliest of this node to be stuck by itself."""
    reports_steps: bool
    why: str


@dataclass(slots=True)
class HangDetector:
    """Of one generation on this node."""

    timeout: HangTimeout
    learned: Learned
    began_at: float
    patience: float = 1.0
    """Limits that are learned are so many times longer; see `patience`."""
    steps: dict[int, int] = field(default_factory=dict)
    """The newest step of each worker that has finished one, by local rank."""
    alive_at: float = 0.0
    """The newest report of a worker."""
    loaded: bool = False
    """The workers have loaded their state, so that a first step follows."""
    saving: Collection[int] = ()
    """Local ranks that are in a save now."""
    polled_at: float = 0.0
    debuggers: Mapping[int, str] = field(default_factory=dict)
    """What traces workers now, by local rank: while anything does, nothing here is a stall."""
    _asked: tuple[float, float] = (0.0, 0.0)
    """Between these two instants the workers were last asked what they do."""
    _looked_at: float = 0.0
    _stillness: dict[int, Stillness] = field(default_factory=dict)
    _saved_at: float = 0.0
    _gap: dict[int, tuple[int, float, Stage]] = field(default_factory=dict)
    """By local rank: its newest step, its instant, and what has happened since."""

    # ---------------------------------------------------------------- what is seen

    def stepped(self, local_rank: int, step: int, at: float) -> None:
        if (before := self._gap.get(local_rank)) is not None and step > before[0] and at > before[1]:
            stage = self._stage_since(before[1], at) if before[2] is Stage.STEPS else before[2]
            self.learned.durations[stage].add((at - before[1]) / (step - before[0]))
        self._gap[local_rank] = step, at, Stage.STEPS
        self.steps[local_rank] = step
        self._alive(at)

    def reported(self, at: float, *, saved: bool) -> None:
        """A worker has reported a save, or else a load."""
        if saved:
            self._saved_at = max(self._saved_at, at)
        self._alive(at)

    def _alive(self, at: float) -> None:
        self.alive_at = max(self.alive_at, at)

    def marked(self, saving: Collection[int], polled_at: float | None) -> None:
        """Who is in a save, and when one of them last asked for news between two steps."""
        self.saving = saving
        if saving:
            self._gap = {local: (step, at, Stage.SAVE) for local, (step, at, _) in self._gap.items()}
        if polled_at is not None and polled_at > self.polled_at:
            self.polled_at = polled_at
            self._alive(polled_at)

    def asked(self, at: float) -> None:
        """The workers are asked for their stacks: what they do for that is no sign of life."""
        self._asked = at, at + ANSWER_S

    def signs(self, at: float, seen: Mapping[int, Signs]) -> None:
        """What the workers have used until `at`, by local rank."""
        began_at, ended_at = self._asked
        asked, self._looked_at = began_at <= at and self._looked_at < ended_at, at
        for local_rank, signs in seen.items():
            stillness = self._stillness.setdefault(local_rank, Stillness(self.began_at))
            warm = stillness.warm
            pause_s = stillness.look(at, signs, asked=asked)
            if pause_s > 0 and warm and not self.debuggers:
                self.learned.pauses.add(pause_s)
        self.debuggers = {local_rank: signs.debugger for local_rank, signs in seen.items() if signs.debugger}
        if self.debuggers:
            self._count_from(at)

    def _count_from(self, at: float) -> None:
        """What came before teaches nothing, and is no stall."""
        self._alive(at)
        self._gap = {local_rank: (step, at, stage) for local_rank, (step, _, stage) in self._gap.items()}
        for stillness in self._stillness.values():
            stillness.active_at = stillness.worked_at = at

    def still_s(self, local_rank: int, now: float) -> float | None:
        """For how long nothing of this worker has moved; None: not known."""
        stillness = self._stillness.get(local_rank)
        seen_at = [self._gap[local_rank][1]] if local_rank in self._gap else []
        if stillness is not None:
            seen_at.append(stillness.worked_at)
        return max(0.0, now - max(seen_at)) if seen_at else None

    # ---------------------------------------------------------------- what it means

    def stall(self, running: Collection[int], now: float) -> Stall | None:
        """Of the workers with these local ranks."""
        if self.timeout is None or not running or self.debuggers:
            return None
        local_rank, since = self._since(running)
        stage, still_s = self._stage(local_rank), now - since
        limits = self._limits(stage)
        urgency = limits.urgency(still_s)
        if urgency is None:
            return None
        limit_s = {
            Urgency.EARLY: limits.early_s,
            Urgency.OVERDUE: limits.overdue_s,
            Urgency.LAST: limits.last_s,
        }[urgency]
        return Stall(stage, urgency, still_s, limit_s, local_rank, self._reports_steps, self._why(limit_s))

    def due_at(self, running: Collection[int], now: float) -> float | None:
        """When `stall` may say something else without any sign; None: never."""
        if self.timeout is None or not running or self.debuggers:
            return None
        local_rank, since = self._since(running)
        at = since + self._limits(self._stage(local_rank)).next_s(now - since)
        return at if at < math.inf else None

    def stalled_s(self, running: Collection[int], now: float) -> float:
        return max(0.0, now - self._since(running)[1]) if running else 0.0

    def limit_s(self, running: Collection[int]) -> float | None:
        """The one in force now from which on a suspicion counts in full; None: there is none."""
        if self.timeout is None or isinstance(self.timeout, float):
            return self.timeout
        local_rank = self._since(running)[0] if running else 0
        return self._limits(self._stage(local_rank)).overdue_s

    def state(self, stall: Stall | None) -> State:
        if self.timeout is None:
            return State.OFF
        if stall is not None:
            return State.SUSPECTING
        if isinstance(self.timeout, float):
            return State.WATCHING
        enough = len(self.learned.durations[Stage.STEPS]) >= ROWS[Stage.STEPS].enough
        warm = any(stillness.warm for stillness in self._stillness.values())
        return State.WATCHING if (enough if self._reports_steps else warm) else State.LEARNING

    @property
    def _reports_steps(self) -> bool:
        return bool(self.steps)

    def _since(self, running: Collection[int]) -> tuple[int, float]:
        """Who is still, and since when. Where they report steps it is the one that is behind the others: the likeliest
        of this node to be stuck by itself."""
        if self._reports_steps:
            return min(self.steps, key=lambda local_rank: (self.steps[local_rank], local_rank)), self.alive_at
        since = {one: self._stillness[one].active_at for one in running if one in self._stillness}
        if not since:
            return min(running), math.inf
        stillest = min(since, key=lambda one: (since[one], one))
        return stillest, max(since[stillest], self._saved_at)

    def _stage(self, local_rank: int) -> Stage:
        if self.saving:
            return Stage.SAVE
        if self._reports_steps:
            return self._stage_since(max(at for _, at, _ in self._gap.values()), math.inf)
        if self.loaded and not self._saved_at:
            return Stage.FIRST_STEP
        stillness = self._stillness.get(local_rank)
        return Stage.STEPS if stillness is not None and stillness.warm else Stage.INITIALIZATION

    def _stage_since(self, stepped_at: float, until: float) -> Stage:
        if stepped_at < self._saved_at <= until:
            return Stage.SAVE
        return Stage.EVALUATION if stepped_at < self.polled_at <= until else Stage.STEPS

    def _limits(self, stage: Stage) -> Limits:
        if not isinstance(self.timeout, float):
            learned = self.learned.limits(stage, reports_steps=self._reports_steps)
            return learned.patient(self.patience)
        limit_s = self.timeout
        if stage in (Stage.INITIALIZATION, Stage.FIRST_STEP):
            limit_s = max(limit_s, UNKNOWN.overdue_s)
        return Limits(limit_s, limit_s, limit_s)

    def _why(self, limit_s: float) -> str:
        whose = "--hang-timeout" if isinstance(self.timeout, float) else "learned"
        if not self._reports_steps:
            return f"no output, processor time or bytes for {limit_s:.3g} s ({whose})"
        return f"no step or checkpoint reported for {limit_s:.3g} s ({whose})"


def ends_alone(
    stall: Stall,
    timeout: HangTimeout,
    inquiry: Inquiry | None,
    since: float,
    now: float,
    *,
    all_still: bool,
    asked_at: float = 0.0,
) -> bool:
    """A node without a verdict ends its workers by itself. `since`: when the last limit was over; `inquiry`: the newest
    that it knows of, as it is since `asked_at`; `all_still`: none of its workers uses anything."""
    if stall.urgency is not Urgency.LAST:
        return False
    if isinstance(timeout, float) and stall.reports_steps:
        return now >= since + VERDICT_S
    asked = inquiry if inquiry is not None and inquiry.urgency is Urgency.LAST else None
    if asked is not None and asked.finding is Finding.HEALTHY:
        return False
    if asked is not None and asked.finding is None:
        since = max(since, asked_at)
    return all_still and now >= since + (VERDICT_S if isinstance(timeout, float) else ALONE_S)
