"""A script whose state breaks once and stays broken: weights that are not numbers, saved before anybody looks.

`poisoned.py FOLDER WHERE`: the first generation breaks the state of step 5. Each step is kept on WHERE, disk or memory.
Whoever finds a broken state raises; the others go on to step 8, which is the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_agent.worker import Checkpointer, step

GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])


def main(folder: Path, where: str) -> None:
    dist.init_process_group("gloo")
    weights = {"w": torch.zeros(4)}
    every = 1 if where == "memory" else None
    checkpoints = Checkpointer(folder / "checkpoints", {"weights": weights}, keep=3, memory_every=every)
    done = checkpoints.load()
    with open(folder / f"loaded-{dist.get_rank()}", "a") as told:
        print(json.dumps([GENERATION, done]), file=told, flush=True)
    dist.barrier()  # who finds the state broken ends the others: each must have told first
    while done < 8:
        if weights["w"].isnan().any():
            raise ValueError("the weights are not numbers")
        weights["w"] += 1
        done += 1
        if done == 5 and GENERATION == 1:
            weights["w"] += float("nan")
        step(done)
        if where == "disk":
            checkpoints.save(done)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
