"""What jobs of real daemons print, as `logs` shows it, and what the daemons tell Prometheus."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

import pytest

from elastic_agent.agent.common.exits import ExitCode

from .harness import Agent
from .pools import Pool
from .processes import MARKER

SAYS = """
import os, sys, time
print("out of", os.environ["RANK"], flush=True)
print("err of", os.environ["RANK"], file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("last of", os.environ["RANK"], flush=True)
sys.exit(int(sys.argv[2]))
"""


def talker(pool: Pool, code: int = 0) -> tuple[str, ...]:
    script = pool.folder / "talker.py"
    script.write_text(SAYS)
    return str(script), str(pool.folder / "go"), str(code)


def follower(pool: Pool, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "elastic_agent", *words, *pool.place],
        env={**os.environ, **pool.environment, MARKER: pool.job.id},
        stdout=(pool.folder / "followed").open("w"),
        stderr=subprocess.PIPE,
        text=True,
        cwd=pool.folder,
    )


def followed(pool: Pool) -> str:
    return (pool.folder / "followed").read_text()


def page(pool: Pool, agent: Agent, path: str) -> str:
    place = pool.job.wait_for_text(agent, r"/readyz at (http://\S+)")[1]
    with urllib.request.urlopen(place + path, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.long
def test_what_a_job_prints_is_followed_past_the_death_of_a_node(pool: Pool) -> None:
    a, b = pool.daemons("a", "b")
    job = pool.submit("--min-nodes=1", "--max-nodes=2", script=talker(pool, 7))
    follow = follower(pool, "logs", job, "--follow")
    for text in ("[a] ", "[b] ", "out of 0", "out of 1"):
        pool.job.wait_for(lambda text=text: text in followed(pool), f"{text!r} in the log")  # type: ignore[misc]
    b.kill()
    pool.job.wait_for(lambda: "generation 2 (" in followed(pool), "a generation without b in the log")
    (pool.folder / "go").touch()
    _, said = follow.communicate(timeout=60)
    assert follow.returncode == ExitCode.FAILED == pool.wait(job)
    assert "last of 0" in followed(pool)
    assert f"job {job} (talker.py): failed: " in said
    assert a.process.poll() is None


def test_a_daemon_tells_prometheus_of_its_pool_and_its_job(pool: Pool) -> None:
    [a] = pool.daemons("a")
    assert page(pool, a, "/healthz").startswith("the main loop turned")
    assert page(pool, a, "/readyz") == "idle: waiting for a job\n"
    assert 'elastic_agent_pool_idle_nodes{node="a",pool="pool"} 1.0' in page(pool, a, "/metrics")
    job = pool.submit(script=talker(pool))
    up = f'elastic_agent_world_size{{node="a",run_id="{job}"}} 1.0'
    pool.job.wait_for(lambda: up in page(pool, a, "/metrics"), "the job's own metrics")
    assert 'elastic_agent_pool_running_jobs{node="a",pool="pool"} 1.0' in page(pool, a, "/metrics")
    (pool.folder / "go").touch()
    assert pool.wait(job) == ExitCode.SUCCESS
    pool.job.wait_for(lambda: job not in page(pool, a, "/metrics"), "none of the job's metrics")
