"""A DDP script that guards its last step, with all that changes within one: dropout, BatchNorm, sampler, schedule."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import numpy
import torch
import torch.distributed as dist
from steps_file import hold, note, wait_for_note
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker import Checkpointer, ElasticSampler, step


def main(directory: str, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # what several add up depends on how many they are
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(dist.get_rank())  # each rank draws its own dropout
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(), torch.nn.Linear(64, 1)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    inputs = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    sampler = ElasticSampler(dataset, batch_size=5)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler, generator=torch.Generator())
    progress: dict[str, Any] = {"begun": 0}
    state = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "progress": progress
    }  # fmt: skip
    checkpoints = Checkpointer(directory, state)
    done = checkpoints.load()
    dies_after = int(os.environ.get("RANK_0_DIES_AFTER", "0")) if done == 0 else 0
    long_step = int(os.environ.get("LONG_STEP", "0")) if done == 0 else 0
    note("begun", done)
    with checkpoints.just_in_time():
        epoch = sampler.epoch
        while done < steps:
            sampler.set_epoch(epoch)
            for batch, targets in loader:
                optimizer.zero_grad()
                progress["begun"] += 1
                if done + 1 == long_step:
                    time.sleep(600)
                torch.nn.functional.mse_loss(model(batch), targets).backward()
                if done + 1 == dies_after and dist.get_rank() == 1:
                    # It clips gradients, logs, waits for a device.
                    wait_for_note(what="finished", step=dies_after, rank=0)
                optimizer.step()
                scheduler.step()
                done += 1
                step(done)
                note("finished", done)
                if done == dies_after and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if done == steps:
                    break
                hold(done)
            epoch += 1
    checkpoints.save(done)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
