"""Four ranks on two nodes train in step, so that all their steps take equally long: who holds the others up?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import TORCH_PRELOADED, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

SCRIPT = Path(__file__).with_name("uneven_ddp.py")
SLOWER = r"rank (\d+) on node (\w+) is slower than the others"
EVEN_STEPS = 80
WITHIN_STEPS = 80
"""Of a quarter of a second each."""


def slow_down(slow: Path, told: str) -> None:
    """At once: the script reads the file at each step, and must not find it empty."""
    new = slow.with_suffix(".new")
    new.write_text(told)
    new.replace(slow)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_rank_slowed_by_40_percent_is_named_on_all_nodes_until_it_recovers(job: Job) -> None:
    slow = job.folder / "slow"
    slow_down(slow, "0 1.0")
    options = ("--nnodes=2", "--nproc-per-node=2", TORCH_PRELOADED)
    agents = [job.join(name, *options, script=(SCRIPT, slow)) for name in "ab"]
    a, b = agents
    for agent in agents:
        job.wait_for_text(agent, "first step is")
    job.wait_for(lambda: a.metric("elastic_agent_step") >= EVEN_STEPS, f"{EVEN_STEPS} even steps")
    assert not any(agent.says(SLOWER) for agent in agents)
    assert 0.5 < a.metric("elastic_agent_step_time_skew_ratio", local_rank="1") < 2.0

    slow_down(slow, "3 1.4")
    for agent in agents:
        named = job.wait_for_text(agent, SLOWER)
        assert (named[1], named[2]) == ("3", "b")
    begun = int(job.wait_for_text(a, r"slow 3 1.4 from step (\d+)")[1])
    steps = a.metric("elastic_agent_step") - begun
    print(f"named after at most {steps:.0f} steps")
    assert steps <= 3 * WITHIN_STEPS, "on a machine on which nothing else runs it takes less"
    assert b.metric("elastic_agent_straggler", local_rank="1") == 1
    assert a.metric("elastic_agent_straggler", local_rank="1") == 0
    status = [
        sys.executable,
        "-m",
        "elastic_agent",
        "status",
        "--json",
        "--agent",
        a.url.removeprefix("http://"),
    ]
    [found] = json.loads(subprocess.run(status, capture_output=True, text=True, check=True).stdout)["jobs"]
    assert [(one["node"], one["rank"]) for one in found["stragglers"]] == [("b", 3)]
    assert found["stragglers"][0]["own_us"] > found["usual_us"]

    slow_down(slow, "0 1.0")
    for agent in agents:
        job.wait_for_text(agent, "rank 3 on node b is as fast as the others again")
    assert sum(len(agent.text.split("is slower than the others")) - 1 for agent in agents) == len(agents), (
        "said once"
    )
