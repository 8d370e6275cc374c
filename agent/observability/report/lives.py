"""The journal of one node, read as lives of its agent: what the seconds of each went into, and what happened in it.

Words: a *life* is one agent from its start to its end, or to the last thing that it wrote. A *stretch* is time that
went into one thing. An account counts all seconds of its life, so the instants of a life come from it alone; its wall
clock only says when the life began, as the earliest that any of its accounts allows.

Agents account whenever their workers begin or cease to step, so of what lies between two accounts the order is known:
ORDER. Events that are missing (of a full disk, of a file that was begun anew) move stretches, and lose no second. After
the last account of a life nothing is known of it.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..accounting.goodput import PHASES, Activity
from ..journal.events import JobEvent, Kind


class Use(enum.Enum):
    """What a second of a job went into. Those of RESTARTING are the phases of a start or restart."""

    PRODUCTIVE = "productive"
    REDONE = "redone"
    """Steps were done again that an earlier generation had done."""
    SAVING = "saving"
    """Training stood still for a save."""
    DETECT = "detect"
    STOP = "stop"
    RENDEZVOUS = "rendezvous"
    BACKOFF = "backoff"
    START = "start"
    INIT = "init"
    LOAD = "load"
    FIRST_STEP = "step"
    DRAINING = "draining"
    """Workers ended by plan."""
    WAITING = "waiting"
    """No node had a world to train in."""
    ABSENT = "absent"
    """There is no account of any agent."""


RESTARTING = tuple(Use(phase.value) for phase in PHASES)

_USES = {
    Activity.PRODUCTIVE: Use.PRODUCTIVE,
    Activity.RECOMPUTE: Use.REDONE,
    Activity.WAITING: Use.WAITING,
    **{phase: Use(phase.value) for phase in PHASES},
}
_STOPS = (Use.DETECT, Use.STOP)
_STEPPING = (Use.REDONE, Use.PRODUCTIVE)

ORDER = (
    *(Use.WAITING, Use.START, Use.INIT, Use.LOAD, Use.FIRST_STEP),
    *_STEPPING,
    *(Use.DETECT, Use.STOP, Use.DRAINING, Use.RENDEZVOUS, Use.BACKOFF),
)

NOTED = frozenset(
    {
        Kind.WORLD,
        Kind.WORKERS_STARTED,
        Kind.FAILURE,
        Kind.EXCLUSION,
        Kind.STRAGGLER,
        Kind.RECOVERY,
        Kind.JOB_ENDED,
    }
)
"""Kinds of events that a life keeps."""

CLOCKS_AGREE_S = 2.0
"""Nodes start the workers of a generation within about that."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Instants are of the node's wall clock; it has a length."""

    began_at: float
    ended_at: float
    use: Use
    blocked_s: float = 0.0
    """Of this time, training stood still for saves."""


@dataclass(frozen=True, slots=True)
class Life:
    node: str
    stretches: tuple[Stretch, ...]
    events: tuple[JobEvent, ...]

    def shifted(self, by_s: float) -> Life:
        """The same by a clock that shows so much more."""
        return Life(
            self.node,
            tuple(replace(s, began_at=s.began_at + by_s, ended_at=s.ended_at + by_s) for s in self.stretches),
            tuple(replace(event, at=event.at + by_s) for event in self.events),
        )


def lives_of(journal: Iterable[JobEvent]) -> Iterator[Life]:
    """`journal` is that of one node, in the order in which it was written."""
    life = _Unfinished()
    for event in journal:
        if event.kind is Kind.AGENT_STARTED or event.number <= life.number:
            yield from life.finished()
            life = _Unfinished()
        life.add(event)
    yield from life.finished()


@dataclass(slots=True)
class _Unfinished:
    number: int = 0
    node: str = ""
    began_at: float | None = None
    """As the accounts so far have it."""
    spent: Mapping[Use, float] = field(default_factory=dict)
    parts: list[tuple[dict[Use, float], float]] = field(default_factory=list)
    """Between two accounts: what each second went into, and those in which training stood still for saves."""
    blocked_s: float = 0.0
    """Since the last account."""
    generation: int = 0
    """Of the workers at the last account."""
    drained: set[int] = field(default_factory=set)
    """Generations that ended by plan."""
    events: list[JobEvent] = field(default_factory=list)

    def add(self, event: JobEvent) -> None:
        self.number, self.node = event.number, event.node
        if event.kind in NOTED:
            self.events.append(event)
        if event.kind is Kind.SAVE:
            self.blocked_s += event.seconds.get("blocked", 0.0)
        elif event.kind is Kind.DRAIN:
            self.drained.add(event.generation)
        elif event.kind is Kind.ACCOUNTING:
            self._account(event)

    def _account(self, event: JobEvent) -> None:
        known = {_USES[one]: event.seconds.get(one.value, 0.0) for one in Activity}
        part = {use: max(0.0, known[use] - self.spent.get(use, 0.0)) for use in known}
        if self.generation in self.drained:
            part[Use.DRAINING] = sum(part.pop(use) for use in _STOPS)
        self.parts.append(({use: seconds for use, seconds in part.items() if seconds}, self.blocked_s))
        self.spent, self.blocked_s = known, 0.0
        self.generation = event.generation
        earliest = event.at - sum(known.values())
        self.began_at = earliest if self.began_at is None else min(self.began_at, earliest)

    def finished(self) -> Iterator[Life]:
        """It, if there was one."""
        if not self.number:
            return
        stretches = []
        at = self.began_at or 0.0
        for seconds, blocked_s in self.parts:
            stepping_s = sum(seconds.get(use, 0.0) for use in _STEPPING)
            for use in ORDER:
                until = at + seconds.get(use, 0.0)
                if until > at:
                    blocked = blocked_s * (until - at) / stepping_s if use in _STEPPING else 0.0
                    stretches.append(Stretch(at, until, use, blocked))
                at = until
        yield Life(self.node, tuple(stretches), tuple(self.events))


def clocks(lives: Sequence[Life]) -> dict[str, float]:
    """By how much the clock of each node is ahead of that of the node that has started most generations; only of
    nodes whose clocks are known not to agree. All nodes of a world start their workers at about the same time."""
    started: dict[str, dict[int, float]] = {}
    for life in lives:
        for event in life.events:
            if event.kind is Kind.WORKERS_STARTED:
                started.setdefault(life.node, {}).setdefault(event.generation, event.at)
    if not started:
        return {}
    reference = started[max(sorted(started), key=lambda node: len(started[node]))]
    ahead = {}
    for node, starts in started.items():
        common = [
            starts[generation] - reference[generation] for generation in starts.keys() & reference.keys()
        ]
        if common and abs(by_s := statistics.median(common)) > CLOCKS_AGREE_S:
            ahead[node] = by_s
    return ahead
