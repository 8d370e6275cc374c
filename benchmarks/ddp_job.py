"""The training job of the recovery benchmark: what a careful person writes for torchrun, and nothing of ours.

Plain DDP on CPU with gloo and a model of 72 parameters: the time of a step is a sleep, so that restarts are what is
measured. It resumes from the newest checkpoint, and rank 0 writes one every few steps (temporary file, then rename).

Every rank appends one line for each step that it has finished:

    <time.monotonic()> <step> <rank> <world size> <TORCHELASTIC_RESTART_COUNT> <pid>

in a single write to a file opened with O_APPEND, so that lines of different processes never mix. All processes are on
one machine, where CLOCK_MONOTONIC is the same for all.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.replace(path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on from."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A tiny DDP job that writes down when each step was finished."
    )
    parser.add_argument("directory", type=Path, help="checkpoint and steps go here, the same for all ranks")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds of sleep in each step")
    parser.add_argument(
        "--checkpoint-every", type=int, default=25, help="steps from one checkpoint to the next"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    checkpoint = args.directory / "checkpoint.pt"
    step = load(checkpoint, model, optimizer)
    steps = os.open(args.directory / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:  # whoever started the job ends it
        time.sleep(args.step_s)
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        step += 1
        line = f"{time.monotonic():.6f} {step} {rank} {world_size} {generation} {os.getpid()}\n"
        os.write(steps, line.encode())
        if rank == 0 and step % args.checkpoint_every == 0:
            save(checkpoint, step, model, optimizer)


if __name__ == "__main__":
    main()
