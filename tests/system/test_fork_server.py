"""A forked agent is what a cold one is, as far as the kernel and a worker can tell."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from .fork_server import ForkedProcess
from .harness import RECORDER, Agent, Job
from .networks import network

COLD = ("env",)
"""Words before its command: they bring it nowhere, but the harness does not fork what has any."""
SHELL = ("--no-python", "sh", "-c")


def start(job: Job, *options: str, enter: tuple[str, ...] = (), script: tuple[str | Path, ...]) -> Agent:
    agent = job.start("a", f"--log-dir={job.folder}", *options, enter=enter, script=script)
    assert isinstance(agent.process, ForkedProcess) == (not enter)
    return agent


def strings(pid: int, file: str) -> list[str]:
    return [os.fsdecode(one) for one in Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0") if one]


def descriptors(pid: int) -> list[str]:
    """The kinds of open files."""
    targets = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    return sorted(re.sub(r"\d+|elastic-agent-\w+", "", one.rpartition("/")[2]) for one in targets)


def facts_of(job: Job, agent: Agent) -> dict[str, Any]:
    """In words that are the same for each job."""
    pid = agent.pid
    status = Path(f"/proc/{pid}/status").read_text()
    masks = dict(re.findall(r"^(SigBlk|SigIgn|SigCgt|Umask|Groups):[ \t]*(.*)$", status, re.MULTILINE))
    words, variables = (
        [one.replace(str(job.folder), "FOLDER").replace(job.id, "ID") for one in strings(pid, file)]
        for file in ("cmdline", "environ")
    )
    return {
        "words": words,
        "environment": sorted(variables),
        "directory": os.readlink(f"/proc/{pid}/cwd"),
        "session": os.getsid(pid),
        "group": os.getpgid(pid),
        **masks,
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="alone", marks=pytest.mark.long),
        pytest.param(("--rdzv-endpoint=127.0.0.1:0", "--nnodes=1"), id="host"),
    ],
)
def test_the_kernel_shows_the_same_of_both(job: Job, second_job: Job, options: tuple[str, ...]) -> None:
    forked = start(job, *options, script=(RECORDER,))
    cold = start(second_job, *options, enter=COLD, script=(RECORDER,))
    for one in (job, second_job):
        one.wait_for_training(world=1)
    assert facts_of(job, forked) == facts_of(second_job, cold)
    job.wait_for(lambda: descriptors(forked.pid) == descriptors(cold.pid), "the same open files")
    for agent in (forked, cold):
        agent.signal(signal.SIGTERM)
        assert agent.exit_code() == 143


@pytest.mark.long
@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 3", 3)])
def test_it_ends_with_the_same_code(job: Job, command: str, code: int) -> None:
    codes = {
        start(job, "--max-restarts=0", enter=enter, script=(*SHELL, command)).exit_code()
        for enter in ((), COLD)
    }
    assert len(codes) == 1
    assert (codes == {0}) == (code == 0)


def test_workers_have_the_same_environment(job: Job) -> None:
    seen = []
    for enter in ((), COLD):
        file = job.folder / f"of-{len(seen)}"
        agent = start(job, enter=enter, script=(*SHELL, f"env > {file}; pwd >> {file}; umask >> {file}"))
        assert agent.exit_code() == 0
        seen.append(set(file.read_text().splitlines()))
    of_one_run = re.compile("MASTER_PORT|TORCHELASTIC_RUN_ID|ELASTIC_AGENT|TORCHELASTIC_ERROR_FILE|_=")
    forked, cold = ({line for line in lines if not of_one_run.match(line)} for lines in seen)
    assert forked == cold


def test_one_on_a_host_with_a_network_of_its_own_is_there(job: Job) -> None:
    look = "ls /sys/class/net; readlink /proc/$PPID/ns/net; grep sysfs /proc/self/mounts"
    seen = []
    with network("a") as net:
        for enter in ((), COLD):
            file = job.folder / f"of-{len(seen)}"
            words = (*SHELL, f"({look}) > {file}")
            agent = job.start("a", f"--log-dir={job.folder}", enter=(*enter, *net["a"].enter), script=words)
            assert isinstance(agent.process, ForkedProcess) == (not enter)
            assert agent.exit_code() == 0
            seen.append(file.read_text())
    assert seen[0] == seen[1]
    assert "eth0" in seen[0]


@pytest.mark.long
def test_a_killed_one_is_reported_as_killed(job: Job) -> None:
    agent = start(job, script=(RECORDER,))
    job.wait_for_training(world=1)
    agent.kill()
    assert agent.process.returncode == -signal.SIGKILL


def test_what_is_read_at_the_start_is_not_forked(job: Job) -> None:
    agent = job.start("a", environment={"LC_ALL": "C"}, script=(*SHELL, "true"))
    assert not isinstance(agent.process, ForkedProcess)
    assert agent.exit_code() == 0
