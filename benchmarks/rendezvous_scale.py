#!/usr/bin/env python3
"""Measure how long N nodes need to form a world, and the next one after a failure: elastic-agent and torchrun.

A *run* starts a store, spreads N simulated nodes (`scale_nodes.py`) over a few processes, and measures two things:

- *join*: from the first node that sets out until the last one is told to start generation 1;
- *re-join*: from one node's report that a worker failed until the last one is told to start generation 2.

The world has exactly N nodes (`--min-nodes` = `--max-nodes` = N), so that no last call is waited for. A run may also
hang (a part took longer than the limit) or die, which is a result. `scale_figures.py` makes the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from report import add_options, keep, publish, short
from scale_figures import THEIRS, Part, Run, medians, table
from scale_stores import HOST, store

NODES = Path(__file__).with_name("scale_nodes.py")
SYSTEMS = ("etcd", "c10d", THEIRS)
SIZES = (8, 32, 64, 128)
OUR_SIZES = (256, 512, 1000)
"""Beyond what torchrun gets through in bearable time."""
CONNECT_LIMIT_S = 180.0
COUNTERS = ("requests", "writes", "revisions", "received")


class Hung(Exception):
    """The limit has passed."""


class Died(Exception):
    """A process with nodes in it ended."""


class Crowd:
    """The processes that share the nodes of one run. Leaving the `with` block ends them."""

    def __init__(self, system: str, port: int, nodes: int, processes: int, said: IO[str]) -> None:
        """They write to `said` what goes wrong."""
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said = said
        self._processes = []
        shares = [nodes // processes + (number < nodes % processes) for number in range(processes)]
        for number, share in enumerate(shares):
            words = [sys.executable, str(NODES), system, HOST, str(port)]
            words += [str(sum(shares[:number])), str(share), str(nodes)]
            self._processes.append(
                subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
                )
            )
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def hear(self, limit_s: float) -> list[dict[str, Any]]:
        """One answer from each process. Raises Hung and Died."""
        deadline = time.monotonic() + limit_s
        answers = []
        for _ in self._processes:
            try:
                line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty as error:
                raise Hung from error
            if not line:
                self._said.seek(0)
                raise Died(self._said.read()[-2000:])
            answers.append(json.loads(line))
        return answers

    def tell(self, what: str) -> None:
        for number, process in enumerate(self._processes):
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(json.dumps({"do": what, "fail": number == 0}) + "\n")
            process.stdin.flush()


def measure(system: str, nodes: int, repetition: int, processes: int, limit_s: float) -> Run:
    load = os.getloadavg()[0]
    parts: list[Part] = []
    outcome = "done"
    with (
        store(system) as port,
        tempfile.TemporaryFile("w+") as said,
        Crowd(system, port, nodes, processes, said) as crowd,
    ):
        try:
            crowd.hear(CONNECT_LIMIT_S)
            before = dict.fromkeys(COUNTERS, 0)
            for what in ("join", "rejoin"):
                crowd.tell(what)
                answers = crowd.hear(limit_s)
                parts.append(_part(answers, before))
                before = _sums(answers)
        except Hung:
            outcome = "hung"
        except Died as error:
            outcome = "died"
            print(error, file=sys.stderr)
    return Run(system, nodes, repetition, outcome, tuple(parts), load)


def _part(answers: Sequence[Mapping[str, Any]], before: Mapping[str, int]) -> Part:
    seconds = max(answer["last_s"] for answer in answers) - min(answer["first_s"] for answer in answers)
    now = _sums(answers)
    return Part(seconds, **{name: now[name] - before[name] for name in COUNTERS})


def _sums(answers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(answer[name] for answer in answers) for name in COUNTERS}


# --- The command


def main() -> None:
    args = _arguments()
    if args.plot is not None:
        _pyplot()  # now rather than after an hour
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the run are ended
    runs: list[Run] = []
    for nodes, system, repetition in _plan(args.sizes, args.our_sizes, args.system, args.repeat):
        run = measure(system, nodes, repetition, min(args.processes, nodes), args.limit_s)
        runs.append(run)
        times = ", ".join(f"{short(part.seconds)} s" for part in run.parts)
        print(f"{nodes:5} {system:9} {run.outcome:5} {times}", flush=True)
        keep(runs, args.json)
    how = f"{args.repeat} runs of each in {args.processes} processes, limit {args.limit_s:g} s"
    publish(table(runs, SYSTEMS), how, args.markdown, "scale")
    if args.plot is not None:
        plot(runs, args.plot)


def _plan(
    sizes: Sequence[int], our_sizes: Sequence[int], systems: Sequence[str], repetitions: int
) -> Iterator[tuple[int, str, int]]:
    """Repetitions outermost: a slow quarter of an hour hits all systems."""
    for repetition in range(repetitions):
        for nodes in sorted({*sizes, *our_sizes}):
            for system in SYSTEMS:
                if system in systems and (system != THEIRS or nodes in sizes):
                    yield nodes, system, repetition


def plot(runs: Sequence[Run], file: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for part, (what, style) in enumerate([("join", "o-"), ("re-join", "s--")]):
        for system, points in medians(runs, part).items():
            color = f"C{SYSTEMS.index(system)}"
            label = f"{system if system == THEIRS else f'elastic-agent, {system}'}: {what}"
            axes.loglog([*points], [*points.values()], style, color=color, label=label, markersize=4)
    axes.set(xlabel="nodes", ylabel="seconds until all run the world")
    ticks = sorted({run.nodes for run in runs})
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def _pyplot() -> Any:
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        return pyplot
    raise SystemExit("--plot needs matplotlib: pip install matplotlib, or leave --plot out")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long N nodes need to form a world.")
    add_options(parser)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="only these")
    parser.add_argument(
        "--sizes", nargs="*", type=int, default=SIZES, metavar="N", help="nodes, for all systems"
    )
    parser.add_argument(
        "--our-sizes", nargs="*", type=int, default=OUR_SIZES, metavar="N", help="nodes, not for torchrun"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="that share the nodes of a run (default: as many as there are processors)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=120.0,
        metavar="S",
        help="hung after so long in one part (default 120)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds over nodes (a PNG)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
