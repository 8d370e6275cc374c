"""When a job's agent starts cold, and what becomes of a standby that does not take its job."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.codec import Invalid
from elastic_agent.pool.job_agent import JobAgent
from elastic_agent.pool.standby import (
    RETRY_S,
    AgentCommand,
    Standby,
    receive_job,
    send_job,
    why_cold,
)

PATIENCE_S = 20.0
OURS = {"HOME": "/root", "PYTHONPATH": "/opt/lib"}


@pytest.mark.parametrize(
    ("of_job", "directory", "why"),
    [
        ({}, "/here", ""),
        ({}, "/there", ""),
        ({"MY": "1"}, "/there", ""),
        ({"OMP_NUM_THREADS": "3"}, "/there", ""),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "/there", ""),
        ({"PYTHONPATH": "/opt/lib:/more"}, "/here", "PYTHONPATH is '/opt/lib:/more', and '/opt/lib' where"),
        ({"PYTHON_EXEC": "/usr/bin/python3"}, "/here", "PYTHON_EXEC is"),
        ({"LD_PRELOAD": "/lib/tracer.so"}, "/here", "LD_PRELOAD is"),
        ({"OMP_NUM_THREADS": "many"}, "/here", "OMP_NUM_THREADS is"),
        ({"LC_ALL": "de_DE.UTF-8"}, "/here", "LC_ALL is"),
    ],
)
def test_a_job_is_cold_for_what_is_read_when_a_process_starts(
    of_job: dict[str, str], directory: str, why: str
) -> None:
    found = why_cold(OURS, {**OURS, **of_job}, "/here", directory)
    assert found.startswith(why) if why else not found


@pytest.mark.parametrize("path", ["src", "/opt:src", "/opt:", ":/opt"])
def test_a_path_that_depends_on_the_directory_is_the_same_only_there(path: str) -> None:
    ours = {"PYTHONPATH": path}
    assert why_cold(ours, ours, "/here", "/here") == ""
    expected = f"PYTHONPATH is {path!r}, which depends on the directory"
    assert why_cold(ours, ours, "/here", "/there") == expected


def test_a_job_is_handed_over_whole_however_long_it_is(tmp_path: Path) -> None:
    job = AgentCommand(("--node-id=a", "--", "x.py"), {"LONG": "x" * 2**20, "NOT_UTF_8": "\udcff"}, "/there")
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "output").open("wb") as output:
        sending = threading.Thread(target=send_job, args=(ours, job, output.fileno()))
        sending.start()
        received = receive_job(theirs)
        sending.join()
        assert received is not None
        assert received[0] == job
        with open(received[1], "wb") as same:
            same.write(b"printed")
    assert (tmp_path / "output").read_text() == "printed"


def test_what_is_no_job_is_refused_and_the_end_of_the_daemon_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.send(b"?")
        with pytest.raises(Invalid):
            receive_job(theirs)
        ours.close()
        assert receive_job(theirs) is None


def test_a_job_that_a_dying_daemon_has_cut_in_a_character_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(ours, [b"j"], [theirs.fileno()])
        ours.send("\u00fc".encode()[:1])
        ours.close()
        with pytest.raises(Invalid):
            receive_job(theirs)


class Started:
    """A job's agent, which prints to this file."""

    def __init__(self, command: AgentCommand, output: Path, standby: Standby | None = None) -> None:
        self._ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        standby = standby or Standby((), "local", {}, time.monotonic)
        with output.open("ab") as file:
            self.agent = JobAgent(command, file, standby, lambda code, error: self._ends.put((code, error)))

    def end(self) -> tuple[int, str]:
        return self._ends.get(timeout=PATIENCE_S)


class Handed(Started):
    """A job's agent that was handed over to a process which runs this code with the socket `channel`."""

    def __init__(self, folder: Path, code: str) -> None:
        ours, theirs = socket.socketpair()
        program = (
            "import socket, sys\n"
            "from elastic_agent.pool.standby import TAKEN, receive_job\n"
            "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        )
        with theirs:
            command = [sys.executable, "-c", program + code, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        standby = Standby(("json",), "local", {}, time.monotonic)
        standby._waiting = self.process, ours
        job = AgentCommand(("--version",), {"PATH": "/bin"}, str(folder))
        super().__init__(job, folder / "output", standby)


def test_a_standby_that_has_taken_its_job_ends_as_the_jobs_agent(tmp_path: Path) -> None:
    handed = Handed(tmp_path, "receive_job(channel)\nchannel.send(TAKEN)\nsys.exit(9)")
    assert handed.agent.was_standby
    assert handed.end() == (9, "")


def test_a_standby_that_sigkill_does_not_end_holds_up_nothing() -> None:
    class Hangs:
        killed = False

        def kill(self) -> None:
            self.killed = True

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None
            raise subprocess.TimeoutExpired("standby", timeout)

    ours, theirs = socket.socketpair()
    process = Hangs()
    standby = Standby(("json",), "local", {}, time.monotonic)
    standby._waiting = cast(Any, process), ours
    with theirs:
        standby.close()
    assert process.killed


def test_an_agent_that_was_stopped_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    stop = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    handed = Handed(tmp_path, f"receive_job(channel)\nchannel.send(TAKEN)\n{stop}")
    os.waitid(os.P_PID, handed.process.pid, os.WSTOPPED | os.WNOWAIT)
    handed.agent.leave()
    assert handed.end() == (ExitCode.STOPPED_BY_SIGTERM, "")


@pytest.mark.parametrize(
    "code",
    [
        "",
        "receive_job(channel)",
        "channel.close()\nimport time\ntime.sleep(60)",
        "1 / 0",
    ],
)
def test_one_that_has_not_is_gone_before_another_agent_is_started(tmp_path: Path, code: str) -> None:
    handed = Handed(tmp_path, code)
    assert not handed.agent.was_standby
    assert handed.process.returncode is not None
    assert handed.end() == (0, "")
    assert (tmp_path / "output").read_text().startswith("elastic-agent ")


def test_a_real_standby_takes_no_job_whose_directory_it_cannot_enter(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    standby = Standby(("json",), "local", os.environ, time.monotonic)
    standby.turn()
    assert standby._waiting is not None
    process, _ = standby._waiting
    job = AgentCommand(("--version",), dict(os.environ), str(folder))
    with pytest.raises(OSError, match="gone"):  # nor can it be entered by a process of its own
        Started(job, tmp_path / "output", standby)
    assert process.returncode is not None


def test_a_cold_start_imports_nothing_of_the_jobs_directory(tmp_path: Path) -> None:
    (tmp_path / "elastic_agent").mkdir()
    for name in ("elastic_agent/__init__.py", "runpy.py", "signal.py", "contextlib.py"):
        (tmp_path / name).write_text("raise SystemExit(__file__)")
    started = Started(AgentCommand(("--version",), {}, str(tmp_path)), tmp_path / "output")
    assert started.end() == (0, ""), (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    "command",
    [
        AgentCommand(("--", "x.py", "a\0b"), {}, "/"),
        AgentCommand((), {"A": "\0"}, "/"),
        AgentCommand((), {"A=B": "x"}, "/"),
        AgentCommand(("\ud800",), {}, "/"),
    ],
)
def test_a_job_that_no_system_can_start_ends_no_daemon(command: AgentCommand, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be started"):
        Started(command, tmp_path / "output")


def test_an_agent_that_ends_says_why_to_its_daemon(tmp_path: Path) -> None:
    """Its workers are gone by then, and with them what they have printed to no file."""
    (tmp_path / "train.py").write_text("raise ValueError('boom')")
    words = ("--preload=none", "--standalone", "--max-restarts=0", "train.py")
    started = Started(AgentCommand(words, dict(os.environ), str(tmp_path)), tmp_path / "output")
    assert started.end() == (ExitCode.FAILED, "ValueError: boom (rank 0)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "train.py"]


def test_an_agent_that_is_installed_badly_is_no_failure_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "elastic_agent").mkdir()
    (tmp_path / "elastic_agent" / "__init__.py").write_text("import nothing_of_this_name")
    started = Started(AgentCommand(("--version",), {"PYTHONPATH": str(tmp_path)}, "/"), tmp_path / "output")
    assert started.end() == (ExitCode.AGENT_FAILED, "")
    assert "nothing_of_this_name" in (tmp_path / "output").read_text()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_that_ends_is_replaced_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_child(command: list[str], *_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["false"]))
        return started[-1]

    monkeypatch.setattr("elastic_agent.pool.standby.start_child", start_child)
    clock = Clock()
    standby = Standby(("json",), "local", OURS, clock)
    for number in (1, 2):
        standby.turn()
        started[-1].wait()
        standby.turn()
        assert standby.hand_over(AgentCommand((), OURS, "/here"), 1) is None
        assert len(started) == number
        clock.now += RETRY_S
    standby.close()


def test_without_a_word_of_preload_there_is_none() -> None:
    standby = Standby((), "local", OURS, Clock())
    standby.turn()
    assert standby._waiting is None
