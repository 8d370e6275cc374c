"""Asked to stop: one agent leaves and the others go on; graces, second signals and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import LOCKSTEP, RECORDER, Job, without
from .processes import listening_ports, port_for_a_store, processes_of


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.long),
    ],
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
    assert two.nodes == without(three.nodes, "b")
    assert two.number == three.number + 1, "one planned change, one new generation"
    for name in two.nodes:
        assert agents[name].says(rf"generation {two.number} \(leave\): 2 nodes.* 0 failures so far")
        job.wait_for_metric(agents[name], "elastic_agent_restarts_total", 1, reason="leave")


@pytest.mark.long
def test_a_planned_stop_spares_the_workers_children_until_the_worker_has_ended(job: Job) -> None:
    """A data loader that dies of the same SIGTERM would fail the checkpoint that the grace is for."""
    told = job.folder / "child-was-told"
    child = f"trap 'touch {told}; exit' TERM; while :; do sleep 0.05; done"
    agent = job.start("a", script=(RECORDER, "--exit-0-on-sigterm", f"--child={child}"))
    job.wait_for_training(world=1)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    assert not told.exists()


@pytest.mark.long
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
    assert agent.says("stopped while looking for the rendezvous store at 192.0.2.200:")


@pytest.mark.long
def test_a_signal_while_waiting_for_other_nodes_ends_at_once(job: Job) -> None:
    agent = job.join("a", "--nnodes=2")
    job.wait_for_text(agent, "waiting: 1 more")
    agent.signal(signal.SIGINT)
    assert agent.exit_code(within_s=10) == 130
    assert job.store_port not in listening_ports()


@pytest.mark.long
@pytest.mark.parametrize("preload", ["--preload=none", "--preload=json"])
def test_a_hangup_under_nohup_ends_neither_agent_nor_workers(job: Job, preload: str) -> None:
    nohup = ("sh", "-c", "trap '' HUP USR2; exec \"$@\"", "sh")
    agent = job.start("a", preload, enter=nohup)
    training = job.wait_for_training(world=1)
    for number in (signal.SIGHUP, signal.SIGUSR2):
        os.kill(training.pid(0), number)
        agent.signal(number)
    steps = len(job.history(what="step"))
    job.wait_for(lambda: len(job.history(what="step")) > steps + 5, "more steps")
    assert not agent.says("SIGHUP")
    assert not agent.says("SIGUSR2")


def test_a_schedulers_warning_to_all_processes_is_one_planned_leave(job: Job) -> None:
    """Slurm's --signal reaches each process of the step, and may come again; it cuts nothing short."""
    state = job.folder / "state"
    state.mkdir()
    options = ("--stop-grace=1h", "--signals-to-handle=SIGTERM,SIGXCPU")
    agent = job.start("a", *options, script=(LOCKSTEP, state, "--keep-s=1"))
    job.wait_for_training(world=1)
    job.wait_for(lambda: job.history(what="step"), "a step")
    for process in processes_of(job.id):
        os.kill(process.pid, signal.SIGUSR1)
    job.wait_for(lambda: job.history(what="keep"), "the last step to be kept")
    agent.signal(signal.SIGUSR1)
    agent.signal(signal.SIGUSR2)
    agent.signal(signal.SIGXCPU)
    assert agent.exit_code() == 143
    (kept,) = job.history(what="drained")
    assert kept["step"] == job.history(what="step")[-1]["step"]
    assert agent.says("SIGUSR1: leaving the job before something ends it")
    for more in ("SIGUSR2", "SIGXCPU"):
        assert agent.says(f"{more}: leaving the job already, because of SIGUSR1")
    assert agent.says("ended with exit code 143: stopped by SIGUSR1")
    assert not agent.says("again: killing")


WARNED_AT_ONCE = """
import os, signal, sys

class Warned:
    def find_spec(self, name, path=None, target=None):
        if name == "elastic_agent.cli":  # the first of all that takes time
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Warned())
from elastic_agent.__main__ import start
start()
"""


@pytest.mark.long
def test_a_warning_in_an_agents_first_moments_is_a_planned_leave_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(1000)")
    agent = [sys.executable, "-c", WARNED_AT_ONCE, "--standalone", "--preload=none", str(script)]
    done = subprocess.run(agent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143, done.stderr
    assert "stopped by SIGUSR1" in done.stderr


@pytest.mark.long
def test_the_end_that_a_warning_told_of_leaves_the_workers_their_grace(job: Job) -> None:
    agent = job.start("a", "--stop-grace=1h", script=(RECORDER, "--ignore-sigterm"))
    job.wait_for_training(world=1)
    agent.signal(signal.SIGUSR1)
    job.wait_for(lambda: job.history(what="sigterm"), "the worker to be asked")
    agent.signal(signal.SIGTERM)
    job.wait_for_text(agent, "SIGTERM: leaving the job; a second signal cuts")
    steps = len(job.history(what="step"))
    job.wait_for(lambda: len(job.history(what="step")) > steps + 5, "more steps")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    assert agent.says("SIGTERM again: killing the workers now")
