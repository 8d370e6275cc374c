#!/usr/bin/env python3
"""Measure how long a pool's coordinator takes to decide who runs what: 100 nodes, 1,000 jobs in the queue.

A decision is `decide`, with the view of the store's records that it is made from. Each case decides on the empty
plan and on the plan that this gives, and keeps the slower of the two, the median of its repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_agent.pool.records import Job, Plan, PoolNode, PoolView, Record
from elastic_agent.pool.schedule import decide
from elastic_agent.rendezvous.store.interface import Change, Entry
from report import add_options, keep, markdown, publish, ratio, spread

GOAL_MS = 20.0
NODES = 100
JOBS = 1000
TIMES = 15
NOW = 1e9

CASES: Mapping[str, list[tuple[int, int]]] = {
    "small jobs": [(1 + place % 4, 8) for place in range(JOBS)],
    "900 are too large for the pool": [(200, 200)] * 900 + [(2, 4)] * 100,
    "two take all nodes, the others wait": [(20, 100), (80, 80), *[(2, 4)] * (JOBS - 2)],
}
"""The least and the most nodes of each job, first come first."""


@dataclass(frozen=True, slots=True)
class Run:
    case: str
    first_ms: float
    """On the empty plan, where most allocations are given."""
    again_ms: float
    """On the plan that this gave."""
    allocations: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    options = parser.parse_args()
    runs: list[Run] = []
    for case in CASES:
        for _ in range(options.repeat):
            runs.append(measure(case, CASES[case]))
            print(runs[-1], file=sys.stderr)
            keep(runs, options.json)
    publish(table(runs), f"{options.repeat} runs of each", options.markdown, "schedule")


def measure(case: str, jobs: list[tuple[int, int]], nodes: int = NODES) -> Run:
    view = PoolView()
    records: list[Record] = [PoolNode(f"n{number}", f"n{number}-1") for number in range(nodes)]
    records += [_job(f"j{number}", least, most) for number, (least, most) in enumerate(jobs)]
    for revision, record in enumerate(records, 1):
        entry = Entry(record.key, record.to_json(), revision, revision)
        view.changed([Change(revision, record.key, entry)])
    first_ms, plan = _decide(view)
    view.plan = plan
    again_ms, _ = _decide(view)
    return Run(case, first_ms, again_ms, sum(len(run.allocations) for run in plan.runs))


def table(runs: list[Run]) -> str:
    rows = [["queue", "decision, ms", "goal, ms", "goal / decision"]]
    for case in dict.fromkeys(run.case for run in runs):
        here = [run for run in runs if run.case == case]
        slower = [max(run.first_ms, run.again_ms) for run in here]
        rows.append([case, spread(slower, {}, len(here)), f"{GOAL_MS:g}", ratio([GOAL_MS], slower)])
    return markdown(rows)


def _decide(view: PoolView) -> tuple[float, Plan]:
    took = []
    plan = view.plan
    for _ in range(TIMES):
        begun = time.perf_counter()
        decision = decide(view.pool(), NOW)
        took.append(time.perf_counter() - begun)
        plan = decision.plan if decision is not None else view.plan
    return statistics.median(took) * 1e3, plan


def _job(name: str, least: int, most: int) -> Job:
    return Job(
        job=name,
        name=name,
        options=(),
        command=("--", "train.py"),
        environment={},
        directory="/srv",
        min_nodes=least,
        max_nodes=most,
        submitted_at=NOW,
        submitted_by="user@host",
    )


if __name__ == "__main__":
    main()
