#!/usr/bin/env python3
"""Measure how long a checkpoint holds up training, and how long it takes to get it back.

Each run is a world of its own on this machine: one or two ranks (gloo, CPU) with the same state, a stack of linear
layers and its AdamW optimizer. It saves several times, and waits before each save until the one before is on disk.
The *stall* is the time for which rank 0 stands in the call; next to it, in the same process, one copy of all tensors
within memory. Then new processes load what is there. Where this package writes behind training, the process that does
it in the agent's place is the agent's own.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_agent.agent.checkpoints.processes import DiskWriter
from elastic_agent.agent.common.events import Event, IoThread
from elastic_agent.worker.wire.channel import receive, send
from elastic_agent.worker.wire.messages import FROM_WORKERS, CommitGranted
from report import add_options, keep, markdown, publish, ratio, spread

GOAL = 1.3
LAYERS = 24
WARM_UPS = 2
SAVES = 7
RUN_LIMIT_S = 900.0

SYSTEMS: Mapping[str, str] = {
    "memory-only": "Checkpointer.save_to_memory()",
    "behind": "Checkpointer.save(), disk written behind",
    "at-once": "Checkpointer.save() without memory",
    "plain": "torch.save() and fsync",
    "dcp-async": "distributed.checkpoint.async_save()",
}
"""What each is called in the table."""
OURS = ("memory-only", "behind", "at-once")


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds; each is the median of the saves or loads of one world."""

    system: str
    megabytes: int
    ranks: int
    copy_s: float
    stall_s: float
    durable_s: float
    """From the call until it is on disk; 0 where it never is."""
    restore_s: float
    compare_s: float = 0.0
    """Of the comparison of all ranks' states, in the first save; 0 where there is none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000], metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, help="where the disk is (default: where temporary files are)")
    parser.add_argument("--rank", choices=("save", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank)
        return
    runs: list[Run] = []
    for _ in range(options.repeat):
        for megabytes in options.megabytes:
            for ranks in options.ranks:
                for system in options.systems:
                    runs.append(run(system, megabytes, ranks, options.folder))
                    keep(runs, options.json)
    how = f"{options.repeat} runs of each, {SAVES} saves in each"
    publish(table(runs), how, options.markdown, "checkpoint")


# ---------------------------------------------------------------- worlds


def run(system: str, megabytes: int, ranks: int, disk: Path | None) -> Run:
    with folders(disk) as (folder, memory):
        environment = {
            **os.environ,
            "BENCHMARK_SYSTEM": system,
            "BENCHMARK_MEGABYTES": str(megabytes),
            "BENCHMARK_FOLDER": str(folder / "checkpoints"),
            "ELASTIC_AGENT_SOCKET": str(folder / "commits"),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        }
        if system in ("memory-only", "behind"):
            environment |= {
                "ELASTIC_AGENT_MEMORY": str(memory),
                "ELASTIC_AGENT_MEMORY_BYTES": str(4 * megabytes << 20),
                "ELASTIC_AGENT_WRITES": str(folder / "writes"),
                "ELASTIC_AGENT_NODE": "benchmark",
            }
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        threading.Thread(target=grant, args=(folder / "commits",), daemon=True).start()
        # Nobody reads the reports.
        io = IoThread()
        writer = DiskWriter(
            folder / "writes",
            str(folder / "commits"),
            str(folder / "reports"),
            dict(os.environ),
            io,
            events.put,
        )
        io.start()
        writer.start()
        try:
            saved = world(
                "save", folder, ranks, {**environment, "ELASTIC_AGENT_GENERATION": "1"}, writer, events
            )
            loaded = world(
                "load", folder, ranks, {**environment, "ELASTIC_AGENT_GENERATION": "2"}, writer, events
            )
        finally:
            writer.close()
            io.close()
    return Run(
        system,
        megabytes,
        ranks,
        saved["copy_s"],
        saved["stall_s"],
        saved["durable_s"],
        loaded["restore_s"],
        saved.get("compare_s", 0.0),
    )


def grant(path: Path) -> None:
    """In the place of the agent's commit fence: whoever asks may commit."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection:
            receive(connection, FROM_WORKERS, 5.0)
            send(connection, CommitGranted(60.0), 5.0)


def world(
    role: str,
    folder: Path,
    ranks: int,
    environment: Mapping[str, str],
    writer: DiskWriter,
    events: queue.SimpleQueue[Event],
) -> dict[str, float]:
    """What rank 0 has measured."""
    store = folder / f"store-{role}"
    command = [sys.executable, __file__, "--rank", role]
    processes = [
        subprocess.Popen(
            command,
            env={
                **environment,
                "BENCHMARK_STORE": str(store),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "ELASTIC_AGENT_LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + RUN_LIMIT_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            for process in processes:
                process.kill()
            raise SystemExit(f"a {role} with {environment['BENCHMARK_SYSTEM']} did not end well")
        try:
            event = events.get(timeout=0.01)
        except queue.Empty:
            continue
        if callable(event):
            event()
    told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a {role} with {environment['BENCHMARK_SYSTEM']} failed")
    measured: dict[str, float] = json.loads(told[0])
    return measured


@contextmanager
def folders(disk: Path | None) -> Iterator[tuple[Path, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=disk))
    memory = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir="/dev/shm"))
    try:
        yield folder, memory
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


# ---------------------------------------------------------------- one rank


def run_rank(role: str) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCHMARK_STORE']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    system = make_system(os.environ["BENCHMARK_SYSTEM"], Path(os.environ["BENCHMARK_FOLDER"]))
    measured = system.measure_saves() if role == "save" else {"restore_s": system.measure_load()}
    if rank == 0:
        print(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


class System:
    """One way to save and load the state of this rank."""

    def __init__(self) -> None:
        import torch

        megabytes = int(os.environ["BENCHMARK_MEGABYTES"])
        torch.manual_seed(0)  # all ranks have the same state
        # Of each weight there are three: itself and two averages, of 4 bytes each.
        width = int((megabytes * 1e6 / (12 * LAYERS)) ** 0.5)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train()

    def train(self) -> None:
        import torch

        for weight in self.model.parameters():
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step: int) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Until it is on disk."""

    def load(self) -> None:
        raise NotImplementedError

    def measure_saves(self) -> dict[str, float]:
        import torch.distributed as dist

        copies, stalls, durable = [], [], []
        copy_all = self.copier()
        for step in range(1, WARM_UPS + SAVES + 1):
            copies.append(seconds(copy_all))
            self.train()
            dist.barrier()
            started = time.perf_counter()
            self.save(step)
            stalls.append(time.perf_counter() - started)
            self.wait()
            durable.append(time.perf_counter() - started)
        return {
            "copy_s": statistics.median(copies[WARM_UPS:]),
            "stall_s": statistics.median(stalls[WARM_UPS:]),
            "durable_s": statistics.median(durable[WARM_UPS:]),
        }

    def copier(self) -> Callable[[], None]:
        """Copies all tensors to memory that is there already."""
        import torch

        optimizer = self.optimizer.state_dict()["state"].values()
        sources = [*self.model.state_dict().values(), *[one for part in optimizer for one in part.values()]]
        targets = [torch.zeros_like(source) for source in sources]

        def copy_all() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return copy_all

    def measure_load(self) -> float:
        import torch.distributed as dist

        dist.barrier()
        return seconds(self.load)


class Library(System):
    def __init__(self, folder: Path) -> None:
        from elastic_agent.worker import Checkpointer

        super().__init__()
        self._state = {"model": self.model, "optimizer": self.optimizer}
        self.checkpoints = Checkpointer(folder, self._state)

    def measure_saves(self) -> dict[str, float]:
        import torch.distributed as dist

        from elastic_agent.worker.ranks.comparison import ReplicatedComparison
        from elastic_agent.worker.ranks.group import current_group

        group = current_group()
        comparison = ReplicatedComparison(self._state, ())
        dist.barrier()
        compare_s = seconds(lambda: comparison.compare(group, group.gather(comparison.digest(group)), 1))
        return {**super().measure_saves(), "compare_s": compare_s}

    def save(self, step: int) -> None:
        if not self.checkpoints.save(step):
            raise SystemExit("invalid: a save was refused")

    def wait(self) -> None:
        if not self.checkpoints.wait():
            raise SystemExit("invalid: a save was refused")

    def load(self) -> None:
        if self.checkpoints.load() != WARM_UPS + SAVES:
            raise SystemExit("invalid: not the newest step was loaded")


class MemoryOnly(Library):
    def save(self, step: int) -> None:
        import torch.distributed as dist

        if not self.checkpoints.save_to_memory(step):
            raise SystemExit("invalid: no room in memory")
        dist.barrier()

    def wait(self) -> None:
        """It never is."""


class Plain(System):
    """What a careful script does by itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / "state.pt"
        folder.mkdir(exist_ok=True)

    def save(self, step: int) -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            temporary = self._file.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                torch.save({**self.states(), "step": step}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._file)
        dist.barrier()

    def load(self) -> None:
        import torch

        found = torch.load(self._file, map_location="cpu", weights_only=True)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])


class Distributed(System):
    """torch's own: it copies to memory, and a thread of the training process writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._future: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self._future = dcp.async_save(self.states(), checkpoint_id=self._folder / str(step))

    def wait(self) -> None:
        self._future.result()

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        states = self.states()
        dcp.load(states, checkpoint_id=self._folder / str(WARM_UPS + SAVES))
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])


def make_system(name: str, folder: Path) -> System:
    if name == "memory-only":
        return MemoryOnly(folder)
    if name in OURS:
        return Library(folder)
    return Plain(folder) if name == "plain" else Distributed(folder)


def seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# ---------------------------------------------------------------- the table


def table(runs: Sequence[Run]) -> str:
    """Milliseconds; ratios are of the medians."""
    rows = [
        [
            "state",
            "what",
            "stall, ms",
            "stall / copy",
            "stall / plain",
            "on disk, ms",
            "restore, ms",
            "restore / plain",
        ]
    ]
    for megabytes, ranks in dict.fromkeys((run.megabytes, run.ranks) for run in runs):
        here = [run for run in runs if (run.megabytes, run.ranks) == (megabytes, ranks)]
        plain = [run for run in here if run.system == "plain"]
        state = f"{megabytes} MB, {ranks} {'rank' if ranks == 1 else 'ranks'}"
        copies = [run.copy_s * 1e3 for run in here]
        rows.append([state, "one copy in memory", spread(copies, {}, len(copies)), "", "", "", "", ""])
        if compared := [run.compare_s * 1e3 for run in here if run.compare_s]:
            each = spread(compared, {}, len(compared))
            rows.append([state, "the comparison of all ranks, in the first save", each, "", "", "", "", ""])
        for system, name in SYSTEMS.items():
            if own := [run for run in here if run.system == system]:
                stalls, restores = [run.stall_s for run in own], [run.restore_s for run in own]
                durable = [run.durable_s * 1e3 for run in own] if system != "memory-only" else []
                rows.append(
                    [
                        state,
                        name,
                        spread([one * 1e3 for one in stalls], {}, len(own)),
                        ratio(stalls, [run.copy_s for run in own])
                        + (f" (goal {GOAL:g}x)" if system in ("memory-only", "behind") else ""),
                        ratio(stalls, [run.stall_s for run in plain]) if system != "plain" else "",
                        spread(durable, {}, len(own)) if durable else "never",
                        spread([one * 1e3 for one in restores], {}, len(own)),
                        ratio(restores, [run.restore_s for run in plain]) if system != "plain" else "",
                    ]
                )
    return markdown(rows)


if __name__ == "__main__":
    main()
