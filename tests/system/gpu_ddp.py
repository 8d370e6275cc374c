"""A DDP script over NCCL that fills most of its GPU, and writes to the job's history when each phase of its start ends.

Two of its generations do not fit on a GPU together: the second runs out of memory if it starts before the first's is
free. Otherwise it trains as any script with a Checkpointer does.
"""

from __future__ import annotations

import json
import os
import sys
import time

BALLAST = 0.6
"""Of the GPU's whole memory."""


def record(what: str, **more: object) -> None:
    numbers = {"generation": "ELASTIC_AGENT_GENERATION", "rank": "RANK", "world": "WORLD_SIZE"}
    told = {
        "what": what,
        "at": time.monotonic(),
        "node": os.environ["ELASTIC_AGENT_NODE"],
        "pid": os.getpid(),
        **{key: int(os.environ[name]) for key, name in numbers.items()},
        **more,
    }
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps(told).encode() + b"\n")


def main(directory: str, steps: int) -> None:
    record("start", env=dict(os.environ), argv=sys.argv[1:])
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from elastic_agent.worker import Checkpointer, init_process_group, step

    record("torch imported")
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    whole = torch.cuda.get_device_properties(device).total_memory
    ballast = torch.empty(int(BALLAST * whole), dtype=torch.uint8, device=device)
    record("memory allocated")
    init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device=device))  # the communicator is only made now
    torch.cuda.synchronize()
    record("first collective done")
    torch.manual_seed(dist.get_rank())  # each rank draws its own data and its own dropout
    layers = torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = Checkpointer(directory, {"model": model, "optimizer": optimizer})
    done = checkpoints.load()
    record("checkpoint loaded", step=done)
    while done < steps:
        optimizer.zero_grad()
        model(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        done += 1
        step(done)
        record("step", step=done)
        time.sleep(0.02)
        if done % 10 == 0:
            checkpoints.save(done)
    del ballast
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
