"""The report of a run: a pure function of the journals of all nodes.

ETTR (effective training time ratio) is productive time over wall-clock time, as in the literature. Time in which the
workers do new steps is productive. Time in which they repeat steps is not, nor is time in which training stands still
for a save, a start, a restart or missing nodes. Steps that were lost and repeated are productive once.

A `Report` as lines for a person, and as one JSON document.

`elastic-agent report RUN`: how a run spent its time, from the journals of its agents.

It reads files, asks no agent and changes nothing. The run may still go on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....rendezvous.statements.inquiry import HANG
from ....rendezvous.text import counted
from ...common.exits import ExitCode
from ...configuration.parse import Group
from ...configuration.settings import Settings
from ...output.journal import JobEvent, Kind
from ..status import span
from ..store_command import CannotDo
from .diagnose import journals_in, run_command
from .lives import (
    RESTARTING,
    STEPS_TELL,
    Life,
    Slice,
    Use,
    binned,
    job_time,
    lives_of,
    stretches_of,
    until,
)

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
    lives = [life for journal in journals for life in lives_of(journal)]
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
    for seen in noted.values():
        most |= seen
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


SCHEMA = 1
"""The version of the JSON document."""

NAMES = {
    Use.PRODUCTIVE: "productive",
    Use.REDONE: "done again",
    Use.SAVING: "saving",
    Use.RUNNING: "running (no steps reported)",
    Use.DETECT: "detect",
    Use.STOP: "stop",
    Use.RENDEZVOUS: "rendezvous",
    Use.BACKOFF: "back-off",
    Use.START: "start",
    Use.INIT: "init",
    Use.LOAD: "load",
    Use.FIRST_STEP: "first step",
    Use.DRAINING: "draining",
    Use.WAITING: "waiting for nodes",
    Use.ABSENT: "no agent",
}


def lines(report: Report) -> Iterator[str]:
    state = report.result or "goes on, or was killed"
    generations = counted(len(report.generations), "generation")
    yield (
        f"run {report.run}: {state}, {span(report.wall_s)}, {counted(len(report.nodes), 'node')}, {generations}"
    )
    if report.ettr is not None:
        yield f"ETTR {report.ettr:.4f}: productive time / wall-clock time"
    else:
        yield "ETTR unknown: no steps were reported (elastic_agent.worker.step)"
    yield ""
    yield from _hours(report)
    if report.causes:
        yield ""
        yield from _table(("GENERATIONS ENDED BY", ""), report.causes)
    yield ""
    heads = ("NODE", "STARTS", "FAILURES", "LOST", "HANGS", "EXCLUDED", "STRAGGLING")
    rows = [
        (one.node, one.starts, one.failures, one.losses, one.hangs, one.exclusions, one.straggling)
        for one in report.nodes
    ]
    yield from _table(heads, rows)
    if report.recoveries:
        yield ""
        yield from _slowest(report)


def _hours(report: Report) -> Iterator[str]:
    def row(name: str, seconds: float) -> str:
        return f"  {name:<28}{span(seconds):>12}{seconds / report.wall_s:>9.1%}"

    for use, seconds in report.seconds.items():
        if use is RESTARTING[0]:
            yield row("starting, restarting", report.restarting_s)
        if report.ettr is None and use in STEPS_TELL:
            yield f"  {NAMES[use]:<28}{'unknown':>12}"
        elif use in RESTARTING and seconds:
            yield row(f"  {NAMES[use]}", seconds)
        elif seconds or use not in (*RESTARTING, Use.RUNNING):
            yield row(NAMES[use], seconds)
    yield row("wall-clock", report.wall_s)


def _slowest(report: Report) -> Iterator[str]:
    phases = [use for use in RESTARTING if any(use in one.phases for one in report.recoveries)]
    heads = ("SLOWEST RECOVERIES", "CAUSE", "NODE", "SECONDS", *(NAMES[use].upper() for use in phases))
    rows = [
        (
            f"generation {one.generation}",
            one.cause,
            one.node,
            f"{one.duration_s:.2f}",
            *(f"{one.phases[use]:.2f}" if use in one.phases else "-" for use in phases),
        )
        for one in report.recoveries
    ]
    yield from _table(heads, rows)
    if report.ettr is None:
        yield "  the seconds are those until the scripts had begun again: no steps were reported"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Lines with aligned columns; columns of numbers are aligned right."""
    texts = [heads, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [
        all(text.replace(".", "").isdigit() or text == "-" for text in column[1:])
        for column in zip(*texts, strict=True)
    ]
    for row in texts:
        cells = (
            cell.rjust(width) if numbers else cell.ljust(width)
            for cell, width, numbers in zip(row, widths, right, strict=True)
        )
        yield "  ".join(cells).rstrip()


def document(report: Report) -> dict[str, object]:
    """As `--json` prints it. None: not known."""
    return {
        "schema": SCHEMA,
        "run": report.run,
        "result": report.result,
        "began_at": report.began_at,
        "ended_at": report.ended_at,
        "wall_seconds": round(report.wall_s, 4),
        "ettr": report.ettr,
        "seconds": _by_name(report.seconds)
        | (dict.fromkeys((use.value for use in STEPS_TELL), None) if report.ettr is None else {}),
        "restarting_seconds": round(report.restarting_s, 4),
        "generations": [
            {"generation": one.generation, "at": one.at, "cause": one.cause}
            | {"nodes": one.nodes, "workers": one.workers}
            for one in report.generations
        ],
        "causes": dict(report.causes),
        "nodes": [
            {"node": one.node, "starts": one.starts, "failures": one.failures, "losses": one.losses}
            | {"hangs": one.hangs, "exclusions": one.exclusions, "straggling": one.straggling}
            for one in report.nodes
        ],
        "slowest_recoveries": [
            {"generation": one.generation, "at": one.at, "cause": one.cause, "node": one.node}
            | {"seconds": round(one.duration_s, 4), "phases": _by_name(one.phases)}
            for one in report.recoveries
        ],
        "timeline": [
            {"began_at": one.began_at, "ended_at": one.ended_at, "seconds": _by_name(one.seconds)}
            for one in report.timeline
        ],
    }


def _by_name(seconds: Mapping[Use, float]) -> dict[str, float]:
    return {use.value: round(spent, 4) for use, spent in seconds.items()}


_USAGE = """\
usage: elastic-agent report [RUN] [--json] [--log-dir DIR]

Shows how a run spent its time, its ETTR, the worst nodes and the slowest recoveries. RUN is the folder of a run, or
the name of a job: then it is the newest run of that job below --log-dir, or where agents without one keep their files.
Without RUN it is the newest run there.
The journals of all nodes should be there: copy those that are on other disks into the folder.
"""


REPORT_OPTIONS = Group("report")
JSON = REPORT_OPTIONS.flag("json", "one JSON document instead of text")


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return run_command("report", words, _USAGE, REPORT_OPTIONS, _work)


def _work(folder: Path, command_line: Settings) -> None:
    report = _read(folder)
    shown = json.dumps(document(report)) if command_line[JSON].value else "\n".join(lines(report))
    print(shown, flush=True)


def _read(folder: Path) -> Report:
    """Raises CannotDo."""
    try:
        return report_of(folder.resolve().name, journals_in(folder))
    except ReportError as error:
        raise CannotDo(ExitCode.NO_JOB, f"{folder}: {error}") from None
