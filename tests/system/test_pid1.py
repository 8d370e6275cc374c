"""The agent as process 1 of a real PID namespace, as in a container: signals, orphans, exit codes, and no leftovers."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import ORPHANS_S, PATIENCE_S, RECORDER, Job

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""The process that it starts is number 1 inside, and ends with it; it itself ends with the other's exit code."""

FIRST, AGENT = 1, 2

# It becomes the child of the agent, and writes that before it ends.
ADOPTED = f'until grep -q ") . {AGENT} " /proc/$$/stat; do sleep 0.01; done'
ORPHAN = f"(sh -c '{ADOPTED}; echo $ELASTIC_AGENT_GENERATION >> {{seen}}' &)"


# Goes on below init, and ends when no process 3 is left, not even dead: a child of its child, and so of init.
ORPHANED = """
import os, subprocess, sys
from elastic_agent.agent.main.process import fork_below_pid1
fork_below_pid1()
subprocess.run(["sh", "-c", "sleep 0.1 &"])
while len([name for name in os.listdir("/proc") if name.isdecimal()]) > 2:
    pass
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def _containers() -> None:
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no PID namespace can be made here (as root it can): {tried.stderr.strip()}")


def pid_outside(job: Job, pid_inside: int, node: str | None = None) -> int:
    """Of a living process; kill and /proc know it here by another number. `node` tells one pod from another."""
    for process in job.processes():
        pids = status_of(process.pid)["NSpid"].split()
        here = node is None or process.environment.get("ELASTIC_AGENT_NODE_ID") == node
        if here and len(pids) == 2 and int(pids[1]) == pid_inside:
            return process.pid
    raise AssertionError(f"no process {pid_inside} inside")


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def zombies_below(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(ppid) == parent:
            found.append(int(entry.name))
    return found


def test_orphans_are_reaped_and_a_workers_own_exit_code_is_not_lost_with_them(job: Job) -> None:
    seen = job.folder / "seen"
    seen.touch()
    orphans = [f"--child={ORPHAN.format(seen=seen)}"] * 5
    script = (RECORDER, "--fault=1:1:5:7", "--exit-0-on-sigterm", *orphans)
    agent = job.start("a", "--nproc-per-node=2", enter=CONTAINER, script=script)
    job.wait_for_training(world=2, after=1)
    # Of the first one those that are late are killed as left-overs.
    job.wait_for(
        lambda: seen.read_text().split().count("2") == 2 * len(orphans), "the second one's orphans to end"
    )
    assert "1" in seen.read_text().split()
    assert agent.says("rank 1 failed: exit code 7")
    agents_own = pid_outside(job, AGENT)
    job.wait_for(lambda: not zombies_below(agents_own), "every orphan to be reaped")


def test_process_1_reaps_what_no_process_below_it_has_adopted() -> None:
    ran = subprocess.run(
        [*CONTAINER, sys.executable, "-c", ORPHANED], capture_output=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stdout) == (7, b""), ran


def test_sigterm_to_process_1_stops_the_workers_gently_and_nothing_is_left(job: Job) -> None:
    agent = job.start("a", "--nproc-per-node=2", enter=CONTAINER, script=(RECORDER, "--exit-0-on-sigterm"))
    job.wait_for_training(world=2)
    os.kill(pid_outside(job, FIRST), signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert {record["rank"] for record in job.history(what="sigterm")} == {0, 1}
    assert not job.processes()


@pytest.mark.long
def test_a_killed_worker_is_replaced(job: Job) -> None:
    agent = job.start("a", enter=CONTAINER)
    old = job.wait_for_training(world=1)
    os.kill(pid_outside(job, old.pid(0)), signal.SIGKILL)
    job.wait_for_training(world=1, after=old.number)
    assert agent.says("rank 0 failed: killed by SIGKILL")


def test_when_the_agent_itself_is_killed_the_container_ends_as_it_did(job: Job) -> None:
    agent = job.start("a", enter=CONTAINER, script=(RECORDER, "--child=setsid sleep 600 &"))
    job.wait_for_training(world=1)
    os.kill(pid_outside(job, AGENT), signal.SIGKILL)
    assert agent.exit_code() == 128 + signal.SIGKILL
    job.wait_for(lambda: not job.processes(), "everything of the killed agent to end", ORPHANS_S)


@pytest.mark.long
def test_a_bad_configuration_has_its_exit_code_here_too(job: Job) -> None:
    assert job.start("a", "--max-nodes=0", enter=CONTAINER).exit_code() == 78


@pytest.mark.long
def test_ctrl_c_reaches_the_agent_once(job: Job) -> None:
    """A terminal sends it to all processes in front: an init that passed it on would cut the workers' grace short."""
    ours, theirs = pty.openpty()
    in_front = ("sh", "-c", f'exec setsid --ctty --wait "$@" < {os.ttyname(theirs)}', "sh")
    agent = job.start(
        "a", "--stop-grace=1h", enter=(*in_front, *CONTAINER), script=(RECORDER, "--ignore-sigterm")
    )
    job.wait_for_training(world=1)
    os.write(ours, b"\x03")
    job.wait_for(lambda: job.history(what="sigterm"), "the worker to be asked")
    os.kill(pid_outside(job, FIRST), signal.SIGTERM)
    agent.exit_code()
    assert agent.says("SIGTERM again")
    assert not agent.says("SIGINT again")
    os.close(ours)
    os.close(theirs)
