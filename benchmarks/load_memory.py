#!/usr/bin/env python3
"""Measure what a load from disk takes: seconds, and the memory of all ranks of a node together.

One world on this machine saves a state (see `checkpoint.py`), and another one loads it: all ranks of the node that has
the file (`here`), or of a node beside one that has it (`sent`). Memory is the ranks' proportional share (PSS) at its
peak, less what they had before the load; `anonymous` is the part of it that no file and no shared memory backs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import Library, seconds
from report import markdown

RUN_LIMIT_S = 300.0
FIELDS = ("Pss:", "Pss_Anon:")


@dataclass(frozen=True, slots=True)
class Run:
    """Megabytes, of all measured ranks."""

    case: str
    load_s: float
    pss: float
    anonymous: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, metavar="N")
    parser.add_argument("--ranks", type=int, default=4, metavar="N")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--rank", choices=("save", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank)
        return
    runs = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory(prefix="load-benchmark-") as folder:
            world(Path(folder), "save", options.megabytes, 1, 0)
            runs.append(world(Path(folder), "load", options.megabytes, options.ranks, 0))
            runs.append(world(Path(folder), "load", options.megabytes, options.ranks, 1))
    print(table([run for run in runs if run is not None], options.megabytes, options.ranks))


def world(folder: Path, role: str, megabytes: int, ranks: int, owners: int) -> Run | None:
    """`owners` ranks of another node, which alone has the file then, come before those that are measured."""
    memory = Path(tempfile.mkdtemp(prefix="load-benchmark-", dir="/dev/shm"))
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", role],
            env=environment(folder, memory, megabytes, rank, ranks, owners),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks + owners)
    ]
    timer = threading.Timer(RUN_LIMIT_S, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        for process in processes:
            process.stdout.readline()  # type: ignore[union-attr]  # it is ready
        measured = processes[owners:]
        before, peak, ended = sample(measured), dict.fromkeys(FIELDS, 0.0), threading.Event()

        def watch() -> None:
            while not ended.wait(0.02):
                now = sample(measured)
                peak.update({field: max(peak[field], now[field] - before[field]) for field in FIELDS})

        watcher = threading.Thread(target=watch)
        watcher.start()
        for process in processes:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        told = [json.loads(process.stdout.readline()) for process in processes]  # type: ignore[union-attr]
        ended.set()
        watcher.join()
        if any(process.wait() for process in processes):
            raise SystemExit(f"a {role} failed")
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(memory, ignore_errors=True)
    if role == "save":
        return None
    return Run("sent" if owners else "here", max(told), peak[FIELDS[0]], peak[FIELDS[1]])


def environment(
    folder: Path, memory: Path, megabytes: int, rank: int, ranks: int, owners: int
) -> Mapping[str, str]:
    own = rank < owners
    node = "owner" if own else "node"
    (memory / node).mkdir(exist_ok=True)
    return {
        **os.environ,
        "BENCHMARK_MEGABYTES": str(megabytes),
        "BENCHMARK_FOLDER": str(folder / ("disk" if own or not owners else "elsewhere")),
        "BENCHMARK_STORE": str(memory / "store"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if own else rank - owners),
        "WORLD_SIZE": str(ranks + owners),
        "OMP_NUM_THREADS": "1",
        "ELASTIC_AGENT_NODE": node,
        "ELASTIC_AGENT_LOCAL_RANK": str(rank if own else rank - owners),
        "ELASTIC_AGENT_GENERATION": "1",
        "ELASTIC_AGENT_MEMORY": str(memory / node),
        "ELASTIC_AGENT_MEMORY_BYTES": str(4 * megabytes << 20),
    }


def sample(processes: Sequence[subprocess.Popen[str]]) -> dict[str, float]:
    """Megabytes of all of them."""
    found = dict.fromkeys(FIELDS, 0.0)
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for name, *value in map(str.split, lines):
            if name in found:
                found[name] += int(value[0]) / 1000
    return found


def run_rank(role: str) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCHMARK_STORE']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    library = Library(Path(os.environ["BENCHMARK_FOLDER"]))
    dist.barrier()
    print("ready", flush=True)
    sys.stdin.readline()

    def load() -> None:
        if library.checkpoints.load() != 1:
            raise SystemExit("invalid: nothing was loaded")

    took_s = seconds(load if role == "load" else lambda: library.save(1))
    time.sleep(0.1)  # for the one who looks at the memory
    print(took_s, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def table(runs: Sequence[Run], megabytes: int, ranks: int) -> str:
    rows = [["state", "where the file is", "load, s", "memory of all ranks, MB", "of it anonymous, MB"]]
    for case, where in {"here": "on this node", "sent": "on another node"}.items():
        own = [run for run in runs if run.case == case]
        rows.append(
            [
                f"{megabytes} MB, {ranks} ranks",
                where,
                f"{statistics.median(run.load_s for run in own):.2f}",
                f"{statistics.median(run.pss for run in own):.0f}",
                f"{statistics.median(run.anonymous for run in own):.0f}",
            ]
        )
    return markdown(rows)


if __name__ == "__main__":
    main()
