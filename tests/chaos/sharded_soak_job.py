"""The very `examples/elastic_fsdp.py`, with more epochs: `sharded_soak_job.py FOLDER EPOCHS STEP_S`.

It saves below FOLDER, waits for STEP_S seconds after each step, and writes the records that the harness reads, with
`load` and `result` beside them. What it has saved is gone when it loads: only copies in memory are there to go on from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from elastic_agent import worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_fsdp.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_fsdp", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def main(folder: Path, epochs: int, step_s: float) -> None:
    generation, rank, world = (
        int(os.environ[name]) for name in ("ELASTIC_AGENT_GENERATION", "RANK", "WORLD_SIZE")
    )
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(what: str, **more: object) -> None:
        about = {"what": what, "at": time.monotonic(), "generation": generation, "rank": rank, "world": world}
        about |= {"node": os.environ["ELASTIC_AGENT_NODE"], "pid": os.getpid(), **more}
        os.write(history, json.dumps(about).encode() + b"\n")

    record("start", env={name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")})
    os.chdir(folder)
    example = load_example()
    model, disk = torch.nn.Module(), Path()
    done = 0

    class Recorded(worker.Checkpointer):
        def __init__(self, directory: str, state: dict[str, Any], **options: Any) -> None:
            nonlocal model, disk
            model, disk = state["model"], Path(directory)
            super().__init__(directory, state, **options)

        def load(self) -> int:
            # Each rank does so before it looks, so that no rank finds any, whichever comes first.
            for manifest in disk.glob("step-*.json"):
                manifest.unlink(missing_ok=True)
            record("load", step=(found := super().load()))
            return found

    def step(number: int) -> None:
        nonlocal done
        done = number
        record("step", step=number)
        worker.step(number)
        time.sleep(step_s)

    destroy = dist.destroy_process_group

    def end() -> None:
        weights = b"".join(weight.full_tensor().detach().numpy().tobytes() for weight in model.parameters())
        record("result", step=done, weights=hashlib.sha256(weights).hexdigest())
        destroy()

    example.EPOCHS, example.Checkpointer, example.step = epochs, Recorded, step
    dist.destroy_process_group = end
    example.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
