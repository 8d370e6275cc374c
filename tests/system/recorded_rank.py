"""Training in which rank 1 falls asleep, and rank 0 waits for it as a rank with a GPU may: by computing. Not a test.

From outside rank 0 looks as if it were at work. What torch's thread does for NCCL, a thread does here with torch's own
records of gloo: at an order it writes the dump into the folder of the generation, below the folder of logs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from elastic_agent.worker import step

LOGS = Path(sys.argv[1])
TRAINS_S = 6.0
"""So that the usual time of its steps is known."""
GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])


def answer_orders(folder: Path, rank: int) -> None:
    os.mkfifo(folder / f"pipe_{rank}.pipe")
    pipe = os.open(folder / f"pipe_{rank}.pipe", os.O_RDWR)
    while os.read(pipe, 1):
        (folder / f"rank_{rank}").write_bytes(_dump_fr_trace())


def reduce() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    while not work.is_completed():
        os.sched_yield()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    [generation] = LOGS.glob(f"*/gen{GENERATION}")
    folder = generation / "flight_records"
    folder.mkdir(exist_ok=True)
    Thread(target=answer_orders, args=(folder, rank), daemon=True).start()
    began_at = time.monotonic()
    for number in range(1, 100_000 if GENERATION == 1 else 50):
        if rank == 1 and GENERATION == 1 and time.monotonic() > began_at + TRAINS_S:
            time.sleep(3600)
        reduce()
        time.sleep(0.02)
        step(number)
    print(f"rank {rank} is done in {GENERATION}", flush=True)


if __name__ == "__main__":
    main()
