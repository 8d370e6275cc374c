"""What the soak trains: small, and sensitive to every single step, as each is drawn anew from its number and the rank.

Not from a random state that is kept: with a node, that of its ranks is lost, and only the newest state of all survives.

It writes the records that the harness reads, and `load`, `saved`, `not saved` and `drained` beside them. It goes on
until it has done so many steps and the file `enough` is there, so that it cannot end before the last fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, Drained, step

SAVE_EVERY = 5
"""Between two saves. The number of all steps is a multiple of it, too."""


def is_enough(file: Path) -> bool:
    """Rank 0 looks, for the others may not come to see it at the same step."""
    found = torch.tensor([file.exists()])
    dist.broadcast(found, 0)
    return bool(found)


def main(folder: Path, steps: int, step_s: float) -> None:
    generation, rank, world = (
        int(os.environ[name]) for name in ("ELASTIC_AGENT_GENERATION", "RANK", "WORLD_SIZE")
    )
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(what: str, **more: object) -> None:
        about = {"what": what, "at": time.monotonic(), "generation": generation, "rank": rank, "world": world}
        about |= {"node": os.environ["ELASTIC_AGENT_NODE"], "pid": os.getpid(), **more}
        os.write(history, json.dumps(about).encode() + b"\n")

    record("start", env={name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")})
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # DDP's first step has other buckets than those after it: each restart would have one in which the gradients of
    # three ranks are added up in another order. With this they are not.
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    checkpoints = Checkpointer(folder / "checkpoints", state)
    done = checkpoints.load()
    record("load", step=done)
    with checkpoints.just_in_time():
        while done < steps or done % SAVE_EVERY or not is_enough(folder / "enough"):
            torch.manual_seed(world * done + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            done += 1
            record("step", step=done)
            try:
                step(done)
            except Drained:
                record("drained", step=done)
                raise
            time.sleep(step_s)
            if done % SAVE_EVERY == 0:
                saved = checkpoints.save(done)
                if rank == 0:
                    record("saved" if saved else "not saved", step=done)
    bits = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    record("result", step=done, weights=hashlib.sha256(bits).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
