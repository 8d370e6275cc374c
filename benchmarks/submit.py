#!/usr/bin/env python3
"""Measure from `elastic-agent submit` to the first training step on a warm pool, next to a cold start of torchrun.

A *run* starts the daemons of a pool, waits until they are idle, with their spare agents ready, and submits `ddp_job.py`
with two workers: on one node, or on two nodes with one each. It counts from the start of the command until the last
worker has done its first step. torchrun is given the same script in the same minute, two of them for two nodes.

`--idle` measures what idle daemons cost instead: CPU seconds of a minute of the daemon and all its children, and the
memory of each, with the pool's store of each kind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from report import add_options, keep, markdown, publish, ratio, spread
from scale_stores import HOST, etcd, free_ports

JOB = Path(__file__).with_name("ddp_job.py")
WORKERS = 2
PATIENCE_S = 120.0
QUIET_S = 1.0
IDLE_S = 60.0
GOAL_S = 1.0
GOALS = {"local": 0.1, "c10d": 0.1, "etcd": 0.2}
"""CPU seconds a minute."""
GOAL_MB = 60
TICKS = os.sysconf("SC_CLK_TCK")
OURS, THEIRS = "elastic-agent", "torchrun"


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds, from the start of the command; 0: not known."""

    system: str
    nodes: int
    submitted_s: float
    first_step_s: float
    load: float


@dataclass(frozen=True, slots=True)
class Idle:
    """One daemon, and the processes that it keeps: CPU seconds a minute, and memory in MB (10^6 bytes)."""

    store: str
    cpu_s: float
    daemon_mb: float
    spare_mb: float
    preloaded_mb: float
    pss_mb: float
    """Of all of them, what they share counted once."""
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--store", choices=GOALS, default="local", help="of the pool (default local)")
    parser.add_argument("--idle", action="store_true", help="measure idle daemons")
    options = parser.parse_args()
    if options.idle:
        idles: list[Idle] = []
        for _ in range(options.repeat):
            for kind in GOALS:
                idles.append(idle(kind))
                keep(idles, options.json)
        how = f"{options.repeat} minutes of each, {loads([run.load for run in idles])}"
        publish(idle_table(idles), how, options.markdown, "idle")
        return
    starts: list[Start] = []
    for _ in range(options.repeat):
        for nodes in (1, 2):
            for start in (lambda nodes: submit(nodes, options.store), torchrun):
                starts.append(start(nodes))
                keep(starts, options.json)
    how = f"{options.store} store, {options.repeat} runs of each, {loads([run.load for run in starts])}"
    publish(table(starts), how, options.markdown, "submit")


def loads(found: Sequence[float]) -> str:
    """Of the machine in the last minute before each run, with what the run before has left."""
    return f"load {min(found):.1f}-{max(found):.1f}"


# ---------------------------------------------------------------- one start


def submit(nodes: int, kind: str) -> Start:
    with (
        tempfile.TemporaryDirectory() as folder,
        place(kind) as where,
        daemons(Path(folder), nodes, *where) as pool,
    ):
        environment = pool.environment
        load = os.getloadavg()[0]
        counts = (f"--min-nodes={nodes}", f"--max-nodes={nodes}", f"--nproc-per-node={WORKERS // nodes}")
        began_at = time.monotonic()
        words = [*elastic_agent("submit"), *where, *counts, "--", str(JOB), folder, "--step-s=0"]
        submitted = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        submitted_s = time.monotonic() - began_at
        first_s = first_steps(Path(folder)) - began_at
        job = submitted.stdout.split()[-1]
        subprocess.run(elastic_agent("cancel", job, *where), env=environment, check=True, capture_output=True)
        return Start(OURS, nodes, submitted_s, first_s, load)


def torchrun(nodes: int) -> Start:
    with tempfile.TemporaryDirectory() as folder:
        load, (port,) = os.getloadavg()[0], free_ports(1)
        meeting = (
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={HOST}:{port}",
            "--rdzv-id=submit",
        )
        command = [sys.executable, "-m", "torch.distributed.run", *meeting]
        command += [f"--nproc-per-node={WORKERS // nodes}", str(JOB), folder, "--step-s=0"]
        began_at = time.monotonic()
        nothing = subprocess.DEVNULL
        agents = [subprocess.Popen(command, stdout=nothing, stderr=nothing) for _ in range(nodes)]
        try:
            return Start(THEIRS, nodes, 0.0, first_steps(Path(folder)) - began_at, load)
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait()


def first_steps(folder: Path) -> float:
    """The instant at which the last worker has done its first step."""

    def found() -> float:
        try:
            lines = [line.split() for line in (folder / "steps").read_text().splitlines()]
        except OSError:
            return 0.0
        firsts = {line[2]: float(line[0]) for line in reversed(lines) if line[1] == "1"}
        return max(firsts.values()) if len(firsts) == WORKERS else 0.0

    return wait_for(found, "first step of every worker")


# ---------------------------------------------------------------- a warm pool


@dataclass(frozen=True, slots=True)
class Pool:
    environment: Mapping[str, str]
    """Of those who submit to it."""
    pids: Sequence[int]
    """Of its daemons."""


@contextmanager
def daemons(folder: Path, nodes: int, *options: str) -> Iterator[Pool]:
    """Its daemons are idle, and their spare agents are ready."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("ELASTIC_AGENT_")}
    environment = {**inherited, "RUNTIME_DIRECTORY": str(folder)}
    log = folder / "daemons.log"
    with log.open("wb") as said:
        started = [
            subprocess.Popen(
                [
                    *elastic_agent("--min-nodes=1", "--max-nodes=4", *options),
                    f"--node-id={number}",
                    f"--log-dir={folder / 'logs'}",
                ],
                env=environment,
                stdout=said,
                stderr=said,
            )
            for number in range(nodes)
        ]
    try:
        pids = [daemon.pid for daemon in started]
        wait_until_warm(pids)
        yield Pool(environment, pids)
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        for daemon in started:
            daemon.send_signal(signal.SIGTERM)
        for daemon in started:
            daemon.wait()


def elastic_agent(*words: str) -> list[str]:
    return [sys.executable, "-m", "elastic_agent", *words]


def wait_until_warm(pids: Sequence[int]) -> None:
    """Each has a spare agent with a fork server, and none of them does anything."""
    quiet, since = -1.0, time.monotonic()

    def warm() -> bool:
        nonlocal quiet, since
        families = [family(pid) for pid in pids]
        spent = sum(cpu_s(pid) for found in families for pid in found)
        if spent > quiet + 0.02 or not all(len(found) >= 3 for found in families):
            quiet, since = spent, time.monotonic()
        return time.monotonic() >= since + QUIET_S

    wait_for(warm, "warm pool")


def family(pid: int) -> list[int]:
    """The process and its descendants, each behind its parent."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def cpu_s(pid: int) -> float:
    """With that of the children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def wait_for(condition: Callable[[], float], what: str) -> float:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"no {what} within {PATIENCE_S:g} s")
        time.sleep(0.02)
    return found


# ---------------------------------------------------------------- an idle daemon


def idle(kind: str) -> Idle:
    with (
        tempfile.TemporaryDirectory() as folder,
        place(kind) as options,
        daemons(Path(folder), 1, *options) as pool,
    ):
        processes, load = family(pool.pids[0]), os.getloadavg()[0]
        before = sum(map(cpu_s, processes))
        time.sleep(IDLE_S)
        spent_s = (sum(map(cpu_s, processes)) - before) * 60 / IDLE_S
        daemon, spare, *others = [memory_mb(one, "Rss") for one in processes]
        shared = sum(memory_mb(one, "Pss") for one in processes)
        return Idle(kind, spent_s, daemon, spare, sum(others), shared, load)


@contextmanager
def place(kind: str) -> Iterator[tuple[str, ...]]:
    """The options of a daemon with a store of this kind."""
    if kind == "local":
        yield ()
    elif kind == "c10d":
        yield "--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{free_ports(1)[0]}"
    else:
        with etcd() as port:
            yield f"--rdzv-backend={kind}", f"--rdzv-endpoint={HOST}:{port}"


def memory_mb(pid: int, what: str) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError(what)


# ---------------------------------------------------------------- tables


def table(runs: Sequence[Start]) -> str:
    rows = [
        ["workers", "submit has ended, s", "first step, s", "goal, s", "torchrun, s", "torchrun / submit"]
    ]
    for nodes in dict.fromkeys(run.nodes for run in runs):
        ours, theirs = (
            [run for run in runs if (run.system, run.nodes) == (system, nodes)] for system in (OURS, THEIRS)
        )
        first, cold = [run.first_step_s for run in ours], [run.first_step_s for run in theirs]
        rows.append(
            [
                "two on one node" if nodes == 1 else "one on each of two nodes",
                spread([run.submitted_s for run in ours], {}, len(ours)),
                spread(first, {}, len(ours)),
                f"{GOAL_S:.1f}",
                spread(cold, {}, len(theirs)),
                ratio(cold, first),
            ]
        )
    return markdown(rows)


def idle_table(runs: Sequence[Idle]) -> str:
    head = [
        "store",
        "CPU s a minute",
        "goal",
        "daemon, MB",
        "goal",
        "spare agent, MB",
        "preloaded, MB",
        "PSS of all, MB",
    ]
    rows = [head]
    for kind in dict.fromkeys(run.store for run in runs):
        of_kind = [run for run in runs if run.store == kind]

        def figures(name: str, of_kind: Sequence[Idle] = of_kind) -> str:
            return spread([getattr(run, name) for run in of_kind], {}, len(of_kind))

        memory = [figures(name) for name in ("spare_mb", "preloaded_mb", "pss_mb")]
        rows.append([kind, figures("cpu_s"), f"{GOALS[kind]:g}", figures("daemon_mb"), f"{GOAL_MB}", *memory])
    return markdown(rows)


if __name__ == "__main__":
    main()
