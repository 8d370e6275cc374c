#!/usr/bin/env python3
"""Measure what faults and planned changes cost a training, and what it needs: torchrun, torchft and elastic-agent.

Each *run* starts one *system* on its training job, waits until the training is steady, injects the fault of one
*scenario* and reads what it cost from the lines that the job writes; `recovery_figures.py` says how. A run may also
fail, which is a result: *hung* (no new world that lasts within the limit), *died* (all agents that should go on have
exited), or *unsteady* (there was no steady training to disturb, so the fault was never injected). A scenario without a
fault measures memory and processor time of the steady training.

There is only one run at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from recovery_costs import family, processor_s, pss_mb, spent_s
from recovery_figures import Recovery, Run, figures_of, is_steady, recovery, table, timeline_list, timelines
from recovery_job import AIM_S, START_LIMIT_S, Job, marked, why_no_networks
from recovery_scenarios import GOALS, SCENARIOS, Scenario
from recovery_systems import CHECKPOINT_EVERY, OURS, OURS_LIBRARY, SYSTEMS, TORCHFT, System, torchft_version
from report import add_options, keep, publish

STEADY_STEPS = 200
"""Steps before the fault: time for keep-alives to settle and for spare processes to get ready. Each repetition adds
its own part of a checkpoint interval, the same one for every system, as the steps to redo depend on it."""
LASTING_STEPS = 50
"""A world that falls apart sooner was no recovery."""
WATCH_S = 0.5
"""Between two looks after the fault: all results come from the instants in the lines, and looking takes time from the
others."""
IDLE_S = 60.0
"""For so long the processor time of a steady training is counted."""


def measure(
    scenario: Scenario, system: System, repetition: int, limit_s: float | None, logs: Path | None
) -> Run:
    load = os.getloadavg()[0]
    phase = random.Random(f"{scenario.name} {repetition}").randrange(CHECKPOINT_EVERY)
    with Job(scenario.setting, system) as job:
        job.start()

        def steady() -> bool:
            return is_steady(job.steps, scenario.world_size, STEADY_STEPS + phase)

        if scenario.world_size and not job.wait(steady, START_LIMIT_S, AIM_S):
            outcome, figures = "unsteady", {}
        elif scenario.fault is None:
            outcome, figures = "measured", footprint(job)
        else:
            fault_s = scenario.fault(job, repetition)
            result = watch(job, fault_s, scenario.world_size_after, limit_s or system.limit_s)
            outcome = "recovered" if result else "died" if job.is_dead() else "hung"
            figures = figures_of(result) if result else {}
        told = tuple(timelines(log.read_text(errors="replace") for log in job.logs()))
        if logs is not None:
            kept = logs / f"{scenario.name}.{system.name.replace(' ', '-')}.{repetition}.{outcome}"
            kept.mkdir(parents=True, exist_ok=True)
            for file in [*job.logs(), job.directory / "steps"]:
                shutil.copy(file, kept)
    return Run(scenario.name, system.name, repetition, outcome, figures, load, told)


def watch(job: Job, fault_s: float, world_size: int, limit_s: float) -> Recovery | None:
    """What the fault cost; None if no new world that lasts came within the limit."""
    result: Recovery | None = None

    def recovered() -> bool:
        nonlocal result
        result = recovery(job.steps, fault_s, world_size, LASTING_STEPS)
        return result is not None

    job.wait(recovered, limit_s, WATCH_S)
    return result


def footprint(job: Job) -> dict[str, float]:
    """Of the only node."""
    (node,) = job.nodes
    agents = [agent.pid for agent in node.agents]
    memory = {"agent_mb": pss_mb(agents), "node_mb": pss_mb(node.processes())}

    def beside_the_workers() -> dict[int, float]:
        workers = family({step.pid for step in job.steps})
        return processor_s(pid for pid in node.processes() if pid not in workers)

    before, since_s = beside_the_workers(), time.monotonic()
    until_s = since_s + IDLE_S
    job.wait(lambda: time.monotonic() > until_s, 2 * IDLE_S, WATCH_S)
    after = beside_the_workers()
    return {**memory, "idle_cpu": spent_s(before, after) * 60.0 / (time.monotonic() - since_s)}


# --- The command


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the run are ended
    if others := marked():
        raise SystemExit(f"another benchmark is running (processes {others}): wait for it, or end them")
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in args.scenario]
    systems = [system for system in SYSTEMS if system.name in args.system]
    missing = _missing(scenarios, systems)
    for (scenario, system), why in missing.items():
        print(f"{scenario:12} {system:21} not run: {why}", flush=True)
    runs: list[Run] = []
    for scenario, system, repetition in _plan(scenarios, systems, args.repeat):
        if (scenario.name, system.name) in missing:
            continue
        run = measure(scenario, system, repetition, args.limit_s, args.logs)
        runs.append(run)
        measured = ", ".join(f"{name} {value:.2f}" for name, value in run.figures.items())
        print(f"{run.scenario:12} {run.system:21} {run.outcome:10} {measured}", flush=True)
        for line in run.timeline:
            print(f"{'':12} {line}", flush=True)
        keep(runs, args.json)
    titles = {scenario.name: scenario.title for scenario in SCENARIOS}
    limit = f", limit {args.limit_s:g} s" if args.limit_s else ""
    torchft = f"; torchft {torchft_version()}" if any(run.system == TORCHFT for run in runs) else ""
    ours = (OURS, OURS_LIBRARY)
    result = table(runs, titles, [system.name for system in SYSTEMS], ours, GOALS)
    told = timeline_list([run for run in runs if run.system in ours], titles)
    if told:
        result += f"\n\nWhere the time went in the median run of each, as the agents' logs say:\n\n{told}"
    publish(result, f"{args.repeat} runs of each{limit}{torchft}", args.markdown, "table")


def _missing(scenarios: Sequence[Scenario], systems: Sequence[System]) -> dict[tuple[str, str], str]:
    """What cannot be run here, by scenario and system, and why."""
    no_networks = why_no_networks() if any(scenario.setting.own_networks for scenario in scenarios) else ""
    missing = {}
    for scenario in scenarios:
        for system in systems:
            why = (scenario.setting.own_networks and no_networks) or system.missing(scenario.setting)
            if why:
                missing[scenario.name, system.name] = why
    return missing


def _plan(
    scenarios: Sequence[Scenario], systems: Sequence[System], repetitions: int
) -> Iterator[tuple[Scenario, System, int]]:
    """Repetitions outermost, and another system first in each: a slow quarter of an hour hits all of them."""
    for repetition in range(repetitions):
        for scenario in scenarios:
            first = repetition % len(systems)
            for system in [*systems[first:], *systems[:first]]:
                yield scenario, system, repetition


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what faults and planned changes cost a training.")
    add_options(parser)
    scenarios, systems = [scenario.name for scenario in SCENARIOS], [system.name for system in SYSTEMS]
    parser.add_argument("--scenario", nargs="+", choices=scenarios, default=scenarios, help="only these")
    parser.add_argument("--system", nargs="+", choices=systems, default=systems, help="only these")
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help="hung after so long (default: 90, else 60)"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep what each run wrote: a folder for each"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
