"""One epoch over numbered samples, which writes down each that it has trained on. Not a test.

`sampling.py FOLDER SAMPLES BATCH`: half-way it waits until FOLDER/go-on exists, and lets planned changes happen there,
too. Its loader draws ahead, in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker import Checkpointer, ElasticSampler, poll, step

GENERATION, RANK, WORLD = (
    int(os.environ[name]) for name in ("ELASTIC_AGENT_GENERATION", "RANK", "WORLD_SIZE")
)


def record(what: str, **more: object) -> None:
    place = {"generation": GENERATION, "rank": RANK, "world": WORLD, "node": os.environ["ELASTIC_AGENT_NODE"]}
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps({"what": what, "pid": os.getpid(), **place, **more}).encode() + b"\n")


def main(folder: Path, samples: int, batch: int) -> None:
    record("start", env=dict(os.environ))
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.arange(samples))
    sampler = ElasticSampler(dataset, batch_size=batch)
    loader = DataLoader(dataset, batch, sampler=sampler, num_workers=1, generator=torch.Generator())
    checkpoints = Checkpointer(folder / "checkpoints", {"sampler": sampler})
    done = checkpoints.load()
    for (numbers,) in loader:
        dist.all_reduce(torch.ones(1))  # as DDP does: nobody is a step ahead
        done += 1
        record("step", step=done, samples=numbers.tolist())
        step(done)
        while sampler.position > samples / 2 and not (folder / "go-on").exists():
            time.sleep(0.01)
            poll()
        time.sleep(0.01)
    record("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
