#!/usr/bin/env python3
"""Measure what `elastic_agent.worker.step()` costs training: under an agent's page, next to an empty Python call.

Each run is a process of its own, which stands where a worker stands: its page was made by this one, in the agent's
place. It times blocks of calls, of an empty function and of `step()` in turn, and keeps the median block of each. What
the loop around the calls costs is in both. In the *pending* case `step()` finds that a planned change waits, and asks
whether to go on, which this process answers at once; an agent asks the store before it does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import statistics
import tempfile
import threading
import timeit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.worker.steps import drain, progress
from elastic_agent.worker.wire.channel import receive, send
from elastic_agent.worker.wire.environment import NAMES
from elastic_agent.worker.wire.messages import FROM_WORKERS, StepAnswer, Verdict
from elastic_agent.worker.wire.shared_progress import PENDING, SharedProgress
from report import add_options, keep, markdown, publish, ratio, spread
from worker_place import GENERATION, measure

GOAL_US = 5.0

BLOCKS = 21
NS = 1e9

CASES: Mapping[str, str] = {
    "plain": "step()",
    "listener": "step() with one listener",
    "private": "step() without an agent",
    "pending": "step() while a change is pending",
}
"""What each is called in the table."""


@dataclass(frozen=True, slots=True)
class Run:
    """Nanoseconds per call: the median of its blocks."""

    case: str
    empty_ns: float
    step_ns: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument(
        "--calls", type=int, default=50_000, metavar="N", help="calls in a block (default 50000)"
    )
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(time_calls(options.run, options.calls)))
        return
    runs: list[Run] = []
    for _ in range(options.repeat):
        for case in CASES:
            runs.append(run(case, options.calls))
            keep(runs, options.json)
    how = f"{options.repeat} runs of each, {BLOCKS} blocks of {options.calls} calls"
    publish(table(runs), how, options.markdown, "step")


def run(case: str, calls: int) -> Run:
    """One process; `calls` per block, a hundredth of them where each is a question."""
    calls = max(1, calls // 100) if case == "pending" else calls
    with closing(SharedProgress.make(GENERATION)) as ours, answering() as agent:
        ours.words[PENDING] = case == "pending"
        variables = {NAMES["socket"]: agent} | ({} if case == "private" else {NAMES["page"]: ours.path})
        empty_ns, step_ns = measure([__file__, "--run", case, "--calls", str(calls)], variables)
        if ours.read().step != (None if case == "private" else 2 * BLOCKS * calls):
            raise SystemExit(f"invalid: the agent's place saw step {ours.read().step} as the last one")
    return Run(case, empty_ns, step_ns)


def time_calls(case: str, calls: int) -> tuple[float, float]:
    """In the worker's place: nanoseconds per empty call and per step."""
    if case == "listener":
        progress.on_step(nothing)
    numbers = itertools.count(1)
    blocks: tuple[list[float], list[float]] = [], []
    for _ in range(BLOCKS):
        for call, times in zip((nothing, progress.step), blocks, strict=True):
            # Each call has another number, as in training.
            seconds = timeit.timeit(
                "call(next(numbers))", number=calls, globals={"call": call, "numbers": numbers}
            )
            times.append(seconds / calls * NS)
    empty, steps = map(statistics.median, blocks)
    return empty, steps


def nothing(step: int) -> None:
    pass


@contextmanager
def answering() -> Iterator[str]:
    """The address of a socket whose other end lets everybody go on."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder, "agent"))
        listener.bind(address)
        listener.listen()
        answers = threading.Thread(target=answer, args=(listener,))
        answers.start()
        yield address
        listener.shutdown(socket.SHUT_RDWR)
        answers.join()


def answer(listener: socket.socket) -> None:
    while True:
        try:
            worker, _ = listener.accept()
        except OSError:
            return  # shut down
        with worker:
            receive(worker, FROM_WORKERS, drain.ANSWER_S)
            send(worker, StepAnswer(Verdict.GO_ON, leaves=False), drain.ANSWER_S)


def table(runs: Sequence[Run]) -> str:
    rows = [["what", "ns per call", "step / empty call", "goal"]]
    empty = [run.empty_ns for run in runs]
    rows.append(["an empty function", spread(empty, {}, len(empty)), "", ""])
    for case, name in CASES.items():
        steps = [run.step_ns for run in runs if run.case == case]
        if steps:
            own = [run.empty_ns for run in runs if run.case == case]
            goal = f"{GOAL_US:g} us" if case in ("plain", "listener") else ""
            rows.append([name, spread(steps, {}, len(steps)), ratio(steps, own), goal])
    return markdown(rows)


if __name__ == "__main__":
    main()
