"""A script with FSDP2 that copies its shards to memory after every step.

`sharding.py FOLDER [hsdp]` trains a small network, sharded over all ranks or over pairs, until FOLDER/finish is there.
It writes to the job's history where it began and each step, with a digest of the whole state. The checkpoints are in
FOLDER/disk/fsdp, or in SYSTEM_TEST_CHECKPOINTS/fsdp.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker import Checkpointer, mesh, step

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])


def record(what: str, **more: object) -> None:
    place = {"generation": GENERATION, "rank": RANK, "world": WORLD, "node": os.environ["ELASTIC_AGENT_NODE"]}
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps({"what": what, "pid": os.getpid(), **place, **more}).encode() + b"\n")


def main(folder: Path, kind: str = "fsdp") -> None:
    record("start", env=dict(os.environ))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 14), torch.nn.Linear(14, 1))
    fully_shard(model, mesh=mesh(dp="auto", shard=2) if kind == "hsdp" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def whole() -> str:
        digest = hashlib.sha256()
        for weight in model.parameters():
            held = optimizer.state.get(weight, {})
            for tensor in (weight, *(held[name] for name in sorted(held) if name != "step")):
                digest.update(tensor.full_tensor().detach().numpy().tobytes())
        return digest.hexdigest()

    disk = Path(os.environ.get("SYSTEM_TEST_CHECKPOINTS", folder / "disk"))
    checkpoints = Checkpointer(disk / "fsdp", {"model": model, "optimizer": optimizer}, memory_every=1)
    done = checkpoints.load()
    record("loaded", step=done, whole=whole())
    finish = torch.zeros(1)
    while not finish:
        optimizer.zero_grad()
        drawn = torch.Generator().manual_seed(1000 * done + RANK)
        model(torch.randn(4, 7, generator=drawn)).square().mean().backward()
        optimizer.step()
        done += 1
        record("step", step=done, whole=whole())
        step(done)
        finish[0] = (folder / "finish").exists()
        dist.all_reduce(finish)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
