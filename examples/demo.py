"""Watch one training job live through a killed worker, a lost node, a node that comes back and one that leaves.

Three agents on this machine play three nodes; each runs one worker of `digits.py`. The timeline shows what was
done to them, what the agents said, how long training stood still each time, and where it went on. Needs nothing but
this checkout:

    make demo
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = 600
STEP_S = 0.02
PATIENCE_S = 180.0
NODES = 3

FIRST_STEP = re.compile(r"generation (\d+): first step is (\d+)(?:, after ([\d.]+) s without training)?")
LAST_STEP = re.compile(r"step (\d+) is the last one of generation")
GENERATION = re.compile(r"generation (\d+) \((\w+)\): (\d+) nodes?")
STORE = re.compile(r"--rdzv-endpoint=(\S+)")
EXITS = {"a": 0, "b": 128 + signal.SIGTERM, "c": 0}
ACCURACY = re.compile(r"test accuracy.*: ([\d.]+)%")


class DemoFailed(Exception):
    """Something that the demo waited for did not happen; the logs are shown."""


class Node:
    """One agent as an own process; what it prints goes to the shared queue and to a log file."""

    def __init__(self, name: str, options: Sequence[str], script: Sequence[str], demo: Demo) -> None:
        self.name = name
        self.marks = {f"ELASTIC_AGENT_NODE={name}".encode(), f"TORCHELASTIC_RUN_ID={demo.job}".encode()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic_agent", f"--node-id={name}", *options, *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, args=(demo,), daemon=True).start()

    def _read(self, demo: Demo) -> None:
        assert self.process.stdout is not None
        with open(demo.folder / f"{self.name}.log", "a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                demo.lines.put((self.name, line.rstrip()))

    def worker(self) -> int:
        """The pid of this node's worker, found by the environment that the agent gave it."""
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.marks <= set(environ.read_bytes().split(b"\0")):
                    return int(environ.parent.name)
            except OSError:
                continue
        raise DemoFailed(f"node {self.name} has no worker")


class Demo:
    """The script of the play, and the timeline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder.name
        self.lines: queue.Queue[tuple[str, str]] = queue.Queue()
        self.began = time.monotonic()
        self.nodes: dict[str, Node] = {}
        self.script = [
            str(HERE / "digits.py"),
            f"--steps={STEPS}",
            f"--step-seconds={STEP_S}",
            f"--checkpoints={folder / 'checkpoints'}",
        ]

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)

    def start(self, name: str, *options: str) -> None:
        # The first world waits for all of them, however long this machine takes to start three agents.
        common = (
            "--min-nodes=1",
            f"--max-nodes={NODES}",
            f"--last-call={PATIENCE_S:g}s",
            "--preload=default,sklearn.datasets",
            f"--rdzv-id={self.job}",
        )
        options = (*common, *options)
        self.nodes[name] = Node(name, options, self.script, self)

    def wait_for(self, pattern: re.Pattern[str], *, node: str | None = None) -> re.Match[str]:
        """The next line of `node` (or of any) that matches; everything worth seeing on the way is shown."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                name, line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DemoFailed(f"waited {PATIENCE_S:.0f} s for {pattern.pattern!r}") from None
            generation = GENERATION.search(line)
            if generation and name == "a":
                self.say(
                    f"    generation {generation[1]} on {generation[3]} nodes, because of: {generation[2]}"
                )
            found = pattern.search(line)
            if found and (node is None or name == node):
                return found

    def train_on(self, seconds: float) -> None:
        """Let it train, and read along."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                return

    def recover(self) -> None:
        step = self.wait_for(FIRST_STEP, node="a")
        self.say(f"    training again at step {step[2]}; it stood still for {step[3]} s")

    def change(self) -> None:
        """A planned one: training goes on until all end at the same step."""
        last = self.wait_for(LAST_STEP, node="a")
        self.say(f"    all workers end after the same step, {last[1]}, and keep their state")
        self.recover()

    def play(self) -> None:
        self.say("three nodes start: a, b and c (a hosts the rendezvous store)")
        self.start("a", "--rdzv-backend=c10d")
        endpoint = self.wait_for(STORE, node="a")[1]
        for name in ("b", "c"):
            self.start(name, f"--rdzv-endpoint={endpoint}")
        step = self.wait_for(FIRST_STEP, node="a")
        self.say(f"    training at step {step[2]}")
        self.train_on(2.0)

        pid = self.nodes["b"].worker()
        self.say(f"A WORKER IS KILLED: kill -9 {pid} on node b")
        os.kill(pid, signal.SIGKILL)
        self.recover()
        self.train_on(2.0)

        self.say(
            f"A NODE IS LOST: kill -9 {self.nodes['c'].process.pid}, the agent of node c; its worker dies with it"
        )
        self.nodes["c"].process.kill()
        self.nodes["c"].process.wait()
        self.recover()
        self.train_on(2.0)

        self.say("THE NODE COMES BACK: node c is started again, and imports torch while the others train")
        self.start("c", f"--rdzv-endpoint={endpoint}")
        self.change()
        self.train_on(2.0)

        leaving = self.nodes["b"].process
        self.say(
            f"A NODE LEAVES: kill {leaving.pid}, the agent of node b (from afar: elastic-agent exclude b)"
        )
        leaving.terminate()
        self.change()

        accuracy = self.wait_for(ACCURACY)
        self.say(f"done: {accuracy[1]}% of the test digits are read correctly after {STEPS} steps")
        for name, expected in EXITS.items():
            code = self.nodes[name].process.wait(timeout=PATIENCE_S)
            if code != expected:
                raise DemoFailed(f"node {name} ended with exit code {code}")
        self.say("the agents of a and c ended with exit code 0, that of b with 143: it was asked to stop")

    def clean_up(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.process.terminate()
        for node in self.nodes.values():
            try:
                node.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                node.process.kill()


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="elastic-agent-demo-"))
    demo = Demo(folder)
    try:
        demo.play()
    except (DemoFailed, subprocess.TimeoutExpired) as error:
        print(f"the demo failed: {error}\nthe agents' logs are in {folder}", file=sys.stderr)
        return 1
    finally:
        demo.clean_up()
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
