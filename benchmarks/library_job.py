"""The training job of the recovery benchmark with elastic-agent's worker library: `ddp_job.py`, and few lines changed.

The same model, steps and lines. Checkpoints come as often, and are taken and loaded by `Checkpointer`, which also saves
when another rank has died; `step` tells the agent of every step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, step


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A tiny DDP job with the worker library that writes down when each step was finished."
    )
    parser.add_argument("directory", type=Path, help="checkpoints and steps go here, the same for all ranks")
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
    state = {"model": model, "optimizer": optimizer}
    checkpoints = Checkpointer(args.directory / "checkpoints", state)
    done = checkpoints.load()
    steps = os.open(args.directory / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with checkpoints.just_in_time():
        while True:  # whoever started the job ends it
            time.sleep(args.step_s)
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            done += 1
            line = f"{time.monotonic():.6f} {done} {rank} {world_size} {generation} {os.getpid()}\n"
            os.write(steps, line.encode())
            step(done)
            if done % args.checkpoint_every == 0:
                checkpoints.save(done)


if __name__ == "__main__":
    main()
