"""A script that saves after each short step: `endless_saver.py DIRECTORY`."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from elastic_agent.worker import Checkpointer, step


def main(directory: str) -> None:
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    checkpoints = Checkpointer(directory, {"meta": {}})
    done = checkpoints.load()
    print(f"generation {os.environ['ELASTIC_AGENT_GENERATION']} goes on from {done}", flush=True)
    while True:
        time.sleep(0.02)
        done += 1
        step(done)
        checkpoints.save(done)


if __name__ == "__main__":
    main(sys.argv[1])
