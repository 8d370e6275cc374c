"""A worker without torch that trains in lockstep with all others, and can end at a step: what a drain is about.

Nobody finishes a step before all ranks have entered it: each writes down that it has, in a file, and waits for the
others'. What it keeps of its state goes into the folder, as each node's memory would. Not a test.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from elastic_agent.worker import Drained, poll, step
from elastic_agent.worker.steps import progress


def main() -> None:
    options = parse()
    folder: Path = options.folder
    generation, rank, world = (int(os.environ[k]) for k in ("ELASTIC_AGENT_GENERATION", "RANK", "WORLD_SIZE"))
    node = os.environ["ELASTIC_AGENT_NODE"]
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(what: str, **more: object) -> None:
        common = {
            "what": what,
            "at": time.monotonic(),
            "generation": generation,
            "rank": rank,
            "world": world,
        }
        os.write(history, json.dumps({**common, "node": node, "pid": os.getpid(), **more}).encode() + b"\n")

    def keep(number: int) -> bool:
        record("keep", step=number)
        if options.fault == "keep" and rank == 1:
            os._exit(9)
        time.sleep(options.keep_s)
        new = folder / f"new-{rank}"
        new.write_text(str(number))
        new.rename(folder / f"kept-{node}-{number}")
        return True

    def save_and_exit(_number: int, _frame: object) -> None:
        record("sigterm", step=done)
        if options.own_handler:
            keep(done)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save_and_exit)
    if options.fault == "own save":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    elif not options.own_handler:
        saver = SimpleNamespace(
            save_last_step=lambda step, leaves: keep(step),
            order_write=lambda _: None,
            save_last_step_alone=keep,
            saves_alone=True,
        )
        progress.checkpointers.add("lockstep", saver)
    kept = [int(path.name.rpartition("-")[2]) for path in folder.glob("kept-*")]
    done = max(kept, default=0)
    record("start", env=dict(os.environ), argv=sys.argv[1:], step=done)

    def meet(number: int) -> None:
        """As a collective does: nobody gets through before all have come."""
        (folder / f"in-{generation}-{number}-{rank}").touch()
        awaited = [folder / f"in-{generation}-{number}-{other}" for other in range(world)]
        while not all(path.exists() for path in awaited):
            time.sleep(0.001)

    def finish(number: int) -> None:
        nonlocal done
        if options.fault == "step" and progress.awaited_between_steps() and rank == 1:
            os._exit(9)
        done = number
        record("step", step=number)
        if not options.deaf:
            step(number + (10 * rank if options.astray else 0))

    try:
        while options.steps == 0 or done < options.steps:
            meet(done + 1)
            time.sleep(options.step_s)
            finish(done + 1)
            evaluates = options.evaluates == "all" or (options.evaluates == "rank 0" and rank == 0)
            if evaluates and done % 20 == 0 and world == 2:
                evaluate(folder, record)
    except Drained as drained:
        record("drained", step=drained.step)
        if options.fault == "own save":
            save_by_itself(rank)
        raise
    record("end")


def save_by_itself(rank: int) -> None:
    if rank == 1:
        raise OSError("the disk is full")


def evaluate(folder: Path, record) -> None:  # type: ignore[no-untyped-def]
    """For as long as the test wants."""
    record("evaluation")
    while not (folder / "evaluated").exists():
        time.sleep(0.01)
        poll()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=0, help="0: until somebody ends it")
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--keep-s", type=float, default=0.0)
    parser.add_argument("--deaf", action="store_true", help="tells nobody of its steps")
    parser.add_argument("--astray", action="store_true", help="counts its steps as no other rank does")
    parser.add_argument("--own-handler", action="store_true", help="keeps its state when it gets SIGTERM")
    parser.add_argument(
        "--evaluates", default="nobody", help="all or rank 0, in a world of two after every 20 steps"
    )
    parser.add_argument("--fault", default="", help="step, keep or own save: where rank 1 crashes in a drain")
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    main()
