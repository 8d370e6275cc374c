"""What is left of a generation that could not be started whole."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any, cast

import pytest

from elastic_agent.agent.configuration.config import Command
from elastic_agent.agent.processes import workers
from elastic_agent.agent.processes.guard import Guard
from elastic_agent.agent.processes.logs import WorkerLogs
from elastic_agent.agent.processes.workers import WorkerGroup, WorkerSpec


class Ignored:
    """A guard or a log that nothing is expected of."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Logs(Ignored):
    def attach(self, generation: int, rank: int, *pipes: int) -> None:
        for pipe in pipes:
            os.close(pipe)


class NoSpares:
    why_cold = "there are none"

    def take(self) -> None:
        return None


@pytest.mark.parametrize("before_it", [0, 2])
def test_a_worker_that_cannot_be_started_leaves_nobody_whose_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, before_it: int
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        if len(started) == before_it:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    group = WorkerGroup(
        1,
        "an-incarnation",
        cast(Guard, Ignored()),
        cast(WorkerLogs, Logs()),
        lambda event: None,
        time.monotonic,
    )
    specs = [WorkerSpec(rank, rank, dict(os.environ)) for rank in range(3)]
    with pytest.raises(BlockingIOError):
        group.start(Command("binary", "sleep", ("300",)), specs, NoSpares())
    assert [process.returncode for process in started] == [-9] * before_it
    group.stop(1.0, gently=False)
    assert group.gone()
    assert not group.succeeded, "also where no worker could be started: none has done its work"
