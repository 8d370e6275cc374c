"""What the lines of a run say: recovery, outage and steps redone, their medians, and the tables of all runs.

Pure functions over plain data; `recovery.py` does the running. Instants are seconds of one monotonic clock.

- *recovery*: from the fault to the first step of the new world: the first world of the wanted size that holds a
  process that was not in it before, and that lasts;
- *outage*: the longest time around the fault in which nobody finished a step;
- *redone*: steps that had been finished before the fault and were done again.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from report import markdown, ratio, short, spread

# --- One run: from its lines to its figures


@dataclass(frozen=True, slots=True)
class Step:
    """One rank finished one step. `at_s` is an instant of the monotonic clock."""

    at_s: float
    step: int
    rank: int
    world_size: int
    generation: int
    pid: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Tells a process in the new world from one in the old, whatever numbers a system gives its worlds."""
        return self.pid, self.world_size, self.generation


@dataclass(frozen=True, slots=True)
class Recovery:
    recovery_s: float
    outage_s: float | None
    redone: int | None
    """These two are None if nothing ran before the event."""

    def __str__(self) -> str:
        rest = "" if self.redone is None else f", outage {self.outage_s:.2f} s, {self.redone} steps redone"
        return f"{self.recovery_s:.2f} s{rest}"


def parse_steps(text: str) -> list[Step]:
    rows = (line.split() for line in text.splitlines())
    return [Step(float(at), *map(int, numbers)) for at, *numbers in rows]


def is_steady(steps: Sequence[Step], world_size: int, wanted: int) -> bool:
    """Whether the process that was heard of last is in a world of this size and has finished so many steps there."""
    last = steps[-1] if steps else None
    return last is not None and last.world_size == world_size and _count(steps)[last.place] >= wanted


def recovery(steps: Sequence[Step], fault_s: float, world_size: int, lasting: int) -> Recovery | None:
    """What the fault cost, or None as long as no new world of `world_size` has finished `lasting` steps."""
    old_places = {step.place for step in steps if step.at_s <= fault_s}
    new = [step for step in steps if step.place not in old_places]
    counts = _count(new)
    lasts = [step for step in new if step.world_size == world_size and counts[step.place] >= lasting]
    if not lasts:
        return None
    recovery_s = min(step.at_s for step in lasts) - fault_s
    old = [step for step in steps if step.place in old_places]
    if not old:
        return Recovery(recovery_s, None, None)
    return Recovery(recovery_s, _longest_gap((step.at_s for step in steps), fault_s), _redone(old, new))


def _count(steps: Iterable[Step]) -> Counter[tuple[int, int, int]]:
    return Counter(step.place for step in steps)


def _longest_gap(instants: Iterable[float], since_s: float) -> float:
    """The longest time between two neighbours of which the later is after `since_s`."""
    return max(later - earlier for earlier, later in itertools.pairwise(sorted(instants)) if later > since_s)


def _redone(old: Sequence[Step], new: Sequence[Step]) -> int:
    """How often the new worlds did a step that had been done: the ranks of one world do a step once, together."""
    seen = {step.step for step in old}
    times: Counter[int] = Counter()
    for (number, _rank), count in Counter((step.step, step.rank) for step in new).items():
        times[number] = max(times[number], count)
    return sum(count - (number not in seen) for number, count in times.items())


def timelines(logs: Iterable[str]) -> list[str]:
    """What elastic-agents say of their recoveries, each log's last line of that, without who says it."""
    found = (
        re.findall(r"generation \d+: first step is \d+, after (.* s without training \([^)]*\))", log)[-1:]
        for log in logs
    )
    return [line for lines in found for line in lines]


@dataclass(frozen=True, slots=True)
class Run:
    scenario: str
    system: str
    repetition: int
    outcome: str
    """recovered or measured; or hung, died, unsteady."""
    figures: Mapping[str, float]
    """By the names in `FIGURES`; empty if there was nothing to measure."""
    load: float
    """The machine's load average as the run began."""
    timeline: tuple[str, ...] = ()
    """The agents' own words on where the time went, one line for each."""


def figures_of(result: Recovery) -> dict[str, float]:
    named = {"recovery": result.recovery_s, "outage": result.outage_s, "redone": result.redone}
    return {name: value for name, value in named.items() if value is not None}


# --- All runs: medians and the tables


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    has_ratio: bool = True


FIGURES: Mapping[str, Figure] = {
    "recovery": Figure("to the first new step, s"),
    "outage": Figure("outage, s"),
    "redone": Figure("steps redone", has_ratio=False),
    "agent_mb": Figure("agent alone, MB"),
    "node_mb": Figure("whole node, MB"),
    "idle_cpu": Figure("processor beside the workers, s a minute"),
}


def table(
    runs: Sequence[Run],
    scenarios: Mapping[str, str],
    systems: Sequence[str],
    ours: Sequence[str],
    goals: Mapping[tuple[str, str], str],
) -> str:
    """Markdown: a row for each scenario and figure, a column for each system, and theirs divided by ours.

    `ours` are variants of one system, the one to compare with last. `scenarios` maps names to titles; it and `systems`
    give the order. What no run tells anything of is left out.
    """
    systems = [name for name in systems if any(run.system == name for run in runs)]
    best = next((name for name in reversed(ours) if name in systems), None)
    others = [name for name in systems if best is not None and name not in ours]
    rows = [["scenario", "what", *systems, *(f"{name} / ours" for name in others), "goal"]]
    for scenario, title in scenarios.items():
        chosen = {
            name: [run for run in runs if (run.scenario, run.system) == (scenario, name)] for name in systems
        }
        known = {name for ran in chosen.values() for run in ran for name in run.figures}
        if any(chosen.values()) and not known:
            known = {"recovery"}  # where nobody recovered, that is to be seen
        for name, figure in FIGURES.items():
            if name not in known:
                continue
            values = {system: _values(chosen[system], name) for system in systems}
            cells = [_cell(values[system], chosen[system]) for system in systems]
            ratios = [
                ratio(values[other], values[best]) or "-" if best and figure.has_ratio else ""
                for other in others
            ]
            rows.append([title, figure.title, *cells, *ratios, goals.get((scenario, name), "")])
    return markdown(rows)


def timeline_list(runs: Sequence[Run], scenarios: Mapping[str, str]) -> str:
    """Markdown: what the agents said of the median run of each scenario, those of the slowest agent first."""
    lines = []
    for scenario, title in scenarios.items():
        told = sorted(
            (run for run in runs if run.scenario == scenario and run.timeline and "recovery" in run.figures),
            key=lambda run: run.figures["recovery"],
        )
        if told:
            median = told[(len(told) - 1) // 2]
            seen = f"{short(median.figures['recovery'])} s as the benchmark saw it"
            lines.append(f"- {title} ({median.system}, {seen}): {max(median.timeline, key=len)}")
    return "\n".join(lines)


def _values(runs: Iterable[Run], name: str) -> list[float]:
    return [run.figures[name] for run in runs if name in run.figures]


def _cell(values: Sequence[float], runs: Sequence[Run]) -> str:
    return spread(values, Counter(run.outcome for run in runs if not run.figures), len(runs))
