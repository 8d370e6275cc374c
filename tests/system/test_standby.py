"""A daemon's standby: the process that becomes the agent of the next job, or does not, and then the job starts cold.

What is preloaded is `json`, which takes no time; the script of the jobs needs no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.pool.standby import TAKEN_WITHIN_S
from tests.waiting import wait_for

PATIENCE_S = 60.0

SCRIPT = """
import json, os, sys
with open("starts", "a") as file:
    print(json.dumps({"agent": os.getppid(), "cwd": os.getcwd(), "env": dict(os.environ)}), file=file)
"""


class Node:
    """One daemon, alone in its pool."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("ELASTIC_AGENT_")}
        self.environment = {**inherited, "RUNTIME_DIRECTORY": str(folder), "FROM_DAEMON": "yes"}
        self.log = folder / "daemon.log"
        started_in = folder / "elsewhere"
        started_in.mkdir()
        words = ("--node-id=a", f"--log-dir={folder / 'logs'}", *(options or ("--preload=json",)))
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "elastic_agent", *words],
                env=self.environment,
                cwd=started_in,
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        self.daemon.terminate()
        self.daemon.wait(PATIENCE_S)

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        return wait_for(condition, what, PATIENCE_S, seen=self.log.read_text)

    def standby(self, *others: int) -> int:
        """The process that waits now, but none of these; it has preloaded what it is to."""

        def found() -> int | None:
            waiting = (pid for pid in descendants(self.daemon.pid) if b"--await-job" in cmdline(pid))
            return next((pid for pid in waiting if pid not in others and preloaded(pid)), None)

        return int(self.wait_for(found, "standby"))

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "elastic_agent", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def run(self, *options: str) -> tuple[list[dict[str, Any]], str]:
        """What each start of the new job's script has seen, and what the job's agent has printed."""
        (self.folder / "starts").unlink(missing_ok=True)
        submitted = self.command("submit", *options, "--", "script.py")
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.split()[-1]
        waited = self.command("wait", job)
        printed = "\n".join(file.read_text() for file in (self.folder / "logs/a").glob(f"{job}.log"))
        assert waited.returncode == 0, f"{waited.stderr}\n{printed}\n{self.log.read_text()}"
        return [json.loads(line) for line in (self.folder / "starts").read_text().splitlines()], printed


def descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def preloaded(pid: int) -> bool:
    """Its child has done its imports: it sleeps, and has not worked since the last look."""
    for child in descendants(pid):
        if b"fork_server.py" in cmdline(child):
            look = state_and_work(child)
            before, _looks[child] = _looks.get(child), look
            return look == before and look[0] == "S"
    return False


_looks: dict[int, tuple[str, ...]] = {}


def state_and_work(pid: int) -> tuple[str, ...]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ("gone",)
    return fields[0], fields[11], fields[12]  # the ticks in user mode and in the kernel


def gone(pids: Sequence[int]) -> bool:
    return not any(cmdline(pid) for pid in pids)


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """With these options, where a test is parametrized with others."""
    node = Node(tmp_path, *getattr(request, "param", ()))
    yield node
    node.close()


def test_it_becomes_the_agent_of_a_job_and_another_one_takes_its_place(node: Node) -> None:
    first = node.standby()
    (start,), printed = node.run("--env=OF_JOB=1")
    assert start["agent"] == first
    assert start["cwd"] == str(node.folder)
    assert (start["env"]["FROM_DAEMON"], start["env"]["OF_JOB"]) == ("yes", "1")
    assert "workers are forked from a process that was preloaded before the job came" in printed
    assert "1 worker from spares" in printed
    second = node.standby(first)
    (start,), printed = node.run()
    assert start["agent"] == second
    assert "OF_JOB" not in start["env"]


@pytest.mark.parametrize(
    "option", ["--env=PYTHONPATH=/nowhere", pytest.param("--env=LD_PRELOAD=", marks=pytest.mark.long)]
)
def test_a_job_for_which_python_would_have_started_otherwise_starts_cold(node: Node, option: str) -> None:
    standby = node.standby()
    (start,), printed = node.run(option)
    assert start["agent"] != standby
    name = option.split("=")[1]
    assert f"the job's agent starts cold: {name} is" in node.log.read_text()
    assert "1 worker from spares" in printed, "its own agent has preloaded for it"
    assert node.standby() == standby, "it waits for another job"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--preload=json,csv",), "--preload is json,csv, and was json"),
        (("--preload=none",), "workers start cold"),
    ],
)
def test_a_job_with_a_preload_of_its_own_preloads_again(
    node: Node, options: tuple[str, ...], why: str
) -> None:
    standby = node.standby()
    (start,), printed = node.run(*options)
    assert start["agent"] == standby, "all else is ready"
    assert f"what was preloaded before the job came is not used: {why}" in printed


@pytest.mark.long
def test_it_ends_with_a_daemon_that_is_killed(node: Node) -> None:
    standby = node.standby()
    all_of_it = [standby, *descendants(standby)]
    os.kill(standby, signal.SIGSTOP)  # it is not asked
    node.daemon.kill()
    node.wait_for(lambda: gone(all_of_it), "end of the standby and of what it has preloaded")


@pytest.mark.long
def test_one_that_dies_is_replaced(node: Node) -> None:
    standby = node.standby()
    os.kill(standby, signal.SIGKILL)
    said = "the process that waits for the next job is gone: it ended with -9; another in 60 s"
    node.wait_for(lambda: said in node.log.read_text(), "warning")
    node.run()  # after a job there is no more pause
    assert node.standby(standby) != standby


@pytest.mark.long
def test_one_that_does_not_take_the_job_is_ended_and_the_job_starts_cold_and_once(node: Node) -> None:
    standby = node.standby()
    os.kill(standby, signal.SIGSTOP)
    began_at = time.monotonic()
    (start,), _ = node.run()
    assert time.monotonic() - began_at > TAKEN_WITHIN_S
    assert start["agent"] != standby
    assert gone([standby])
    assert "the process that waits for the next job is gone: it has not taken its job" in node.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("node", [("--preload=none",)], indirect=True)
def test_a_daemon_that_preloads_nothing_has_none(node: Node) -> None:
    node.wait_for(lambda: "idle: waiting for a job" in node.log.read_text(), "node in the pool")
    starts, printed = node.run()
    assert len(starts) == 1
    assert "preloaded before the job came" not in printed
    node.wait_for(lambda: not list(descendants(node.daemon.pid)), "end of the job's agent")
