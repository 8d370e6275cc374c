"""A DDP script that knows nothing of elastic-agent: it saves with torch.save and says each step that it did."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(checkpoint: str, steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        done = state["done"]
    while done < steps:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * done + dist.get_rank()))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        done += 1
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "done": done}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
            print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']} step {done}", flush=True)
        time.sleep(step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
