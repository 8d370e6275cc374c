#!/usr/bin/env python3
"""Measure what it costs to watch a job: next to the same job with all that off, on the same machine, in one go.

A job is *watched* by default, with a folder of its run: the agent looks for hangs, writes its journal and is ready to
collect evidence, and each worker has called `measure_own_time()`. It is *not watched*
with `--hang-timeout off --log-dir /dev/null`, and a worker that does not.

Two figures. *Step*: processor time of a worker's step, a small DDP on gloo that calls `step()`, in one process; blocks
with and without the measurement alternate, and a run keeps the median of each. *Agent*: processor time per minute of
the agent and its helper processes, while eight workers train in steps of 20 ms: workers that call `step()`
(`library_job.py`), and workers that do not (`ddp_job.py`), whose signs of life the agent reads from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_agent.worker.wire.environment import NAMES
from elastic_agent.worker.wire.shared_progress import SharedProgress
from recovery_costs import family, processor_s, spent_s
from report import add_options, keep, markdown, publish, ratio, spread
from worker_place import GENERATION, measure

STEP_S = 0.02
STEP_GOAL = 0.01
"""The share of a step that watching may cost."""
AGENT_GOAL_S = 0.3
"""Processor time that watching may cost the agent per minute."""
WORKERS = 8
BLOCKS = 11

WARM_STEPS = 100
"""Steps of each rank before the agent is measured."""
START_S = 300.0

STEP, AGENT, AGENT_OF_PLAIN = "step", "agent", "agent of a plain job"
JOBS = {AGENT: "library_job.py", AGENT_OF_PLAIN: "ddp_job.py"}


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of processor time: per step, or of the agent per minute."""

    what: str
    watched_s: float
    unwatched_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps in a block (default 500)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="how long an agent is looked at (default 60)"
    )
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(time_steps(options.steps)))
        return
    runs: list[Run] = []
    for _ in range(options.repeat):
        runs.append(step_costs(options.steps))
        keep(runs, options.json)
        for what in JOBS:
            runs.append(agent_costs(what, options.seconds))
            keep(runs, options.json)
    how = f"{options.repeat} runs, {BLOCKS} blocks of {options.steps} steps, {options.seconds:g} s of each agent"
    publish(table(runs), how, options.markdown, "watching")


def step_costs(steps: int) -> Run:
    with closing(SharedProgress.make(GENERATION)) as ours:
        variables = {NAMES["page"]: ours.path, "OMP_NUM_THREADS": "1"}
        watched_s, unwatched_s = measure([__file__, "--run", "--steps", str(steps)], variables)
        if ours.read().step == 0:
            raise SystemExit("invalid: the agent's place saw no step")
    return Run(STEP, watched_s, unwatched_s)


def time_steps(steps: int) -> tuple[float, float]:
    """In the worker's place: processor seconds per step, with and without the measure of waits."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from elastic_agent.worker import measure_own_time, step

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    places = ((dist.Work, "wait"), (dist, "_broadcast_coalesced"), (torch.autograd, "backward"))
    unwatched = put(places, None)
    done = 1
    step(done)
    measure_own_time()
    watched = put(places, None)
    if any(one is other for one, other in zip(watched, unwatched, strict=True)):
        raise SystemExit("invalid: step() does not count waits with this version of torch")
    blocks: tuple[list[float], list[float]] = [], []
    for _ in range(BLOCKS):
        for functions, times in zip((watched, unwatched), blocks, strict=True):
            put(places, functions)
            begun = time.process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
                done += 1
                step(done)
            times.append((time.process_time() - begun) / steps)
    return statistics.median(blocks[0]), statistics.median(blocks[1])


def put(places: Sequence[tuple[Any, str]], functions: Sequence[Any] | None) -> tuple[Any, ...]:
    """The functions at these places; they are replaced by `functions`, if given."""
    there = tuple(getattr(place, name) for place, name in places)
    for (place, name), function in zip(places, functions or (), strict=functions is not None):
        setattr(place, name, function)
    return there


def agent_costs(what: str, seconds: float) -> Run:
    script = Path(__file__).with_name(JOBS[what])
    return Run(what, agent_s(script, seconds, watched=True), agent_s(script, seconds, watched=False))


def agent_s(script: Path, seconds: float, *, watched: bool) -> float:
    """Processor seconds of an agent per minute, measured for `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        off = ("--hang-timeout=off", "--log-dir=/dev/null")
        options = (f"--log-dir={folder}/logs",) if watched else off
        command = (
            *(sys.executable, "-m", "elastic_agent", f"--nproc-per-node={WORKERS}", "--notice=off"),
            *(*options, str(script), folder, "--step-s", str(STEP_S), "--checkpoint-every", "1000000"),
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = Path(folder, "log")
        with log.open("wb") as output:
            agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            workers = await_steps(Path(folder, "steps"), agent, log)
            before, at = processor_s(beside(agent.pid, workers)), time.monotonic()
            time.sleep(seconds)
            spent = spent_s(before, processor_s(beside(agent.pid, workers)))
            return spent / (time.monotonic() - at) * 60
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait()


def beside(agent: int, workers: set[int]) -> set[int]:
    """The agent and its helper processes, without the workers."""
    return family([agent]) - family(workers)


def await_steps(file: Path, agent: subprocess.Popen[bytes], log: Path) -> set[int]:
    """The processes of all ranks, once each has done WARM_STEPS."""
    deadline = time.monotonic() + START_S
    while True:
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        warm = {int(line[5]) for line in lines if line[1] == str(WARM_STEPS)}
        if len(warm) == WORKERS:
            return warm
        if agent.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"invalid: the job does not step. Its agent says:\n{log.read_text(errors='replace')}"
            )
        time.sleep(0.2)


def table(runs: Sequence[Run]) -> str:
    rows = [["processor time", "watched", "not watched", "ratio", "difference", "goal"]]
    for what, name, unit, goal in ROWS:
        found = [run for run in runs if run.what == what]
        watched, unwatched = (
            [run.watched_s / unit for run in found],
            [run.unwatched_s / unit for run in found],
        )
        if found:
            more = [with_it - without for with_it, without in zip(watched, unwatched, strict=True)]
            cells = (spread(values, {}, len(found)) for values in (watched, unwatched))
            rows.append([name, *cells, ratio(watched, unwatched), difference(what, more), goal])
    return markdown(rows)


ROWS: tuple[tuple[str, str, float, str], ...] = (
    (STEP, "a worker's step, us", 1e-6, f"{STEP_GOAL:.0%} of {STEP_S * 1000:g} ms"),
    (AGENT, f"the agent of {WORKERS} workers, s per minute", 1.0, f"{AGENT_GOAL_S:g} s"),
    (AGENT_OF_PLAIN, "the same, without step()", 1.0, f"{AGENT_GOAL_S:g} s"),
)


def difference(what: str, more: Sequence[float]) -> str:
    """The median difference of paired runs; for a step also as a share of it."""
    median = statistics.median(more)
    if what in JOBS:
        return f"{median:+.2f} s"
    return f"{median:+.1f} us, {median * 1e-6 / STEP_S:.2%}"


if __name__ == "__main__":
    main()
