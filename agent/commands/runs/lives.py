"""How a job spent its time: of each node the lives of its agent, from its journal, and what follows for the job.

A *life* is one agent from its start to its end, or to its last event. A *stretch* is a time with one use. An account
counts all seconds since the start of the life, so the lengths come from the accounts alone. The wall clock is only used
for the begin of the life: the earliest instant that any of its accounts allows.

An agent writes an account whenever its workers begin or cease to step, so the uses between two accounts come in a known
order: ORDER. Missing events (disk full, file replaced) move stretches, but lose no second. The time after the last
account of a life is unknown.

A second of the job is one second, however many nodes it has: each instant is divided among the uses as on the average
of the nodes. A node that waits for a world counts only while all nodes wait: a spare, or a node that came early, costs
the job nothing. Training stands still for a save of any node, so the slowest save counts. Time without an account of
any agent is ABSENT.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...observability.training_account import BEGUN, PHASES, Activity
from ...output.journal import JobEvent, Kind


class Use(enum.Enum):
    """The uses of time. RESTARTING has the phases of a start or restart."""

    PRODUCTIVE = "productive"
    REDONE = "redone"
    """Workers repeated steps that an earlier generation had done."""
    SAVING = "saving"
    """Training stood still for a save."""
    RUNNING = "running"
    """The scripts ran, in a job that reports no steps: what of it was productive is not known."""
    DETECT = "detect"
    STOP = "stop"
    RENDEZVOUS = "rendezvous"
    BACKOFF = "backoff"
    START = "start"
    INIT = "init"
    LOAD = "load"
    FIRST_STEP = "step"
    DRAINING = "draining"
    """Workers ended for a planned change."""
    WAITING = "waiting"
    """No node had a world to train in."""
    ABSENT = "absent"
    """No agent has an account of this time."""


RESTARTING = tuple(Use(phase.value) for phase in PHASES)
STEPS_TELL = (Use.PRODUCTIVE, Use.REDONE, Use.SAVING)
"""What is known of a job that reports steps alone."""

_USES = {
    Activity.PRODUCTIVE: Use.PRODUCTIVE,
    Activity.RECOMPUTE: Use.REDONE,
    Activity.WAITING: Use.WAITING,
    **{phase: Use(phase.value) for phase in PHASES},
}
_STOPS = (Use.DETECT, Use.STOP)
_STEPPING = (Use.REDONE, Use.PRODUCTIVE)
_SCRIPTS_RUN = tuple(Use(phase.value) for phase in BEGUN)

ORDER = (
    *(Use.WAITING, Use.START, Use.INIT, Use.LOAD, Use.FIRST_STEP),
    *_STEPPING,
    *(Use.DETECT, Use.STOP, Use.DRAINING, Use.RENDEZVOUS, Use.BACKOFF),
)

NOTED = frozenset(
    {
        Kind.WORLD,
        Kind.FAILURE,
        Kind.EXCLUSION,
        Kind.STRAGGLER,
        Kind.RECOVERY,
        Kind.JOB_ENDED,
    }
)
"""Kinds of events that a life keeps."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time with one use, longer than 0 s. Instants are of the node's wall clock."""

    began_at: float
    ended_at: float
    use: Use
    blocked_s: float = 0.0
    """How long of it training stood still for saves."""


@dataclass(frozen=True, slots=True)
class Life:
    node: str
    stretches: tuple[Stretch, ...]
    events: tuple[JobEvent, ...]


def stretches_of(lives: Iterable[Life]) -> list[Stretch]:
    """Those of all nodes of a job. If it reports no steps, its scripts are RUNNING from their begin on."""
    found = [stretch for life in lives for stretch in life.stretches]
    if any(stretch.use in _STEPPING for stretch in found):
        return found
    return [
        replace(stretch, use=Use.RUNNING) if stretch.use in _SCRIPTS_RUN else stretch for stretch in found
    ]


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
    """By the accounts so far."""
    spent: Mapping[Use, float] = field(default_factory=dict)
    parts: list[tuple[dict[Use, float], float]] = field(default_factory=list)
    """One entry between each two accounts: the seconds by use, and how long saves blocked training."""
    blocked_s: float = 0.0
    """How long saves had blocked training at the last account."""
    generation: int = 0
    """The generation of the workers at the last account."""
    drained: set[int] = field(default_factory=set)
    """Generations that ended by a planned change."""
    events: list[JobEvent] = field(default_factory=list)

    def add(self, event: JobEvent) -> None:
        self.number, self.node = event.number, event.node
        if event.kind in NOTED:
            self.events.append(event)
        if event.kind is Kind.DRAIN:
            self.drained.add(event.generation)
        elif event.kind is Kind.ACCOUNTING:
            self._account(event)

    def _account(self, event: JobEvent) -> None:
        known = {_USES[one]: event.seconds.get(one.value, 0.0) for one in Activity}
        part = {use: max(0.0, known[use] - self.spent.get(use, 0.0)) for use in known}
        if self.generation in self.drained:
            part[Use.DRAINING] = sum(part.pop(use) for use in _STOPS)
        blocked_s = event.seconds.get("blocked", 0.0)
        blocked = max(0.0, blocked_s - self.blocked_s)
        self.parts.append(({use: seconds for use, seconds in part.items() if seconds}, blocked))
        self.spent, self.blocked_s = known, blocked_s
        self.generation = event.generation
        earliest = event.at - sum(known.values())
        self.began_at = earliest if self.began_at is None else min(self.began_at, earliest)

    def finished(self) -> Iterator[Life]:
        """The life, if it has an event."""
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


def job_seconds(stretches: Sequence[Stretch], end: float) -> dict[Use, float]:
    """How a job spent its time up to the instant `end`, by the stretches of its nodes."""
    seconds = dict.fromkeys(Use, 0.0)
    changes = sorted(
        (
            (min(at, end), change, stretch)
            for stretch in stretches
            for at, change in ((stretch.began_at, 1), (stretch.ended_at, -1))
        ),
        key=lambda change: change[0],
    )
    present: Counter[Use] = Counter(dict.fromkeys(Use, 0))
    """In the order of Use: of productive time saves take first, however the nodes' stretches come."""
    saves: list[tuple[float, float]] = []
    """A heap of negative share of time blocked by saves, and end. Ended entries are removed once they are on top."""
    before = changes[0][0] if changes else 0.0
    for at, change, stretch in changes:
        if at > before:
            while saves and saves[0][1] <= before:
                heapq.heappop(saves)
            _divide(at - before, present, -saves[0][0] if saves else 0.0, seconds)
        present[stretch.use] += change
        if change > 0 and stretch.blocked_s:
            share = min(1.0, stretch.blocked_s / (stretch.ended_at - stretch.began_at))
            heapq.heappush(saves, (-share, stretch.ended_at))
        before = at
    return seconds


def _divide(length_s: float, present: Mapping[Use, int], saving: float, seconds: dict[Use, float]) -> None:
    """Add this time to `seconds`, by the uses of the nodes that are present; `saving`: the largest share of saves."""
    nodes = sum(present.values())
    busy = nodes - present[Use.WAITING]
    if not busy:
        seconds[Use.WAITING if nodes else Use.ABSENT] += length_s
        return
    left_s = saving * length_s
    for use, count in present.items():
        if use is not Use.WAITING:
            spent_s = length_s * count / busy
            saved_s = min(left_s, spent_s) if use in _STEPPING else 0.0
            left_s -= saved_s
            seconds[use] += spent_s - saved_s
            seconds[Use.SAVING] += saved_s
