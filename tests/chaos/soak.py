"""Faults in a row against one job on three nodes, all drawn from a seed; and the books of what its training did.

Every fault waits until each rank has done a few new steps in the generation that followed the one before: nothing is
timed. The job needs all three nodes, so that every world has the same size and the result does not depend on the
faults. An agent that was killed is started again at once, as a service manager would. So is one that was asked to
leave, when it has: meanwhile the others wait for it, and hold the state that all go on with. For root each agent has a
`/dev/shm` of its own, which others may fill: that ends nothing, until a worker is killed, too.

Nobody reads the console of one of the nodes, from the first word to the last.

A fault that hit nothing makes the run invalid, which fails it, too.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import random
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.agent.common.exits import ExitCode
from tests.consoles import full_pipe
from tests.etcd_servers import EtcdCluster
from tests.system.etcd_jobs import agent_of
from tests.system.harness import Agent, Generation, Job, Record
from tests.system.processes import family, look_at

from .soak_job import SAVE_EVERY

NODES = ("a", "b", "c")
SCRIPT = Path(__file__).with_name("soak_job.py")
PATIENCE_S = 60.0
"""From one fault to the steps that the next one waits for, on two busy cores."""
STEP_S = 0.01
MOST_STEPS = 20
"""Between two faults; at least so many that a checkpoint is among them."""
_MOUNT = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
OWN_MEMORY = ("unshare", "-m", "sh", "-c", _MOUNT, "sh") if os.geteuid() == 0 else ()
"""Words before an agent's command, which keep its pid."""
PRELOAD = "--preload=default"
OPTIONS = ("--nnodes=3", "--max-restarts=1000000", "--last-call=0")


class Kind(enum.Enum):
    WORKER = "a worker is killed"
    AGENT = "an agent is killed, and started again"
    NODE = "all processes of a node are killed, and its agent is started again"
    SIGTERM = "an agent is asked to leave by SIGTERM, and started again"
    FULL = "others fill the memory of a node, and only then a worker there is killed"

    @property
    def planned(self) -> bool:
        return self is Kind.SIGTERM

    @property
    def on_top(self) -> bool:
        """Not one of the kills that were asked for."""
        return self.planned or self is Kind.FULL


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained meanwhile: `script` with the job's folder and these words, in workers that are preloaded so."""

    script: Path = SCRIPT
    words: tuple[str, ...] = ("0", str(STEP_S))
    preload: str = PRELOAD


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    node: str
    after_steps: int
    """So many steps has every rank done in its generation when this happens."""

    def __str__(self) -> str:
        return f"{self.kind.value}, on node {self.node} after {self.after_steps} steps"


def plan(seed: int, kills: int) -> list[Fault]:
    """So many kills, half of them of workers; for every five one planned change more, for every ten a full memory.

    Of kills every kind is there if there are three or more.
    """
    rng = random.Random(seed)
    kinds = [(Kind.WORKER, Kind.AGENT, Kind.NODE, Kind.WORKER)[number % 4] for number in range(kills)]
    kinds += [Kind.SIGTERM] * math.ceil(kills / 5)
    kinds += [Kind.FULL] * math.ceil(kills / 10) if OWN_MEMORY else []
    rng.shuffle(kinds)
    return [Fault(kind, rng.choice(NODES), rng.randint(SAVE_EVERY + 1, MOST_STEPS)) for kind in kinds]


class Soak:
    """One run. `faults` happen in this order; `seed` is what a failure names."""

    def __init__(
        self,
        job: Job,
        etcd: EtcdCluster,
        seed: int,
        faults: Sequence[Fault],
        training: Training = Training(),
    ) -> None:
        self._job, self._seed, self._faults, self._training = job, seed, faults, training
        self._deaf = random.Random(seed).choice(NODES)
        """Nobody reads what this node's agents say: their console stands still from the first word on."""
        job.use_etcd(etcd)

    def run(self) -> dict[int, Fault]:
        """All faults, and then to the end of the training. Returns by which fault each generation was ended."""
        with full_pipe() as console:
            self._console = console.write
            return self._run()

    def _run(self) -> dict[int, Fault]:
        for node in NODES:
            self._start(node)
        before, ended = 0, {}
        for number, fault in enumerate(self._faults, 1):
            try:
                before = self._one(fault, before)
            except (AssertionError, subprocess.TimeoutExpired) as error:
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
            self._kill_worker(generation, fault.node)
            return generation.number
        if fault.kind is Kind.FULL:
            with full_memory(agent_of(self._job, fault.node).pid):
                self._wait_for_steps(generation, SAVE_EVERY + 1)
                self._kill_worker(generation, fault.node)
                self._job.wait_for(
                    lambda: (
                        len(self._job.history(what="load", generation=generation.number + 1)) == len(NODES)
                    ),
                    "all to load with a full memory",
                    PATIENCE_S,
                )
            return generation.number
        agent = agent_of(self._job, fault.node)
        if fault.kind.planned:
            agent.signal(signal.SIGTERM)
            code = agent.exit_code(PATIENCE_S)
            assert code == ExitCode.STOPPED_BY_SIGTERM, f"the agent that left ended with {code}"
        else:
            kill_all(family(agent.pid) if fault.kind is Kind.NODE else [agent.pid])
            agent.process.wait()
        self._start(fault.node)
        return generation.number

    def _kill_worker(self, generation: Generation, node: str) -> None:
        kill_all([generation.pid(generation.rank_on(node))])

    def _wait_for_steps(self, generation: Generation, more: int) -> None:
        """Until every rank has gone on for so many; fails when another generation begins."""
        before = self._steps_done(generation)

        def gone_on() -> bool:
            assert self._job.generations()[-1].number == generation.number, "a full memory ended a generation"
            return self._steps_done(generation) >= before + more

        self._job.wait_for(gone_on, "steps while the memory is full", PATIENCE_S)

    def _steps_done(self, generation: Generation) -> int:
        """In this generation by every rank."""
        return min(
            len(self._job.history(what="step", generation=generation.number, rank=rank))
            for rank in range(len(NODES))
        )

    def _trained(self, fault: Fault, before: int) -> Generation | None:
        """The newest generation, when it follows the one before and every rank has done its steps there."""
        for node in NODES:
            code = agent_of(self._job, node).process.poll()
            assert code is None, (
                f"agent {node} has ended with exit code {code}, and not by a fault: the run is invalid if its lease "
                "ran out because this machine was too busy"
            )
        for newest in self._job.generations()[-1:]:
            if newest.number > before and self._steps_done(newest) >= fault.after_steps:
                return newest
        return None

    def _start(self, node: str) -> Agent:
        training = self._training
        script = (training.script, self._job.folder, *training.words)
        environment = {"OMP_NUM_THREADS": "1"}
        console = self._console if node == self._deaf else None
        return self._job.join(
            *(node, training.preload, *OPTIONS),
            script=script,
            environment=environment,
            enter=OWN_MEMORY,
            console=console,
        )

    def _where(self, number: int, fault: Fault, error: str) -> str:
        logs = "\n".join(
            f"--- agent {node}\n" + "\n".join(agent_of(self._job, node).text.splitlines()[-25:])
            for node in NODES
        )
        kills = sum(not fault.kind.on_top for fault in self._faults)
        again = f"SOAK_SEED={self._seed} SOAK_KILLS={kills}"
        return f"{again}, fault {number} ({fault}): {error}\n{logs}"


def undisturbed(folder: Path, training: Training) -> list[Record]:
    """The results by rank of as many ranks on one node, without any fault."""
    folder.mkdir()
    (folder / "enough").touch()
    job = Job(folder)
    script = (training.script, folder, *training.words)
    workers = f"--nproc-per-node={len(NODES)}"
    agent = job.start("quiet", training.preload, workers, script=script, environment={"OMP_NUM_THREADS": "1"})
    code = agent.exit_code(300)
    found = results(job)
    job.close()
    assert code == 0, agent.text
    return found


def results(job: Job) -> list[Record]:
    found = sorted(job.history(what="result"), key=lambda result: int(result["rank"]))
    return [{name: one[name] for name in ("rank", "step", "weights")} for one in found]


@contextlib.contextmanager
def full_memory(agent: int) -> Iterator[None]:
    """Others have taken all that was left of this agent's `/dev/shm`."""
    others = Path(f"/proc/{agent}/root/dev/shm/others")
    with open(others, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    others.unlink()


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

    None when a worker dies, as the others save just in time, also beside a full memory; nor in a planned change. With
    an agent the memory of its node is gone, too, and an older state may be the newest that is whole.
    """
    return 0 if fault is not None and (fault.kind is Kind.WORKER or fault.kind.on_top) else SAVE_EVERY


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


def unplanned(history: Sequence[Record], planned: Collection[int]) -> list[str]:
    """Where a planned change was none, in words: `planned` are the generations that one has ended.

    All their ranks end by themselves after the same step, and the very next generation goes on there.
    """
    found: list[str] = []
    for number in sorted(planned):
        ranks = {event["rank"] for event in history if event["generation"] == number}
        ends = {event["rank"]: event["step"] for event in _of(history, number, "drained")}
        if ends.keys() != ranks:
            found.append(
                f"generation {number}: of the ranks {sorted(ranks)} only {sorted(ends)} ended as told"
            )
        begins = {event["step"] for event in _of(history, number + 1, "load")}
        if len({*ends.values(), *begins}) != 1 or not begins:
            found.append(
                f"generation {number} ended at {sorted(ends.values())}, and the next began at {sorted(begins)}"
            )
    return found


def _of(history: Sequence[Record], generation: int, what: str) -> list[Record]:
    return [event for event in history if (event["generation"], event["what"]) == (generation, what)]
