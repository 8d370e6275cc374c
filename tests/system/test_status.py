"""`elastic-agent status` of real jobs: what it says is what happened, by every source, and the job does not notice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.etcd_servers import EtcdCluster

from .etcd_jobs import assert_all_live, record_key
from .harness import PATIENCE_S, RECORDER, Job
from .test_observed import SAVE_ONCE

REPORTS = (RECORDER, "--report")
COMMAND = (sys.executable, "-m", "elastic_agent", "status")


def run_status(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def document(*words: str) -> dict[str, Any]:
    """The only job."""
    done = run_status("--json", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert isinstance(job, dict)
    return job


def here(job_id: str) -> dict[str, Any]:
    """Found without any word, among whatever else runs on this machine."""
    done = run_status("--json", "--timeout=1s")
    assert done.returncode == 0, done.stderr
    (job,) = (job for job in json.loads(done.stdout)["jobs"] if job["job"] == job_id)
    assert isinstance(job, dict)
    return job


def nodes(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["node"]: node for node in job["nodes"]}


def at(url: str) -> tuple[str, str]:
    return ("--agent", url.removeprefix("http://"))


def etcd_source(job: Job, etcd: EtcdCluster) -> tuple[str, str]:
    host, port = etcd.endpoints[0]
    return f"--rdzv-endpoint=etcd://{host}:{port}", f"--rdzv-id={job.id}"


def test_from_each_source_through_a_killed_worker_a_frozen_node_and_a_lost_one(
    job: Job, etcd: EtcdCluster
) -> None:
    job.use_etcd(etcd)
    options = ("--nnodes=1:3", "--nproc-per-node=2", "--max-restarts=4", "--lease-ttl=6")
    agents = {node: job.join(node, *options, script=REPORTS) for node in "abc"}
    first = job.wait_for_training(world=6)
    store = etcd_source(job, etcd)
    sources = {"agent": at(agents["b"].url), "store": store}

    def all_report() -> bool:
        return all(node["step"] for node in document(*sources["agent"])["nodes"])

    job.wait_for(all_report, "each node to have heard of a step")
    for asked, words in sources.items():
        shown = document(*words)
        assert asked in shown["asked"]
        assert (shown["job"], shown["state"], shown["generation"]) == (job.id, "running", first.number)
        assert (shown["world_size"], shown["complete"], shown["notes"]) == (6, True, [])
        assert shown["restarts"] | {"failures": 0, "limit": 4, "left": 4} == shown["restarts"]
        assert [node["node"] for node in shown["nodes"]] == first.nodes
        for node in shown["nodes"]:
            assert (node["state"], node["workers"], node["silence"]) == ("running", 2, None)
            assert node["first_rank"] == first.rank_on(node["node"])
            assert node["step"] > 1000
            assert 0 <= node["lease_age_s"] < node["lease_ttl_s"] == 6.0
        assert len([node for node in shown["nodes"] if node["coordinates"]]) == 1

    rank = first.rank_on("c")
    os.kill(first.pid(rank), signal.SIGKILL)
    second = job.wait_for_training(world=6, after=first.number)
    for shown in (document(*sources["agent"]), here(job.id)):
        assert (shown["generation"], shown["restarts"]["failures"], shown["restarts"]["left"]) == (
            second.number,
            1,
            3,
        )
        assert shown["cause"] | {"kind": "failure", "node": "c", "rank": rank} == shown["cause"]
        said = f"rank {rank} on node c failed in generation {first.number}: killed by SIGKILL"
        assert said in shown["cause"]["text"]

    agents["c"].signal(signal.SIGSTOP)
    text = run_status(*sources["agent"], "--timeout=1s").stdout
    assert re.search(r"^c( \*)? +\d-\d +no answer +- +- +- +\S+:\d+$", text, re.MULTILINE)
    assert "! node c: no answer from " in text
    silent = run_status(*at(agents["c"].url), "--timeout=1s")
    assert (silent.returncode, silent.stdout) == (69, "")
    assert "no answer within 1 s" in silent.stderr
    job.wait_for_training(world=4, after=second.number)
    for words in sources.values():
        shown = document(*words)
        assert shown["cause"] | {"kind": "lost", "node": "c"} == shown["cause"]
        assert sorted(nodes(shown)) == ["a", "b"]

    agents["c"].kill()
    job.wait_for(
        lambda: "no process listens" in run_status(*at(agents["c"].url)).stderr, "its port to be closed"
    )
    missing = run_status(store[0], "--rdzv-id=no-such-job")
    assert (missing.returncode, missing.stdout) == (67, "")
    assert "no-such-job" in missing.stderr


def test_looking_through_the_store_does_not_touch_it(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    # A script that reports no step: a node with steps would itself write how it gets on, about once a second.
    agents = [job.join(name, "--nnodes=1:1") for name in "ab"]
    generation = job.wait_for_training(world=1)

    def stored() -> list[tuple[str, str, int]]:
        found = json.loads(etcd.ctl("get", "--prefix", record_key(job, "")))["kvs"]
        return [(kv["key"], kv["value"], kv.get("lease")) for kv in found]

    job.wait_for(lambda: len(stored()) == 4, "the world, both nodes and the memory servers' key in the store")
    before = stored()
    shown = document(*etcd_source(job, etcd))
    assert (shown["state"], shown["world_size"], shown["generation"]) == ("running", 1, generation.number)
    (outside,) = (node for node in shown["nodes"] if node["first_rank"] is None)
    assert (outside["state"], outside["first_rank"], outside["has_lease"]) == ("standby", None, True)
    assert stored() == before
    assert_all_live(agents)
    assert job.generations()[-1].number == generation.number


def test_a_job_that_has_to_wait_shows_for_what_from_both_sources(job: Job) -> None:
    agent = job.join("a", "--nnodes=2")
    job.wait_for_text(agent, "waiting: 1 more")
    for words in (at(agent.url), (f"--rdzv-endpoint=127.0.0.1:{job.store_port}", "--timeout=10s")):
        shown = document(*words)
        assert (shown["state"], shown["generation"], shown["cause"]) == ("waiting", 0, None)
        assert "1 more of at least 2 nodes" in shown["waiting_for"]
        assert nodes(shown)["a"]["state"] == "standby"


@pytest.mark.long
def test_a_checkpoint_has_the_age_that_its_own_node_counts(job: Job) -> None:
    script = job.folder / "save_once.py"
    script.write_text(SAVE_ONCE)
    agent = job.start("a", script=(script, job.folder / "checkpoints"))
    job.wait_for_text(agent, "metrics, ")
    saved = job.wait_for(lambda: document(*at(agent.url))["checkpoint"], "a checkpoint")
    later = document(*at(agent.url))["checkpoint"]
    assert saved["step"] == later["step"] == 1
    assert 0 <= saved["age_s"] < later["age_s"] < PATIENCE_S
