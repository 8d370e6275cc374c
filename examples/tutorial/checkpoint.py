"""One rank saves, all ranks load, and the file goes at the end: killed at any instant, it goes on.

    elastic-agent --nproc-per-node 2 examples/tutorial/checkpoint.py /tmp/model.checkpoint

The file must be this run's own. `Checkpointer` of `elastic_agent.worker` does all of this, and more: see `digits.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import init_process_group

STEPS = 4


def main(path: Path) -> None:
    init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    train(path, device)
    dist.destroy_process_group()


def train(path: Path, device: torch.device) -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(12, 3).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # A generation that was killed may have left the file. No rank writes before all know whether it is there.
    done = load(path, model, device) if agree(path.exists(), device) else 0
    while done < STEPS:
        optimizer.zero_grad()
        model(torch.randn(64, 12, device=device)).square().mean().backward()
        optimizer.step()
        done += 1
        if rank == 0:
            save(path, model, done)
        dist.barrier()  # no rank loads before the file is whole, or that of a former step
        assert load(path, model, device) == done
        print(f"rank {rank} has loaded step {done}", flush=True)
    dist.barrier()  # no rank is still loading; within the loop the next backward sees to that
    if rank == 0:
        path.unlink()


def agree(there: bool, device: torch.device) -> bool:
    """What rank 0 sees: on a shared file system another rank may see it later."""
    seen = torch.tensor([int(there)], device=device)
    dist.broadcast(seen, 0)
    return bool(seen.item())


def save(path: Path, model: nn.Module, step: int) -> None:
    """Half a file never has the name."""
    whole = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "step": step}, whole)
    whole.replace(path)


def load(path: Path, model: nn.Module, device: torch.device) -> int:
    """The step; without `map_location` all ranks of a node would load to the device of the rank that saved."""
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    return int(saved["step"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
