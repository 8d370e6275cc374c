"""What follows from the cause of a failure, in whole jobs of real agents and workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .harness import Job

pytestmark = pytest.mark.usefixtures("in_etcd")


def script(job: Job, code: str) -> tuple[Path]:
    path = job.folder / "script.py"
    path.write_text(code)
    return (path,)


@pytest.mark.long
def test_kills_from_outside_neither_end_the_job_nor_make_it_wait(job: Job) -> None:
    """More than a script may fail by itself: the default is three in a row without progress."""
    agent = job.start("a", "--nproc-per-node=2")
    for kills in range(6):
        generation = job.wait_for_training(world=2, after=kills)
        os.kill(generation.pid(kills % 2), signal.SIGKILL)
    job.wait_for_training(world=2, after=6)
    assert not agent.says("backing off")
    job.wait_for_metric(agent, "elastic_agent_restarts_total", 6, reason="killed")


@pytest.mark.parametrize("options", [(), pytest.param(("--max-restarts=9",), marks=pytest.mark.long)])
def test_an_error_of_the_script_is_tried_twice(job: Job, options: tuple[str, ...]) -> None:
    agent = job.start("a", *options, script=script(job, "import no_such_module"))
    assert agent.exit_code() == 3
    assert agent.says(r"known as: import_error: a module is missing")
    assert agent.says(r"the same error of the script \(import_error\) 2 times in a row without progress")
    assert agent.says("generation 2")
    assert not agent.says("generation 3")


ROOT = """
import atexit, os, sys, time
FLAG = sys.argv[1]

def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)

def slow_exit():
    open(FLAG, "w").close()
    time.sleep(60)

if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
    if os.environ["RANK"] == sys.argv[2]:
        atexit.register(slow_exit)
        raise ValueError("the root of it")
    wait_for(lambda: os.path.exists(FLAG))
    raise RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4503")
"""


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_the_first_cause_is_the_jobs_though_its_collateral_ended_first(
    job: Job, nodes: int, rank: str
) -> None:
    """On one node, and from node to node; the guilty worker is still on its way out when all are asked to end."""
    worker = (*script(job, ROOT), job.folder / "flag", rank)
    options = f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"
    agents = [job.join(name, *options, script=worker) for name in "ab"[:nodes]]
    assert [agent.exit_code() for agent in agents] == [0] * nodes
    for agent in agents:
        assert agent.says(rf"generation 2 \(failure\).*because rank {rank} on node . failed")
        assert agent.says("ValueError: the root of it")
    assert any(
        agent.says("failed before that, and the others because of it: .*ValueError") for agent in agents
    )


KILLED = ROOT.replace("import atexit, os,", "import os, signal,").replace(
    """        atexit.register(slow_exit)
        raise ValueError("the root of it")
""",
    """        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        slow_exit()
""",
)


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_kill_that_shows_after_its_collateral_is_the_cause(job: Job, nodes: int) -> None:
    """A killed process closes its connections some time before its parent can see that it has ended."""
    worker = (*script(job, KILLED), job.folder / "flag", "0")
    options = f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"
    agents = [job.join(name, *options, script=worker) for name in "ab"[:nodes]]
    assert [agent.exit_code() for agent in agents] == [0] * nodes
    for agent in agents:
        assert agent.says(r"generation 2 \(failure\).*because rank 0 on node a failed")
    assert agents[0].says("rank 0 failed before that, and the others because of it: killed by SIGKILL")
