"""What is left of a generation that could not be started whole, and what does not end after SIGKILL."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.configuration.config import Command
from elastic_agent.agent.output.worker_logs import WorkerLogs
from elastic_agent.agent.workers.processes import workers
from elastic_agent.agent.workers.processes.guard import Guard
from elastic_agent.agent.workers.processes.spares import Spares
from elastic_agent.agent.workers.processes.workers import (
    LEFTOVER_LONGEST_PAUSE_S,
    WorkerGroup,
    WorkerSpec,
)
from tests.io_threads import started_io

PATIENCE_S = 20.0
SLEEP = Command("binary", "sleep", ("300",))


class Ignored:
    """A guard or a log that nothing is expected of."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Logs(Ignored):
    def attach(self, generation: int, rank: int, pipes: Sequence[int], routes: object) -> None:
        for pipe in pipes:
            os.close(pipe)


class NoSpares:
    why_cold = "there are none"

    def hand_out(self, *_: object) -> None:
        return None


NO_SPARES = cast(Spares, NoSpares())


def group_of(
    post: Callable[[Event], None] = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
    exited: Callable[[int, int, float], object] = lambda *_: None,
    unknown_children: Callable[[], Collection[int]] = tuple,
) -> WorkerGroup:
    guard, logs = cast(Guard, Ignored()), cast(WorkerLogs, Logs())
    return WorkerGroup(1, guard, logs, started_io(), exited, post, clock, unknown_children)


def reaped() -> WorkerGroup:
    """As the main loop does, each worker is reaped when it has ended."""
    group = group_of(lambda event: event(), exited=lambda _, local_rank, at: group.reap(local_rank))  # type: ignore[operator]
    return group


def specs(count: int = 3) -> list[WorkerSpec]:
    return [WorkerSpec(rank, rank, dict(os.environ)) for rank in range(count)]


def scarce(monkeypatch: pytest.MonkeyPatch, name: str, left: int) -> None:
    """The system call fails, as without descriptors, after so many that do not."""
    call, calls = getattr(os, name), iter(range(left))

    def try_call(*args: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(24, "Too many open files")
        return call(*args)

    monkeypatch.setattr(workers.os, name, try_call)


def drive(group: WorkerGroup) -> None:
    """Until nothing is left of it."""
    deadline = time.monotonic() + PATIENCE_S
    while not group.gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("before_it", [0, 2])
def test_a_worker_that_cannot_be_started_leaves_no_end_to_wait_for(
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
    group = reaped()
    with pytest.raises(BlockingIOError):
        group.start(SLEEP, specs(), NO_SPARES)
    assert set(group.cold) == set(group.ranks), "who did not start at all did not start cold"
    group.stop(1.0, gently=False)
    drive(group)
    assert [process.returncode for process in started] == [-9] * before_it
    assert not group.succeeded, "also where no worker could be started: none has done its work"


@pytest.mark.parametrize(("call", "left"), [("pipe", 3 * 2 + 1), ("pidfd_open", 2)])
def test_a_start_that_fails_for_want_of_descriptors_gives_back_its_own(
    monkeypatch: pytest.MonkeyPatch, call: str, left: int
) -> None:
    """`pipe`: the second one of the third worker; a start in `subprocess` takes one, too."""
    started_io()
    gc.collect()  # what earlier tests have left open is closed now, and not meanwhile
    before = os.listdir("/proc/self/fd")
    group = reaped()
    with monkeypatch.context() as patch:
        scarce(patch, call, left)
        with pytest.raises(OSError, match="Too many open files"):
            group.start(SLEEP, specs(), NO_SPARES)
    drive(group)
    assert os.listdir("/proc/self/fd") == before


def test_a_start_that_fails_waits_for_no_worker_that_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signals reach nothing, as those to a process in uninterruptible sleep."""
    group = reaped()
    with monkeypatch.context() as patch:
        patch.setattr(WorkerGroup, "_signal", lambda *args, **kwargs: None)
        scarce(patch, "pidfd_open", 2)
        with pytest.raises(OSError, match="Too many open files"):
            group.start(SLEEP, specs(3), NO_SPARES)
        assert not group.gone()
    assert group.running == 2
    group.stop(300.0, gently=False)
    drive(group)
    assert set(group.returncodes.values()) <= {-signal.SIGTERM, -signal.SIGKILL}


def test_what_may_not_be_killed_ends_nothing_but_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of sudo is another user's."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(workers, "find_processes", lambda *args, **kwargs: {4711: "1"})
    monkeypatch.setattr(workers.os, "kill", refuse)
    now = [100.0]
    group = group_of(clock=lambda: now[0])
    group.start(SLEEP, (), NO_SPARES)
    group.stop(0.0, gently=False)
    assert not group.gone()
    now[0] += 60.0
    assert not group.gone()
    assert group.kill_elapsed_s() == 60.0
    assert group.unkillable() == {4711}
    assert group.wake_at() == now[0] + LEFTOVER_LONGEST_PAUSE_S, "a look reads all of /proc"


def test_an_orphan_that_comes_while_proc_is_listed_is_not_overlooked() -> None:
    """Its parent lived when the agent's children were read, and had ended when /proc was."""
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    looks = iter([(), (orphan.pid,), (orphan.pid,), (orphan.pid,)])
    group = group_of(unknown_children=lambda: next(looks, ()))
    group.start(SLEEP, (), NO_SPARES)
    group.stop(0.0, gently=False)
    assert not group.gone()
    assert not group.gone()
    assert orphan.wait() == -signal.SIGKILL
    assert group.gone()
