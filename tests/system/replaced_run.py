"""A script whose checkpoint directory another run has, or takes: `replaced_run.py FOLDER WHEN`.

WHEN is load: another process holds the directory's lock. WHEN is save: another run takes over after the first step,
which nothing prevents where locks do not work.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from elastic_agent.worker import Checkpointer, step
from elastic_agent.worker.storage.disk import ownership
from elastic_agent.worker.wire.environment import Run

ownership.LOCK_WAIT_S = 0.5


def main(folder: Path, when: str) -> None:
    dist.init_process_group("gloo")
    with open(folder / f"started-{dist.get_rank()}", "a") as told:
        print(when, file=told, flush=True)
    directory = folder / "checkpoints"
    checkpoints = Checkpointer(directory, {"numbers": {}})
    checkpoints.load()
    step(1)
    checkpoints.save(1)
    checkpoints.wait()
    if when == "save" and dist.get_rank() == 0:
        (directory / ownership.OWNER_NAME).write_bytes(ownership.Ownership(Run("thief")).to_json())
    dist.barrier()
    step(2)
    checkpoints.save(2)
    checkpoints.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
