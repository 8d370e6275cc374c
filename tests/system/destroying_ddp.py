"""Plain DDP in one function that destroys the process group while its model still lives, as many scripts do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    for _ in range(6):
        model(torch.randn(8, 20)).square().mean().backward()
    loss = torch.ones(())
    dist.all_reduce(loss)
    dist.destroy_process_group()
    print(f"done: {loss.item():g}", flush=True)


if __name__ == "__main__":
    main()
