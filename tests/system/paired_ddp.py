"""A DDP script with two Checkpointers: the model with its optimizer, and a moving average of its weights."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from steps_file import note
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from elastic_agent.worker import Checkpointer, step

STEP_S = 0.01


def main(directory: str, memory_every: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    average = AveragedModel(model.module, avg_fn=get_ema_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    every = memory_every or None
    models = Checkpointer(f"{directory}/model", {"model": model, "optimizer": optimizer}, memory_every=every)
    averages = Checkpointer(f"{directory}/average", {"average": average}, memory_every=every)
    done = models.load()
    note("begun", done, average=averages.load(), updates=int(average.n_averaged))
    with models.just_in_time():
        while True:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model.module)
            done += 1
            step(done)
            note("finished", done)
            time.sleep(STEP_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
