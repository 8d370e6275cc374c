"""Train a small network with FSDP2, and lose nothing to killed workers, lost nodes and changing worlds.

`plain_fsdp.py` is the same script without the worker library; docs/worker.md shows what differs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker import Checkpointer, ElasticSampler, init_process_group, step

EPOCHS, BATCH = 4, 32


def main() -> None:
    init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = examples()
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    checkpoints = Checkpointer("runs/elastic_fsdp", state, memory_every=1)
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
    dist.destroy_process_group()


def examples() -> TensorDataset:
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


if __name__ == "__main__":
    main()
