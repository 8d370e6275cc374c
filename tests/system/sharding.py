"""A script with FSDP2 that copies its shards to memory after every step, and saves to disk where the test says.

`sharding.py FOLDER [SAVE_AT...]`: trains until FOLDER/finish exists; FOLDER/disk is the checkpoint directory where
SYSTEM_TEST_CHECKPOINTS does not name another. Writes to the job's history where it began, with
a digest of the whole state and of its random numbers there, and every step with those that it had.
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

from elastic_agent.worker import Checkpointer, step

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])


def record(what: str, **more: object) -> None:
    place = {"generation": GENERATION, "rank": RANK, "world": WORLD, "node": os.environ["ELASTIC_AGENT_NODE"]}
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps({"what": what, "pid": os.getpid(), **place, **more}).encode() + b"\n")


def main(folder: Path, *save_at: int) -> None:
    record("start", env=dict(os.environ))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Dropout(), torch.nn.Linear(13, 1))
    torch.manual_seed(RANK)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    meta = {"done": 0}
    directory = os.environ.get("SYSTEM_TEST_CHECKPOINTS", folder / "disk")
    checkpoints = Checkpointer(
        directory, {"model": model, "optimizer": optimizer, "meta": meta}, memory_every=1
    )

    def whole() -> str:
        """Of the state of all ranks together: the same for every world size."""
        digest = hashlib.sha256(json.dumps(meta).encode())
        for weight in model.parameters():
            held = optimizer.state[weight]
            for tensor in (weight, *(held[name] for name in sorted(held) if name != "step")):
                digest.update(tensor.full_tensor().detach().numpy().tobytes())
            digest.update(repr(held["step"].item() if held else 0).encode())
        return digest.hexdigest()

    def randomness() -> str:
        return hashlib.sha256(repr(torch.get_rng_state().tolist()).encode()).hexdigest()

    done = checkpoints.load()
    record("loaded", step=done, whole=whole(), randomness=randomness())
    finish = torch.zeros(1)
    while not finish:
        optimizer.zero_grad()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        done += 1
        meta["done"] = done
        record("step", step=done, whole=whole(), randomness=randomness())
        step(done)
        if done in save_at:
            record("saved", step=done, ok=checkpoints.save(done))
        finish[0] = (folder / "finish").exists()
        dist.all_reduce(finish)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
