"""DDP over gloo, in which each rank works for a while in each step; what stands in a file makes one of them slower.

The file holds `RANK FACTOR`, and may change at any time. Rank 0 says at which step it sees a change. Not a test.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic_agent.worker as elastic

OWN_S = 0.2


def main(slow: Path) -> None:
    dist.init_process_group("gloo")
    elastic.measure_own_time()
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = ""
    for step in range(1, 100_000):
        told = slow.read_text()
        who, factor = told.split()
        time.sleep(OWN_S * (float(factor) if rank == int(who) else 1.0))
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        elastic.step(step)
        if told != said and rank == 0:
            said = told
            print(f"slow {told} from step {step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
