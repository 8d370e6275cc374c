"""Workers that were forked from a fork server, in real jobs: they live, end and are stopped like all others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .harness import ORPHANS_S, RECORDER, Agent, Job
from .processes import Process, family

WARM = "--preload=json"
PLAIN_DDP = Path(__file__).with_name("plain_ddp.py")


def preloaded(job: Job, agent: Agent) -> Process:
    """The one that runs now."""

    def found() -> Process | None:
        for process in job.processes():
            leads = process.parent == agent.pid and process.session == process.pid
            if leads and "-u" in str(process) and "/processes/fork_server.py" in str(process):
                return process
        return None

    process = job.wait_for(found, "the fork server to run")
    assert process is not None
    return process


FROM_SPARES = "generation {}: {} workers? from spares in "


def from_spares(job: Job, agent: Agent, generation: int, workers: int) -> None:
    """The log may come a moment after the workers' first steps."""
    job.wait_for_text(agent, FROM_SPARES.format(generation, workers))


def test_eight_workers_come_from_spares_and_so_do_those_after_them(job: Job) -> None:
    agent = job.start("a", WARM, "--nproc-per-node=8", script=(RECORDER, "--fault=1:3:5:7"))
    job.wait_for_training(world=8, after=1)
    from_spares(job, agent, 1, 8)
    from_spares(job, agent, 2, 8)
    assert agent.says("rank 3 failed: exit code 7")
    sessions = {worker.pid: os.getsid(worker.pid) for worker in job.workers()}
    assert len(sessions) == 8
    assert all(pid == session for pid, session in sessions.items()), "each leads its own"
    assert all(
        Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-u", str(RECORDER).encode()]
        for pid in sessions
    )


@pytest.mark.parametrize("options", [(WARM,), ()], ids=["warm", "cold"])
@pytest.mark.parametrize(
    ("faults", "code", "says"),
    [
        (["*:0:3:raise"], 1, r"rank 0 failed: exit code 1: RuntimeError: planned by the test"),
        pytest.param(["*:1:3:segv"], 1, r"rank 1 failed: killed by SIGSEGV", marks=pytest.mark.long),
        pytest.param(["*:0:3:0", "*:1:3:0"], 0, r"2 workers here ended with success", marks=pytest.mark.long),
    ],
)
def test_how_a_worker_ends_is_reported_the_same_way(
    job: Job, options: tuple[str, ...], faults: list[str], code: int, says: str
) -> None:
    script = (RECORDER, *(f"--fault={fault}" for fault in faults))
    agent = job.start("a", *options, "--nproc-per-node=2", "--max-restarts=0", script=script)
    assert agent.exit_code() == code
    assert agent.says(says)
    assert bool(agent.says(FROM_SPARES.format(1, 2))) == bool(options)


def test_workers_outlive_the_fork_server_and_start_cold_until_there_is_another(job: Job) -> None:
    agent = job.start("a", WARM, "--nproc-per-node=2")
    old = job.wait_for_training(world=2)
    first = preloaded(job, agent).pid
    os.kill(first, signal.SIGKILL)
    job.wait_for_text(agent, "the fork server is gone: killed by SIGKILL")
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=2, after=old.number)
    job.wait_for_text(agent, "generation 2: 2 workers start cold: there is no fork server: killed by SIGKILL")
    assert [generation.number for generation in job.generations()] == [1, 2]
    assert preloaded(job, agent).pid != first


@pytest.mark.long
def test_a_fork_server_that_stands_still_is_waited_for_only_so_long(job: Job) -> None:
    agent = job.start("a", WARM, "--nproc-per-node=2")
    old = job.wait_for_training(world=2)
    first = preloaded(job, agent).pid
    os.kill(first, signal.SIGSTOP)
    os.kill(old.pid(0), signal.SIGKILL)
    new = job.wait_for_training(world=2, after=old.number)
    job.wait_for_text(agent, "the fork server is gone: it has not forked")
    assert preloaded(job, agent).pid != first
    job.wait_for(lambda: agent.text.count("preloaded ") == 2, "its successor")
    os.kill(new.pid(1), signal.SIGKILL)
    job.wait_for_training(world=2, after=new.number)
    from_spares(job, agent, 3, 2)


@pytest.mark.long
def test_after_sigkill_of_the_agent_nothing_is_left(job: Job) -> None:
    agent = job.start("a", WARM, "--nproc-per-node=2")
    job.wait_for_training(world=2)
    everyone = 1 + 2 + 3  # workers, fork server, store server and guard
    job.wait_for(lambda: len(family(agent.pid)) >= everyone, "all that an agent starts")
    agent.signal(signal.SIGKILL)
    job.wait_for(lambda: not job.processes(), "everything of the killed agent to end", ORPHANS_S)


def test_an_agent_that_is_asked_to_stop_leaves_nothing_and_waits_for_nothing(job: Job) -> None:
    agent = job.start("a", WARM, "--nproc-per-node=2", "--stop-grace=1h")
    job.wait_for_text(agent, "2 workers from spares")
    agent.signal(signal.SIGTERM)  # they have hardly begun
    assert agent.exit_code(within_s=10.0) == 128 + signal.SIGTERM
    assert not job.processes()
    assert not agent.says("killed what its workers left")


def test_what_a_forked_worker_leaves_behind_is_gone_before_the_next_generation(job: Job) -> None:
    """Forks without exec show the environment that the kernel was given, and sessions are as of any worker."""
    children = ("setsid sleep 600 &", "(setsid sh -c 'sleep 600 & wait' &)", "exec sleep 600")
    agent = job.start("a", WARM, script=(RECORDER, *(f"--child={child}" for child in children)))
    old = job.wait_for_training(world=1)
    job.wait_for(lambda: len(job.workers()) >= 5, "worker and children")
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=1)
    from_spares(job, agent, 2, 1)
    assert {worker.generation for worker in job.workers()} == {2}


def test_a_training_with_ddp_comes_back_from_spares_that_have_torch(job: Job) -> None:
    """With what is preloaded by default. A cold start without need is logged."""
    script = (PLAIN_DDP, job.folder / "checkpoint.pt", "1000000", "0.01")
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    agent = job.start("a", "--preload=default", "--nproc-per-node=2", script=script, environment=environment)
    job.wait_for_text(agent, r"restart 0 step \d+")
    victim = next(worker for worker in job.workers() if worker.environment.get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    job.wait_for_text(agent, r"restart 1 step \d+")
    from_spares(job, agent, 1, 2)
    from_spares(job, agent, 2, 2)
    assert not agent.says("is no fork|start cold")
    agent.signal(signal.SIGTERM)
    agent.exit_code()


@pytest.mark.long
def test_a_command_that_is_no_python_starts_as_ever(job: Job) -> None:
    agent = job.start("a", WARM, "--no-python", script=("python3", RECORDER, "--steps=3"))
    assert agent.exit_code() == 0
    assert not agent.says("preloaded")
