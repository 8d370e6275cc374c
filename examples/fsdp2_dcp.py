"""Train a small network with FSDP2 and torch.distributed.checkpoint, through kills and changing worlds.

The script saves its sharded state itself: every 20 steps, and after the last step before a planned change. Each world
takes what it needs of the newest checkpoint. The two classes of `elastic_agent.worker.dcp` give DCP a Checkpointer's
directory, verified, pruned, and committed by the newest generation alone, and copies in the memory of the nodes.
`elastic_fsdp.py` lets a Checkpointer do all of that.

    elastic-agent --nproc-per-node 2 examples/fsdp2_dcp.py
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker import Drained, ElasticSampler, init_process_group, step
from elastic_agent.worker.dcp import ElasticStorageReader, ElasticStorageWriter

STEPS, BATCH = 120, 16
FOLDER = "runs/fsdp2"


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = examples()
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    training = Training(model, optimizer, sampler)
    training.load()
    epoch = sampler.epoch
    while training.done < STEPS:
        sampler.set_epoch(epoch)
        epoch += 1
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.done += 1
            try:
                step(training.done)
            except Drained:
                training.save(durable=True)
                raise
            if training.done % 20 == 0:
                training.save()
                if dist.get_rank() == 0:
                    print(f"step {training.done}: loss {loss.item():.6f}", flush=True)
            if training.done == STEPS:
                break
    dist.destroy_process_group()


class Training:
    """What is saved, and where."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        self.model, self.optimizer, self.sampler = model, optimizer, sampler
        self.done = 0

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "sampler": self.sampler.state_dict(),
            "done": self.done,
        }

    def save(self, *, durable: bool = False) -> None:
        """All ranks call it. It returns when all have copied what they write, with `durable` when that is on disk."""
        writer = ElasticStorageWriter(FOLDER, step=self.done, durable=durable)
        dcp.save(self.state(), storage_writer=writer)

    def load(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one. All ranks call it."""
        reader = ElasticStorageReader(FOLDER)
        if reader.step is None:
            return
        state = self.state()
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.sampler.load_state_dict(state["sampler"])
        self.done = state["done"]


def examples() -> TensorDataset:
    inputs = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


if __name__ == "__main__":
    main()
