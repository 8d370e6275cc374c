"""Asked to stop: one agent leaves and the others go on; graces, second signals and exit codes."""

from __future__ import annotations

import signal

import pytest

from .harness import RECORDER, Job, listening_ports, port_for_a_store


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)]
)
def test_a_signal_stops_the_workers_gently_and_names_itself_in_the_exit_code(
    job: Job, number: int, code: int
) -> None:
    agent = job.start("a", "--nproc-per-node=2", script=(RECORDER, "--exit-0-on-sigterm"))
    job.wait_for_training(world=2)
    agent.signal(number)
    assert agent.exit_code() == code
    assert {record["rank"] for record in job.history(what="sigterm")} == {0, 1}
    assert agent.says(f"ended with exit code {code}: stopped by {signal.Signals(number).name}")


def test_one_of_three_leaves_and_the_others_go_on_without_counting_a_failure(job: Job) -> None:
    agents = {name: job.join(name, "--nnodes=1:3") for name in ("a", "b", "c")}
    three = job.wait_for_training(world=3)
    agents["b"].signal(signal.SIGTERM)
    two = job.wait_for_training(world=2, after=three.number)
    assert agents["b"].exit_code() == 143
    assert two.nodes == [node for node in three.nodes if node != "b"]
    assert two.number == three.number + 1, "one planned change, one new generation"
    for name in two.nodes:
        assert agents[name].says(rf"generation {two.number} \(leave\): 2 nodes.* 0 failures so far")
        assert agents[name].metric("elastic_agent_restarts_total", reason="leave") == 1


def test_a_planned_stop_spares_the_workers_children_until_the_worker_has_ended(job: Job) -> None:
    """A data loader that dies of the same SIGTERM would fail the checkpoint that the grace is for."""
    told = job.folder / "child-was-told"
    child = f"trap 'touch {told}; exit' TERM; while :; do sleep 0.05; done"
    agent = job.start("a", script=(RECORDER, "--exit-0-on-sigterm", f"--child={child}"))
    job.wait_for_training(world=1)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    assert not told.exists()


def test_a_worker_that_ignores_sigterm_is_killed_after_the_stop_grace(job: Job) -> None:
    agent = job.start("a", "--stop-grace=1s", script=(RECORDER, "--ignore-sigterm"))
    job.wait_for_training(world=1)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    asked = job.history(what="sigterm")[0]["at"]
    assert job.history(what="step")[-1]["at"] - asked > 0.5, "it had its grace, and used it"


def test_a_second_signal_cuts_the_grace_short(job: Job) -> None:
    agent = job.start("a", "--stop-grace=1h", script=(RECORDER, "--ignore-sigterm"))
    job.wait_for_training(world=1)
    agent.signal(signal.SIGTERM)
    job.wait_for(lambda: job.history(what="sigterm"), "the worker to be asked")
    assert agent.process.poll() is None
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    assert agent.says("SIGTERM again: killing the workers now")


def test_a_signal_while_looking_for_the_store_ends_at_once(job: Job) -> None:
    agent = job.start("a", "--nnodes=2", f"--rdzv-endpoint=192.0.2.200:{port_for_a_store()}")
    job.wait_for_text(agent, "looking for the rendezvous store")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code(within_s=10) == 143
    assert agent.says("stopped while looking for the store")


def test_a_signal_while_waiting_for_other_nodes_ends_at_once(job: Job) -> None:
    agent = job.join("a", "--nnodes=2")
    job.wait_for_text(agent, "waiting for 1 more")
    agent.signal(signal.SIGINT)
    assert agent.exit_code(within_s=10) == 130
    assert job.store_port not in listening_ports()
