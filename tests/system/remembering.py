"""A DDP script that copies its state to memory after every step and saves to disk only where the test says.

`remembering.py FOLDER [SAVE_AT...]`: trains until FOLDER/finish exists; FOLDER/disk-of-NODE is the checkpoint directory
where SYSTEM_TEST_CHECKPOINTS does not name another. Writes to the job's history where it began,
with the state and the random numbers that it found there, and every step with those that it had.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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
    torch.manual_seed(RANK)
    random.seed(RANK)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    own = folder / f"disk-of-{os.environ['ELASTIC_AGENT_NODE']}"
    checkpoints = Checkpointer(os.environ.get("SYSTEM_TEST_CHECKPOINTS", own), state, memory_every=1)

    def bits() -> str:
        buffer = io.BytesIO()
        torch.save([model.module.state_dict(), optimizer.state_dict()], buffer)
        randomness = [random.getstate(), torch.get_rng_state().tolist()]
        return hashlib.sha256(buffer.getvalue() + repr(randomness).encode()).hexdigest()

    done = checkpoints.load()
    record("loaded", step=done, bits=bits())
    finish = torch.zeros(1)
    while not finish:
        optimizer.zero_grad()
        model(torch.randn(4, 8) + random.random()).square().mean().backward()
        optimizer.step()
        done += 1
        record("step", step=done, bits=bits())
        step(done)
        if done in save_at:
            record("saved", step=done, ok=checkpoints.save(done))
        finish[0] = (folder / "finish").exists()
        dist.all_reduce(finish)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
