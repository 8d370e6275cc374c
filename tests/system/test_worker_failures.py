"""A worker ends: what becomes of the others, of the job, and what is logged."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from .harness import RECORDER, Agent, Generation, Job

pytestmark = pytest.mark.usefixtures("in_etcd")


def two_nodes(job: Job, *options: str, script: tuple[object, ...] = (RECORDER,)) -> tuple[Agent, Agent]:
    first, second = (job.join(name, "--nnodes=2", *options, script=script) for name in ("a", "b"))
    return first, second


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "SIGKILL"), pytest.param(signal.SIGSEGV, "SIGSEGV", marks=pytest.mark.long)],
)
def test_a_worker_that_a_signal_ends_brings_a_new_generation(job: Job, number: int, words: str) -> None:
    agent = job.start("a", "--nproc-per-node=2")
    old = job.wait_for_training(world=2)
    os.kill(old.pid(1), number)
    new = job.wait_for_training(world=2, after=old.number)
    assert new.number == old.number + 1
    assert agent.says(rf"rank 1 failed: .*{words}")
    assert job.history(what="sigterm", generation=old.number, rank=0), "the survivor was asked to stop"
    assert {("a", old.number), ("a", new.number)} <= job.watcher.seen, "the watcher for I1 has looked at both"


def test_a_failure_on_one_node_restarts_all_nodes_and_counts_once_everywhere(job: Job) -> None:
    agents = two_nodes(job, "--nproc-per-node=2", script=(RECORDER, "--fault=1:3:5:1"))
    new = job.wait_for_training(world=4, after=1)
    assert new.number == 2
    assert sorted(new.nodes) == ["a", "b"]
    assert {start["env"]["TORCHELASTIC_RESTART_COUNT"] for start in new.starts.values()} == {"1"}
    for agent in agents:
        assert agent.says(r"generation 2 \(failure\): 2 nodes, 4 workers.* 1 failure so far")
    for rank in range(3):
        assert job.history(what="sigterm", generation=1, rank=rank), f"rank {rank} was asked to stop"
    killed = new.pid(0)
    os.kill(killed, signal.SIGKILL)
    newest = job.wait_for_training(world=4, after=2)
    assert {start["env"]["TORCHELASTIC_RESTART_COUNT"] for start in newest.starts.values()} == {"2"}


@pytest.mark.long
def test_a_survivor_that_ignores_sigterm_is_killed_after_the_failure_grace(job: Job) -> None:
    script = (RECORDER, "--ignore-sigterm", "--fault=1:0:5:1")
    job.start("a", "--nproc-per-node=2", script=script)
    job.wait_for_training(world=2, after=1)
    asked = job.history(what="sigterm", generation=1, rank=1)[0]["at"]
    last = job.history(what="step", generation=1, rank=1)[-1]["at"]
    first = job.history(what="start", generation=2, rank=1)[0]["at"]
    assert asked < last < first, "it went on until it was killed, and its successor waited for that"


def test_the_summary_names_the_rank_that_failed_first_and_shows_its_traceback(job: Job) -> None:
    script = (RECORDER, "--fault=*:1:3:raise")
    agents = two_nodes(job, "--max-restarts=0", script=script)
    assert [agent.exit_code() for agent in agents] == [1, 1]
    named = [agent.says(r"rank 1 \(.* on node (\w)\) failed first") for agent in agents]
    assert len({found and found[1] for found in named}) == 1, "also the node where nothing failed names it"
    for agent in agents:
        assert agent.says(r"RuntimeError: planned by the test")
        assert agent.says(r"fault\.happen\(\)"), "the traceback's frames"


@pytest.mark.long
def test_an_error_file_written_by_torch_is_what_the_summary_shows(job: Job) -> None:
    report = (
        '{"message": {"message": "ValueError: from the error file", "extraInfo": {"py_callstack": "deep"}}}'
    )
    script = f"import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({report!r}); os._exit(7)"
    own = job.folder / "agent.json"
    surroundings = {"TORCHELASTIC_ERROR_FILE": str(own)}
    agent = job.start(
        "a", "--max-restarts=0", "--no-python", script=("python3", "-c", script), environment=surroundings
    )
    assert agent.exit_code() == 1
    written = json.loads(own.read_text())["message"]
    assert (written["message"], written["errorCode"]) == ("ValueError: from the error file", 7)
    assert agent.says("ValueError: from the error file")
    assert agent.says("exit code 7")


@pytest.mark.long
def test_a_rank_that_ends_early_with_success_waits_for_the_others(job: Job) -> None:
    agents = two_nodes(job, script=(RECORDER, "--fault=*:1:5:0", "--steps=60"))
    assert [agent.exit_code() for agent in agents] == [0, 0]
    assert [generation.number for generation in job.generations()] == [1], "nothing was restarted"
    assert job.history(what="end", rank=0), "the other one came to its own end"


@pytest.mark.long
def test_a_failure_after_another_rank_has_ended_restarts_both(job: Job) -> None:
    script = (RECORDER, "--fault=1:1:3:0", "--fault=1:0:20:1", "--steps=30")
    agent = job.start("a", "--nproc-per-node=2", script=script)
    assert agent.exit_code() == 0
    assert [sorted(generation.starts) for generation in job.generations()] == [[0, 1], [0, 1]]


def test_a_crash_loop_ends_soon_with_its_own_exit_code(job: Job) -> None:
    agent = job.start("a", "--nproc-per-node=2", script=(RECORDER, "--fault=*:0:5:raise"))
    assert agent.exit_code() == 3
    assert not agent.says("failed after it"), "a worker that ended because we asked it to has not failed"
    assert agent.says("crash loop: 4 failures in a row without progress")
    assert [generation.number for generation in job.generations()] == [1, 2, 3, 4]


def test_progress_forgives_failures(job: Job) -> None:
    """Six failures in a row end nothing while each generation comes further than the one before."""
    agent = job.start("a", script=(RECORDER, "--report", "--fault=*:0:3:1"))
    job.wait_for(lambda: len(job.generations()) > 6, "more generations than a crash loop has")
    assert agent.process.poll() is None


@pytest.mark.parametrize(("budget", "runs"), [pytest.param(0, 1, marks=pytest.mark.long), (2, 3)])
def test_max_restarts_counts_the_failures_of_all_nodes_together(job: Job, budget: int, runs: int) -> None:
    """Each time another rank on another node fails, with another code: no loop, just too many failures."""
    script = (RECORDER, "--fault=1:0:3:11", "--fault=2:1:3:22", "--fault=3:0:3:33", "--fault=4:1:3:44")
    agents = two_nodes(job, f"--max-restarts={budget}", script=script)
    assert [agent.exit_code() for agent in agents] == [1, 1]
    assert [generation.number for generation in job.generations()] == list(range(1, runs + 1))
    for agent in agents:
        assert agent.says(f"{runs} failures, --max-restarts allows {budget}")


@pytest.mark.long
def test_a_command_that_does_not_exist_is_named_and_nothing_is_started(job: Job) -> None:
    agent = job.start("a", "--no-python", script=("no-such-program",))
    assert agent.exit_code() == 78
    assert agent.says("--no-python 'no-such-program': expected a program that exists")


def kill_and_measure(job: Job, old: Generation, rank: int, world: int) -> float:
    killed_at = time.monotonic()
    os.kill(old.pid(rank), signal.SIGKILL)
    new = job.wait_for_training(world=world, after=old.number)
    return min(start["at"] for start in new.starts.values()) - killed_at


@pytest.mark.long
def test_many_kills_in_a_row_are_survived_in_order(job: Job) -> None:
    job.start("a", "--nproc-per-node=2", "--max-restarts=1000")
    for kill in range(6):
        old = job.wait_for_training(world=2, after=kill)
        assert old.number == kill + 1, "each kill made exactly one new generation"
        kill_and_measure(job, old, kill % 2, world=2)


@pytest.mark.long
def test_workers_that_cannot_all_be_started_are_ended_and_tried_again(job: Job) -> None:
    few_files = (
        "sh",
        "-c",
        'ulimit -n 172; exec "$@"',
        "sh",
    )  # enough for pages and stacks, of three descriptors each
    agent = job.start("a", "--nproc-per-node=32", "--max-restarts=100", enter=few_files)
    job.wait_for(lambda: agent.says("a worker could not be started.*trying again"), "another try")
    assert agent.exit_code() == 73
    assert agent.says("generation 2.*0 failures so far"), "the lack is no failure of the script"
    assert not agent.says("generation 3")
    assert not job.processes()


@pytest.mark.long
def test_a_rank_that_lives_on_after_the_others_have_ended_is_ended_as_a_hang(job: Job) -> None:
    options = ("--nnodes=2", "--hang-timeout=2s")
    worker = (RECORDER, "--report", "--steps=20", "--fault=1:0:10:hang")
    agents = [job.join(name, *options, script=worker) for name in ("a", "b")]
    assert [agent.exit_code() for agent in agents] == [0, 0]
    assert agents[0].says(r"rank 0.*SIGABRT|Fatal Python error: Aborted"), "it has shown where it stood"
    assert {record["rank"] for record in job.history(what="end", generation=2)} == {0, 1}
    assert agents[1].says(r"generation 2 \(failure\): .*hang: ")


@pytest.mark.long
def test_the_other_nodes_name_the_rank_of_a_failure_that_is_survived(job: Job) -> None:
    worker = (RECORDER, "--steps=40", "--fault=1:0:10:raise")
    agents = {name: job.join(name, "--nnodes=2", script=worker) for name in ("a", "b")}
    assert [agent.exit_code() for agent in agents.values()] == [0, 0]
    failed, other = job.generations()[0].nodes
    expected = rf"Worker failure in generation 1: rank 0 \(local rank 0 on node {failed}\) failed first"
    assert agents[other].says(expected)
    assert agents[other].says("RuntimeError: planned by the test")
