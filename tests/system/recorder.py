"""A worker without torch: writes what it sees to the job's history, steps, and fails where the test says.

Each record is one JSON line, appended whole. Not a test, and starts in some 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

SAVE_EVERY = 25
"""Steps."""


def main() -> None:
    options = parse()
    generation, rank, world = (int(os.environ[k]) for k in ("ELASTIC_AGENT_GENERATION", "RANK", "WORLD_SIZE"))
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(what: str, **more: object) -> None:
        common = {
            "what": what,
            "at": time.monotonic(),
            "generation": generation,
            "rank": rank,
            "world": world,
        }
        node, pid = os.environ["ELASTIC_AGENT_NODE"], os.getpid()
        os.write(history, json.dumps({**common, "node": node, "pid": pid, **more}).encode() + b"\n")

    def on_sigterm(_number: int, _frame: object) -> None:
        record("sigterm")
        if not options.ignore_sigterm:
            sys.exit(0 if options.exit_0_on_sigterm else 143)

    signal.signal(signal.SIGTERM, on_sigterm)
    record("start", env=dict(os.environ), argv=sys.argv[1:])
    for command in options.child:
        subprocess.Popen(["sh", "-c", command])
    step = resume(options.checkpoint) if options.checkpoint else 0
    while options.steps == 0 or step < options.steps:
        for fault in options.fault:
            if fault.hits(generation, rank, step):
                await_all_ranks(generation, world)
                fault.happen()
        time.sleep(options.step_s)
        step += 1
        record("step", step=step)
        if options.report:
            from elastic_agent.worker.steps.progress import step as report

            report(step + 1000 * generation)
        if options.checkpoint:
            go_on(options.checkpoint, step, saves=rank == 0 and step % SAVE_EVERY == 0)
        if options.say:
            print(f"{options.say} {step}", flush=True)
    record("end")


def resume(checkpoint: str) -> int:
    """The step to go on from, reported as `Checkpointer.load` does it."""
    from elastic_agent.worker.steps import progress

    progress.measure_own_time()
    try:
        with open(checkpoint) as file:
            step = int(file.read())
    except FileNotFoundError:
        step = 0
    progress.checkpoint_load(step, "ok" if step else "none", 0.001)
    return step


def go_on(checkpoint: str, step: int, *, saves: bool) -> None:
    """A step of a training that will be resumed, and its checkpoint, reported as the worker library does it."""
    from elastic_agent.worker.steps import progress

    progress.step(step)
    if saves:
        with open(f"{checkpoint}.new", "w") as file:
            size = file.write(str(step))
        os.replace(file.name, checkpoint)
        progress.checkpoint_save(step, "ok", 0.001, size, blocked_s=0.001)


def await_all_ranks(generation: int, world: int) -> None:
    """A fault hits a world of which every rank has started, and so can hear what comes of it."""
    while True:
        with open(os.environ["SYSTEM_TEST_HISTORY"]) as file:
            # Another rank may be writing the last line.
            records = [json.loads(line) for line in file if line.endswith("\n")]
        started = [r for r in records if r["what"] == "start" and r["generation"] == generation]
        if len(started) == world:
            return
        time.sleep(0.005)


class Fault:
    """`GENERATION:RANK:STEP:HOW`, each number or `*`; HOW is raise, segv, hang or the exit code."""

    def __init__(self, text: str) -> None:
        *self.where, self.how = text.split(":")

    def hits(self, *here: int) -> bool:
        return all(wanted in ("*", str(number)) for wanted, number in zip(self.where, here, strict=True))

    def happen(self) -> None:
        if self.how == "raise":
            raise RuntimeError("planned by the test")
        if self.how == "segv":
            import ctypes

            ctypes.string_at(0)
        if self.how == "hang":
            threading.Event().wait()
        os._exit(int(self.how))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0, help="0: until somebody ends it")
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--fault", type=Fault, action="append", default=[])
    parser.add_argument("--child", action="append", default=[], help="a shell command to leave running")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--exit-0-on-sigterm", action="store_true")
    parser.add_argument("--report", action="store_true", help="tell the agent of each step")
    parser.add_argument(
        "--checkpoint", default="", help="save here and resume from it, and report all of that"
    )
    parser.add_argument("--say", default="", help="print this and the step after each step")
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    main()
