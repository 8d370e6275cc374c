"""`--slurm` with real processes, in an environment as srun makes it; `tests/slurm` has a real Slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.harness import Job
from tests.system.processes import port_for_a_store, processes_of

LOCKSTEP = Path(__file__).with_name("lockstep.py")

STEPS = """
import json, os, sys, time
from elastic_agent.worker import Drained, step

history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

def record(what, **more):
    about = {"generation": int(os.environ["ELASTIC_AGENT_GENERATION"]), "rank": int(os.environ["RANK"]),
             "world": int(os.environ["WORLD_SIZE"]), "node": os.environ["ELASTIC_AGENT_NODE"]}
    line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **about, **more}
    os.write(history, json.dumps(line).encode() + b"\\n")

record("start", env=dict(os.environ), argv=sys.argv[1:])
for number in range(1, 1000000):
    time.sleep(0.01)
    record("step", step=number)
    try:
        step(number)
    except Drained:
        record("drained", step=number)
        raise
"""


def task(nodes: int, node: int, **more: str) -> dict[str, str]:
    """The job's number is such that the port of its store is free."""
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_NODEID": str(node),
        **more,
    }


def test_a_schedulers_sigterm_to_all_processes_is_one_planned_leave(job: Job) -> None:
    """As with Slurm's linuxproc; and again at the end of a preemption's grace."""
    script = job.folder / "train.py"
    script.write_text(STEPS)
    agent = job.start("a", "--slurm", script=(script,), environment=task(1, 0, SLURM_JOB_ID="7"))
    job.wait_for(lambda: len(job.history(what="step")) > 1, "a step() that has ended, which catches signals")
    for process in processes_of(job.id):
        os.kill(process.pid, signal.SIGTERM)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    (drained,) = job.history(what="drained")
    assert drained["step"] == job.history(what="step")[-1]["step"]
    assert not agent.says("killed by")


def test_two_tasks_of_srun_meet_and_leave_after_a_warning(job: Job) -> None:
    state = job.folder / "state"
    state.mkdir()
    port = next(port for port in iter(port_for_a_store, None) if port < 30000)
    agents = [
        job.start(
            f"n{node}",
            *("--slurm", "--local-addr=127.0.0.1"),
            script=(LOCKSTEP, state),
            environment=task(2, node, SLURM_JOB_ID=str(port - 20000)),
        )
        for node in (0, 1)
    ]
    job.wait_for_training(world=2)
    job.wait_for(lambda: job.history(what="step"), "a step")
    for agent in agents:
        agent.signal(signal.SIGUSR1)
    assert [agent.exit_code() for agent in agents] == [80, 80]


@pytest.mark.long
def test_a_job_leaves_before_its_time_is_over(job: Job) -> None:
    script = job.folder / "train.py"
    script.write_text(STEPS)
    ends_at = str(int(time.time()) + 3)
    environment = task(1, 0, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=ends_at)
    agent = job.start("a", "--slurm", script=(script,), environment=environment)
    assert agent.exit_code() == 80
    assert agent.says("SLURM_JOB_END_TIME: leaving the job before something ends it")
