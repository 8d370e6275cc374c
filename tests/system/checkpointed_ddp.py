"""A DDP script with our Checkpointer and all that makes a run hard to repeat: momentum, a schedule, dropout."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, step


def main(directory: str, steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # each rank draws its own data and its own dropout
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    checkpoints = Checkpointer(directory, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    for done in range(checkpoints.load(), steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        step(done + 1)
        time.sleep(step_s)
        if (done + 1) % 10 == 0:
            checkpoints.save(done + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
