"""What stock torchrun runs in the tests of our plug-in: writes what it sees to the job's history, as JSON lines.

With `--collective` the workers of a generation are one process group, and every step is an all_reduce whose result
must be the sum over a dense set of ranks. Without, they know nothing of each other, and start without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    options = parse()
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    place = {name.lower(): os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TEST_NODE")}

    def record(what: str, **more: object) -> None:
        os.write(history, json.dumps({"what": what, **place, "pid": os.getpid(), **more}).encode() + b"\n")

    record("start")
    world, ended = int(place["world_size"]), False
    while not ended:
        if options.fail_on == place["test_node"]:
            raise SystemExit(7)
        ended = options.until.exists()
        if options.collective:
            ranks, ended = together(int(place["rank"]), ended)
            assert ranks == world * (world + 1) / 2
        record("step")
        time.sleep(0.05)
    record("end")


def together(rank: int, ended: bool) -> tuple[float, bool]:
    """The sum of all ranks, counted from 1, and whether the end has come for any: then it has for all."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    sums = torch.tensor([rank + 1.0, float(ended)])
    dist.all_reduce(sums)
    return float(sums[0]), bool(sums[1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="end when this file exists")
    parser.add_argument("--collective", action="store_true")
    parser.add_argument("--fail-on", default="", help="the name of the node whose worker fails at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
