#!/usr/bin/env python3
"""Measure how long training stands still after a fault: torchrun, torchrun tuned and elastic-agent side by side.

Each *run* starts one *system* on `ddp_job.py`, waits until the training is steady, injects the fault of one *scenario*
and reads what it cost from the lines that the job writes; `recovery_figures.py` says how. A run may also fail, which
is a result: *hung* (no new world that lasts within the limit), *died* (all agents that should go on have exited), or
*unsteady* (there was no steady training to disturb, so the fault was never injected).

Nodes are agents on the loopback of one machine. Every process is found by a variable in its environment, so that a
node can be killed whole, and nothing that a run started outlives it; there is only one run at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery_figures import Recovery, Run, Step, is_steady, parse_steps, recovery, table
from report import add_options, keep, publish

JOB = Path(__file__).with_name("ddp_job.py")

MARK = "RECOVERY_BENCHMARK"
CHECKPOINT_EVERY = 25
STEADY_STEPS = 200
"""Steps before the fault: time for keep-alives to settle and for spare processes to get ready. Each repetition adds
its own part of a checkpoint interval, the same one for every system, as the steps to redo depend on it."""
LASTING_STEPS = 50
"""A world that falls apart sooner was no recovery."""
START_LIMIT_S = 150.0
"""From the first agent to steady training: above torchrun's last call of 30 s and its store timeout of 60 s."""
CLEANUP_LIMIT_S = 10.0
AIM_S = 0.05
"""Between two looks before the fault, which is to come near a given step."""
WATCH_S = 0.5
"""The same after it: all results come from the instants in the lines, and looking takes time from the others."""


# --- Scenarios: what is running, and what happens to it


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    min_nodes: int
    max_nodes: int
    nodes: int
    """Nodes before the fault; with none, the start itself is the event."""
    workers: int
    """Workers of each node."""
    nodes_after: int
    inject: Callable[[Job, int], float]
    """Takes the number of the repetition, to vary what may be varied. Returns the instant of the fault."""


def kill_worker(job: Job, repetition: int) -> float:
    """Each repetition kills another rank: losing rank 0 is another thing than losing the last."""
    world_size = job.scenario.nodes * job.scenario.workers
    rank = repetition % world_size
    return kill([next(step.pid for step in reversed(job.steps) if step.rank == rank)])


def kill_node(job: Job, _repetition: int) -> float:
    """All its processes, as when the machine is lost; the agent first, so that it cannot tell of its workers' end."""
    node = job.pick_leaver()
    agent = job.agents[node].pid
    return kill([agent, *(pid for pid in marked(f"{job.mark}.{node}") if pid != agent)])


def terminate_agent(job: Job, _repetition: int) -> float:
    node, fault_s = job.pick_leaver(), time.monotonic()
    job.agents[node].terminate()
    return fault_s


def add_node(job: Job, _repetition: int) -> float:
    fault_s = time.monotonic()
    job.start_node()
    return fault_s


SCENARIOS = (
    Scenario("worker-1x2", "worker SIGKILL, 1 node x 2", 1, 1, 1, 2, 1, kill_worker),
    Scenario("worker-2x1", "worker SIGKILL, 2 nodes x 1", 2, 2, 2, 1, 2, kill_worker),
    Scenario("node-killed", "one node's processes all killed, 3 -> 2", 1, 3, 3, 1, 2, kill_node),
    Scenario("node-joins", "node joins, 2 -> 3", 2, 3, 2, 1, 3, add_node),
    Scenario("node-leaves", "SIGTERM to one of 3 agents", 1, 3, 3, 1, 2, terminate_agent),
    Scenario("start", "start to first step, 1 node x 2", 1, 1, 0, 2, 1, add_node),
)


# --- Systems: how each is told to run the job


@dataclass(frozen=True, slots=True)
class System:
    name: str
    limit_s: float
    """How long it may take from the fault to a world that lasts."""
    command: Callable[[Scenario, int, str], list[str]]
    """Takes the scenario, the number of the node (0 hosts the store) and the endpoint of the store."""
    environment: Mapping[str, str] = field(default_factory=dict)
    store_first: bool = False
    """Whether node 0 must be up before the others start, as the first agent that can bind the endpoint hosts."""


def _torchrun(*tuning: str) -> Callable[[Scenario, int, str], list[str]]:
    def command(scenario: Scenario, node: int, endpoint: str) -> list[str]:
        words = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
        # By default torchrun restarts nothing, and there would be nothing to measure.
        words += ["--max-restarts=100", f"--nproc-per-node={scenario.workers}"]
        conf = list(tuning)
        if scenario.max_nodes > 1:
            words += [f"--nnodes={scenario.min_nodes}:{scenario.max_nodes}", "--rdzv-backend=c10d"]
            words += [f"--rdzv-endpoint={endpoint}", "--rdzv-id=recovery"]
            # On one machine every agent would take itself for the host.
            conf.append(f"is_host={int(node == 0)}")
        return words + ([f"--rdzv-conf={','.join(conf)}"] if conf else [])

    return command


def _elastic_agent(scenario: Scenario, node: int, endpoint: str) -> list[str]:
    words = [str(Path(sys.executable).with_name("elastic-agent")), f"--nproc-per-node={scenario.workers}"]
    if scenario.max_nodes > 1:
        words += [f"--min-nodes={scenario.min_nodes}", f"--max-nodes={scenario.max_nodes}"]
        words += [f"--rdzv-endpoint={endpoint}", "--rdzv-id=recovery", f"--node-id=node{node}"]
    return words


OURS = "elastic-agent"
SYSTEMS = (
    System("torchrun", 90.0, _torchrun()),
    System(
        "torchrun-tuned",
        60.0,
        _torchrun("last_call_timeout=1", "keep_alive_interval=1", "keep_alive_max_attempt=3"),
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    System(OURS, 60.0, _elastic_agent, store_first=True),
)


# --- One run


class Job:
    """The agents of one run and what their workers wrote. Leaving the `with` block ends all its processes."""

    def __init__(self, scenario: Scenario, system: System) -> None:
        self.scenario, self.system = scenario, system
        self.mark = uuid.uuid4().hex
        self.agents: list[subprocess.Popen[bytes]] = []
        self.steps: list[Step] = []
        self._leaver: int | None = None
        self._endpoint = f"127.0.0.1:{_free_port()}"
        self.directory = Path(tempfile.mkdtemp(prefix="recovery-"))
        self._lines = (self.directory / "steps").open("x+")
        self._partial = ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + CLEANUP_LIMIT_S
        while alive := marked(self.mark):  # again and again: an agent may start a worker while we look
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"processes {alive} of this run cannot be ended: end them before you measure on"
                )
            kill(alive)
            time.sleep(AIM_S)
        for agent in self.agents:
            agent.wait()
        self._lines.close()
        shutil.rmtree(self.directory)

    def start(self) -> None:
        for node in range(self.scenario.nodes):
            self.start_node()
            if node == 0 and self.system.store_first and self.scenario.max_nodes > 1:
                self._wait_for_store()

    def start_node(self) -> None:
        node = len(self.agents)
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.directory),
            MARK: f"{self.mark}.{node}",
            **self.system.environment,
        }
        command = self.system.command(self.scenario, node, self._endpoint)
        job = [str(JOB), str(self.directory), f"--checkpoint-every={CHECKPOINT_EVERY}"]
        with (self.directory / f"node{node}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    command + job, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def pick_leaver(self) -> int:
        """The node that nobody shall expect to go on: the last one, as the first hosts the store."""
        self._leaver = len(self.agents) - 1
        return self._leaver

    def is_dead(self) -> bool:
        """Whether nobody is left who could go on."""
        staying = [agent for node, agent in enumerate(self.agents) if node != self._leaver]
        return all(agent.poll() is not None for agent in staying)

    def wait(self, condition: Callable[[], bool], limit_s: float, look_s: float) -> bool:
        """Read on until `condition`; False if the job died or the limit passed first."""
        deadline = time.monotonic() + limit_s
        while True:
            dead = self.is_dead()
            self._read()
            if condition():
                return True
            if dead or time.monotonic() > deadline:
                return False
            time.sleep(look_s)

    def _read(self) -> None:
        text = self._partial + self._lines.read()
        whole, newline, self._partial = text.rpartition("\n")
        self.steps += parse_steps(whole + newline)

    def _wait_for_store(self) -> None:
        host, port = self._endpoint.split(":")

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                return True
            return False

        self.wait(answers, START_LIMIT_S, AIM_S)


def measure(
    scenario: Scenario, system: System, repetition: int, limit_s: float | None, logs: Path | None
) -> Run:
    load = os.getloadavg()[0]
    phase = random.Random(f"{scenario.name} {repetition}").randrange(CHECKPOINT_EVERY)
    world_size = scenario.nodes_after * scenario.workers
    result: Recovery | None = None
    with Job(scenario, system) as job:

        def steady() -> bool:
            return is_steady(job.steps, scenario.nodes * scenario.workers, STEADY_STEPS + phase)

        def recovered() -> bool:
            nonlocal result
            result = recovery(job.steps, fault_s, world_size, LASTING_STEPS)
            return result is not None

        job.start()
        if scenario.nodes and not job.wait(steady, START_LIMIT_S, AIM_S):
            outcome = "unsteady"
        else:
            fault_s = scenario.inject(job, repetition)
            if job.wait(recovered, limit_s or system.limit_s, WATCH_S):
                outcome = "recovered"
            else:
                outcome = "died" if job.is_dead() else "hung"
        if logs is not None:
            kept = logs / f"{scenario.name}.{system.name}.{repetition}.{outcome}"
            kept.mkdir(parents=True, exist_ok=True)
            for file in [*job.directory.glob("*.log"), job.directory / "steps"]:
                shutil.copy(file, kept)
    return Run(scenario.name, system.name, repetition, outcome, result, load)


def kill(pids: Sequence[int]) -> float:
    """The instant before the first one was killed."""
    before_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return before_s


def marked(mark: str = "") -> list[int]:
    """Processes whose mark begins so. A zombie has no environment any more, and nothing is left of it to end."""
    wanted = f"\0{MARK}={mark}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it may end while we look, or belong to somebody else
            if wanted in b"\0" + environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def _free_port() -> int:
    """For the store, whose port all agents must know beforehand. Taken meanwhile, the run will not get steady."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- The command


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the run are ended
    if others := marked():
        raise SystemExit(f"another benchmark is running (processes {others}): wait for it, or end them")
    runs: list[Run] = []
    for scenario, system, repetition in _plan(args.scenario, args.system, args.repeat):
        run = measure(scenario, system, repetition, args.limit_s, args.logs)
        runs.append(run)
        print(f"{run.scenario:12} {run.system:15} {run.outcome:10} {run.result or ''}", flush=True)
        keep(runs, args.json)
    titles = {scenario.name: scenario.title for scenario in SCENARIOS}
    limit = f", limit {args.limit_s:g} s" if args.limit_s else ""
    result = table(runs, titles, [system.name for system in SYSTEMS], OURS)
    publish(result, f"{args.repeat} runs of each{limit}", args.markdown, "table")


def _plan(
    scenarios: Sequence[str], systems: Sequence[str], repetitions: int
) -> Iterator[tuple[Scenario, System, int]]:
    """Repetitions outermost, and another system first in each: a slow quarter of an hour hits all of them."""
    chosen = [system for system in SYSTEMS if system.name in systems]
    for repetition in range(repetitions):
        for scenario in SCENARIOS:
            if scenario.name in scenarios:
                first = repetition % len(chosen)
                for system in chosen[first:] + chosen[:first]:
                    yield scenario, system, repetition


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long training stands still after a fault.")
    add_options(parser)
    scenarios, systems = [scenario.name for scenario in SCENARIOS], [system.name for system in SYSTEMS]
    parser.add_argument("--scenario", nargs="+", choices=scenarios, default=scenarios, help="only these")
    parser.add_argument("--system", nargs="+", choices=systems, default=systems, help="only these")
    parser.add_argument("--limit-s", type=float, metavar="S", help="hung after so long (default: 90, 60, 60)")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep what each run wrote: a folder for each"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
