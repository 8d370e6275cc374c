"""What the benchmarks have in common: their options, where and how they write results, and their tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

README = Path(__file__).with_name("README.md")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run here")
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="?",
        const=README,
        metavar="FILE",
        help="put the table here (README.md)",
    )


def machine() -> dict[str, object]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "elastic-agent": metadata.version("elastic-agent"),
        "date": datetime.date.today().isoformat(),
    }


def keep(runs: Sequence[Any], file: Path | None) -> None:
    """Call it after each run, a dataclass, so that a broken night leaves what it has."""
    if file is not None:
        file.write_text(json.dumps({"machine": machine(), "runs": [asdict(run) for run in runs]}, indent=1))


def publish(table: str, how: str, document: Path | None, place: str) -> None:
    """Print the table, and put it into the document's place of this name, with the machine and `how` it was made."""
    print(table)
    if document is not None:
        where = ", ".join(f"{name} {value}" for name, value in machine().items())
        document.write_text(insert(document.read_text(), f"{where}; {how}.\n\n{table}", place))


def insert(document: str, text: str, place: str) -> str:
    """The document with this text between its two markers. Raises `ValueError` if it has none."""
    first, last = (f"<!-- {place}: {end} -->" for end in ("begin", "end"))
    before, begin, rest = document.partition(first)
    _old, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"nowhere to put the table: the document needs the lines {first} and {last}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = ["-" * width for width in widths]
    texts = (
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (rows[0], line, *rows[1:])
    )
    return "\n".join(f"| {text} |" for text in texts)


def spread(values: Sequence[float], failures: Mapping[str, int], runs: int) -> str:
    """Median, smallest to largest, and what went wrong in so many runs: `7.0 (6.5-8.1), 1 of 4 hung`."""
    parts = (
        [f"{short(statistics.median(values))} ({short(min(values))}-{short(max(values))})"] if values else []
    )
    parts += [f"{count} of {runs} {outcome}" for outcome, count in sorted(failures.items())]
    return ", ".join(parts)


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Of the medians, empty without one: a run that failed has no time, so read it together with the failures."""
    return f"{short(statistics.median(theirs) / statistics.median(ours))}x" if theirs and ours else ""


def short(value: float) -> str:
    """Two digits or so: more would pretend that runs repeat better than they do."""
    if value >= 10 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"
