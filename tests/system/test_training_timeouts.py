"""The ladder of training's timeouts at work: a hang is ended, a process group has its timeout, failures widen it."""

from __future__ import annotations

import pytest

from .harness import RECORDER, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

FAILING = """
import os
from elastic_agent.worker import step
class DistBackendError(RuntimeError): ...
generation = int(os.environ["ELASTIC_AGENT_GENERATION"])
print("timeout in", generation, os.environ["ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S"], flush=True)
if generation == 3:
    step(1)
if generation <= 3:
    raise DistBackendError("NCCL error in: x.cpp:1, remote process exited")
"""

STUCK = """
import time, torch, torch.distributed as dist
from elastic_agent.worker import init_process_group
init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(60)
dist.all_reduce(torch.ones(1))
"""


def test_a_hang_on_one_node_is_ended_named_and_restarted(job: Job) -> None:
    options = ("--nnodes=2", "--hang-timeout=1.5")
    script = (RECORDER, "--report", "--fault=1:1:10:hang")
    agents = [job.join(name, *options, script=script) for name in ("a", "b")]
    first = job.wait_for_training(world=2)
    stuck, other = sorted(agents, key=lambda agent: first.rank_on(agent.name) == 0)
    second = job.wait_for_training(world=2, after=1)
    cause = r"hang: no step or checkpoint reported for 1.5 s \(--hang-timeout\); last steps: rank 1: 10\d\d"
    assert all(agent.says(cause) for agent in agents)
    assert stuck.says(r"\] Fatal Python error: Aborted"), "where it stood"
    assert stuck.says(r"\]   File .*recorder.py\", line \d+ in happen")
    assert [agent.metric("elastic_agent_restarts_total", reason="hang") for agent in agents] == [1, 1]
    assert stuck.metric("elastic_agent_worker_exits_total", reason="hang") == 1
    assert other.metric("elastic_agent_worker_exits_total") == 0
    assert {agent.metric("elastic_agent_hang_timeout_seconds") for agent in agents} == {1.5}
    assert job.generations()[-1].number == second.number == 2


def test_repeated_network_failures_widen_the_timeout_until_there_is_progress(job: Job) -> None:
    script = job.folder / "failing.py"
    script.write_text(FAILING)
    agent = job.start("a", "--hang-timeout=60", script=(script,))
    assert agent.exit_code() == 0
    for generation, timeout in ((1, 120), (2, 120), (3, 240), (4, 120)):
        assert agent.says(rf"timeout in {generation} {timeout}$"), generation
    assert agent.says("network timeouts are widened by 1 steps of 2, were by 0")
    assert agent.says("network timeouts are widened by 0 steps of 2, were by 1")


def test_a_collective_that_does_not_end_meets_the_timeout_of_the_process_group(job: Job) -> None:
    script = job.folder / "stuck.py"
    script.write_text(STUCK)
    options = ("--nproc-per-node=2", "--process-group-timeout=10", "--max-restarts=0")
    agent = job.start("a", *options, script=(script,))
    assert agent.exit_code() == 1
    assert agent.says(r"[Tt]imed out waiting 10000ms")
