"""The agent of a job as a child of its daemon: its words, how it is started, warm or cold, and what its end means."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import Config
from elastic_agent.agent.configuration.derive import resolve, resolve_daemon
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.agent.workers.processes import spare_wire as wire
from elastic_agent.agent.workers.processes.spare_wire import BecomeAgent
from elastic_agent.pool import job_agent
from elastic_agent.pool.job_agent import (
    RETRY_S,
    JobAgent,
    SpareAgent,
    agent_words,
    allocation_end,
    own_words,
    why_cold,
)
from elastic_agent.pool.member import Assignment
from elastic_agent.pool.records import Allocation, Attempt, Job, Outcome, PoolNode

PATIENCE_S = 20.0

# --- Its words

JOB = Job("ab12", "train", ("--max-restarts=5",), ("-m", "train", "--lr", "0.1"), {}, "/", 2, 4, 0.0, "me")
ALLOCATION = Allocation("a", "a-1", 7)
DUE = Assignment(JOB, Attempt("ab12", 1, 0.0, (ALLOCATION,)), ALLOCATION)
STORE = {"rdzv-endpoint": "local:///x", "rdzv-id": "pool"}


def words(due: Assignment = DUE, own: tuple[str, ...] = ()) -> list[str]:
    return agent_words(due, "a", STORE, own, "/logs/ab12")


def config_of(said: list[str]) -> Config:
    return resolve(read_argv(said), {}, lambda: "").config


def test_the_pool_decides_before_the_job_and_the_job_before_the_nodes_operator() -> None:
    said = words(own=("--max-restarts=1", "--lease-ttl=9"))
    assert "--pool=pool" in said
    assert said[-4:] == ["-m", "train", "--lr", "0.1"]
    config = config_of(said)
    assert (config.max_restarts, config.rendezvous.lease_ttl_s) == (5, 9.0)
    odd = replace(JOB, options=("--min-nodes=1", "--rdzv-id=other", "--node-id=b"))
    config = config_of(words(replace(DUE, job=odd)))
    assert (config.rendezvous.job_id, config.node_id) == ("ab12", "a")
    assert (config.nodes.min, config.nodes.max) == (2, 4)


@pytest.mark.parametrize(("allocations", "last_call_s"), [(1, 0.0), (2, 0.0), (3, 1.0)])
def test_a_start_with_no_more_nodes_than_a_world_needs_waits_for_no_others(
    allocations: int, last_call_s: float
) -> None:
    run = Attempt("ab12", 1, 0.0, tuple(Allocation(node, f"{node}-1", 7) for node in "abc"[:allocations]))
    assert config_of(words(replace(DUE, run=run))).rendezvous.last_call_s == last_call_s


def test_a_job_has_its_daemons_file_wherever_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool.toml").write_text('hang-timeout = "60s"\n')
    monkeypatch.chdir(tmp_path)
    given = (
        (["--config=pool.toml", "--preload=none", "--node-id=a"], {}),
        ([], {"ELASTIC_AGENT_CONFIG": "pool.toml"}),
    )
    found = [
        own_words(resolve_daemon(read_argv(words), environ).settings, str(tmp_path))
        for words, environ in given
    ]
    file = f"--config={tmp_path}/pool.toml"
    assert found == [(file, "--preload=none"), (file,)]
    assert own_words(resolve_daemon(read_argv([]), {}).settings, "/x") == ()


# --- What its end means

MEANINGS = {
    Outcome.SUCCEEDED: {ExitCode.SUCCESS},
    Outcome.FAILED: {ExitCode.FAILED, ExitCode.CRASH_LOOP, ExitCode.NOT_ON_DISK},
}


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_of_an_agent_means_something_for_its_job(code: ExitCode) -> None:
    end = allocation_end(DUE, code)
    expected = (outcome for outcome, codes in MEANINGS.items() if code in codes)
    assert end.outcome is next(expected, Outcome.UNABLE)
    assert (end.job, end.allocation_id, end.code) == ("ab12", 7, code)
    assert code.meaning in end.reason
    said = allocation_end(DUE, code, "ValueError: boom (rank 0)")
    assert (said.outcome, said.reason) == (end.outcome, f"ValueError: boom (rank 0); exit code {code}")


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGRTMIN - 1, 42, 255])
def test_an_agent_that_ends_as_none_does_may_do_better_on_another_node(code: int) -> None:
    end = allocation_end(DUE, code)
    assert (end.outcome, end.code) == (Outcome.UNABLE, code)
    assert ("killed by" in end.reason) == (code < 0)
    PoolNode("a", "a-1", ended=end).to_json()


# --- Cold

OURS = {"HOME": "/root", "PYTHONPATH": "/opt/lib"}


@pytest.mark.parametrize(
    ("of_job", "why"),
    [
        ({}, ""),
        ({"MY": "1"}, ""),
        ({"OMP_NUM_THREADS": "3"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ""),
        ({"PYTHONPATH": "/opt/lib:/more"}, "PYTHONPATH is '/opt/lib:/more', and '/opt/lib' where"),
        ({"LD_PRELOAD": "/lib/tracer.so"}, "LD_PRELOAD is"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS is"),
    ],
)
def test_a_job_is_cold_for_what_is_read_when_a_process_starts(of_job: dict[str, str], why: str) -> None:
    found = why_cold(OURS, {**OURS, **of_job}, "/here", "/there")
    assert found.startswith(why) if why else not found


@pytest.mark.parametrize("path", ["src", "/opt:src", "/opt:", ":/opt"])
def test_a_path_that_depends_on_the_directory_is_the_same_only_there(path: str) -> None:
    ours = {"PYTHONPATH": path}
    assert why_cold(ours, ours, "/here", "/here") == ""
    expected = f"PYTHONPATH is {path!r}, which depends on the directory"
    assert why_cold(ours, ours, "/here", "/there") == expected


class Started:
    """A job's agent, which prints to this file."""

    def __init__(self, command: BecomeAgent, output: Path, spare: SpareAgent | None = None) -> None:
        self._ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        spare = spare or SpareAgent((), "local", {}, time.monotonic)
        with output.open("ab") as file:
            self.agent = JobAgent(command, file, spare, lambda code, error: self._ends.put((code, error)))

    def end(self) -> tuple[int, str]:
        return self._ends.get(timeout=PATIENCE_S)


def test_a_cold_start_imports_nothing_of_the_jobs_directory(tmp_path: Path) -> None:
    (tmp_path / "elastic_agent").mkdir()
    for name in ("elastic_agent/__init__.py", "runpy.py", "signal.py", "contextlib.py"):
        (tmp_path / name).write_text("raise SystemExit(__file__)")
    started = Started(BecomeAgent(("--version",), {}, str(tmp_path)), tmp_path / "output")
    assert started.end() == (0, ""), (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    "command",
    [
        BecomeAgent(("--", "x.py", "a\0b"), {}, "/"),
        BecomeAgent((), {"A=B": "x"}, "/"),
        BecomeAgent(("\ud800",), {}, "/"),
    ],
)
def test_a_job_that_no_system_can_start_ends_no_daemon(command: BecomeAgent, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be started"):
        Started(command, tmp_path / "output")


def test_an_agent_that_ends_says_why_to_its_daemon(tmp_path: Path) -> None:
    """Its workers are gone by then, and with them what they have printed to no file."""
    (tmp_path / "train.py").write_text("raise ValueError('boom')")
    said = ("--preload=none", "--standalone", "--max-restarts=0", "train.py")
    started = Started(BecomeAgent(said, dict(os.environ), str(tmp_path)), tmp_path / "output")
    assert started.end() == (ExitCode.FAILED, "ValueError: boom (rank 0)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "train.py"]


def test_an_agent_that_is_installed_badly_is_no_failure_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "elastic_agent").mkdir()
    (tmp_path / "elastic_agent" / "__init__.py").write_text("import nothing_of_this_name")
    started = Started(BecomeAgent(("--version",), {"PYTHONPATH": str(tmp_path)}, "/"), tmp_path / "output")
    assert started.end() == (ExitCode.AGENT_FAILED, "")
    assert "nothing_of_this_name" in (tmp_path / "output").read_text()


# --- Warm


class Handed(Started):
    """A job's agent that was handed over to a process which runs this code with the socket `channel`."""

    def __init__(self, folder: Path, code: str) -> None:
        ours, theirs = wire.pair()
        program = (
            "import os, socket, sys\n"
            "from elastic_agent.agent.workers.processes import spare_wire as wire\n"
            "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        )
        with theirs:
            command = [sys.executable, "-c", program + code, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        spare = SpareAgent(("json",), "local", {}, time.monotonic)
        spare._waiting = self.process, ours
        job = BecomeAgent(("--version",), {"PATH": "/bin"}, str(folder))
        super().__init__(job, folder / "output", spare)


TAKES = "wire.receive(channel)\nwire.send(channel, wire.Ready(os.getpid()))\n"


def test_a_spare_agent_that_has_taken_its_job_ends_as_the_jobs_agent(tmp_path: Path) -> None:
    handed = Handed(tmp_path, TAKES + "sys.exit(9)")
    assert handed.agent.was_spare
    assert handed.end() == (9, "")


def test_an_agent_that_was_stopped_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    handed = Handed(tmp_path, TAKES + "import signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    os.waitid(os.P_PID, handed.process.pid, os.WSTOPPED | os.WNOWAIT)
    handed.agent.leave()
    assert handed.end() == (-signal.SIGTERM, "")


@pytest.mark.parametrize(
    "code", ["", "wire.receive(channel)", "channel.close()\nimport time\ntime.sleep(60)", "1 / 0"]
)
def test_one_that_has_not_is_gone_before_another_agent_is_started(tmp_path: Path, code: str) -> None:
    handed = Handed(tmp_path, code)
    assert not handed.agent.was_spare
    assert handed.process.returncode is not None
    assert handed.end() == (0, "")
    assert (tmp_path / "output").read_text().startswith("elastic-agent ")


def test_a_real_one_takes_no_job_whose_directory_it_cannot_enter(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    spare = SpareAgent(("json",), "local", os.environ, time.monotonic)
    spare.turn()
    assert spare._waiting is not None
    process, _ = spare._waiting
    job = BecomeAgent(("--version",), dict(os.environ), str(folder))
    with pytest.raises(OSError, match="gone"):  # nor can it be entered by a process of its own
        Started(job, tmp_path / "output", spare)
    assert process.returncode is not None


def test_one_that_ends_is_replaced_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_agent(*_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["false"]))
        return started[-1]

    monkeypatch.setattr(job_agent, "start_agent", start_agent)
    now = 1000.0
    spare = SpareAgent(("json",), "local", OURS, lambda: now)
    for number in (1, 2):
        spare.turn()
        started[-1].wait()
        spare.turn()
        assert spare.hand_over(BecomeAgent((), OURS, "/here"), 1) is None
        assert len(started) == number
        now += RETRY_S
    spare.close()


# --- With a daemon that is killed

DAEMON = """
import os, sys, threading, time
from pathlib import Path
from elastic_agent.agent.workers.processes.spare_wire import BecomeAgent
from elastic_agent.pool.job_agent import JobAgent, SpareAgent

folder, sys.executable = Path(sys.argv[1]), sys.argv[2]
os.register_at_fork(after_in_child=(folder / "python_ran_after_fork").touch)
for _ in range(30):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
job = BecomeAgent((), {**os.environ, "PYTHONPATH": str(folder)}, str(folder))
spare = SpareAgent((), "", {}, time.monotonic)
agent = JobAgent(job, (folder / "output").open("ab"), spare, lambda code, error: None)
print(agent._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("late", [False, True], ids=["tied", "before it can tie itself"])
def test_it_is_killed_with_its_daemon_or_starts_nothing(tmp_path: Path, late: bool) -> None:
    (tmp_path / "elastic_agent.py").write_text('import time\nprint("ready", flush=True)\ntime.sleep(60)')
    program = tmp_path / "program"
    wait = "echo waits\nwhile kill -0 $PPID; do sleep 0.01; done\n" if late else ""
    program.write_text(f'#!/bin/sh\n{wait}exec {sys.executable} "$@"\n')
    program.chmod(0o700)
    command = [sys.executable, "-c", DAEMON, str(tmp_path), str(program)]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    child, output, deadline = (
        int(daemon.stdout.readline()),
        tmp_path / "output",
        time.monotonic() + PATIENCE_S,
    )
    try:
        while not output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        daemon.kill()
        daemon.communicate()
        while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.01)
        assert ("the daemon has ended; nothing was started" in output.read_text()) == late
        assert ("ready" in output.read_text()) != late
        assert not (tmp_path / "python_ran_after_fork").exists(), "it may deadlock beside threads"
    finally:
        subprocess.run(["kill", "-9", str(child)], check=False)
