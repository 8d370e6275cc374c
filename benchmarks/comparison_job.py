"""A worker of `comparison.py`: writes who it is to a file, and does what its mode says.

    comparison_job.py FOLDER MODE

`wait` goes on until FOLDER has a file `enough`; `crash` fails at once; `crash-on-b` when all workers are there;
`crash-late` on node a alone, in the first try, when the worker of node b has ended; `crash-strangely` in the first try,
with an error file that is no JSON;
`train` takes steps together with all ranks, and saves each fiftieth one with elastic_agent.worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(folder: Path, mode: str) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    note(folder, "start")
    print(f"worker {os.getpid()} of node {os.environ['NODE']} begins", flush=True)
    modes = {
        "crash": crash,
        "crash-late": crash_late,
        "crash-on-b": crash_on_b,
        "crash-strangely": crash_strangely,
        "train": train,
        "wait": wait,
    }
    record(modes[mode])(folder)


def note(folder: Path, what: str, **more: object) -> None:
    names = ("NODE", "RANK", "WORLD_SIZE", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT")
    line = (
        {"what": what, "at": time.monotonic(), "pid": os.getpid()}
        | {name: os.environ[name] for name in names}
        | more
    )
    with open(folder / "history", "a") as file:
        file.write(json.dumps(line) + "\n")


def wait(folder: Path) -> None:
    while not (folder / "enough").exists():
        time.sleep(0.01)


def crash(folder: Path) -> None:
    raise ValueError("the data is not there")


def crash_on_b(folder: Path) -> None:
    while (folder / "history").read_text().count("start") < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if os.environ["NODE"] == "b":
        time.sleep(1.0)
        crash(folder)
    wait(folder)


def crash_late(folder: Path) -> None:
    again = "fail" in (folder / "history").read_text()
    while (folder / "history").read_text().count("start") < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if again:
        wait(folder)
    elif os.environ["NODE"] == "a":
        time.sleep(3.0)  # for the agent of b to see that its worker has ended
        note(folder, "fail")
        crash(folder)


def crash_strangely(folder: Path) -> None:
    if (folder / "history").read_text().count("start") == 1:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("out of data")
        os._exit(1)
    wait(folder)


def train(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from elastic_agent.worker import Checkpointer, step

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same on every rank
    weights = torch.nn.Linear(4, 4)
    checkpoints = Checkpointer(folder / "checkpoints", {"model": weights})
    done = checkpoints.load()
    note(folder, "load", step=done)
    while not (folder / "enough").exists():
        time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
        done += 1
        note(folder, "step", step=done)
        step(done)
        if done % 50 == 0:
            checkpoints.save(done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
