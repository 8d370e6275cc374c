"""Two ranks train a little in each way of waiting for each other; rank 1 (of `buffers` rank 0) sleeps in each step.

Prints as one line of JSON the own times of this rank's steps and a digest of its model, by way. Without `--measure`
nothing is measured, and the digests must be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker.steps import progress

STEPS = 8
SLEEP_S = 0.05
RANK = int(os.environ.get("RANK", 0))


def ddp() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), bucket_cap_mb=0.001)


def buffers() -> nn.Module:
    """Each forward pass begins with a broadcast from rank 0."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)))


def compiled() -> nn.Module:
    return torch.compile(DistributedDataParallel(nn.Linear(8, 8)), backend="aot_eager")  # type: ignore[return-value]


def fsdp() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))


def train(make: Callable[[], nn.Module]) -> tuple[list[int], str]:
    torch.manual_seed(7)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow = (0 if make is buffers else 1) == RANK
    own: list[int] = []
    torch.manual_seed(RANK)
    for step in range(STEPS):
        if slow:
            time.sleep(SLEEP_S)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        if make is plain:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        progress.step(step)
        words = progress._words
        assert words is not None
        count = words[progress.OWN_COUNT]
        if step > 1 and count:
            own.append(words[progress.OWN_TIMES + (count - 1) % progress.KEPT_TIMES])
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update((value.to_local() if hasattr(value, "to_local") else value).numpy().tobytes())
    return own, digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=RANK, world_size=2)
    if "--measure" in sys.argv:
        progress.measure_own_time()
    print(
        json.dumps({make.__name__: train(make) for make in (ddp, buffers, compiled, fsdp, plain)}), flush=True
    )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch may abort a rank of gloo's that exits


if __name__ == "__main__":
    main()
