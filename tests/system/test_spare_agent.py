"""A daemon's spare agent: the process that becomes the agent of the next job, or does not; then the job starts cold.

What is preloaded is `json`, which takes no time; the script of the jobs needs no torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.pool.job_agent import TAKEN_WITHIN_S

from .pools import Pool


class Node:
    """One daemon, alone in its pool."""

    def __init__(self, pool: Pool, preload: str = "json") -> None:
        self.pool, self.daemon = pool, pool.daemon("a", f"--preload={preload}")
        self._looks: dict[int, tuple[str, ...]] = {}

    def spare(self, *others: int) -> int:
        """The process that waits now, but none of these; it has preloaded what it is to."""

        def found() -> int | None:
            waiting = (pid for pid in descendants(self.daemon.pid) if b"--await-job" in cmdline(pid))
            return next((pid for pid in waiting if pid not in others and self._preloaded(pid)), None)

        return int(self.pool.job.wait_for(found, "a spare agent") or 0)

    def _preloaded(self, pid: int) -> bool:
        """Its child has done its imports: it sleeps, and has not worked since the last look."""
        for child in descendants(pid):
            if b"fork_server.py" in cmdline(child):
                look = state_and_work(child)
                before, self._looks[child] = self._looks.get(child), look
                return look == before and look[0] == "S"
        return False

    def run(self, *options: str) -> tuple[dict[str, Any], str]:
        """What the start of the new job's script has seen, and what the job's agent has printed."""
        job = self.pool.submit(*options)
        self.pool.end_job(job)
        assert self.pool.wait(job) == ExitCode.SUCCESS
        [start] = self.pool.starts_of(job)
        return start, (self.pool.folder / f"logs/a/{job}.log").read_text()


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


def state_and_work(pid: int) -> tuple[str, ...]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ("gone",)
    return fields[0], fields[11], fields[12]  # the ticks in user mode and in the kernel


def gone(pids: Sequence[int]) -> bool:
    return not any(cmdline(pid) for pid in pids)


@pytest.fixture
def node(pool: Pool) -> Node:
    return Node(pool)


def test_it_becomes_the_agent_of_a_job_and_another_one_takes_its_place(node: Node) -> None:
    first = node.spare()
    start, printed = node.run("--env=OF_JOB=1")
    assert start["agent"] == first
    assert start["cwd"] == os.path.realpath(node.pool.folder)
    assert start["env"]["OF_JOB"] == "1"
    assert "workers are forked from a process that was preloaded before the job came" in printed
    assert "1 worker from spares" in printed
    second = node.spare(first)
    start, printed = node.run()
    assert start["agent"] == second
    assert "OF_JOB" not in start["env"]


@pytest.mark.parametrize(
    "option", ["--env=PYTHONPATH=/nowhere", pytest.param("--env=LD_PRELOAD=", marks=pytest.mark.long)]
)
def test_a_job_for_which_python_would_have_started_otherwise_starts_cold(node: Node, option: str) -> None:
    spare = node.spare()
    start, printed = node.run(option)
    assert start["agent"] != spare
    name = option.split("=")[1]
    assert node.daemon.says(f"the job's agent starts cold: {name} is")
    assert "1 worker from spares" in printed, "its own agent has preloaded for it"
    assert node.spare() == spare, "it waits for another job"


@pytest.mark.long
@pytest.mark.parametrize(
    ("preload", "why"),
    [("json,csv", "--preload is json,csv, and was json"), ("none", "workers start cold")],
)
def test_a_job_with_a_preload_of_its_own_preloads_again(node: Node, preload: str, why: str) -> None:
    spare = node.spare()
    start, printed = node.run(f"--preload={preload}")
    assert start["agent"] == spare, "all else is ready"
    assert f"what was preloaded before the job came is not used: {why}" in printed


@pytest.mark.long
def test_it_ends_with_a_daemon_that_is_killed(node: Node) -> None:
    spare = node.spare()
    all_of_it = [spare, *descendants(spare)]
    os.kill(spare, signal.SIGSTOP)  # it is not asked
    node.daemon.kill()
    node.pool.job.wait_for(lambda: gone(all_of_it), "end of the spare agent and of what it has preloaded")


@pytest.mark.long
def test_one_that_dies_is_replaced_later(node: Node) -> None:
    spare = node.spare()
    os.kill(spare, signal.SIGKILL)
    said = "the process that waits for the next job is gone: it ended with -9; another in 60 s"
    node.pool.job.wait_for_text(node.daemon, said)
    node.run()  # cold, and nothing is lost


@pytest.mark.long
def test_one_that_does_not_take_the_job_is_ended_and_the_job_starts_cold_and_once(node: Node) -> None:
    spare = node.spare()
    os.kill(spare, signal.SIGSTOP)
    began_at = time.monotonic()
    start, _ = node.run()
    assert time.monotonic() - began_at > TAKEN_WITHIN_S
    assert start["agent"] != spare
    assert gone([spare])
    assert node.daemon.says("the process that waits for the next job is gone: it has not taken its job")


def test_a_daemon_that_preloads_nothing_has_none(pool: Pool) -> None:
    node = Node(pool, preload="none")
    pool.offered(node.daemon)
    _, printed = node.run()
    assert "preloaded before the job came" not in printed
    pool.job.wait_for(lambda: not list(descendants(node.daemon.pid)), "end of the job's agent")
