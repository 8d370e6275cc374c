"""Faults in a row against one job on three nodes, all drawn from a seed; and the books of what its training did.

Every fault waits until each rank has done a few new steps in the generation that followed the one before: nothing is
timed. The job needs all three nodes, so that every world has the same size and the result does not depend on the
faults. An agent that was killed is started again at once, as a service manager would.

A fault that hit nothing makes the run invalid, which fails it, too.
"""

from __future__ import annotations

import enum
import os
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.etcd_servers import EtcdCluster
from tests.system.etcd_jobs import agent_of
from tests.system.harness import Agent, Generation, Job, Record, family, look_at

from .soak_job import LAST_STEPS, SAVE_EVERY

NODES = ("a", "b", "c")
SCRIPT = Path(__file__).with_name("soak_job.py")
PATIENCE_S = 60.0
"""From one fault to the steps that the next one waits for, on two busy cores."""
STEP_S = 0.01
MOST_STEPS = 20
"""Between two faults; at least so many that a checkpoint is among them."""
PRELOAD = "--preload=default"
OPTIONS = (PRELOAD, "--nnodes=3", "--max-restarts=1000000", "--last-call=0")


class Kind(enum.Enum):
    WORKER = "a worker is killed"
    AGENT = "an agent is killed, and started again"
    NODE = "all processes of a node are killed, and its agent is started again"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    node: str
    after_steps: int
    """So many steps has every rank done in its generation when this happens."""

    def __str__(self) -> str:
        return f"{self.kind.value}, on node {self.node} after {self.after_steps} steps"


def plan(seed: int, count: int) -> list[Fault]:
    """Half of them hit workers; every kind is there if there are four or more."""
    rng = random.Random(seed)
    kinds = [(Kind.WORKER, Kind.AGENT, Kind.WORKER, Kind.NODE)[number % 4] for number in range(count)]
    rng.shuffle(kinds)
    return [Fault(kind, rng.choice(NODES), rng.randint(SAVE_EVERY + 1, MOST_STEPS)) for kind in kinds]


def steps_for(faults: Sequence[Fault]) -> int:
    """So many that the job is still training at the last fault."""
    return sum(fault.after_steps for fault in faults) + MOST_STEPS + LAST_STEPS


class Soak:
    """One run. `faults` happen in this order; `seed` is what a failure names."""

    def __init__(self, job: Job, etcd: EtcdCluster, seed: int, faults: Sequence[Fault]) -> None:
        self._job, self._seed, self._faults = job, seed, faults
        self._steps = steps_for(faults)
        job.use_etcd(etcd)

    def run(self) -> dict[int, Fault]:
        """All faults, and then to the end of the training. Returns by which fault each generation was ended."""
        for node in NODES:
            self._start(node)
        before, ended = 0, {}
        for number, fault in enumerate(self._faults, 1):
            try:
                before = self._one(fault, before)
            except AssertionError as error:
                raise AssertionError(self._where(number, fault, str(error))) from error
            ended[before] = fault
            if number % 10 == 0:
                print(f"{number} of {len(self._faults)} faults, generation {before}", flush=True)
        (self._job.folder / "enough").touch()
        for node in NODES:
            assert agent_of(self._job, node).exit_code(PATIENCE_S) == 0, f"seed {self._seed}: agent {node}"
        return ended

    def _one(self, fault: Fault, before: int) -> int:
        """Wait for its moment, let it happen; the generation that it ended."""
        generation = self._job.wait_for(lambda: self._trained(fault, before), str(fault), PATIENCE_S)
        assert generation is not None
        if fault.kind is Kind.WORKER:
            kill_all([generation.pid(generation.rank_on(fault.node))])
        else:
            agent = agent_of(self._job, fault.node)
            kill_all(family(agent.pid) if fault.kind is Kind.NODE else [agent.pid])
            agent.process.wait()
            self._start(fault.node)
        return generation.number

    def _trained(self, fault: Fault, before: int) -> Generation | None:
        """The newest generation, when it follows the one before and every rank has done its steps there."""
        for newest in self._job.generations()[-1:]:
            done = [
                [step["step"] for step in self._job.history(what="step", generation=newest.number, rank=rank)]
                for rank in range(len(NODES))
            ]
            at_last = self._steps - LAST_STEPS
            if newest.number > before and all(
                len(steps) >= fault.after_steps or at_last in steps for steps in done
            ):
                return newest
        return None

    def _start(self, node: str) -> Agent:
        script = (SCRIPT, self._job.folder, str(self._steps), str(STEP_S))
        return self._job.join(node, *OPTIONS, script=script, environment={"OMP_NUM_THREADS": "1"})

    def _where(self, number: int, fault: Fault, error: str) -> str:
        logs = "\n".join(
            f"--- agent {node}\n" + "\n".join(agent_of(self._job, node).text.splitlines()[-25:])
            for node in NODES
        )
        again = f"SOAK_SEED={self._seed} SOAK_KILLS={len(self._faults)}"
        return f"{again}, fault {number} ({fault}): {error}\n{logs}"


def kill_all(pids: Iterable[int]) -> None:
    """The first of them must be there to be hit."""
    for number, pid in enumerate(pids):
        try:
            assert number or look_at(pid) is not None, f"process {pid} is gone already: the run is invalid"
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            assert number, f"process {pid} has just gone: the run is invalid"


# --- The books


def most_lost(fault: Fault | None) -> int:
    """How many steps that all have finished may be done again.

    None when a worker dies, as the others save just in time. With an agent the memory of its node is gone, too, and an
    older state may be the newest that is whole.
    """
    return 0 if fault is not None and fault.kind is Kind.WORKER else SAVE_EVERY


def mistakes(history: Sequence[Record], most_lost: Callable[[int], int]) -> list[str]:
    """What is wrong with what the training did, in words; `history` is in the order of events.

    Within a generation all ranks begin at the same step and do each of the following once. No generation begins
    before a step that was reported as saved, nor before where an earlier one began (I6, I7). The end of a generation
    costs no more steps than `most_lost` says of it, and those that were not saved because that was refused.
    """
    found: list[str] = []
    saved = began = refused = newest = 0
    loads: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for event in history:
        generation, rank, what, step = (event.get(name) for name in ("generation", "rank", "what", "step"))
        if what == "load":
            if loads.setdefault(generation, step) != step:
                found.append(
                    f"generation {generation}: rank {rank} began at {step}, another at {loads[generation]}"
                )
            if step < saved:
                found.append(f"generation {generation} began at {step}, though {saved} was saved")
            if step < began:
                found.append(f"generation {generation} began at {step}, an earlier one at {began}")
            if generation > newest:
                finished = min((at for (where, _), at in last.items() if where == newest), default=0)
                if finished - step > most_lost(newest) + refused:
                    found.append(
                        f"generation {newest} lost {finished - step} steps: {step + 1} to {finished}"
                    )
                newest = generation
            began = max(began, step)
            last[generation, rank] = step
        elif what == "step":
            if step != last.get((generation, rank), -1) + 1:
                found.append(
                    f"generation {generation}: rank {rank} did {step} after {last.get((generation, rank))}"
                )
            last[generation, rank] = step
        elif what == "saved":
            if step <= saved:
                found.append(f"generation {generation}: saved {step} after {saved}")
            saved, refused = max(saved, step), 0
        elif what == "not saved":
            refused += SAVE_EVERY
    return found
