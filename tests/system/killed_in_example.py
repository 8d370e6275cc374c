"""Runs one of the examples, with its arguments, and kills it in the middle. Not a test.

`checkpoint.py` is killed once in each generation, at another place; the others in the first one, at a step of rank 1.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["ELASTIC_AGENT_GENERATION"])


def die(place: str) -> None:
    print(f"generation {GENERATION} dies {place}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def save_half(state: dict[str, Any], path: Path, save: Any = torch.save) -> None:
    whole = io.BytesIO()
    save(state, whole)
    if state["step"] < 2:
        path.write_bytes(whole.getvalue())
        return
    path.write_bytes(whole.getvalue()[: whole.tell() // 2])
    die("in the middle of a save")


def replace_and_die(path: Path, name: Path, replace: Any = Path.replace) -> None:
    replace(path, name)
    die("between a save and the barrier")


def meet_and_die(meet: Any = dist.barrier) -> None:
    meet()
    die("between the barrier and a load")


def dying_step(optimizer: type[torch.optim.Optimizer], at: int) -> tuple[type, str, Any]:
    left, really_step = iter(range(at - 1, -1, -1)), optimizer.step

    def step(self: torch.optim.Optimizer) -> None:
        really_step(self)
        if next(left) == 0:
            die("after a step")

    return optimizer, "step", step


PLACES: dict[tuple[int, int], tuple[Any, str, Any]] = {
    (1, 0): (torch, "save", save_half),
    (2, 0): (Path, "replace", replace_and_die),
    (3, 1): (dist, "barrier", meet_and_die),
    (4, 0): (Path, "unlink", lambda path: die("before the file is removed")),
}
"""By generation and rank: what does it, in the place of torch's or Python's own."""

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0])
    if script.name == "checkpoint.py":
        places = PLACES
    elif script.parent.name == "tutorial":
        places = {(1, 1): dying_step(torch.optim.SGD, 3)}
    else:
        places = {(1, 1): dying_step(torch.optim.AdamW, 40)}
    if (GENERATION, RANK) in places:
        setattr(*places[GENERATION, RANK])
    runpy.run_path(sys.argv[0], run_name="__main__")
