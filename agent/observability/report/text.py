"""A `Report` as lines for a person, and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ....rendezvous.text import counted
from ..status.text import span
from .lives import RESTARTING, STEPS_TELL, Use
from .report import Report

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
        yield from _recoveries(report)
    if report.clocks:
        ahead = ", ".join(f"{node} by {by_s:+.1f} s" for node, by_s in sorted(report.clocks.items()))
        yield ""
        yield f"clocks did not agree, and were moved back: {ahead}"


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


def _recoveries(report: Report) -> Iterator[str]:
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
        "clocks_ahead_seconds": dict(report.clocks),
    }


def _by_name(seconds: Mapping[Use, float]) -> dict[str, float]:
    return {use.value: round(spent, 4) for use, spent in seconds.items()}
