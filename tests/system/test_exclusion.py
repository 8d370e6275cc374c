"""A node on which alone the workers die is out after two failures, and back when it is mended and checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import DYING, Job, planted

SOON = planted("constants cool_down_s=3")
LIMITS = ("--min-nodes=2", "--max-nodes=3", "--last-call=3s")


def test_one_of_three_nodes_is_excluded_and_comes_back(job: Job, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    first = job.join("a", *LIMITS, script=(DYING,))
    job.join("b", *LIMITS, script=(DYING,))
    bad = job.join("c", *LIMITS, script=(DYING,), environment={"DIES_UNLESS": str(mended), **SOON})

    without = job.wait_for_training(world=2)
    assert sorted(without.nodes) == ["a", "b"]
    tried = {one["generation"] for one in job.history(what="start") if one["node"] == "c"}
    assert len(tried) <= 2, "out after two failures"
    said = r"node c is excluded: each of 2 failures in a row began there alone; the last: .*exit code 7"
    job.wait_for_text(first, said)
    job.wait_for(lambda: bad.metric("elastic_agent_node_excluded") == 1, "node c to know it")
    job.wait_for_metric(first, "elastic_agent_restart_budget_remaining", float("inf"), kind="failure")
    status = told(job, "status", "--agent", f"127.0.0.1:{first.url.rpartition(':')[2]}", "--json")
    (found,) = json.loads(status)["jobs"]
    assert [(one["node"], one["times"], one["readmitted"]) for one in found["exclusions"]] == [
        ("c", 1, False)
    ]
    assert {one["node"]: one["state"] for one in found["nodes"]}["c"] == "excluded"

    mended.touch()
    whole = job.wait_for_training(world=3, after=without.number)
    assert sorted(whole.nodes) == ["a", "b", "c"]
    assert bad.says("this node was checked after its cool-down, and it asks to be readmitted")
    assert first.says("node c is readmitted")
    job.wait_for_metric(bad, "elastic_agent_node_excluded", 0)


def test_an_operator_excludes_a_node_and_readmits_it(job: Job) -> None:
    agents = {name: job.join(name, *LIMITS, script=(DYING,)) for name in "abc"}
    three = job.wait_for_training(world=3)
    place = (f"--rdzv-endpoint=127.0.0.1:{job.store_port}", "--rdzv-backend=c10d")
    assert "goes on without node a" in told(job, "exclude", "a", "--reason=a fan is loud", *place)
    two = job.wait_for_training(world=2, after=three.number)
    assert sorted(two.nodes) == ["b", "c"], "node a hosts the store, and stays for that"
    assert agents["b"].says("node a is excluded by an operator: a fan is loud")
    told(job, "readmit", "a", *place)
    assert sorted(job.wait_for_training(world=3, after=two.number).nodes) == ["a", "b", "c"]
    assert not any(agent.says("failed: ") for agent in agents.values())


@pytest.mark.long
def test_a_node_that_is_excluded_while_it_is_away_stays_out_when_it_comes(job: Job) -> None:
    agents = {name: job.join(name, *LIMITS, script=(DYING,)) for name in "abc"}
    three = job.wait_for_training(world=3)
    place = (f"--rdzv-endpoint=127.0.0.1:{job.store_port}", "--rdzv-backend=c10d")
    agents["c"].kill()
    two = job.wait_for_training(world=2, after=three.number)
    said = told(job, "exclude", "c", "--reason=its disk is swapped", *place)
    assert "its agent is away: it is left out when it comes" in said
    back = job.join("c", *LIMITS, script=(DYING,))
    job.wait_for_text(back, "excluded by an operator: its disk is swapped")
    job.wait_for_metric(back, "elastic_agent_node_excluded", 1)
    job.wait_for_steps(two, for_s=1.0)
    told(job, "readmit", "c", *place)
    assert sorted(job.wait_for_training(world=3, after=two.number).nodes) == ["a", "b", "c"]


def told(job: Job, *words: str) -> str:
    command = [sys.executable, "-m", "elastic_agent", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
