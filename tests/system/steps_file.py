"""What the DDP scripts beside this file write of each step to the file that `STEPS_FILE` names. Not a test."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist


def note(what: str, number: int, **more: Any) -> None:
    record = {
        "what": what,
        "step": number,
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "generation": int(os.environ["ELASTIC_AGENT_GENERATION"]),
        **more,
    }
    with open(os.environ["STEPS_FILE"], "a") as file:
        file.write(json.dumps(record) + "\n")
