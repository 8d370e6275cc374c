"""Trains on gloo, with or without `step()`, until one rank does what the test asks, once.

Arguments: rank, what, steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from elastic_agent.worker import step

LAST = {"compute": 600, "stop": 100_000, "sleep": 100_000}
"""Step of the first generation."""


def main(stuck: int, what: str, reports: bool) -> None:
    dist.init_process_group("gloo")
    rank, generation = dist.get_rank(), int(os.environ["ELASTIC_AGENT_GENERATION"])
    first_at, begun = time.monotonic(), False
    for number in range(1, 100_000):
        over = time.monotonic() > first_at + (6.0 if reports else 35.0)  # its usual use must be known
        if generation == 1 and over and not begun and rank == stuck:
            begun = True
            print(f"rank {rank}: {what}", flush=True)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "sleep":
                time.sleep(3600)
            else:
                compute(25.0)
        dist.all_reduce(torch.ones(64, 64) @ torch.ones(64, 64))
        if reports:
            step(number)
        time.sleep(0.02)
        if number == (LAST[what] if generation == 1 else 100):
            break
    print(f"rank {rank} is done in {generation}", flush=True)


def compute(for_s: float) -> None:
    """The others wait for it, and it is at work."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        for _ in range(50):
            first(1000)
        second(1000)


def first(count: int) -> int:
    return sum(number * number for number in range(count))


def second(count: int) -> int:
    return max(number % 7 for number in range(count))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "steps")
