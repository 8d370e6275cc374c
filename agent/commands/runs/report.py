"""`elastic-agent report RUN`: how a run spent its time, from the journals of all nodes' agents.

ETTR (effective training time ratio) is productive time over wall-clock time, as in the literature. Time in which the
workers do new steps is productive. Time in which they repeat steps is not, nor is time in which training stands still
for a save, a start, a restart or missing nodes. Steps that were lost and repeated are productive once.

A `Report` is a pure function of the journals, and is shown as lines for a person or as one JSON document. The command
reads files, asks no agent and changes nothing. The run may still go on.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ....rendezvous.statements.inquiry import HANG
from ....rendezvous.text import counted
from ...common.exits import CannotDo, ExitCode
from ...configuration.load import Settings
from ...configuration.parse import Group
from ...output.journal import JobEvent, Kind
from ..status import span
from .diagnose import folder_of, journals_in, run_command
from .lives import RESTARTING, STEPS_TELL, Life, Use, job_seconds, lives_of, stretches_of

MOST_RECOVERIES = 10
"""Only the slowest recoveries are listed."""
_LOST = "lost"
"""The cause of a world after a node was lost."""
_SLOW = "slow"
"""The cause of the event when a rank becomes a straggler; when it recovers, the event has another cause."""
_START = "start"
"""The cause of the first world."""


class ReportError(Exception):
    """There is nothing to report; the text says why, and what to do."""


TROUBLES = ("failures", "losses", "hangs", "exclusions", "straggling")
"""Of a node: generations that ended because a worker of it failed, it was lost, or a worker of it hung; how often it
was excluded, and ranks of it that became slower than the others. Each counts once, however many nodes noted it."""


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
    generations: tuple[JobEvent, ...]
    """How each was formed; `cause`: why the one before ended."""
    causes: tuple[tuple[str, int], ...]
    """Why generations ended, and how many did for that reason, the most frequent first."""
    nodes: Mapping[str, Counter[str]]
    """Lives of its agent (`starts`) and `TROUBLES` of each node, the worst first."""
    recoveries: tuple[JobEvent, ...]
    """How long training stood still before a generation, on the node that took longest, and for which cause: the
    slowest, at most MOST_RECOVERIES."""

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
    stretches = stretches_of(lives)
    if not stretches:
        raise ReportError(
            "the journals say nothing of how time was spent: the first account is a minute after the start"
        )
    end = min(max(one.ended_at for one in stretches), ends[-1].at if ends else math.inf)
    generations = _generations(events)
    return Report(
        run,
        ends[-1].cause if ends else "",
        min(*(one.began_at for one in stretches), end),
        end,
        job_seconds(stretches, end),
        generations,
        _causes(generations, events),
        _nodes(lives, events),
        _recoveries(generations, events),
    )


def duration_s(recovery: JobEvent) -> float:
    return sum(recovery.seconds.get(phase.value, 0.0) for phase in RESTARTING)


def _generations(events: Iterable[JobEvent]) -> tuple[JobEvent, ...]:
    """The generations, each from the first node that noted it."""
    found: dict[int, JobEvent] = {}
    for event in events:
        if event.kind is Kind.WORLD:
            found.setdefault(event.generation, event)
    return tuple(found[number] for number in sorted(found))


def _causes(generations: Sequence[JobEvent], events: Iterable[JobEvent]) -> tuple[tuple[str, int], ...]:
    """Counts the causes for which generations ended, that of the last generation's failure included."""
    counted = Counter(one.cause or "unknown" for one in generations if one.cause != _START)
    last = max((one.generation for one in generations), default=0)
    final = [event.cause for event in events if event.kind is Kind.FAILURE and event.generation >= last]
    counted.update(cause or "unknown" for cause in final[:1])
    return tuple(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def _nodes(lives: Iterable[Life], events: Sequence[JobEvent]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for life in lives:
        found[life.node]["starts"] += 1
    once: set[tuple[str, str, tuple[int, int | None]]] = {
        (about, "hangs" if cause == HANG else "failures", (generation, None))
        for (generation, about), cause in _ended(events).items()
    }
    for event in events:
        if event.kind is Kind.WORLD and event.cause == _LOST:
            once.add((event.about, "losses", (event.generation, None)))
        elif event.kind is Kind.EXCLUSION:
            once.add((event.about, "exclusions", (event.counts.get("times", 0), None)))
        elif event.kind is Kind.STRAGGLER and event.cause == _SLOW:
            once.add((event.about, "straggling", (event.generation, event.rank)))
    for about, trouble, _ in once:
        if about:
            found[about][trouble] += 1
    return dict(sorted(found.items(), key=lambda item: (_health(item[1]), item[0])))


def _health(node: Counter[str]) -> tuple[int, int]:
    """Less is worse."""
    ended = node["failures"] + node["losses"] + node["hangs"]
    return -ended, -(node["exclusions"] + node["straggling"])


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


def _recoveries(generations: Iterable[JobEvent], events: Iterable[JobEvent]) -> tuple[JobEvent, ...]:
    causes = {one.generation: one.cause for one in generations}
    longest: dict[int, JobEvent] = {}
    for event in events:
        known = longest.get(event.generation)
        if event.kind is Kind.RECOVERY and (known is None or duration_s(event) > duration_s(known)):
            longest[event.generation] = replace(event, cause=causes.get(event.generation, event.cause))
    slowest = sorted(longest.values(), key=lambda one: (-duration_s(one), one.generation))
    return tuple(slowest[:MOST_RECOVERIES])


SCHEMA = 2
"""The version of the JSON document."""
COLUMNS = ("starts", *TROUBLES)

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
    rows = [(node, *(counts[name] for name in COLUMNS)) for node, counts in report.nodes.items()]
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
    phases = [use for use in RESTARTING if any(use.value in one.seconds for one in report.recoveries)]
    heads = ("SLOWEST RECOVERIES", "CAUSE", "NODE", "SECONDS", *(NAMES[use].upper() for use in phases))
    rows = [
        (
            f"generation {one.generation}",
            one.cause,
            one.node,
            f"{duration_s(one):.2f}",
            *(f"{one.seconds[use.value]:.2f}" if use.value in one.seconds else "-" for use in phases),
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
    unknown = STEPS_TELL if report.ettr is None else ()
    return {
        "schema": SCHEMA,
        "run": report.run,
        "result": report.result,
        "began_at": report.began_at,
        "ended_at": report.ended_at,
        "wall_seconds": round(report.wall_s, 4),
        "ettr": report.ettr,
        "seconds": {
            use.value: None if use in unknown else round(spent, 4) for use, spent in report.seconds.items()
        },
        "restarting_seconds": round(report.restarting_s, 4),
        "generations": [
            {"generation": one.generation, "at": one.at, "cause": one.cause}
            | {name: one.counts.get(name, 0) for name in ("nodes", "workers")}
            for one in report.generations
        ],
        "causes": dict(report.causes),
        "nodes": [
            {"node": node, **{name: counts[name] for name in COLUMNS}}
            for node, counts in report.nodes.items()
        ],
        "slowest_recoveries": [
            {"generation": one.generation, "at": one.at, "cause": one.cause, "node": one.node}
            | {"seconds": round(duration_s(one), 4), "phases": one.seconds}
            for one in report.recoveries
        ],
    }


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


def _work(run: str | None, command_line: Settings) -> None:
    folder = folder_of("report", run, command_line)
    try:
        report = report_of(folder.resolve().name, journals_in(folder))
    except ReportError as error:
        raise CannotDo(ExitCode.NO_JOB, f"{folder}: {error}") from None
    shown = json.dumps(document(report)) if command_line[JSON].value else "\n".join(lines(report))
    print(shown, flush=True)
