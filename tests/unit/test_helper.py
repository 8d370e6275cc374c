"""When a helper process has ended, with and without a descriptor to wait on."""

from __future__ import annotations

import errno
import os
import subprocess
import threading

import pytest

from elastic_agent.agent.workers.processes import helper as module
from elastic_agent.agent.workers.processes.helper import Helper
from tests.io_threads import settle_io, started_io


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def end(ended: threading.Event) -> Helper:
    return Helper("helper", started_io(), ended.set)


def test_the_end_of_a_process_is_told(end: Helper, ended: threading.Event) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        end._wait_for(process.pid)
        assert not ended.wait(0.05)
        process.kill()
        assert ended.wait(20.0)


def test_a_process_that_is_gone_already_is_not_looked_for(
    end: Helper, ended: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(pid: int) -> int:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(os, "pidfd_open", gone)
    end._wait_for(2**22)
    assert ended.wait(20.0)
    assert "looking now and then" not in caplog.text


def test_without_a_descriptor_a_process_is_looked_for(
    end: Helper, ended: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scarce(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", scarce)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    with subprocess.Popen(["sleep", "60"]) as process:
        end._wait_for(process.pid)
        assert not ended.wait(0.05)
        process.kill()
        assert ended.wait(20.0)
    assert caplog.text.count("the helper is watched by looking now and then") == 1


def test_a_closed_one_looks_for_no_process(
    end: Helper, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process' by now, which would be looked for without end."""
    looked: list[int] = []
    monkeypatch.setattr(module, "has_ended", looked.append)
    end.end()
    end._look(os.getpid())
    settle_io()
    assert looked == []
    assert not ended.is_set()
