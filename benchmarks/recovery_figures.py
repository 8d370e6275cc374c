"""What the lines of a run say: recovery, outage and steps redone, their medians, and the table of all runs.

Pure functions over plain data; `recovery.py` does the running. Instants are seconds of one monotonic clock.

- *recovery*: from the fault to the first step of the new world: the first world of the wanted size that holds a
  process that was not in it before, and that lasts;
- *outage*: the longest time around the fault in which nobody finished a step;
- *redone*: steps that had been finished before the fault and were done again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from report import markdown, ratio, spread

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
    def place(self) -> tuple[int, int]:
        """Tells a process in the new world from one in the old, whatever numbers a system gives its worlds."""
        return self.pid, self.world_size


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


def _count(steps: Iterable[Step]) -> Counter[tuple[int, int]]:
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


@dataclass(frozen=True, slots=True)
class Run:
    scenario: str
    system: str
    repetition: int
    outcome: str
    """recovered, hung, died or unsteady."""
    result: Recovery | None
    load: float
    """The machine's load average as the run began."""


# --- All runs: medians and the table

RECOVERY = "to the first new step, s"
OUTAGE = "outage, s"
TIMES = (RECOVERY, OUTAGE)
METRICS: Mapping[str, Callable[[Recovery], float | None]] = {
    RECOVERY: lambda result: result.recovery_s,
    OUTAGE: lambda result: result.outage_s,
    "steps redone": lambda result: result.redone,
}


def table(runs: Sequence[Run], scenarios: Mapping[str, str], systems: Sequence[str], ours: str) -> str:
    """Markdown: a row for each scenario and metric, a column for each system, and theirs divided by `ours`.

    `scenarios` maps names to titles; it and `systems` give the order. What no run tells anything of is left out.
    """
    systems = [name for name in systems if any(run.system == name for run in runs)]
    others = [name for name in systems if name != ours and ours in systems]
    rows = [["scenario", "what", *systems, *(f"{name} / ours" for name in others)]]
    for scenario, title in scenarios.items():
        chosen = {
            name: [run for run in runs if (run.scenario, run.system) == (scenario, name)] for name in systems
        }
        for metric, value_of in METRICS.items():
            values = {name: _values(chosen[name], value_of) for name in systems}
            if not any(values.values()) and (metric != RECOVERY or not any(chosen.values())):
                continue
            cells = [_cell(values[name], chosen[name]) for name in systems]
            ratios = [ratio(values[name], values[ours]) or "-" if metric in TIMES else "" for name in others]
            rows.append([title, metric, *cells, *ratios])
    return markdown(rows)


def _values(runs: Iterable[Run], value_of: Callable[[Recovery], float | None]) -> list[float]:
    values = (value_of(run.result) for run in runs if run.result is not None)
    return [value for value in values if value is not None]


def _cell(values: Sequence[float], runs: Sequence[Run]) -> str:
    return spread(values, Counter(run.outcome for run in runs if run.result is None), len(runs))
