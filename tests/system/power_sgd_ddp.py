"""A DDP script whose gradients are compressed by PowerSGD: what a rank has not sent yet is its own, and no one else's.

DDP keeps the buckets of a process's first step, to which that belongs.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import numpy
import torch
import torch.distributed as dist
from steps_file import hold, note
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, step
from elastic_agent.worker.collectives import register_comm_hook


def train(directory: str, steps: int) -> None:
    torch.set_num_threads(1)  # what several add up depends on how many they are
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
    )
    model = DistributedDataParallel(network, find_unused_parameters=True)
    power = PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=1)
    hook = register_comm_hook(model, power, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own samples
    memory_every = int(os.environ.get("MEMORY_EVERY", "0")) or None
    state = {"model": model, "optimizer": optimizer, "hook": hook}
    checkpoints = Checkpointer(directory, state, per_rank=["hook"], memory_every=memory_every)
    done = begun = checkpoints.load()
    note("begun", done)
    while done < steps:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).sub(1).square().mean().backward()
        optimizer.step()
        done += 1
        step(done)
        note("finished", done)
        if done % 10 == 0:
            checkpoints.save(done)
        if done == int(os.environ.get("RANK_1_DIES_AFTER", "0")) and dist.get_rank() == 1 and begun == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        hold(done)
        time.sleep(float(os.environ.get("STEP_S", "0")))
    checkpoints.save(done)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
