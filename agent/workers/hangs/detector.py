"""Do the workers of one generation on this node hang? Judged from what they report and from what is seen of them.

Where they report steps, a stall is a time without a step, a checkpoint or a `poll`. Where they do not, it is one in
which a worker uses no processor, moves no bytes and prints nothing. Either is only a suspicion: workers elsewhere may
be the reason for it, or be at work while these wait. So an early one costs no more than a question: what do all of them
do?

There are two rows of limits, `STEPS` and `UNKNOWN`, of three numbers each. Nothing but how long a step mostly takes is
learned.

Pure but for its own state: readings and instants are arguments, seconds on the monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ....rendezvous.statements.inquiry import LOOK_S, Finding, Inquiry, Urgency
from .signs import LOOK_EVERY_S, Signs, Stillness

HangTimeout: TypeAlias = float | Literal["auto"] | None
"""The user's own limit, those of the table, or none at all."""

VERDICT_S = 5.0
"""How long a node whose user's own limit is over waits for the verdict of all, before it ends its workers by itself."""
ALONE_S = 60.0
"""And one with `auto`, when the last of them is over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without any sign of life from which on a suspicion is as urgent as that."""

    early_s: float
    overdue_s: float
    last_s: float

    def passed(self, still_s: float) -> tuple[Urgency, float] | None:
        """The longest that is over; None: that is nothing unusual."""
        over = [(urgency, limit_s) for urgency, limit_s in self._rising if still_s >= limit_s]
        return over[-1] if over else None

    def next_s(self, still_s: float) -> float:
        """The next of them; infinity beyond the last."""
        return min((limit_s for _, limit_s in self._rising if limit_s > still_s), default=math.inf)

    @property
    def _rising(self) -> tuple[tuple[Urgency, float], ...]:
        return (Urgency.EARLY, self.early_s), (Urgency.OVERDUE, self.overdue_s), (Urgency.LAST, self.last_s)


UNKNOWN = Limits(30.0 - LOOK_EVERY_S - LOOK_S, 300.0, 1800.0)
"""Of workers that report no steps, or too few so far, and of those that save or evaluate. A rank is named within 30 s:
the last sign of life may be as old as the pause between two looks, and then the workers are looked at. It is ended
late: it may wait for a service, or load, or compile."""
STEPS = Limits(5.0, 30.0, 600.0)
"""Of workers that report steps: the least, where steps are short. A look is begun so early that it is over by then."""
TIMES = Limits(3.0, 5.0, 5.0)
"""Else so many of the usual steps."""
ENOUGH = 10
"""Steps from which on it is known how long they take."""


class Durations:
    """How long the newest steps took. Of a job, over all generations."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=512)
        self._usual_s: float | None = None

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        self._usual_s = None

    @property
    def usual_s(self) -> float | None:
        """Only one in a hundred takes longer; None: not known yet."""
        if self._usual_s is None and len(self._newest) >= ENOUGH:
            self._usual_s = sorted(self._newest)[math.ceil(0.99 * len(self._newest)) - 1]
        return self._usual_s


@dataclass(frozen=True, slots=True)
class Stall:
    """What is unusual now."""

    urgency: Urgency
    local_rank: int
    """The likeliest of this node to be stuck by itself."""
    reports_steps: bool
    why: str


@dataclass(slots=True)
class HangDetector:
    """Of one generation on this node."""

    timeout: HangTimeout
    learned: Durations
    began_at: float
    steps: dict[int, int] = field(default_factory=dict)
    """The newest step of each worker that has finished one, by local rank."""
    alive_at: float = 0.0
    """The newest report of a worker."""
    saving: Collection[int] = ()
    """Local ranks that are in a save now."""
    polled_at: float = 0.0
    _stepped_at: dict[int, float] = field(default_factory=dict)
    _aside: set[int] = field(default_factory=set)
    """Who has saved or evaluated since its newest step: how long that took teaches nothing."""
    _stillness: dict[int, Stillness] = field(default_factory=dict)
    _asked_until: float = 0.0
    """Until then the workers do what they were asked for."""
    _looked_at: float = 0.0

    # ---------------------------------------------------------------- what is seen

    def stepped(self, local_rank: int, step: int, at: float) -> None:
        before, before_at = self.steps.get(local_rank, step), self._stepped_at.get(local_rank, at)
        if step > before and at > before_at and local_rank not in self._aside:
            self.learned.add((at - before_at) / (step - before))
        self._aside.discard(local_rank)
        self.steps[local_rank], self._stepped_at[local_rank] = step, at
        self.reported(at)

    def reported(self, at: float) -> None:
        """A worker has reported something: a save, a load."""
        self.alive_at = max(self.alive_at, at)

    def marked(self, saving: Collection[int], polled_at: float | None) -> None:
        """Who is in a save, and when one of them last asked for news between two steps."""
        self.saving = saving
        if saving:
            self._aside = set(self.steps)
        if polled_at is not None and polled_at > self.polled_at:
            self.polled_at = polled_at
            self._aside = set(self.steps)
            self.reported(polled_at)

    def asked(self, at: float) -> None:
        """The workers are asked for their stacks: what they do for that is no sign of life."""
        self._asked_until = at + 2 * LOOK_S

    def signs(self, at: float, seen: Mapping[int, Signs]) -> None:
        """What the workers have used until `at`, by local rank."""
        asked, self._looked_at = self._looked_at < self._asked_until, at
        for local_rank, signs in seen.items():
            self._stillness.setdefault(local_rank, Stillness(self.began_at)).look(at, signs, asked=asked)

    def still_s(self, local_rank: int, now: float) -> float | None:
        """For how long nothing of this worker has moved; None: not known."""
        stillness = self._stillness.get(local_rank)
        seen_at = [self._stepped_at[local_rank]] if local_rank in self._stepped_at else []
        if stillness is not None:
            seen_at.append(stillness.worked_at)
        return max(0.0, now - max(seen_at)) if seen_at else None

    # ---------------------------------------------------------------- what it means

    def stall(self, running: Collection[int], now: float) -> Stall | None:
        """Of the workers with these local ranks."""
        if self.timeout is None or not running:
            return None
        local_rank, since = self._since(running)
        passed = self._limits().passed(now - since)
        if passed is None:
            return None
        urgency, limit_s = passed
        nothing = "no step or checkpoint reported" if self.steps else "no output, processor time or bytes"
        return Stall(urgency, local_rank, bool(self.steps), f"{nothing} for {limit_s:.3g} s (--hang-timeout)")

    def due_at(self, running: Collection[int], now: float) -> float | None:
        """When `stall` may say something else without any sign; None: never."""
        if self.timeout is None or not running:
            return None
        _, since = self._since(running)
        at = since + self._limits().next_s(now - since)
        return at if at < math.inf else None

    def stalled_s(self, running: Collection[int], now: float) -> float:
        return max(0.0, now - self._since(running)[1]) if running else 0.0

    def limit_s(self) -> float | None:
        """The one in force now from which on a suspicion counts in full; None: there is none."""
        return self._limits().overdue_s if self.timeout == "auto" else self.timeout

    def state(self, stall: Stall | None) -> str:
        """For people."""
        if self.timeout is None:
            return "off"
        return "suspecting" if stall is not None else "watching"

    def _since(self, running: Collection[int]) -> tuple[int, float]:
        """Who is still, and since when. Where they report steps it is the one that is behind the others: the likeliest
        of this node to be stuck by itself."""
        if self.steps:
            left = [one for one in running if one in self.steps] or self.steps
            return min(left, key=lambda local_rank: (self.steps[local_rank], local_rank)), self.alive_at
        since = {one: self._stillness[one].active_at for one in running if one in self._stillness}
        if not since:
            return min(running), math.inf
        stillest = min(since, key=lambda one: (since[one], one))
        return stillest, max(since[stillest], self.alive_at)

    def _limits(self) -> Limits:
        if isinstance(self.timeout, float):
            limit_s = self.timeout if self.steps else max(self.timeout, UNKNOWN.overdue_s)
            return Limits(limit_s, limit_s, limit_s)
        usual_s = self.learned.usual_s
        aside = self.saving or self.polled_at > max(self._stepped_at.values(), default=0.0)
        if not self.steps or usual_s is None or aside:
            return UNKNOWN
        return Limits(
            max(STEPS.early_s, TIMES.early_s * usual_s) - LOOK_S,
            max(STEPS.overdue_s, TIMES.overdue_s * usual_s),
            max(STEPS.last_s, TIMES.last_s * usual_s),
        )


def ends_alone(
    stall: Stall, timeout: HangTimeout, inquiry: Inquiry | None, since: float, now: float, *, all_still: bool
) -> bool:
    """A node without a verdict ends its workers by itself. `since`: when the last limit was over; `inquiry`: the newest
    that it knows of; `all_still`: none of its workers uses anything."""
    if stall.urgency is not Urgency.LAST:
        return False
    if isinstance(timeout, float) and stall.reports_steps:
        return now >= since + VERDICT_S
    asked = inquiry if inquiry is not None and inquiry.urgency is Urgency.LAST else None
    if asked is not None and asked.finding is Finding.HEALTHY:
        return False  # a rank elsewhere is at work
    to_come = asked is not None and asked.finding is None
    return all_still and now >= since + (VERDICT_S if isinstance(timeout, float) and not to_come else ALONE_S)
