"""Folders of a pool's jobs: which have processes here still."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import subprocess
from pathlib import Path
from typing import IO

import pytest

from elastic_agent.pool.job_agent import JobAgent, JobAgentEnded
from elastic_agent.pool.job_logs import JobFolders, hold
from elastic_agent.pool.standby import AgentCommand


def test_a_job_is_unfinished_while_a_process_has_its_output_open(tmp_path: Path) -> None:
    earlier = JobFolders(tmp_path, "pool", "a")
    for job in ("one", "two"):
        with earlier.begin(job).open("ab") as output:
            hold(output.fileno())
            if job == "one":
                child = subprocess.Popen(["sleep", "600"], stdout=output)
    other = JobFolders(tmp_path, "pool", "b")
    assert other.unfinished() == (), "another node's"
    later = JobFolders(tmp_path, "pool", "a")
    assert later.unfinished() == ("one",)
    assert later.unfinished() == ("one",)
    child.kill()
    child.wait()
    assert later.unfinished() == ()
    assert JobFolders(tmp_path / "none", "pool", "a").unfinished() == ()


def test_a_job_is_found_on_nfs_which_asks_how_a_file_that_is_locked_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def flock_of_nfs(file: int, operation: int) -> None:
        forbidden = os.O_WRONLY if operation & fcntl.LOCK_SH else os.O_RDONLY
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == forbidden:
            raise OSError(errno.EBADF, "bad file descriptor")
        flock(file, operation)

    def start_child(*_: object, stdout: IO[bytes], **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], stdout=stdout)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    monkeypatch.setattr("elastic_agent.pool.job_agent.start_child", start_child)
    ended: queue.SimpleQueue[JobAgentEnded] = queue.SimpleQueue()
    output = JobFolders(tmp_path, "pool", "a").begin("one")
    agent = JobAgent(AgentCommand((), {}, str(tmp_path)), output, ended.put)
    agent.start()
    try:
        assert JobFolders(tmp_path, "pool", "a").unfinished() == ("one",)
    finally:
        agent.leave()
        ended.get(timeout=20.0)
