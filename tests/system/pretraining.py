"""Pretrains ten steps in one directory, then finetunes the same weights in another, with steps from 1, for ever.

`pretraining.py DIRECTORY keep|drop`: whether the script keeps the first Checkpointer.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from steps_file import note

from elastic_agent.worker import Checkpointer, init_process_group, step

STEP_S = 0.01
PRETRAINED = 10


def main(directory: str, keeps: bool) -> None:
    init_process_group("gloo")
    weights: dict[str, Any] = {"is": "new"}
    kept: list[Checkpointer] = []

    def train(what: str, steps: int) -> None:
        checkpoints = Checkpointer(f"{directory}/{what}", {"weights": weights})
        if keeps:
            kept.append(checkpoints)
        done = checkpoints.load()
        note(f"begun {what}", done, weights=weights["is"])
        while not steps or done < steps:
            dist.all_reduce(torch.ones(1))
            weights["is"] = what
            done += 1
            step(done)
            note("finished", done)
            if done % 10 == 0:
                checkpoints.save(done)
            time.sleep(STEP_S)
        checkpoints.wait()

    train("pretrained", PRETRAINED)
    train("finetuned", 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "keep")
