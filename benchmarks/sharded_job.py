"""The training job of the benchmark of sharded state: FSDP2 on CPUs with gloo, a stack of linear layers and AdamW.

A step changes the shards of one layer, after a sleep that stands for the computation of a GPU: what is measured is the
machinery around the steps, not the CPU. With `--saves` the job measures how long saves hold it up, and ends. Otherwise
it trains until it is ended, with `Checkpointer` or with plain `dcp.save(checkpoint_id=...)`, and writes to DIRECTORY:

- `steps`: a line of each finished step, as `ddp_job.py` writes them;
- `loads`: a line of JSON for each load: rank, generation, step, seconds, and bytes of the data files that it opened.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker import Checkpointer, init_process_group, step

LAYERS = 24
SAVE_EVERY = 20
WARM_UPS = 2
SAVES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--megabytes", type=int, default=300, help="of the whole state, on all ranks together"
    )
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--memory-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY, help="0: never")
    parser.add_argument("--dcp", action="store_true", help="without Checkpointer")
    parser.add_argument("--saves", action="store_true", help="measure saves")
    options = parser.parse_args()
    init_process_group("gloo")
    training = Training(options.megabytes)
    if options.saves:
        measured = measure_saves(training, options.directory)
        if dist.get_rank() == 0:
            (options.directory / "saves.tmp").write_text(json.dumps(measured))
            (options.directory / "saves.tmp").rename(options.directory / "saves")
        dist.barrier()
        dist.destroy_process_group()
        return
    folder = options.directory / "checkpoints"
    loop(training, Plain(training, folder) if options.dcp else Library(training, folder, options), options)


class Training:
    """As those do who have large models: made on the meta device, and with values only where none are loaded."""

    def __init__(self, megabytes: int) -> None:
        # Of each weight there are three: itself and two averages, of 4 bytes each.
        width = int((megabytes * 1e6 / (12 * LAYERS)) ** 0.5)
        with torch.device("meta"):
            self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])
        fully_shard(self.model)
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.done = 0

    def begin(self) -> None:
        """Anew: weights, and all that the optimizer will have."""
        torch.manual_seed(0)
        for layer in self.model:
            layer.reset_parameters()
            self._train(layer)

    def step(self) -> None:
        self._train(self.model[self.done % LAYERS])
        self.done += 1

    def _train(self, layer: torch.nn.Module) -> None:
        for weight in layer.parameters():
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": self.done}

    def copier(self) -> Callable[[], None]:
        """Copies all tensors of this rank to memory that is there already."""
        held = [one for state in self.optimizer.state.values() for one in state.values()]
        tensors = [*self.model.state_dict().values(), *held]
        sources = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
        targets = [torch.zeros_like(source) for source in sources]

        def copy_all() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return copy_all


# ---------------------------------------------------------------- how long a save holds up training


def measure_saves(training: Training, directory: Path) -> Mapping[str, float]:
    """Seconds for which the slowest rank stands in each call, and of one copy: medians."""
    import torch.distributed.checkpoint as dcp

    training.begin()
    checkpoints = Checkpointer(
        directory / "checkpoints", {"model": training.model, "optimizer": training.optimizer}
    )
    checkpoints.load()
    pending: list[Any] = []
    # Its thread meets the other ranks while training goes on.
    group = dist.new_group(backend="gloo")

    def save(number: int) -> None:
        if not checkpoints.save(number):
            raise SystemExit("invalid: a save was refused")

    def remember(number: int) -> None:
        if not checkpoints.save_to_memory(number):
            raise SystemExit("invalid: a copy was skipped")

    def async_save(number: int) -> None:
        states, folder = training.states(), directory / f"dcp-{number}"
        pending.append(dcp.async_save(states, checkpoint_id=folder, process_group=group))

    def wait() -> None:
        while pending:
            pending.pop().result()
        checkpoints.wait()

    copy_all = training.copier()
    calls: Mapping[str, Callable[[int], None]] = {
        "copy": lambda _number: copy_all(),
        "remember": remember,
        "save": save,
        "async_save": async_save,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    number = 0
    for _ in range(WARM_UPS + SAVES):
        for name, call in calls.items():
            number += 1
            training.step()
            dist.barrier()
            started = time.perf_counter()
            call(number)
            slowest = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(slowest.item())
            wait()
    return {name: statistics.median(seconds[WARM_UPS:]) for name, seconds in found.items()}


# ---------------------------------------------------------------- training that is disturbed


class Library:
    """With the worker library."""

    def __init__(self, training: Training, folder: Path, options: argparse.Namespace) -> None:
        state = {"model": training.model, "optimizer": training.optimizer}
        self._training = training
        self._checkpoints = Checkpointer(folder, state, memory_every=options.memory_every)

    def load(self) -> None:
        self._training.done = self._checkpoints.load()

    def save(self) -> None:
        self._checkpoints.save(self._training.done)


class Plain:
    """With plain `dcp.save(checkpoint_id=...)`."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._folder = folder

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._training.states(), checkpoint_id=self._folder / f"step-{self._training.done:06}")

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = sorted(path.parent for path in self._folder.glob("step-*/.metadata"))
        newest = [str(found[-1]) if found else None]
        dist.broadcast_object_list(newest)
        if newest[0] is None:
            return
        state = self._training.states()
        dcp.load(state, checkpoint_id=newest[0])
        set_state_dict(
            self._training.model,
            self._training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._training.done = state["done"]


def loop(training: Training, checkpoints: Library | Plain, options: argparse.Namespace) -> None:
    rank, world_size, pid = dist.get_rank(), dist.get_world_size(), os.getpid()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    opened = data_files_opened(options.directory / "checkpoints")
    started = time.perf_counter()
    checkpoints.load()
    took_s = time.perf_counter() - started
    if not training.done:
        training.begin()
    size = sum(os.path.getsize(path) for path in opened)
    load = {"rank": rank, "generation": generation, "step": training.done, "s": took_s, "disk_bytes": size}
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.write(os.open(options.directory / "loads", append, 0o644), json.dumps(load).encode() + b"\n")
    steps = os.open(options.directory / "steps", append, 0o644)
    everyone = torch.zeros(1)
    while True:  # the benchmark ends it
        time.sleep(options.step_s)
        training.step()
        dist.all_reduce(everyone)
        line = f"{time.monotonic():.6f} {training.done} {rank} {world_size} {generation} {pid}\n"
        os.write(steps, line.encode())
        step(training.done)
        if options.save_every and training.done % options.save_every == 0:
            checkpoints.save()


def data_files_opened(folder: Path) -> set[str]:
    """Grows with each data file of a checkpoint on disk that this process opens."""
    found: set[str] = set()

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == "open" else ""
        if path.startswith(str(folder)) and path.endswith(".distcp"):
            found.add(path)

    sys.addaudithook(see)
    return found


if __name__ == "__main__":
    main()
