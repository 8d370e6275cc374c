"""Watch a pool live: three daemons, two jobs that share the nodes, and a daemon that is killed and started again.

Three daemons on this machine play three nodes. Each runs `elastic-agent --min-nodes 1 --max-nodes 4` and nothing else;
their names and folders come from the environment. Every line is about something that was seen in the pool, in the exit
code of a command, or in the file to which the first job writes each step. Needs nothing but this checkout:

    make demo-daemon
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE_S = 180.0
LOOK_S = 0.1
DAEMON = ("--min-nodes", "1", "--max-nodes", "4")
NODES = ("a", "b", "c")
STEPS = 1_000_000
"""More than either job ever takes: it is told when it is enough."""
SAVED_EVERY = 50
"""Steps, by `counted.py`: no more are done again where a node is lost."""


class DemoFailed(Exception):
    """Something that the demo claims did not happen; the logs are shown."""


class Demo:
    """The script of the play, and the timeline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("ELASTIC_AGENT_")},
            "RUNTIME_DIRECTORY": str(folder),
            "ELASTIC_AGENT_LOG_DIR": str(folder / "logs"),
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.killed = False
        """One of them, and what it ran, as if its machine were lost."""

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)

    # ---------------------------------------------------------------- what people type

    def start(self, name: str) -> None:
        """The daemon of one node."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                [sys.executable, "-m", "elastic_agent", *DAEMON],
                env={**self.environment, "ELASTIC_AGENT_NODE_ID": name},
                stdout=log,
                stderr=log,
            )

    def submit(self, name: str, most_nodes: int) -> str:
        """Returns the job's id."""
        folder = self.folder / name
        folder.mkdir()
        options = (f"--name={name}", "--min-nodes=1", f"--max-nodes={most_nodes}")
        said = self.command("submit", *options, "--", str(HERE / "counted.py"), str(folder), str(STEPS))
        return said.splitlines()[-1]

    def command(self, *words: str, quiet: bool = False) -> str:
        """Its output. Raises DemoFailed when its exit code is not 0, unless `quiet`."""
        done = subprocess.run(
            [sys.executable, "-m", "elastic_agent", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode and not quiet:
            raise DemoFailed(
                f"elastic-agent {words[0]} ended with exit code {done.returncode}: {done.stderr}"
            )
        return done.stdout

    # ---------------------------------------------------------------- what can be seen

    def jobs(self) -> Mapping[str, Mapping[str, Any]]:
        """By their ids."""
        return {one["job"]: one for one in json.loads(self.command("jobs", "--json"))["jobs"]}

    def steps(self, name: str) -> list[tuple[int, int]]:
        """Each step that the job has finished, and the number of workers that took part in it."""
        try:
            text = (self.folder / name / "steps").read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]
        return [(int(number), int(world)) for number, world in map(str.split, whole.splitlines())]

    def wait_for(self, what: str, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {PATIENCE_S:.0f} s for {what}")
            time.sleep(LOOK_S)

    def wait_for_idle(self, number: int) -> None:
        self.wait_for(f"{number} idle nodes", lambda: self.idle_nodes() == number)

    def idle_nodes(self) -> int:
        """0 as long as the pool has no store."""
        text = self.command("jobs", "--json", quiet=True)
        return int(json.loads(text)["pool"]["idle_nodes"]) if text else 0

    def wait_for_workers(self, name: str, number: int) -> None:
        """Until the job trains on so many nodes, each with one worker; says at which step, and checks all steps."""
        self.wait_for(
            f"a step of job {name} on {number} nodes",
            lambda: bool(taken := self.steps(name)) and taken[-1][1] == number,
        )
        (_, _, last), (_, first, _) = [(0, 0, 0), *self.phases(name)][-2:]
        lost = f"{last + 1 - first} steps are done again" if first <= last else "no step is lost"
        self.say(f"    job {name} trains on {number} node{'s' * (number > 1)} from step {first} on; {lost}")

    def phases(self, name: str) -> list[tuple[int, int, int]]:
        """Workers, first and last step of each world. Raises DemoFailed when a step is missing, or was done twice: but
        those since the last save are, when a daemon is killed."""
        taken = self.steps(name)
        for (last, before), (number, world) in pairwise([(0, 0), *taken]):
            again = self.killed and world < before and last - SAVED_EVERY < number <= last
            if number != last + 1 and not again:
                raise DemoFailed(f"job {name}: step {number} where step {last + 1} was due")
        parts = [
            (world, [number for number, _ in part]) for world, part in groupby(taken, lambda one: one[1])
        ]
        return [(world, numbers[0], numbers[-1]) for world, numbers in parts]

    # ---------------------------------------------------------------- the play

    def play(self) -> None:
        self.say("THREE DAEMONS START: elastic-agent --min-nodes 1 --max-nodes 4, three times")
        for number, name in enumerate(NODES, 1):
            self.start(name)
            self.wait_for_idle(number)
        self.say("    elastic-agent jobs: 3 nodes, 3 idle; they meet in a file of the pool")

        self.say("A JOB FOR UP TO THREE NODES: elastic-agent submit --max-nodes 3 -- counted.py")
        long = self.submit("long", 3)
        self.wait_for_workers("long", 3)

        self.say("ANOTHER JOB WAITS: elastic-agent submit --max-nodes 1 -- counted.py")
        short = self.submit("short", 1)
        self.wait_for_workers("long", 2)
        self.wait_for_workers("short", 1)
        jobs = self.jobs()
        here, there = jobs[short]["nodes"], jobs[long]["nodes"]
        if set(here) & set(there) or set(here) | set(there) != set(NODES):
            raise DemoFailed(f"job short is on {here}, and job long on {there}")
        self.say(f"    elastic-agent jobs: short on node {here[0]}, long on {' and '.join(sorted(there))}")
        self.end("short", short)
        self.wait_for_workers("long", 3)

        victim = self.daemons["a"]
        self.say(f"A DAEMON IS KILLED: kill -9 {victim.pid}, that of node a")
        self.killed = True
        victim.kill()
        victim.wait()
        self.wait_for_workers("long", 2)
        if (state := self.jobs()[long]["state"]) != "running":
            raise DemoFailed(f"job long is {state}")
        self.say("    elastic-agent jobs: answers: the pool's store needs no daemon")
        self.say("THE DAEMON COMES BACK: the same line again")
        self.start("a")
        self.wait_for_workers("long", 3)

        self.end("long", long)
        worlds = ", ".join(str(world) for world, _, _ in self.phases("long"))
        self.say(f"    none of its steps is missing, on {worlds} nodes in turn")
        self.wait_for_idle(3)
        self.say("done: the pool waits for the next job, and the daemons are stopped")
        self.stop()

    def end(self, name: str, job: str) -> None:
        """The job has done enough, and ends with success."""
        (self.folder / name / "enough").touch()
        self.command("wait", job)
        last = self.phases(name)[-1][2]
        self.say(f"    elastic-agent wait: job {name} has succeeded, after {last} steps")

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.terminate()
        for name, daemon in self.daemons.items():
            if (code := daemon.wait(timeout=PATIENCE_S)) != 128 + signal.SIGTERM:
                raise DemoFailed(f"the daemon of node {name} ended with exit code {code}")

    def clean_up(self) -> None:
        """Whatever has happened. Jobs end with their daemons."""
        for daemon in self.daemons.values():
            if daemon.poll() is None:
                daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="elastic-agent-demo-"))
    demo = Demo(folder)
    code = 0
    try:
        demo.play()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        code = 130
    except (DemoFailed, subprocess.TimeoutExpired) as error:
        print(f"the demo failed: {error}\nthe logs are in {folder}", file=sys.stderr)
        return 1
    finally:
        demo.clean_up()
    shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
