"""The ladder of training's timeouts at work: a hang is ended, a process group has its timeout."""

from __future__ import annotations

import pytest

from .harness import RECORDER, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

STUCK = """
import datetime, time, torch, torch.distributed as dist
from elastic_agent.worker import init_process_group
init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
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


@pytest.mark.long
def test_a_collective_that_does_not_end_meets_the_timeout_of_the_process_group(job: Job) -> None:
    script = job.folder / "stuck.py"
    script.write_text(STUCK)
    options = ("--nproc-per-node=2", "--max-restarts=0")
    agent = job.start("a", *options, script=(script,))
    assert agent.exit_code() == 1
    assert agent.says(r"[Tt]imed out waiting 10000ms")
