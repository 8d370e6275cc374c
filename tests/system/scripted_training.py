"""A worker that does known things at known steps, and then holds still until it is told to stop. Not a test.

`scripted_training.py DIRECTORY 6,10,12`: generation 1 ends at step 6, generation 2 at step 10. In generation 1 rank 0
has to be killed to stop, and rank 1 kills itself when rank 0 waits. All others tell the agent something that is no
report, and wait.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

BEGAN_AT = time.monotonic()

import torch.distributed as dist  # noqa: E402

from elastic_agent.worker import Checkpointer, step  # noqa: E402

STEP_S = 0.25
SAVE_EVERY = 4


def main(directory: str, last_steps: list[int]) -> None:
    generation, rank = int(os.environ["ELASTIC_AGENT_GENERATION"]), int(os.environ["RANK"])
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND)

    def record(what: str, at: float | None = None, **more: object) -> None:
        common = {"what": what, "at": at or time.monotonic(), "generation": generation, "rank": rank}
        node = os.environ["ELASTIC_AGENT_NODE"]
        os.write(history, json.dumps({**common, "node": node, **more}).encode() + b"\n")

    if generation == 1 and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.pop(
        "ELASTIC_AGENT_MEMORY", None
    )  # a damaged file is to be missed, so nobody may remember what was in it
    dist.init_process_group("gloo")
    checkpoints = Checkpointer(directory, {"known": {"generation": generation}})
    record("began", BEGAN_AT)
    record("loading")
    start = checkpoints.load()
    record("loaded")
    for done in range(start + 1, last_steps[generation - 1] + 1):
        time.sleep(STEP_S)
        print(f"step {done}")
        record("step", step=done)
        step(done)
        dist.barrier()
        if done % SAVE_EVERY == 0:
            checkpoints.save(done)
    if generation == 1 and rank == 1:
        while b'"what": "hold"' not in Path(os.environ["SYSTEM_TEST_HISTORY"]).read_bytes():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.sendto(b"not a report", os.environ["ELASTIC_AGENT_REPORTS"])
    record("hold", step=done)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], [int(step) for step in sys.argv[2].split(",")])
