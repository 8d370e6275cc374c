"""Runs an example as it stands, in $TEST_FOLDER, and writes down in the job's history its steps and what they are
trained on. Not a test.

A sample is known by the checksum of what the model is given, whatever loaders and samplers brought it there. While the
file in $TEST_SLOW exists each step takes a tenth of a second, and two seconds after as many as the file says, so that a
test can come in between.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import zlib
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elastic_agent.worker.steps import progress


def record(what: str, **more: object) -> None:
    common = {
        "what": what,
        "at": time.monotonic(),
        "generation": int(os.environ["ELASTIC_AGENT_GENERATION"]),
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "node": os.environ["ELASTIC_AGENT_NODE"],
        "pid": os.getpid(),
    }
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(history, json.dumps({**common, **more}).encode() + b"\n")
    os.close(history)


finished: list[int] = []
"""The steps that this process has finished."""


def stepped(number: int) -> None:
    finished.append(number)
    record("step", step=number)
    with suppress(FileNotFoundError), open(os.environ["TEST_SLOW"]) as file:
        time.sleep(0.1 if len(finished) < int(file.read()) else 2.0)


def record_samples() -> None:
    """Of each call of a whole model in training."""
    call, depth = nn.Module.__call__, 0

    def recorded(module: nn.Module, *args: Any, **named: Any) -> Any:
        nonlocal depth
        if depth == 0 and torch.is_grad_enabled():
            inputs = next(leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor))
            samples = [zlib.crc32(row.numpy().tobytes()) for row in inputs.detach().cpu()]
            record("samples", after=finished[-1] if finished else None, samples=samples)
        depth += 1
        try:
            return call(module, *args, **named)
        finally:
            depth -= 1

    nn.Module.__call__ = recorded  # type: ignore[method-assign]


def main() -> None:
    sys.argv = sys.argv[1:]
    os.chdir(os.environ["TEST_FOLDER"])
    record("start", env=dict(os.environ), argv=sys.argv)
    # After the copy in memory: what is written down here is what a kill may not cost.
    progress.on_step(stepped, stage=9)
    record_samples()
    runpy.run_path(sys.argv[0], run_name="__main__")
    record("end")


if __name__ == "__main__":
    main()
