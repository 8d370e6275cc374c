"""Train a small network on handwritten digits, data-parallel on any number of nodes, through whatever happens.

A plain DDP script (gloo on CPUs, NCCL on GPUs) on a real data set: the 1,797 digits that scikit-learn ships. Two
lines make it survive: `Checkpointer.load()` before the loop and `.save()` in it. Run it alone or on many nodes:

    python examples/digits.py
    elastic-agent --nproc-per-node 2 examples/digits.py
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, step

BATCH = 96
"""Over all workers, whatever their number: the run takes the same steps on 1 node and on 4."""


def main() -> None:
    options = parse()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    images, labels, test_images, test_labels = (part.to(device) for part in digits())

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    state = {"model": ddp, "optimizer": optimizer, "scheduler": scheduler}
    checkpoints = Checkpointer(options.checkpoints, state)

    done = checkpoints.load()
    if rank == 0:
        print(f"training on {world} workers from step {done}", flush=True)
    while done < options.steps:
        # The batch of a step depends on the step alone, so that a restart and a resize lose and repeat nothing.
        batch = torch.randperm(len(images), generator=torch.Generator().manual_seed(done))[:BATCH]
        mine = batch[rank::world].to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images[mine]), labels[mine]).backward()
        optimizer.step()
        scheduler.step()
        done += 1
        step(done)
        time.sleep(options.step_seconds)
        if done % options.save_every == 0 or done == options.steps:
            checkpoints.save(done)

    if rank == 0:
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"test accuracy after {done} steps: {accuracy:.2%}", flush=True)


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (N x 64, in 0..1) and labels (N), for training and for the test: every fifth image is for the test."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(data.target)
    test = torch.arange(len(images)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=25, help="steps between two checkpoints")
    parser.add_argument("--checkpoints", default="runs/digits", help="directory for the checkpoints")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pause after each step, to watch it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after DDP's model is gone: with gloo it may hang before
