"""When a helper process has ended, and when it cannot be watched."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from elastic_agent.agent.workers.processes import helper as module
from elastic_agent.agent.workers.processes.helper import Helper, start_helper
from tests.io_threads import started_io

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


def test_the_end_of_a_process_is_told(ended: threading.Event) -> None:
    helper = Helper(started_io(), ended.set)
    helper.start(SLEEPS, os.environ, subprocess.DEVNULL)
    [pid] = helper.pids
    assert not ended.wait(0.05)
    os.kill(pid, 9)
    assert ended.wait(20.0)
    assert "9" in helper.reap()
    assert not helper.runs


def test_one_that_cannot_be_watched_is_not_left_running(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def starts(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(start_helper(*arguments, **more))
        return started[0]

    def scarce(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, "start_helper", starts)
    monkeypatch.setattr(os, "pidfd_open", scarce)
    helper = Helper(started_io(), ended.set)
    with pytest.raises(OSError, match="Too many open files"):
        helper.start(SLEEPS, os.environ, subprocess.DEVNULL)
    assert started[0].wait(20.0) == -9
    assert not helper.runs
    assert not ended.is_set()
