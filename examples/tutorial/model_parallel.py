"""A model that is spread over two devices of each worker, and data-parallel over the workers.

elastic-agent --nproc-per-node gpu --devices-per-worker 2 examples/tutorial/model_parallel.py
elastic-agent --nproc-per-node 2 examples/tutorial/model_parallel.py    # without GPUs
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import init_process_group

STEPS = 5


class TwoHalves(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.encoder = nn.Linear(12, 24).to(first)
        self.head = nn.Linear(24, 3).to(second)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(inputs.to(self.first)).tanh()
        outputs: torch.Tensor = self.head(hidden.to(self.second))
        return outputs


def own_devices() -> tuple[torch.device, torch.device]:
    """Both pinnings number them so: with `mask` LOCAL_RANK is 0. Without an accelerator the CPU stands in for both."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), torch.device("cpu")
    first = 2 * int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(first)
    return torch.device(accelerator.type, first), torch.device(accelerator.type, first + 1)


def main() -> None:
    first, second = own_devices()
    init_process_group()
    train(first, second)
    dist.destroy_process_group()


def train(first: torch.device, second: torch.device) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHalves(first, second))  # device_ids and output_device stay unset
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        targets = torch.zeros(64, 3, device=second)
        loss = nn.functional.mse_loss(model(torch.randn(64, 12)), targets)
        loss.backward()
        optimizer.step()
        print(
            f"rank {dist.get_rank()} on {first} and {second}, step {step + 1}: loss {loss.item():.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
