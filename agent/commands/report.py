"""`elastic-agent report RUN`: how a run spent its time, from the journals of all nodes' agents.

ETTR (effective training time ratio) is productive time over wall-clock time, as in the literature. Time in which the
workers do new steps is productive. Time in which they repeat steps is not, nor is time in which training stands still
for a save, a start, a restart or missing nodes. Steps that were lost and repeated are productive once.

A *life* is one agent from its start to its end. An account has the seconds of each activity since the start of the
life, so the lengths come from the accounts alone: events that are missing (disk full, file replaced) lose no second.
The wall clock is only used for the begin of the life: the earliest instant that any of its accounts allows. An account
is written whenever workers begin or cease to step, so what lies between two of them is taken for an even mixture. The
time after the last account of a life is unknown.

A second of the job is one second, however many nodes it has: each instant is divided as on the average of the nodes. A
node that waits for a world counts only while all nodes wait: a spare, or a node that came early, costs the job nothing.
Training stands still for a save of any node, so the slowest save counts.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...rendezvous.text import counted
from ..common.exits import CannotDo, ExitCode
from ..configuration.load import Settings
from ..configuration.parse import OptionGroup
from ..observability.training_account import BEGUN, PHASES, Activity
from ..output.journal import EventKind, JobEvent
from .command import columns, run_command
from .runs import WHAT_RUN, WHERE, folder_of_run, journals_in
from .status import span

SAVING, RUNNING, ABSENT = "saving", "running", "absent"
"""Beside the activities: training stood still for a save; the scripts ran in a job that reports no steps, so that what
of it was productive is not known; no agent has an account of this time."""

PRODUCTIVE, REDONE, WAITING = Activity.PRODUCTIVE.value, Activity.RECOMPUTE.value, Activity.WAITING.value
BLOCKED = "blocked"
"""In an account, and no activity: the part of them for which training stood still for saves."""
RESTARTING = tuple(phase.value for phase in PHASES)

NAMES = {
    PRODUCTIVE: "productive",
    REDONE: "done again",
    SAVING: "saving",
    RUNNING: "running (no steps reported)",
    **{phase: phase for phase in RESTARTING},
    Activity.BACKOFF.value: "back-off",
    Activity.FIRST_STEP.value: "first step",
    WAITING: "waiting for nodes",
    ABSENT: "no agent",
}
"""Each use of time, in words. Saves take of productive time first, which is before that of steps done again."""
STEPS_TELL = (PRODUCTIVE, REDONE, SAVING)
"""What is known of a job that reports steps alone."""

_SLOW = "slow"
"""The cause of the event when a rank becomes a straggler; when it recovers, the event has another cause."""
_START = "start"
"""The cause of the first world."""
_KEPT = (EventKind.WORLD, EventKind.FAILURE, EventKind.EXCLUSION, EventKind.STRAGGLER, EventKind.JOB_ENDED)

Trouble = tuple[str, str]
"""A cause, and the node that it is put down to; empty: none."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Time of one node between two accounts. Instants are of the node's wall clock."""

    began_at: float
    ended_at: float
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of each activity; empty: it waited for a world."""
    saving: float = 0.0
    """The share in which training stood still for saves."""


@dataclass(frozen=True, slots=True)
class Report:
    """Instants are seconds since the epoch."""

    run: str
    result: str
    """If no journal has one: stopped, if all agents have ended by themselves, as of a job of a pool that was cancelled;
    else empty, as the run goes on, or its last agents were killed."""
    began_at: float
    ended_at: float
    """The time of the last account."""
    seconds: Mapping[str, float]
    """The seconds of each use; they add up to `wall_s`."""
    nodes: int
    generations: int
    troubles: Mapping[Trouble, int]
    """Why generations ended, nodes were excluded and ranks were slow, and how often each was so, the most frequent
    first. Each counts once, however many nodes noted it."""

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
        return self.seconds[PRODUCTIVE] / self.wall_s if stepped else None


# --- From journals to a report


def report_of(run: str, journals: Iterable[Iterable[JobEvent]]) -> Report | None:
    """`journals` has one journal for each node. None: they say nothing of how time was spent."""
    of_nodes = [list(_lives(journal)) for journal in journals]
    lives = [life for of_node in of_nodes for life in of_node]
    intervals = [interval for life in lives for interval in intervals_of(life)]
    if not intervals:
        return None
    kept = (event for life in lives for event in life if event.kind in _KEPT)
    events = sorted(kept, key=lambda event: event.at)
    all_left = all(of_node[-1][-1].kind is EventKind.AGENT_ENDED for of_node in of_nodes if of_node)
    ends = [event for event in events if event.kind is EventKind.JOB_ENDED]
    end = min(max(one.ended_at for one in intervals), ends[-1].at if ends else math.inf)
    worlds = {event.generation: event for event in reversed(events) if event.kind is EventKind.WORLD}
    return Report(
        run,
        ends[-1].cause if ends else "stopped" if all_left else "",
        min(*(one.began_at for one in intervals), end),
        end,
        job_seconds(intervals, end),
        len({life[0].node for life in lives}),
        len(worlds),
        _troubles(worlds, events),
    )


def _lives(journal: Iterable[JobEvent]) -> Iterator[list[JobEvent]]:
    """The events of one agent after the other."""
    life: list[JobEvent] = []
    for event in journal:
        if life and (event.kind is EventKind.AGENT_STARTED or event.number <= life[-1].number):
            yield life
            life = []
        life.append(event)
    if life:
        yield life


def intervals_of(life: Sequence[JobEvent]) -> Iterator[Interval]:
    """What its accounts say."""
    known = [activity.value for activity in Activity]
    accounts = [event for event in life if event.kind is EventKind.ACCOUNTING]
    at = min((one.at - sum(one.seconds.get(use, 0.0) for use in known) for one in accounts), default=0.0)
    before: Mapping[str, float] = {}
    for event in accounts:
        part = {
            use: max(0.0, event.seconds.get(use, 0.0) - before.get(use, 0.0)) for use in (*known, BLOCKED)
        }
        waited_s, blocked_s = part.pop(WAITING), part.pop(BLOCKED)
        busy_s = sum(part.values())
        if waited_s:
            yield Interval(at, at + waited_s)
        at += waited_s
        if busy_s:
            shares = {use: spent / busy_s for use, spent in part.items()}
            yield Interval(at, at + busy_s, shares, min(1.0, blocked_s / busy_s))
        at += busy_s
        before = event.seconds


def job_seconds(intervals: Sequence[Interval], end: float) -> dict[str, float]:
    """How a job spent its time up to the instant `end`, by the intervals of its nodes."""
    seconds = dict.fromkeys(NAMES, 0.0)
    ends = ((interval, at, change) for interval in intervals for at, change in _ends(interval))
    changes = sorted(
        ((min(at, end), change, interval) for interval, at, change in ends), key=lambda one: one[0]
    )
    busy = waiting = 0
    """Nodes."""
    present = dict.fromkeys(NAMES, 0.0)
    """The sum of the shares of those that are busy."""
    saves: list[tuple[float, float]] = []
    """A heap of negative share of saves, and end. Ended entries are removed once they are on top."""
    before = changes[0][0] if changes else 0.0
    for at, change, interval in changes:
        if at > before:
            while saves and saves[0][1] <= before:
                heapq.heappop(saves)
            if busy:
                left_s = -saves[0][0] * (at - before) if saves else 0.0
                for use, share in present.items():
                    spent_s = max(0.0, share) * (at - before) / busy
                    saved_s = min(left_s, spent_s) if use in STEPS_TELL else 0.0
                    left_s -= saved_s
                    seconds[use] += spent_s - saved_s
                    seconds[SAVING] += saved_s
            else:
                seconds[WAITING if waiting else ABSENT] += at - before
        before = at
        if not interval.shares:
            waiting += change
            continue
        busy += change
        for use, share in interval.shares.items():
            present[use] += change * share
        if change > 0 and interval.saving:
            heapq.heappush(saves, (-interval.saving, interval.ended_at))
    if not any(seconds[use] for use in STEPS_TELL):
        for phase in BEGUN:
            seconds[RUNNING] += seconds[phase.value]
            seconds[phase.value] = 0.0
    return seconds


def _ends(interval: Interval) -> tuple[tuple[float, int], tuple[float, int]]:
    return (interval.began_at, 1), (interval.ended_at, -1)


def _troubles(worlds: Mapping[int, JobEvent], events: Iterable[JobEvent]) -> Mapping[Trouble, int]:
    once: set[tuple[Trouble, int, int | None]] = {
        ((one.cause or "unknown", one.about), one.generation, None)
        for one in worlds.values()
        if one.cause != _START
    }
    last: JobEvent | None = None
    for event in events:
        if event.kind is EventKind.EXCLUSION:
            once.add((("excluded", event.about), event.counts.get("times", 0), None))
        elif event.kind is EventKind.STRAGGLER and event.cause == _SLOW:
            once.add(((_SLOW, event.about), event.generation, event.rank))
        elif event.kind is EventKind.FAILURE and event.generation >= max(worlds, default=0):
            last = last or event
        elif event.kind is EventKind.JOB_ENDED and last is not None and not last.about:
            last = replace(last, about=event.about)  # as of a hang, which no worker's end tells
    if last is not None:
        once.add(((last.cause or "unknown", last.about), last.generation + 1, None))
    found = Counter(trouble for trouble, _, _ in once)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


# --- What is shown


def lines(report: Report) -> Iterator[str]:
    state = report.result or "goes on, or was killed"
    counts = f"{counted(report.nodes, 'node')}, {counted(report.generations, 'generation')}"
    yield f"run {report.run}: {state}, {span(report.wall_s)}, {counts}"
    if report.ettr is not None:
        yield f"ETTR {report.ettr:.4f}: productive time / wall-clock time"
    else:
        yield "ETTR unknown: no steps were reported (elastic_agent.worker.step)"
    yield ""
    yield from _hours(report)
    if report.troubles:
        yield ""
        rows = [(cause, node or "-", str(times)) for (cause, node), times in report.troubles.items()]
        yield from columns([("WHAT HAPPENED", "NODE", "TIMES"), *rows])


def _hours(report: Report) -> Iterator[str]:
    def row(name: str, seconds: float) -> str:
        return f"  {name:<28}{span(seconds):>12}{seconds / (report.wall_s or 1.0):>9.1%}"

    for use, seconds in report.seconds.items():
        if use == RESTARTING[0]:
            yield row("starting, restarting", report.restarting_s)
        if report.ettr is None and use in STEPS_TELL:
            yield f"  {NAMES[use]:<28}{'unknown':>12}"
        elif use in RESTARTING and seconds:
            yield row(f"  {NAMES[use]}", seconds)
        elif seconds or use not in (*RESTARTING, RUNNING):
            yield row(NAMES[use], seconds)
    yield row("wall-clock", report.wall_s)


SCHEMA = 4
"""The version of the JSON document."""


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
        "seconds": {use: None if use in unknown else round(s, 4) for use, s in report.seconds.items()},
        "restarting_seconds": round(report.restarting_s, 4),
        "nodes": report.nodes,
        "generations": report.generations,
        "troubles": [
            {"cause": cause, "node": node, "times": times} for (cause, node), times in report.troubles.items()
        ],
    }


_USAGE = f"""\
usage: elastic-agent report [RUN] [--json] [--log-dir DIR]

Shows how a run spent its time, its ETTR, and what ended its generations and on which node. The journals of all nodes
should be there: copy those that are on other disks into the folder. {WHAT_RUN}
"""

REPORT_OPTIONS = OptionGroup("report")
JSON = REPORT_OPTIONS.flag("json", "one JSON document instead of text")


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return run_command("report", words, _USAGE, [*REPORT_OPTIONS, WHERE], _show, takes="[RUN]")


def _show(run: str, command_line: Settings) -> None:
    with folder_of_run(run, command_line) as folder:
        report = report_of(folder.resolve().name, journals_in(folder))
    if report is None:
        reason = (
            "the journals say nothing of how time was spent: the first account is a minute after the start"
        )
        raise CannotDo(ExitCode.NO_JOB, f"{folder}: {reason}")
    shown = json.dumps(document(report)) if command_line[JSON].value else "\n".join(lines(report))
    print(shown, flush=True)
