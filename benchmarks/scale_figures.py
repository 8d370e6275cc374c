"""What the runs of the scale benchmark say: medians, and the table of all runs. Pure functions over plain data."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from report import markdown, ratio, spread

THEIRS = "torchrun"
HEAD = (
    "nodes",
    "system",
    "join, s",
    "re-join, s",
    f"{THEIRS} / this",
    "writes per node",
    "KiB per node",
    "revisions",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One half of a run, over all nodes."""

    seconds: float
    requests: int
    writes: int
    """Those that were tried, also in vain."""
    revisions: int
    """Those that changed the store."""
    received: int
    """Bytes of keys and values that the store gave to the nodes."""


@dataclass(frozen=True, slots=True)
class Run:
    system: str
    nodes: int
    repetition: int
    outcome: str
    """done, hung or died."""
    parts: tuple[Part, ...]
    """The join, then the re-join; those that came to an end."""
    load: float
    """The machine's load average as the run began."""


def table(runs: Sequence[Run], systems: Sequence[str]) -> str:
    """Markdown: a row for each number of nodes and system. In the last columns: the join + the re-join."""
    rows: list[Sequence[str]] = [HEAD]
    for nodes in sorted({run.nodes for run in runs}):
        these = {name: [run for run in runs if (run.nodes, run.system) == (nodes, name)] for name in systems}
        for name, mine in these.items():
            if mine:
                rows.append([str(nodes), name, *_cells(mine, these.get(THEIRS, []))])
    return markdown(rows)


def medians(runs: Sequence[Run], part: int) -> Mapping[str, Mapping[int, float]]:
    """Seconds of the join (0) or the re-join (1), by system and number of nodes: what is plotted."""
    found: dict[str, dict[int, float]] = {}
    for run in sorted(runs, key=lambda run: run.nodes):
        mine = [other for other in runs if (other.system, other.nodes) == (run.system, run.nodes)]
        if values := _values(mine, part, lambda one: one.seconds):
            found.setdefault(run.system, {})[run.nodes] = statistics.median(values)
    return found


def _cells(mine: Sequence[Run], theirs: Sequence[Run]) -> list[str]:
    def per_node(what: Callable[[Part], float]) -> str:
        both = [_values(mine, part, what) for part in (0, 1)]
        return " + ".join(f"{statistics.median(values) / mine[0].nodes:.1f}" for values in both if values)

    revisions = [_values(mine, part, lambda one: one.revisions) for part in (0, 1)]
    ratios = [_ratio(theirs, mine, part) for part in (0, 1)]
    return [
        *(_seconds(mine, part) for part in (0, 1)),
        " and ".join(ratio for ratio in ratios if ratio) if theirs is not mine else "",
        per_node(lambda one: one.writes),
        per_node(lambda one: one.received / 1024),
        " + ".join(f"{statistics.median(values):.0f}" for values in revisions if values),
    ]


def _values(runs: Sequence[Run], part: int, what: Callable[[Part], float]) -> list[float]:
    return [what(run.parts[part]) for run in runs if len(run.parts) > part]


def _seconds(runs: Sequence[Run], part: int) -> str:
    """Of this part, and what went wrong in it: `0.31 (0.28-0.40), 1 of 3 hung`."""
    failures = Counter(run.outcome for run in runs if len(run.parts) == part and run.outcome != "done")
    return spread(_values(runs, part, lambda one: one.seconds), failures, len(runs))


def _ratio(theirs: Sequence[Run], ours: Sequence[Run], part: int) -> str:
    return ratio(*(_values(runs, part, lambda one: one.seconds) for runs in (theirs, ours)))
