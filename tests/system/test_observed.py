"""What an agent shows is true (I14): metrics, probes and log of a live job against what its workers saw."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess

import pytest

from .harness import RECORDER, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

STEPS_UNTIL_KILLED = """
import os, signal, time
from elastic_agent.worker import step
def at(name): print(name, "at", time.monotonic(), flush=True)
if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
    at("before 1")
    step(1)
    at("after 1")
    for done in range(2, 250):
        time.sleep(0.002)
        step(done)
    at("before 250")
    step(250)
    at("after 250")
    os.kill(os.getpid(), signal.SIGKILL)
at("begin")
at("before 251")
step(251)
at("after 251")
time.sleep(600)
"""

CLOCK_S = 0.002
"""What numbers are rounded to."""

SAVE_ONCE = """
import sys, time, torch
from elastic_agent.worker import Checkpointer, step
model = torch.nn.Linear(3, 1)
checkpoints = Checkpointer(sys.argv[1], {"model": model})
done = checkpoints.load()
step(done + 1)
checkpoints.save(done + 1)
time.sleep(600)
"""


def test_promtool_finds_nothing_to_complain_about(job: Job) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    agent = job.start("a", "--nproc-per-node=2", script=(RECORDER, "--report"))
    old = job.wait_for_training(world=2)
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=2, after=1)
    _, page = agent.get("/metrics")
    result = subprocess.run([promtool, "check", "metrics"], input=page, text=True, capture_output=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_metrics_log_and_workers_name_the_same_generation_after_each_kill(job: Job) -> None:
    agents = [job.join(name, "--nnodes=2") for name in ("a", "b")]
    for kills in range(3):
        generation = job.wait_for_training(world=2, after=kills)
        for agent in agents:
            environment = generation.starts[generation.rank_on(agent.name)]["env"]
            job.wait_for_metric(agent, "elastic_agent_restarts_total", kills)
            exported = agent.metric("elastic_agent_rendezvous_generation")
            assert exported == int(environment["ELASTIC_AGENT_GENERATION"]) == kills + 1
            master = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
            assert agent.says(rf"generation {kills + 1} .* master {master}, {kills} failure")
            assert agent.metric("elastic_agent_restarts_total", reason="killed") == kills
            assert agent.metric("elastic_agent_world_size") == 2
            assert agent.metric("elastic_agent_group_world_size") == 2
        os.kill(generation.pid(kills % 2), signal.SIGKILL)


def test_exits_are_counted_by_rank_and_reason(job: Job) -> None:
    script = (RECORDER, "--fault=1:0:3:raise", "--fault=2:1:3:segv")
    agent = job.start("a", "--nproc-per-node=2", script=script)
    job.wait_for_training(world=2, after=2)
    assert agent.metric("elastic_agent_worker_exits_total", local_rank="0", reason="exception") == 1
    exits = agent.metric("elastic_agent_worker_exits_total", local_rank="1", reason="signal")
    assert exits == 1, "the one by SIGSEGV, not the one that the agent asked for"
    assert agent.metric("elastic_agent_restarts_total", reason="exception") == 1
    assert agent.metric("elastic_agent_restarts_total", reason="signal") == 1


def test_states_and_counts_follow_the_job(job: Job) -> None:
    first = job.join("a", "--nnodes=2", script=(RECORDER, "--report"))
    job.wait_for_text(first, "waiting: 1 more")
    assert first.metric("elastic_agent_state", state="joining") == 1
    assert first.metric("elastic_agent_nodes", state="waiting") == 1
    assert first.metric("elastic_agent_world_size") == 0
    assert first.get("/healthz")[0] == 200
    assert first.get("/readyz")[0] == 503

    job.join("b", "--nnodes=2", script=(RECORDER, "--report"))
    job.wait_for_training(world=2)
    job.wait_for_metric(first, "elastic_agent_state", 1, state="running")
    assert first.metric("elastic_agent_nodes", state="active") == 2
    job.wait_for(lambda: "elastic_agent_step{" in first.get("/metrics")[1], "the first step")
    assert first.metric("elastic_agent_step") > 1000
    assert first.metric("elastic_agent_restart_budget_remaining", kind="failure") == float("inf")
    assert first.get("/readyz")[0] == 200


@pytest.mark.long
def test_a_real_checkpoint_shows_in_the_metrics(job: Job) -> None:
    script = job.folder / "save_once.py"
    script.write_text(SAVE_ONCE)
    checkpoints = job.folder / "checkpoints"
    agent = job.start("a", script=(script, checkpoints))
    job.wait_for_text(agent, "metrics, ")
    saves = ("elastic_agent_checkpoint_saves_total", {"tier": "local", "result": "ok"})
    job.wait_for(lambda: agent.metric(saves[0], **saves[1]) == 1, "the save to be counted")
    assert agent.metric("elastic_agent_checkpoint_last_step", tier="local") == 1

    worker = next(process for process in job.workers("a"))
    os.kill(worker.pid, signal.SIGKILL)
    job.wait_for(lambda: agent.metric(saves[0], **saves[1]) == 2, "the second generation to save")
    assert agent.metric("elastic_agent_checkpoint_last_step", tier="local") == 2


def test_what_a_worker_did_until_it_was_killed_is_counted_and_what_came_then_told(job: Job) -> None:
    script = job.folder / "steps_until_killed.py"
    script.write_text(STEPS_UNTIL_KILLED)
    agent = job.start("a", script=(script,))
    told = job.wait_for_text(
        agent,
        r"generation 2: first step is 251, after (\S+) s without training \((.*)\) because rank 0 on node a failed",
    )
    at = {
        name: float(job.wait_for_text(agent, rf"{name} at (\S+)")[1])
        for name in ("begin", *(f"{side} {step}" for step in (1, 250, 251) for side in ("before", "after")))
    }

    def between(first: int, last: int) -> tuple[float, float]:
        """Seconds between two steps: at least, and at most."""
        least, most = at[f"before {last}"] - at[f"after {first}"], at[f"after {last}"] - at[f"before {first}"]
        return least - CLOCK_S, most + CLOCK_S

    assert agent.metric("elastic_agent_steps_total") == 251
    assert agent.metric("elastic_agent_step_duration_seconds_count") == 249
    least, most = between(1, 250)
    assert least < agent.metric("elastic_agent_productive_time_seconds_total") < most
    assert least < agent.metric("elastic_agent_step_duration_seconds_sum") < most
    assert agent.metric("elastic_agent_lost_steps_total") == 0

    duration_s, phases = float(told[1]), dict(re.findall(r"(\w+) (\S+?)(?:,|$)", told[2]))
    assert list(phases) == ["detect", "stop", "rendezvous", "backoff", "start", "init"], "no load, no more"
    assert sum(map(float, phases.values())) == pytest.approx(duration_s, abs=0.004)
    least, most = between(250, 251)
    assert least < duration_s < most
    assert float(phases["init"]) > at["before 251"] - at["begin"] - CLOCK_S
    assert agent.metric("elastic_agent_recovery_duration_seconds_sum") == pytest.approx(duration_s, abs=0.001)
