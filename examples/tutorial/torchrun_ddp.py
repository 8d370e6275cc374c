"""Each rank is started by the agent, which says who it is and where it meets the others.

On each of two nodes, with the words of torchrun:

    elastic-agent --nnodes=2 --nproc_per_node=8 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29400 \
        examples/tutorial/torchrun_ddp.py

After a kill it begins anew; `examples/elastic_ddp.py` goes on where it was.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device, backend = torch.device("cpu"), "gloo"
    else:
        # LOCAL_RANK, not RANK: on the second of two nodes with eight GPUs rank 8 has cuda:0.
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
        backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend)
    train(device)
    dist.destroy_process_group()


def train(device: torch.device) -> None:
    """DDP's model is gone at the end of it, before the process group: the other way round gloo may hang."""
    model = DistributedDataParallel(
        nn.Linear(12, 3).to(device), device_ids=None if device.type == "cpu" else [device]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 12, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"rank {dist.get_rank()} on {device}, step {step + 1}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
