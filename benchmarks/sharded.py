#!/usr/bin/env python3
"""Measure what checkpoints of sharded state cost, and what faults cost with them: FSDP2, gloo, CPU, agents on loopback.

Four scenarios, each next to its peer in the same run: how long a save holds up training, next to a copy of all tensors
within memory and to torch's `async_save`; a killed node of three, next to torch.distributed.checkpoint from disk under
the same agent; a node that leaves and one that joins; and steps per second with and without replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery_figures import Step, is_steady, recovery
from recovery_job import Job, Launch, Setting, kill
from report import add_options, keep, markdown, publish, ratio, spread

SCRIPT = Path(__file__).with_name("sharded_job.py")
OURS, DCP = "Checkpointer", "distributed.checkpoint from disk"
LIMIT_S = 120.0
LOOK_S = 0.02
STEADY = 35
"""Steps before a fault, which comes between two copies; after it the new world counts as one that lasts when it has
done half as many."""
COUNTED = 60
"""Steps whose time says how fast training is."""
THREE = Setting(1, 3, 3, 1)
KILL_GOAL_S, PLANNED_GOAL_S = 1.0, 0.6


@dataclass(frozen=True, slots=True)
class Run:
    scenario: str
    what: str
    megabytes: int
    """Of each rank, at the start."""
    load: float
    """Of the machine in the minute before."""
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class System:
    """What `recovery_job` asks of a system."""

    arguments: Sequence[str]
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    store: Callable[[int], list[str]] | None = None
    store_first: bool = True
    etcd: bool = False

    @property
    def commands(self) -> Callable[[Launch], list[list[str]]]:
        return self._commands

    def _commands(self, launch: Launch) -> list[list[str]]:
        setting = launch.setting
        words = [sys.executable, "-m", "elastic_agent", f"--nproc-per-node={setting.workers}", *self.options]
        if setting.max_nodes > 1:
            words += [f"--min-nodes={setting.min_nodes}", f"--max-nodes={setting.max_nodes}"]
            words += [f"--rdzv-endpoint={launch.endpoint}", "--rdzv-id=sharded"]
            words += [f"--node-id=node{launch.node}"]
        return [[*words, str(SCRIPT), str(launch.directory), *self.arguments]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--scenario", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[100], metavar="N", help="of each rank, for stalls"
    )
    options = parser.parse_args()
    runs: list[Run] = []
    for _ in range(options.repeat):
        for scenario in options.scenario:
            for megabytes in options.megabytes if scenario == "stall" else [100]:
                for run in SCENARIOS[scenario](megabytes):
                    print(run, file=sys.stderr)
                    runs.append(run)
                    keep(runs, options.json)
    loads = [run.load for run in runs]
    how = f"{options.repeat} runs of each, load {min(loads):.1f}-{max(loads):.1f}"
    publish(table(runs), how, options.markdown, "sharded")


# ---------------------------------------------------------------- scenarios


def stall(megabytes: int) -> list[Run]:
    load = os.getloadavg()[0]
    system = System((f"--megabytes={2 * megabytes}", "--saves"), store_first=False)
    with Job(Setting(1, 1, 1, 2), system) as job:
        job.start()
        _until(job, (job.directory / "saves").exists, "saves")
        measured = json.loads((job.directory / "saves").read_text())
    return [Run("stall", "saves", megabytes, load, measured)]


def killed(megabytes: int) -> list[Run]:
    return [_killed(megabytes, OURS, ()), _killed(megabytes, DCP, ("--dcp",))]


def _killed(megabytes: int, what: str, more: Sequence[str]) -> Run:
    load = os.getloadavg()[0]
    with Job(THREE, System((f"--megabytes={3 * megabytes}", *more))) as job:
        _train(job)
        fault_s = kill(job.pick_leaver().processes())
        figures = _recovered(job, fault_s, 2)
    return Run("killed", what, megabytes, load, figures)


def planned(megabytes: int) -> list[Run]:
    load = os.getloadavg()[0]
    with Job(THREE, System((f"--megabytes={3 * megabytes}",))) as job:
        _train(job)
        left_s = time.monotonic()
        job.pick_leaver().agents[0].terminate()
        left = _recovered(job, left_s, 2)
        joined_s = time.monotonic()
        job.start_node()
        joined = _recovered(job, joined_s, 3)
    return [
        Run("planned", "3 -> 2", megabytes, load, left),
        Run("planned", "2 -> 3", megabytes, load, joined),
    ]


def replicas(megabytes: int) -> list[Run]:
    return [_replicas(megabytes, number) for number in (0, 1)]


def _replicas(megabytes: int, number: int) -> Run:
    load = os.getloadavg()[0]
    system = System((f"--megabytes={3 * megabytes}", "--save-every=0"), (f"--memory-replicas={number}",))
    with Job(THREE, system) as job:
        _train(job)
        first = job.steps[-1]
        _until(job, lambda: job.steps[-1].step >= first.step + COUNTED, f"{COUNTED} steps")
        last = job.steps[-1]
        a_second = (last.step - first.step) / (last.at_s - first.at_s)
    return Run("replicas", f"{number}", megabytes, load, {"a_second": a_second})


SCENARIOS: Mapping[str, Callable[[int], list[Run]]] = {
    "stall": stall,
    "killed": killed,
    "planned": planned,
    "replicas": replicas,
}


def _train(job: Job) -> None:
    """Until all nodes have trained steadily."""
    job.start()
    _until(job, lambda: is_steady(job.steps, job.setting.nodes, STEADY), "steady training")


def _recovered(job: Job, fault_s: float, world_size: int) -> dict[str, float]:
    found = None

    def lasts() -> bool:
        nonlocal found
        found = recovery(job.steps, fault_s, world_size, STEADY // 2)
        return found is not None

    _until(job, lasts, f"new world of {world_size}")
    assert found is not None
    assert found.outage_s is not None
    assert found.redone is not None
    still_s = stood_still(job.steps)
    loads = [json.loads(line) for line in (job.directory / "loads").read_text().splitlines()]
    newest = [one for one in loads if one["generation"] == max(load["generation"] for load in loads)]
    return {
        "recovery_s": found.recovery_s,
        "outage_s": found.outage_s,
        "still_s": still_s,
        "redone": found.redone,
        "load_s": max(one["s"] for one in newest),
        "disk_mb": sum(one["disk_bytes"] for one in newest) / 1e6,
    }


def stood_still(steps: Sequence[Step]) -> float:
    """Seconds from the last step of the world before to the first one of the newest.

    Steps that come late before that are no part of it: a node that comes imports torch on the cores of the others here.
    """
    newest = max(step.generation for step in steps)
    before = [step.at_s for step in steps if step.generation < newest]
    return min(step.at_s for step in steps if step.generation == newest) - max(before)


def _until(job: Job, condition: Callable[[], bool], what: str) -> None:
    if not job.wait(condition, LIMIT_S, LOOK_S):
        for log in job.logs():
            print(f"---- {log.name}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr)
        raise SystemExit(f"no {what} within {LIMIT_S:g} s; the logs are above")


# ---------------------------------------------------------------- the table


def table(runs: Sequence[Run]) -> str:
    rows = [["scenario", "measured", "elastic-agent", "goal", "peer", "peer's", "elastic-agent / peer"]]
    for megabytes in dict.fromkeys(run.megabytes for run in runs if run.scenario == "stall"):
        of_size = [run for run in runs if (run.scenario, run.megabytes) == ("stall", megabytes)]
        goals = {"copy": "<= 1.5x" if megabytes <= 100 else "<= 1.3x", "async_save": "<= 0.33x"}
        for call in ("remember", "save"):
            for peer, goal in goals.items():
                ours, theirs = _of(of_size, call, 1e3), _of(of_size, peer, 1e3)
                rows.append(_row(f"{megabytes} MB a rank", f"{call}(): stall, ms", ours, goal, peer, theirs))
    died, peers = _named(runs, "killed", OURS), _named(runs, "killed", DCP)
    for name, what, goal in (
        ("recovery_s", "to the first new step, s", f"<= {KILL_GOAL_S:g}"),
        ("load_s", "of it the load, s", ""),
        ("redone", "steps redone", ""),
        ("disk_mb", "data files of the disk opened, MB", "0"),
    ):
        if died:
            rows.append(_row("a node of 3 killed", what, _of(died, name), goal, DCP, _of(peers, name)))
    for change in ("3 -> 2", "2 -> 3"):
        changed = _named(runs, "planned", change)
        for name, what, goal in (
            ("still_s", "from the last step to the first new one, s", f"<= {PLANNED_GOAL_S:g}"),
            ("outage_s", "longest pause since the change was asked for, s", ""),
            ("load_s", "of it the load, s", ""),
            ("redone", "steps redone", "0"),
        ):
            if changed:
                rows.append(_row(f"planned, {change}", what, _of(changed, name), goal, "", []))
    without, with_them = _named(runs, "replicas", "0"), _named(runs, "replicas", "1")
    if with_them:
        ours, theirs = _of(with_them, "a_second"), _of(without, "a_second")
        rows.append(_row("1 replica", "steps a second", ours, ">= 0.95x", "no replica", theirs))
    return markdown(rows)


def _named(runs: Sequence[Run], scenario: str, what: str) -> list[Run]:
    return [run for run in runs if (run.scenario, run.what) == (scenario, what)]


def _of(runs: Sequence[Run], name: str, factor: float = 1.0) -> list[float]:
    return [run.figures[name] * factor for run in runs]


def _row(
    scenario: str, what: str, ours: Sequence[float], goal: str, peer: str, theirs: Sequence[float]
) -> list[str]:
    ratios = ratio(ours, theirs) if any(theirs) else ""
    peers = spread(theirs, {}, len(theirs))
    return [scenario, what, spread(ours, {}, len(ours)), goal, peer, peers, ratios]


if __name__ == "__main__":
    main()
