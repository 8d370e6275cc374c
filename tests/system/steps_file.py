"""What the DDP scripts beside this file write of each step to the file that `STEPS_FILE` names. Not a test.

With `HOLD_EVERY` the training of generation G waits before step G times that number until the test has made the file
`STEPS_FILE`.go: however slow the machine, what the test does to the training comes before its end.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elastic_agent.worker import poll


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


def wait_for_note(**wanted: Any) -> None:
    """Of any rank."""
    file = Path(os.environ["STEPS_FILE"])
    while not any(wanted.items() <= json.loads(line).items() for line in file.read_text().split("\n")[:-1]):
        time.sleep(0.01)


def hold(done: int) -> None:
    """Between two steps."""
    if done + 1 != int(os.environ.get("HOLD_EVERY", "0")) * int(os.environ["ELASTIC_AGENT_GENERATION"]):
        return
    note("held", done)
    while not os.path.exists(f"{os.environ['STEPS_FILE']}.go"):
        poll()
        time.sleep(0.01)
