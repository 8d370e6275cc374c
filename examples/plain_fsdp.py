"""Train a small network with FSDP2: an ordinary script, for torchrun or elastic-agent.

`elastic_fsdp.py` is the same script with the worker library; docs/worker.md shows what differs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 4, 32


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = examples()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    done = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            done += 1
            if done % 16 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {done}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


def examples() -> TensorDataset:
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


if __name__ == "__main__":
    main()
