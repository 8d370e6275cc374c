"""The agent of a job as a child of its daemon: what it gets when the daemon is killed."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import WARNINGS, ExitCode
from elastic_agent.pool.job_agent import JobAgent
from elastic_agent.pool.standby import AgentCommand, Standby

PATIENCE_S = 20.0

CHILD = """
import os, signal, time
for number in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}:
    signal.signal(number, lambda number, _: os.write(1, b"%d\\n" % number))
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""

DAEMON = """
import os, signal, stat, sys, threading, time
from pathlib import Path
from elastic_agent.pool.standby import AgentCommand, Standby
from elastic_agent.pool.job_agent import JobAgent

folder, sys.executable = Path(sys.argv[1]), sys.argv[2]
os.register_at_fork(after_in_child=(folder / "python_ran_after_fork").touch)
for _ in range(30):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
job = AgentCommand((), {**os.environ, "PYTHONPATH": str(folder)}, str(folder))
agent = JobAgent(job, (folder / "output").open("ab"), Standby((), "", {}, time.monotonic), lambda code, error: None)
print(agent._process.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_daemon_with_many_threads_asks_it_to_leave_and_never_cuts_its_grace_short(
    tmp_path: Path,
) -> None:
    """`elastic-agent` counts a second signal that is no warning as impatience."""
    daemon, child = start_daemon(tmp_path, sys.executable)
    output, deadline = tmp_path / "output", time.monotonic() + PATIENCE_S
    try:
        wait_for_lines(output, 1, deadline)
        daemon.kill()
        wait_for_lines(output, 2, deadline)
        time.sleep(0.2)  # no condition says that no other signal comes
        got = [signal.Signals(int(number)) for number in output.read_text().split()[1:]]
        assert len(set(got)) == 1
        assert got[0] in WARNINGS
        assert not (tmp_path / "python_ran_after_fork").exists(), "it may deadlock beside threads"
    finally:
        daemon.kill()
        daemon.communicate()
        subprocess.run(["kill", "-9", str(child)], check=False)


def test_nothing_is_started_where_the_daemon_was_killed_before_the_child_could_tie_itself_to_it(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program"
    wait = "echo $PPID\nwhile kill -0 $PPID; do sleep 0.01; done"
    program.write_text(f'#!/bin/sh\n{wait}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    daemon, child = start_daemon(tmp_path, str(program))
    output, deadline = tmp_path / "output", time.monotonic() + PATIENCE_S
    wait_for_lines(output, 1, deadline)  # before, the shell would find another parent
    daemon.kill()
    daemon.communicate()
    try:
        while "the daemon has ended; nothing was started" not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.01)
        assert "ready" not in output.read_text()
    finally:
        subprocess.run(["kill", "-9", str(child)], check=False)


def test_one_that_is_asked_to_leave_before_it_can_hear_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    command = AgentCommand((), dict(os.environ), str(tmp_path))
    with (tmp_path / "output").open("ab") as output:
        agent = JobAgent(
            command, output, Standby((), "", {}, time.monotonic), lambda code, error: ended.put(code)
        )
    agent.leave()
    assert ended.get(timeout=PATIENCE_S) == ExitCode.STOPPED_BY_SIGTERM


def start_daemon(folder: Path, python: str) -> tuple[subprocess.Popen[str], int]:
    """And the pid of the agent that it has started: `CHILD`, run by this program."""
    (folder / "elastic_agent.py").write_text(CHILD)
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, folder, python], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    return daemon, int(daemon.stdout.readline())


def wait_for_lines(output: Path, number: int, deadline: float) -> None:
    while len(output.read_text().splitlines()) < number:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
