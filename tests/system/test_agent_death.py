"""An agent is killed: nothing of it stays behind, and the next one under its name takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .harness import ORPHANS_S, RECORDER, Job

GRANDCHILDREN = (
    "exec sleep 600",
    "setsid sleep 600 &",
    "(setsid sh -c 'sleep 600 & wait' &)",
)
"""A data loader; a daemon in a session of its own; one more generation, whose parents are gone."""


@pytest.mark.usefixtures("in_etcd")
def test_after_sigkill_of_the_agent_no_worker_child_or_daemon_lives(job: Job) -> None:
    children = [f"--child={command}" for command in GRANDCHILDREN]
    agent = job.start("a", "--nproc-per-node=2", script=(RECORDER, *children))
    training = job.wait_for_training(world=2)
    job.wait_for(lambda: len(job.workers()) >= 2 + 2 * 4, "all grandchildren to run")
    run_dir = Path(training.starts[0]["env"]["ELASTIC_AGENT_REPORTS"]).parent
    assert run_dir.exists()
    agent.kill()
    job.wait_for(lambda: not job.processes(), "everything of the killed agent to end", ORPHANS_S)
    job.wait_for(lambda: not run_dir.exists(), "its temporary files to be removed", ORPHANS_S)


@pytest.mark.usefixtures("in_etcd")
def test_what_a_worker_leaves_behind_is_gone_before_the_next_generation(job: Job) -> None:
    """The watcher of the harness fails this test if a daemon of generation 1 meets generation 2."""
    job.start("a", script=(RECORDER, "--child=setsid sleep 600 &"))
    old = job.wait_for_training(world=1)
    job.wait_for(lambda: len(job.workers()) == 2, "worker and daemon")
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=1)
    job.wait_for(lambda: len(job.workers()) == 2, "worker and daemon of the second generation")
    assert {worker.generation for worker in job.workers()} == {2}


@pytest.mark.long
@pytest.mark.usefixtures("in_etcd")
def test_so_is_a_daemon_that_has_forgotten_where_it_comes_from(job: Job) -> None:
    """Neither its environment nor its session tells whose it is; but it is an orphan, and the agent adopts it."""
    told = job.folder / "daemons"
    daemon = f"env -i setsid sh -c 'echo $$ >> {told}; exec /bin/sleep 600' &"
    job.start("a", script=(RECORDER, f"--child={daemon}"))
    old = job.wait_for_training(world=1)
    job.wait_for(lambda: told.exists() and told.read_text().endswith("\n"), "the daemon to run")
    first = int(told.read_text())
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=1)
    job.wait_for(lambda: not Path(f"/proc/{first}").exists(), "it to be killed and buried", ORPHANS_S)
    job.wait_for(lambda: told.read_text().count("\n") == 2, "the daemon of the second generation to run")
    job.agents[0].signal(signal.SIGTERM)
    job.agents[0].exit_code()
    assert not any(Path(f"/proc/{pid}").exists() for pid in told.read_text().split())


@pytest.mark.long
@pytest.mark.usefixtures("in_etcd")
def test_a_finished_job_takes_its_workers_daemons_with_it(job: Job) -> None:
    agent = job.start("a", script=(RECORDER, "--child=setsid sleep 600 &", "--steps=5"))
    assert agent.exit_code() == 0
    # A busy machine takes its time with the end of a helper that was killed, and the agent waits for that a second.
    job.wait_for(lambda: not job.processes(), "everything to end with the agent", within_s=5.0)


@pytest.mark.long
def test_an_agent_started_again_under_its_name_joins_when_the_dead_ones_lease_is_over(job: Job) -> None:
    options = ("--nnodes=1:2", "--lease-ttl=2")
    job.join("a", *options)
    victim = job.join("b", *options)
    old = job.wait_for_training(world=2)
    first_life = old.starts[old.rank_on("b")]["env"]["ELASTIC_AGENT_INCARNATION"]
    victim.kill()
    job.join("b", *options)
    new = job.wait_for_training(world=2, after=old.number)
    second_life = new.starts[new.rank_on("b")]["env"]["ELASTIC_AGENT_INCARNATION"]
    assert new.nodes == ["a", "b"], "the survivor stands in front"
    assert first_life != second_life
