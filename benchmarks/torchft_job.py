"""The training job of the recovery benchmark for torchft: the same model and steps as `ddp_job.py`, as torchft has it.

Each worker is a replica of its own, started by its own torchrun, and the optimizer takes a step with whoever is there:
a replica that dies costs the others that step, and one that comes gets the state of the others. It writes the same
lines as `ddp_job.py`: the world size is the number of replicas that took part in the step, the generation counts how
often that number has changed for this replica.

torchft is not in the package's environment: `recovery_systems.py` says where it is.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

TIMEOUT = timedelta(seconds=10)
"""As long as a collective waits for a silent peer. A peer that dies breaks its connections, and is seen at once."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A tiny fault tolerant job that writes down when each step was done."
    )
    parser.add_argument("directory", type=Path, help="steps go here, the same for all replicas")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds of sleep in each step")
    args = parser.parse_args()

    model = torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=TIMEOUT,
        hostname=os.environ["MASTER_ADDR"],
        replica_id=os.environ["REPLICA_GROUP_ID"],
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    steps = os.open(args.directory / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    generation = world_size = 0
    while True:  # whoever started the job ends it
        time.sleep(args.step_s)
        before = manager.current_step()
        optimizer.zero_grad()
        ddp(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        rank = manager.participating_rank()  # None: it was getting the state of the others meanwhile
        if manager.current_step() > before and rank is not None:
            if manager.num_participants() != world_size:
                world_size = manager.num_participants()
                generation += 1
            done = manager.current_step()
            line = f"{time.monotonic():.6f} {done} {rank} {world_size} {generation} {os.getpid()}\n"
            os.write(steps, line.encode())


if __name__ == "__main__":
    main()
