"""The report of a run: a pure function of the journals of all nodes.

ETTR (effective training time ratio) is productive time over wall-clock time, as in the literature. Time in which the
workers do new steps is productive. Time in which they repeat steps is not, nor is time in which training stands still
for a save, a start, a restart or missing nodes. Steps that were lost and repeated are productive once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....rendezvous.statements.inquiry import HANG
from ..journal.events import JobEvent, Kind
from .job_time import Slice, binned, job_time, until
from .lives import RESTARTING, STEPS_TELL, Life, Use, clocks, lives_of, stretches_of

MOST_RECOVERIES = 10
"""Only the slowest recoveries are listed."""
BINS = 120
"""Slices of the timeline."""

_LOST = "lost"
"""The cause of a world after a node was lost."""
_SLOW = "slow"
"""The cause of the event when a rank becomes a straggler; when it recovers, the event has another cause."""
_START = "start"
"""The cause of the first world."""


class ReportError(Exception):
    """There is nothing to report; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """The troubles of one node. Each counts once, however many nodes have noted it."""

    node: str
    starts: int
    """Lives of its agent."""
    failures: int
    """Generations that ended because a worker of this node failed, without hangs."""
    losses: int
    """Generations that ended because the node was lost."""
    hangs: int
    """Generations that ended because one of its workers hung."""
    exclusions: int
    straggling: int
    """How often one of its ranks became slower than the others."""

    @property
    def trouble(self) -> tuple[int, int]:
        """More is worse."""
        return self.failures + self.losses + self.hangs, self.exclusions + self.straggling


@dataclass(frozen=True, slots=True)
class JobRecovery:
    """How long training stood still before a generation, on the node that took longest."""

    generation: int
    at: float
    """When training went on."""
    cause: str
    node: str
    phases: Mapping[Use, float]

    @property
    def duration_s(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class Formed:
    """A generation that was formed. `cause`: why the one before ended."""

    generation: int
    at: float
    cause: str
    nodes: int
    workers: int


@dataclass(frozen=True, slots=True)
class Report:
    """Instants are seconds since the epoch."""

    run: str
    result: str
    """Empty if no journal has one: the run goes on, or all of its agents were killed."""
    began_at: float
    ended_at: float
    """The time of the last account."""
    seconds: Mapping[Use, float]
    """The seconds of each use; they add up to `wall_s`."""
    generations: tuple[Formed, ...]
    causes: tuple[tuple[str, int], ...]
    """Why generations ended, and how many did for that reason, the most frequent first."""
    nodes: tuple[NodeFigures, ...]
    """The worst first."""
    recoveries: tuple[JobRecovery, ...]
    """The slowest, at most MOST_RECOVERIES."""
    timeline: tuple[Slice, ...]
    clocks: Mapping[str, float]
    """By how much a node's clock was ahead of the others'; the times of its events were corrected by that."""

    @property
    def wall_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def restarting_s(self) -> float:
        return sum(self.seconds[phase] for phase in RESTARTING)

    @property
    def ettr(self) -> float | None:
        """None: the workers have reported no step."""
        stepped = sum(self.seconds[use] for use in STEPS_TELL)
        return self.seconds[Use.PRODUCTIVE] / self.wall_s if stepped else None


def report_of(run: str, journals: Iterable[Iterable[JobEvent]]) -> Report:
    """`journals` has one journal for each node. Raises ReportError."""
    read = [life for journal in journals for life in lives_of(journal)]
    ahead = clocks(read)
    lives = [life.shifted(-ahead[life.node]) if life.node in ahead else life for life in read]
    events = sorted((event for life in lives for event in life.events), key=lambda event: event.at)
    ends = [event for event in events if event.kind is Kind.JOB_ENDED]
    slices = list(job_time(stretches_of(lives)))
    if ends:
        slices = list(until(slices, ends[-1].at))
    if not slices:
        raise ReportError(
            "the journals say nothing of how time was spent: the first account is a minute after the start"
        )
    seconds = dict.fromkeys(Use, 0.0)
    for one in slices:
        for use, spent in one.seconds.items():
            seconds[use] += spent
    generations = _generations(events)
    return Report(
        run,
        ends[-1].cause if ends else "",
        slices[0].began_at,
        slices[-1].ended_at,
        seconds,
        generations,
        _causes(generations, events),
        _nodes(lives, events),
        _recoveries(generations, events),
        binned(slices, BINS),
        ahead,
    )


def _generations(events: Iterable[JobEvent]) -> tuple[Formed, ...]:
    """The generations, each from the first node that noted it."""
    found: dict[int, Formed] = {}
    for event in events:
        if event.kind is Kind.WORLD and event.generation not in found:
            nodes, workers = (event.counts.get(name, 0) for name in ("nodes", "workers"))
            found[event.generation] = Formed(event.generation, event.at, event.cause, nodes, workers)
    return tuple(found[number] for number in sorted(found))


def _causes(generations: Sequence[Formed], events: Iterable[JobEvent]) -> tuple[tuple[str, int], ...]:
    """Counts the causes for which generations ended, that of the last generation's failure included."""
    counted = Counter(one.cause or "unknown" for one in generations if one.cause != _START)
    last = max((one.generation for one in generations), default=0)
    final = [event.cause for event in events if event.kind is Kind.FAILURE and event.generation >= last]
    counted.update(cause or "unknown" for cause in final[:1])
    return tuple(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def _nodes(lives: Iterable[Life], events: Sequence[JobEvent]) -> tuple[NodeFigures, ...]:
    starts = Counter(life.node for life in lives)
    ended = _ended(events)
    failures = Counter(node for (_, node), cause in ended.items() if cause != HANG)
    hangs = Counter(node for (_, node), cause in ended.items() if cause == HANG)
    lost = {(e.generation, e.about) for e in events if e.kind is Kind.WORLD and e.about and e.cause == _LOST}
    losses = Counter(node for _, node in lost)
    excluded = {(e.about, e.counts.get("times", 0)) for e in events if e.kind is Kind.EXCLUSION and e.about}
    exclusions = Counter(node for node, _ in excluded)
    straggling = _straggling(lives)
    found = [
        NodeFigures(
            *(node, starts[node], failures[node], losses[node]),
            *(hangs[node], exclusions[node], straggling[node]),
        )
        for node in starts | failures | losses | hangs | exclusions | straggling
    ]
    return tuple(sorted(found, key=lambda node: (*(-number for number in node.trouble), node.node)))


def _ended(events: Sequence[JobEvent]) -> dict[tuple[int, str], str]:
    """The cause of each failure that ended a generation, by generation and node to blame. If no worker has failed, as
    in a hang, the failure names no node; the next world or the end of the job names it then."""
    why = {event.generation: event.cause for event in events if event.kind is Kind.FAILURE}
    found = {}
    for event in events:
        ended = event.generation - 1 if event.kind is Kind.WORLD else event.generation
        if event.kind is Kind.WORLD and event.cause != why.get(ended):
            continue
        if event.about and ended in why and event.kind in (Kind.FAILURE, Kind.WORLD, Kind.JOB_ENDED):
            found[ended, event.about] = why[ended]
    return found


def _straggling(lives: Iterable[Life]) -> Counter[str]:
    """How often a rank of each node became slower than the others, as counted by the node that noted it most often."""
    noted: dict[str, Counter[str]] = {}
    for life in lives:
        here = noted.setdefault(life.node, Counter())
        here.update(e.about for e in life.events if e.kind is Kind.STRAGGLER and e.about and e.cause == _SLOW)
    most: Counter[str] = Counter()
    for counted in noted.values():
        most |= counted
    return most


def _recoveries(generations: Iterable[Formed], events: Iterable[JobEvent]) -> tuple[JobRecovery, ...]:
    causes = {one.generation: one.cause for one in generations}
    longest: dict[int, JobRecovery] = {}
    for event in events:
        if event.kind is Kind.RECOVERY:
            phases = {
                phase: event.seconds[phase.value] for phase in RESTARTING if phase.value in event.seconds
            }
            cause = causes.get(event.generation, event.cause)
            one = JobRecovery(event.generation, event.at, cause, event.node, phases)
            known = longest.get(event.generation)
            if known is None or one.duration_s > known.duration_s:
                longest[event.generation] = one
    slowest = sorted(longest.values(), key=lambda one: (-one.duration_s, one.generation))
    return tuple(slowest[:MOST_RECOVERIES])
