"""Runs an example as it stands, in $TEST_FOLDER, and writes its steps down in the job's history. Not a test.

While the file in $TEST_SLOW exists each step takes a tenth of a second, so that a test can come in between.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time

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


def stepped(number: int) -> None:
    record("step", step=number)
    if os.path.exists(os.environ["TEST_SLOW"]):
        time.sleep(0.1)


def main() -> None:
    sys.argv = sys.argv[1:]
    os.chdir(os.environ["TEST_FOLDER"])
    record("start", env=dict(os.environ), argv=sys.argv)
    # After the copy in memory: what is written down here is what a kill may not cost.
    progress.on_step(stepped, stage=9)
    runpy.run_path(sys.argv[0], run_name="__main__")
    record("end")


if __name__ == "__main__":
    main()
