"""Train a tiny model, data-parallel, and write each finished step to a file: how `demo_daemon.py` counts them.

It ends after so many steps, or as soon as the file `enough` is in its folder.

elastic-agent submit --min-nodes 1 --max-nodes 3 -- examples/counted.py runs/counted 400
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, init_process_group, step

STEP_S = 0.02


def main(folder: Path, steps: int) -> None:
    init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoints = Checkpointer(folder / "checkpoints", {"model": model, "optimizer": optimizer})
    for number in range(checkpoints.load() + 1, steps + 1):
        # All workers end after the same step.
        enough = torch.tensor((folder / "enough").exists(), dtype=torch.int32)
        dist.all_reduce(enough, dist.ReduceOp.MAX)
        if enough:
            return
        optimizer.zero_grad()
        inputs = torch.randn(16, 8)
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            with open(folder / "steps", "a") as file:
                file.write(f"{number} {dist.get_world_size()}\n")
        step(number)
        time.sleep(STEP_S)
        if number % 50 == 0:
            checkpoints.save(number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()  # after DDP's model is gone: with gloo it may hang before
