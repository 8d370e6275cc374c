"""One job under one launcher, torchrun or elastic-agent, on this machine: its agents, and what its workers wrote.

A worker writes lines to the file `history` in the job's folder: JSON, with `what` and the monotonic instant `at`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run"),
    "elastic-agent": ("-m", "elastic_agent"),
}
ANSWERS_WITHIN_S = 90.0


class Run:
    """One scenario under one launcher. `job` is the script, which is given the folder and the mode."""

    def __init__(self, launcher: str, job: Path) -> None:
        self.launcher = launcher
        self._job = job
        self.folder = Path(tempfile.mkdtemp(prefix="job-"))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.variables: dict[str, str] = {}
        self._endpoint = f"127.0.0.1:{free_port()}"

    def join(self, node: str, nodes: str, *options: str, mode: str = "wait") -> None:
        """An agent of a job on several nodes, whose store the first one hosts."""
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=job")
        own = (f"--node-id={node}",) if self.launcher == "elastic-agent" else ()
        self.start(node, f"--nnodes={nodes}", *meeting, "--local-addr=127.0.0.1", *own, *options, mode=mode)
        if len(self.agents) == 1:
            host, _, port = self._endpoint.partition(":")
            self.wait_for(lambda: answers(host, int(port)), "the store")

    def start(self, node: str, *options: str, mode: str = "wait") -> None:
        words = [*options, str(self._job), str(self.folder), mode]
        own = {"NODE": node, "TORCHELASTIC_ERROR_FILE": f"{self.folder}/error-{node}"} | self.variables
        shown = " ".join(f"{name}={value}" for name, value in own.items())
        print(f"    {shown} {self.launcher} {shlex.join(words)}", flush=True)
        environment = os.environ | own
        with open(self.folder / f"{node}.log", "wb") as log:
            self.agents[node] = subprocess.Popen(
                [sys.executable, *LAUNCHERS[self.launcher], *words],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lose(self, node: str, workers: list[dict[str, Any]]) -> None:
        """The agent and its workers of these are killed at once."""
        self.agents[node].kill()
        for one in workers:
            if one["NODE"] == node and alive(one["pid"]):
                os.kill(one["pid"], signal.SIGKILL)

    def exit_codes(self) -> dict[str, int | None]:
        """Of the agents, by node; None while one runs."""
        return {node: agent.poll() for node, agent in self.agents.items()}

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text(errors="replace")

    def history(self, what: str = "start", after: float = 0.0, **wanted: Any) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "history").read_text().splitlines()
        except FileNotFoundError:
            return []
        records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        wanted["what"] = what
        return [one for one in records if one["at"] > after and wanted.items() <= one.items()]

    def whole(self, world: int, after: float = 0.0) -> list[dict[str, Any]]:
        """The newest start of each rank, when a world of this size is there."""
        starts = {one["RANK"]: one for one in self.history(after=after, WORLD_SIZE=str(world))}
        return [starts[rank] for rank in sorted(starts)] if len(starts) == world else []

    def wait_for(self, condition: Callable[[], Any], what: str, within_s: float = ANSWERS_WITHIN_S) -> Any:
        """None if that does not come."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                print(f"    {self.launcher}: no {what} within {within_s:g} s")
                return None
            time.sleep(0.01)
        return found

    def close(self) -> None:
        (self.folder / "enough").touch()
        for agent in self.agents.values():
            agent.kill()
        for one in self.history():
            if alive(one["pid"]):
                os.kill(one["pid"], signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
