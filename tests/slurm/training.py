"""What the jobs of these tests train: gloo, a Checkpointer that comes to disk only in planned changes, a line per step.

Not a test. Arguments: the folder of checkpoints and history, the number of steps, seconds per step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_agent.worker import Checkpointer, Drained, step


def main(folder: Path, steps: int, step_s: float) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    history = os.open(folder / "history", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(what: str, **more: object) -> None:
        run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        about = {"what": what, "rank": rank, "world": world, "run": run, "at": time.monotonic(), **more}
        os.write(history, json.dumps(about).encode() + b"\n")

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    checkpoints = Checkpointer(folder / "checkpoints", {"model": model})
    done = checkpoints.load()
    record("load", step=done, node=os.environ.get("SLURMD_NODENAME"))
    while done < steps:
        dist.all_reduce(torch.zeros(1))
        time.sleep(step_s)
        done += 1
        record("step", step=done)
        try:
            step(done)
        except Drained:
            record("drained", step=done)
            raise
    record("end", step=done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
