"""Real agents with real workers on this machine, and what tests need to see of them.

A `Job` is one training job: it starts agents, reads the *history* that the workers write (see `recorder.py`), and
finds every process that came from it by a marker in its environment, which agents, workers and their children
inherit. While a job lives, a thread looks at all of its processes over and over: two generations of workers alive on
one node (I1) fail the test, whatever it is about. So do, at the end, a generation that is not one world with dense
ranks (I2, I3) or that a node has started twice (I4), and a process that outlives its agent by five seconds (I9).

Nothing here sleeps and hopes: `Job.wait_for` asks until a condition holds or a deadline passes. A test that fails shows
the end of what all agents had to say, in order of time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tests.etcd_servers import EtcdCluster
from tests.waiting import wait_for

from .fork_server import AgentProcess, ForkServer, fork_server
from .processes import MARKER, Census, Process, listening_ports, look_at, port_for_a_store, processes_of

PATIENCE_S = 100.0
"""No wait of a healthy run comes near this, also where so much else runs that torch takes 35 s to import."""

C_LIBRARY_SIGNALS = 0b11 << 31
"""Signals 32 and 33 belong to the C library, which lets nobody change how they were inherited."""

ORPHANS_S = 5.0
"""Promise I9."""

CONVERGED_S = 60.0
"""Promise I11, after the last fault."""

TRAINING_GAP = "longest training gap by store fault"
"""The property under which a test notes (fault, seconds)."""

RECORDER = Path(__file__).with_name("recorder.py")
LOCKSTEP = Path(__file__).with_name("lockstep.py")

LACKING = Path(__file__).with_name("lacking.py")
DYING = Path(__file__).with_name("dying.py")

NO_MORE_TORCH_THAN_NEEDED = str(Path(__file__).with_name("without_torch"))
"""On the PYTHONPATH of agents: they and the processes that serve the workers' stores import of torch the store alone.
An import of all of it costs more than the rest of most jobs. A test that sets PYTHONPATH has the real torch."""

WHOLE_TORCH = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""For an agent that is to check its node after an exclusion: it multiplies matrices."""

WITHOUT_TORCH = (RECORDER, LOCKSTEP, LACKING, DYING)
"""Workers that ask their store for nothing: it is a stand-in, which only holds the socket."""

HELD_STORES = {"SYSTEM_TEST_WITHOUT_TORCH": "yes"}
"""In the environment of an agent: its workers have no use for torch."""

TORCH_PRELOADED = "--preload=default"
"""For a job whose workers use torch and start again and again: they are forked from one process that has imported it,
as they are by default. `Job.start` says why this is not so for the others."""

MOST_LINES, MOST_CHARACTERS = 100, 300
"""Of the agents' logs, and of each line, that a test shows which has failed."""

CHECKPOINTER_PRELOADED = "--preload=torch,torch.distributed,elastic_agent.worker.checkpointing.checkpointer"
"""For those that train without DistributedDataParallel, whose imports cost as much again."""

T = TypeVar("T")
Record = dict[str, Any]


class OneGenerationPerNode(threading.Thread):
    """Looks for two generations of one node alive at the same instant (I1), until closed."""

    def __init__(self, job: str) -> None:
        super().__init__(name="one-generation-per-node", daemon=True)
        self.seen: set[tuple[str, int]] = set()
        self.violations: list[str] = []
        self._census = Census(job)
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(0.02):
            self.look()

    def look(self) -> None:
        workers = [process for process in self._census.take() if process.generation is not None]
        self.seen |= {(worker.node, worker.generation or 0) for worker in workers}
        for old in workers:
            newer = [new for new in workers if new.node == old.node and new.generation > old.generation]  # type: ignore[operator]
            # The list was not made in one instant: only who is there now, after the newer was seen, overlaps it.
            if newer and look_at(old.pid) == old:
                self.violations.append(f"on node {old.node} two at once: {old}; {newer[0]}")

    def close(self) -> None:
        self._closed.set()
        self.join()


# --- Agents


def planted(fault: str) -> dict[str, str]:
    """The environment of an agent that has this fault: see the folder `planted`."""
    return {"PYTHONPATH": str(Path(__file__).with_name("planted")), "PLANTED": fault}


AGENT = (sys.executable, "-m", "elastic_agent")


def python_path() -> str:
    """Of agents, unless a test says otherwise."""
    return os.pathsep.join(filter(None, (NO_MORE_TORCH_THAN_NEEDED, os.environ.get("PYTHONPATH"))))


def server_for(words: Sequence[str], environment: Mapping[str, str]) -> ForkServer | None:
    """Of whom an agent with these words may be forked; None: it starts cold."""
    endpoint = any(word.startswith("--rdzv-endpoint") for word in words)
    with_store = endpoint and "--rdzv-backend=etcd" not in words
    server = fork_server(python_path(), with_store=with_store)
    return server if server.can_start(environment) else None


def network_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The namespace that the first words enter, if they do, and the others; one with files of its own is not known."""
    if tuple(command[:3]) == ("ip", "netns", "exec") and not Path("/etc/netns", command[3]).exists():
        return command[3], command[4:]
    return "", command


class Agent:
    """One agent process and all that it says."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        console: int | None = None,
        stdin: int = subprocess.DEVNULL,
        folder: Path | None = None,
    ) -> None:
        """`console` is where it writes, if that is not to be the log: then nothing here knows what it says."""
        self.name = name
        self.log = log
        network, words = network_of(command)
        forks = console is None and stdin == subprocess.DEVNULL and tuple(words[:3]) == AGENT
        self.process: AgentProcess
        with open(log, "wb") as output:
            if forks and (server := server_for(words[3:], environment)) is not None:
                self.process = server.start(words[3:], environment, output.fileno(), network)
                return
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=output if console is None else console,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, self.text, re.MULTILINE)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def exit_code(self, within_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {self.name} has not ended within {within_s} s") from None

    @property
    def url(self) -> str:
        found = self.says(r"at (http://\S+)")
        assert found is not None, f"agent {self.name} has not said where its metrics are"
        return found[1]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name with these labels."""
        _, text = self.get("/metrics")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = [
            sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"agent {self.name} exports no {name} with {labels}"
        return sum(sample.value for sample in found)


@dataclass(frozen=True, slots=True)
class Generation:
    """What the workers of one generation wrote when they started, by rank."""

    number: int
    starts: Mapping[int, Record]

    def pid(self, rank: int) -> int:
        return int(self.starts[rank]["pid"])

    @property
    def nodes(self) -> list[str]:
        """In the order of ranks, each once."""
        return list(dict.fromkeys(self.starts[rank]["node"] for rank in sorted(self.starts)))

    def rank_on(self, node: str) -> int:
        return next(rank for rank, start in sorted(self.starts.items()) if start["node"] == node)


class Job:
    """See the module's docstring."""

    def __init__(self, folder: Path) -> None:
        self.id = uuid.uuid4().hex
        self.folder = folder
        self.agents: list[Agent] = []
        self.more_logs: list[str] = []
        """Of agents that this has not started itself."""
        self.store_port: int | None = None
        self._etcd: tuple[str, ...] = ()
        self._first_registers: Callable[[], object] | None = None
        self.watcher = OneGenerationPerNode(self.id)
        self.watcher.start()
        self._history = folder / "history.jsonl"
        self._history.touch()
        self._read = 0
        self._records: dict[tuple[Any, Any], list[Record]] = {}
        """By what they say and by generation, and by either: a wait looks at few of them each time."""
        self._census = Census(self.id)

    # --- starting

    def start(
        self,
        name: str,
        *options: str,
        script: Sequence[str | Path] = (RECORDER,),
        environment: Mapping[str, str] | None = None,
        enter: Sequence[str] = (),
        console: int | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Agent:
        """An agent with just these options. `script` is what its workers run, with arguments.

        Nothing is preloaded unless an option says what: most scripts here need no torch, which would be imported
        beside them. Nor does it ask whether this machine goes away, or is fit. `enter` are words before its command
        that bring it to another place, and keep its pid.
        """
        log = self.folder / f"{name}-{len(self.agents)}.log"
        interpreter = [*enter, *AGENT]
        cold = () if any(option.startswith("--preload") for option in options) else ("--preload=none",)
        quiet = () if any(option.startswith("--notice") for option in options) else ("--notice=off",)
        unchecked = () if any(option.startswith("--check=") for option in options) else ("--check=off",)
        command = [*interpreter, f"--node-id={name}", *cold, *quiet, *unchecked, *options, *map(str, script)]
        surroundings = {**os.environ, MARKER: self.id, "SYSTEM_TEST_HISTORY": str(self._history)}
        surroundings["PYTHONPATH"] = python_path()
        if script[:1] and script[0] in WITHOUT_TORCH and TORCH_PRELOADED not in options:
            surroundings |= HELD_STORES
        agent = Agent(name, command, {**surroundings, **(environment or {})}, log, console, stdin)
        self.agents.append(agent)
        return agent

    def use_etcd(self, cluster: EtcdCluster, *, in_order: bool = False) -> None:
        """Let the agents of this job meet there instead of at the first one. `in_order`: the first that joins is the
        oldest node, as where it hosts the store."""
        endpoints = ",".join(f"{host}:{port}" for host, port in cluster.endpoints)
        self._etcd = ("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoints}", f"--rdzv-id={self.id}")
        words = ("get", f"/elastic-agent/{self.id}/nodes/", "--prefix", "--keys-only")
        if in_order:
            self._first_registers = lambda: (
                self.agents[0].process.poll() is not None or "kvs" in json.loads(cluster.ctl(*words))
            )

    def join(self, name: str, *options: str, **more: Any) -> Agent:
        """An agent of a job on several nodes.

        Without etcd the first one hosts the store, and listens before the next starts.
        """
        if self._etcd:
            if self._first_registers is not None and len(self.agents) == 1:
                self.wait_for(self._first_registers, "the first node's record")
            return self.start(name, *self._etcd, *options, **more)
        first = self.store_port is None
        if self.store_port is None:
            self.store_port = port_for_a_store()
        rendezvous = (f"--rdzv-endpoint=127.0.0.1:{self.store_port}", "--local-addr=127.0.0.1")
        agent = self.start(name, *rendezvous, *options, **more)
        if first:
            self.wait_for(lambda: self.store_port in listening_ports(), f"agent {name} to listen")
        return agent

    # --- seeing

    def wait_for(self, condition: Callable[[], T], what: str, within_s: float = PATIENCE_S) -> T:
        """The condition's value as soon as it is true. `what` completes "waited for"."""
        return wait_for(condition, what, within_s)

    def wait_for_metric(self, agent: Agent, name: str, value: float, **labels: str) -> None:
        """Within a rendering, as a scrape may get the last one."""
        self.wait_for(lambda: agent.metric(name, **labels) == value, f"{name} of {agent.name} to be {value}")

    def wait_for_text(self, agent: Agent, pattern: str, within_s: float = PATIENCE_S) -> re.Match[str]:
        found = self.wait_for(lambda: agent.says(pattern), f"agent {agent.name} to say {pattern!r}", within_s)
        assert found is not None
        return found

    def history(self, **wanted: Any) -> list[Record]:
        """All records so far with these values, in the order in which they were written."""
        with open(self._history, "rb") as file:
            file.seek(self._read)
            *lines, rest = file.read().split(b"\n")
            self._read = file.tell() - len(rest)
        whole = (
            line[line.rfind(b'{"what": ') :] for line in lines
        )  # a worker killed as it wrote left half a line
        for record in map(json.loads, whole):
            what, generation = record["what"], record.get("generation")
            for key in {(what, generation), (what, None), (None, generation), (None, None)}:
                self._records.setdefault(key, []).append(record)
        found = self._records.get((wanted.get("what"), wanted.get("generation")), ())
        return [record for record in found if wanted.items() <= record.items()]

    def generations(self) -> list[Generation]:
        starts: dict[int, dict[int, Record]] = {}
        for start in self.history(what="start"):
            starts.setdefault(start["generation"], {})[start["rank"]] = start
        return [Generation(number, starts[number]) for number in sorted(starts)]

    def wait_for_training(self, world: int, *, after: int = 0) -> Generation:
        """The newest generation beyond `after`, as soon as it has this world size and every rank has done a step."""

        def training() -> Generation | None:
            newest = self.generations()[-1:]
            for generation in newest:
                steps = self.history(what="step", generation=generation.number)
                ranks = {step["rank"] for step in steps if step["world"] == world}
                if generation.number > after and ranks == set(range(world)):
                    return generation
            return None

        found = self.wait_for(training, f"{world} workers to train in a generation after {after}")
        assert found is not None
        return found

    def wait_for_convergence(self, *nodes: str, within_s: float = CONVERGED_S) -> Generation:
        """I11: exactly these nodes run the newest generation, every rank steps from now on, and nothing older runs."""
        since = time.monotonic()

        def converged() -> Generation | None:
            newest = self.generations()[-1]
            stepped = {step["rank"] for step in self.steps(since) if step["generation"] == newest.number}
            whole = sorted(newest.nodes) == sorted(nodes) and stepped == set(newest.starts)
            alone = whole and {worker.generation for worker in self.workers()} == {newest.number}
            return newest if alone else None

        found = self.wait_for(converged, f"one generation on {', '.join(nodes)}", within_s)
        assert found is not None
        return found

    def wait_for_steps(self, generation: Generation, for_s: float) -> None:
        """Until every rank of it has gone on for so long from now; fails when another generation starts."""
        until = time.monotonic() + for_s

        def gone_on() -> bool:
            assert self.generations()[-1].number == generation.number, "training was interrupted"
            late = {step["rank"] for step in self.steps(until) if step["generation"] == generation.number}
            return late == set(generation.starts)

        self.wait_for(gone_on, f"generation {generation.number} to train for {for_s:g} s", for_s + PATIENCE_S)

    def steps(self, since: float = -math.inf) -> list[Record]:
        """Since that instant, by this machine's monotonic clock."""
        return [step for step in self.history(what="step") if step["at"] >= since]

    def processes(self) -> list[Process]:
        """All that came from this job and lives."""
        found = (look_at(process.pid) for process in self._census.take())
        return [process for process in found if process is not None]

    def workers(self, node: str | None = None) -> list[Process]:
        """Living workers and their descendants, on one node or on all."""
        found = [process for process in self.processes() if process.generation is not None]
        return [worker for worker in found if node is None or worker.node == node]

    # --- ending

    def close(self) -> None:
        """Ends all, and raises AssertionError for every promise that was broken meanwhile."""
        self.watcher.close()
        for agent in self.agents:
            agent.kill()
        deadline = time.monotonic() + ORPHANS_S
        while (orphans := processes_of(self.id)) and time.monotonic() < deadline:
            time.sleep(0.02)
        described = [str(orphan) for orphan in orphans]
        for orphan in orphans:
            os.kill(orphan.pid, signal.SIGKILL)
        ends = ", ".join(f"{agent.name} {agent.process.returncode}" for agent in self.agents)
        print(f"---------------- exit codes: {ends}; whole logs: {self.folder}")
        print(in_order_of_time([*(agent.text for agent in self.agents), *self.more_logs]))
        problems = [f"orphan {orphan}" for orphan in described] + self.watcher.violations
        problems += broken_promises(self.history(what="start"))
        assert not problems, "\n".join(problems)


def in_order_of_time(logs: Iterable[str]) -> str:
    """The last lines of all of them. One that has no time belongs to the one before it."""
    stamp = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\.\d{3}")
    lines: list[tuple[str, str]] = []
    for log in logs:
        at = ""
        for line in log.splitlines():
            found = stamp.match(line)
            at = found[0] if found is not None else at
            lines.append((at, line))
    lines.sort(key=lambda line: line[0])
    left_out = [f"[{len(lines) - MOST_LINES} lines before these]"] if len(lines) > MOST_LINES else []
    return "\n".join([*left_out, *(line[:MOST_CHARACTERS] for _, line in lines[-MOST_LINES:])])


def without(nodes: Sequence[str], lost: str) -> list[str]:
    """The places in the next world when one of these is lost and no newcomer takes its place: the last node does."""
    *others, last = nodes
    return [last if node == lost else node for node in others]


def broken_promises(starts: Iterable[Record]) -> list[str]:
    """I2 to I4, as the workers saw it."""
    problems = []
    worlds: dict[int, tuple[int, str, str]] = {}
    taken: set[tuple[int, int]] = set()
    for start in starts:
        generation, rank, environment = start["generation"], start["rank"], start["env"]
        world = (start["world"], environment["MASTER_ADDR"], environment["MASTER_PORT"])
        if worlds.setdefault(generation, world) != world:
            problems.append(f"generation {generation} is two worlds: {worlds[generation]} and {world}")
        if not 0 <= rank < start["world"]:
            problems.append(f"generation {generation}: rank {rank} of {start['world']}")
        if (generation, rank) in taken:
            problems.append(f"generation {generation}: rank {rank} started twice")
        taken.add((generation, rank))
    return problems


def longest_training_gap(steps: Iterable[Record]) -> float:
    """Seconds for which synchronous training stood still: it goes on while all ranks of one generation step."""
    times: dict[int, dict[int, list[float]]] = {}
    worlds: dict[int, int] = {}
    for step in steps:
        worlds[step["generation"]] = step["world"]
        times.setdefault(step["generation"], {}).setdefault(step["rank"], []).append(step["at"])
    gaps, until = [0.0], math.inf
    for generation, ranks in sorted(times.items()):
        begin, end = max(at[0] for at in ranks.values()), min(at[-1] for at in ranks.values())
        if generation == max(times):
            end = max(begin, end)  # it goes on
        if len(ranks) < worlds[generation] or begin > end:
            continue  # it was over before all had begun
        gaps.append(begin - until)
        for at in ranks.values():
            within = [one for one in at if begin <= one <= end]
            gaps += [after - before for before, after in itertools.pairwise(within)]
        until = end
    return max(gaps)
