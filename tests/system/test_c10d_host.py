"""The node that hosts the c10d store: others lose sight of it, it dies, and it is started again."""

from __future__ import annotations

import pytest

from elastic_agent.agent.common.exits import ExitCode

from .harness import RECORDER, Generation, Job
from .networks import RESET, network

PORT = 29400
LEASE = "--lease-ttl=4s"


def run_of(generation: Generation) -> str:
    (run,) = {start["env"]["ELASTIC_AGENT_RUN"] for start in generation.starts.values()}
    return str(run)


def test_resets_on_the_way_to_the_host_are_no_proof_that_it_has_ended(job: Job) -> None:
    """A firewall that is loaded anew: short of the lease nothing stops, beyond it the node joins again."""
    with network("a", "b") as net:
        store = f"--rdzv-endpoint={net['a'].address}:{PORT}"
        host = job.start("a", store, "--nnodes=1:2", LEASE, enter=net["a"].enter)
        job.wait_for_text(host, "metrics, /healthz")
        other = job.start("b", store, "--nnodes=1:2", LEASE, enter=net["b"].enter)
        job.wait_for_training(world=2)
        two = job.wait_for_convergence("a", "b")

        net["b"].disturb(RESET, towards=[net["a"]], received=False)
        job.wait_for_text(other, "lease not confirmed")
        net["b"].heal()
        job.wait_for_text(other, "lease confirmed again")
        job.wait_for_steps(two, 0.5)

        net["b"].disturb(RESET, towards=[net["a"]], received=False)
        job.wait_for(lambda: not job.workers("b"), "the node that is cut off to stop its workers")
        net["b"].heal()
        assert job.wait_for_convergence("a", "b").number > two.number
        assert other.says("refuses connections: the agent that hosts the c10d store has ended, or a firewall")


def test_a_host_that_is_started_again_at_its_endpoint_goes_on_with_the_job(job: Job) -> None:
    """From the checkpoint, in a generation above all that there were. One of the others never comes back."""
    script = (RECORDER, f"--checkpoint={job.folder / 'checkpoint'}")
    agents = {name: job.join(name, "--nnodes=1:3", LEASE, script=script) for name in ("a", "b", "c")}
    job.wait_for_training(world=3)
    three = job.wait_for_convergence("a", "b", "c")
    job.wait_for(lambda: (job.folder / "checkpoint").exists(), "a checkpoint")
    agents["a"].kill()
    agents["c"].kill()
    saved = int((job.folder / "checkpoint").read_text())
    again = job.join("a", "--nnodes=1:3", LEASE, script=script)
    later = job.wait_for_convergence("a", "b")
    assert later.number > three.number
    assert run_of(later) == run_of(three)
    assert again.says(f"has left generation {three.number}")
    steps = [step["step"] for step in job.history(what="step", generation=later.number)]
    assert min(steps) > saved


@pytest.mark.long
def test_another_job_at_the_endpoint_of_a_dead_one_is_a_run_of_its_own(job: Job) -> None:
    """It has the same id, because none was given, and a number above all that there were."""
    agents = [job.join(name, "--nnodes=1:3", LEASE) for name in ("a", "b")]
    job.wait_for_training(world=2)
    dead = job.wait_for_convergence("a", "b")
    for agent in agents:
        agent.kill()
    job.join("c", "--nnodes=1:3", LEASE)
    other = job.wait_for_convergence("c")
    assert other.number > dead.number
    assert run_of(other) != run_of(dead)


@pytest.mark.long
def test_another_jobs_store_where_the_host_was_is_no_failure_of_the_agent(job: Job) -> None:
    """It will not go away by being asked again, so the node says whose it is, and leaves."""
    agents = {name: job.join(name, "--nnodes=1:3", LEASE) for name in ("a", "b")}
    job.wait_for_training(world=2)
    agents["a"].kill()
    job.join("x", "--nnodes=2", "--rdzv-id=another", LEASE)
    assert agents["b"].exit_code() == ExitCode.MISMATCH
    assert agents["b"].says("expected 'default'")
