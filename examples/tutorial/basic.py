"""A script that starts its ranks by itself, and meets them at a port that it names.

    python examples/tutorial/basic.py
    elastic-agent examples/tutorial/basic.py

Under the agent this is one worker with processes of its own. When it or any of them is killed, all of them end, and the
script begins anew. With `torchrun_ddp.py` the agent starts each rank, on several nodes too, and finds the port.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ON_CPU = 2
"""Ranks where there is no accelerator; with some, each has a rank."""


def setup(rank: int, world: int, port: int) -> torch.device:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        return torch.device("cpu")
    torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend, rank=rank, world_size=world)
    return torch.device(accelerator.type, rank)


def train(rank: int, world: int, device: torch.device) -> None:
    torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0
    model = DistributedDataParallel(nn.Linear(12, 3).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 12, device=device)
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    total = sum(weight.sum() for weight in model.parameters()).item()
    print(f"rank {rank} of {world} has trained: weights add up to {total:.6f}", flush=True)


def run(rank: int, world: int, port: int) -> None:
    device = setup(rank, world, port)
    try:
        train(rank, world, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 12355
    world = torch.accelerator.device_count() or ON_CPU
    mp.spawn(run, args=(world, port), nprocs=world)
