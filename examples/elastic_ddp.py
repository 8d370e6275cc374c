"""Train a small network, data-parallel, and lose nothing to killed workers and changing worlds.

`plain_ddp.py` is the same script without the worker library; docs/worker.md shows what differs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker import Checkpointer, ElasticSampler, init_process_group, step

EPOCHS, BATCH = 4, 32


def main() -> None:
    init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = examples()
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    checkpoints = Checkpointer("runs/elastic_ddp", state)
    done = checkpoints.load()
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            done += 1
            step(done)
            if done % 10 == 0:
                checkpoints.save(done)
            if done % 16 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {done}: loss {loss.item():.6f}", flush=True)


def examples() -> TensorDataset:
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after DDP's model is gone: with gloo it may hang before
