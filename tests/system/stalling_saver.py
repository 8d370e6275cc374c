"""A data-parallel script that saves after every step, and whose first rank 0 stalls in a save once the test says so.

`stalling_saver.py FOLDER WHERE`: WHERE is `data-written`, with the manifest still to come, or `granted`, with nothing
left to do but the rename. Files in FOLDER are the test's signals: `stall`, `go` on, and `finish`. SIGTERM does not
hurry the stalled rank: it is to have every chance to commit. With `granted` the second generation does not save
before `woken`: its first write removes what the stalled rank is about to rename, and hides what the grant is for.

Writes to the job's history what became of each attempt to publish.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_agent.worker import Checkpointer
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.manifests import FileSum, Manifest

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])
STALLS = GENERATION == 1 and RANK == 0


def record(what: str, **more: object) -> None:
    common = {"what": what, "generation": GENERATION, "rank": RANK, "world": WORLD}
    node, pid = os.environ["ELASTIC_AGENT_NODE"], os.getpid()
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps({**common, "node": node, "pid": pid, **more}).encode() + b"\n")


def wait_for(signal: Path) -> None:
    while not signal.exists():
        time.sleep(0.005)


def watch_publishing(folder: Path, where: str) -> None:
    """Put hooks round the real thing: what happens in between is the library's own."""
    really_publish = CheckpointFiles.publish

    def stall(here: str) -> None:
        if STALLS and here == where and (folder / "stall").exists() and not (folder / "go").exists():
            record("stalled")
            wait_for(folder / "go")

    def publish(
        self: CheckpointFiles,
        manifest: Manifest,
        may_change: Callable[[], None],
        listed: Mapping[str, FileSum],
    ) -> None:
        stall("data-written")

        def with_the_grant_of_the_write() -> None:
            stall("granted")
            may_change()

        try:
            really_publish(self, manifest, with_the_grant_of_the_write, listed)
        except Exception as error:
            record("not published", step=manifest.step, why=type(error).__name__)
            raise
        record("published", step=manifest.step)

    CheckpointFiles.publish = publish  # type: ignore[method-assign]


def main(folder: Path, where: str) -> None:
    if STALLS:
        signal.signal(signal.SIGTERM, lambda *_: record("sigterm"))
    record("start", env=dict(os.environ))
    watch_publishing(folder, where)
    del os.environ["ELASTIC_AGENT_MEMORY"]  # this process is to write by itself
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same on all ranks, or no save is taken
    checkpoints = Checkpointer(folder / "checkpoints", {"model": torch.nn.Linear(2, 1)})
    step = checkpoints.load()
    record("loaded", step=step)
    if where == "granted" and GENERATION == 2:
        wait_for(folder / "woken")
    finish = torch.zeros(1)
    while not finish:
        step += 1
        finish[0] = (folder / "finish").exists()
        dist.all_reduce(finish)
        checkpoints.save(step)
        record("step", step=step)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
