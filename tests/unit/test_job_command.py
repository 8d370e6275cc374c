"""What a node runs for its part of a job, and what the end of that means for the job."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import Config
from elastic_agent.agent.configuration.derive import resolve, resolve_daemon
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.pool.job_agent import agent_words, allocation_end, own_words
from elastic_agent.pool.member import Assignment
from elastic_agent.pool.records import Allocation, AllocationOutcome, Attempt, Job, PoolNode

JOB = Job("ab12", "train", ("--max-restarts=5",), ("-m", "train", "--lr", "0.1"), {}, "/", 2, 4, 0.0, "me")
ALLOCATION = Allocation("a", "a-1", 7)
DUE = Assignment(JOB, Attempt("ab12", 1, 0.0, (ALLOCATION,)), ALLOCATION)
STORE = {"rdzv-endpoint": "local:///x", "rdzv-id": "pool"}


def words(due: Assignment = DUE, own: tuple[str, ...] = ()) -> list[str]:
    return agent_words(due, "a", STORE, own, "/logs/ab12")


def config_of(said: list[str]) -> Config:
    return resolve(read_argv(said), {}, lambda: "").config


def test_the_agent_of_a_job_meets_under_the_jobs_id_below_the_pool() -> None:
    config = config_of(words())
    assert (config.rendezvous.job_id, config.node_id) == ("ab12", "a")
    assert (config.nodes.min, config.nodes.max) == (2, 4)
    assert "--pool=pool" in words()
    assert words()[-4:] == ["-m", "train", "--lr", "0.1"]


def test_what_the_job_says_is_stronger_than_what_the_nodes_operator_says() -> None:
    config = config_of(words(own=("--max-restarts=1", "--lease-ttl=9")))
    assert config.max_restarts == 5
    assert config.rendezvous.lease_ttl_s == 9.0


def test_what_the_pool_decides_is_stronger_than_what_the_job_says() -> None:
    odd = replace(JOB, options=("--min-nodes=1", "--rdzv-id=other", "--node-id=b"))
    config = config_of(words(replace(DUE, job=odd)))
    assert (config.nodes.min, config.rendezvous.job_id, config.node_id) == (2, "ab12", "a")


@pytest.mark.parametrize(
    ("allocations", "options", "last_call_s"),
    [
        (1, (), 0.0),
        (2, (), 0.0),
        (3, (), 1.0),
        (2, ("--last-call=5s",), 5.0),
        (2, ("--last-call", "5s"), 5.0),
    ],
)
def test_a_start_with_no_more_nodes_than_a_world_needs_waits_for_no_others(
    allocations: int, options: tuple[str, ...], last_call_s: float
) -> None:
    run = Attempt("ab12", 1, 0.0, tuple(Allocation(node, f"{node}-1", 7) for node in "abc"[:allocations]))
    due = replace(DUE, run=run, job=replace(JOB, options=options))
    assert config_of(words(due)).rendezvous.last_call_s == last_call_s


MEANINGS = {
    AllocationOutcome.SUCCEEDED: {ExitCode.SUCCESS},
    AllocationOutcome.FAILED: {ExitCode.FAILED, ExitCode.CRASH_LOOP, ExitCode.NOT_ON_DISK},
    AllocationOutcome.REFUSED: {ExitCode.UNLIKE_THE_JOB, ExitCode.MISMATCH, ExitCode.BAD_CONFIG},
    AllocationOutcome.LEFT: {ExitCode.STOPPED_BY_SIGTERM, ExitCode.STOPPED_BY_SIGINT, ExitCode.LEFT_IN_TIME},
}


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_of_an_agent_means_something_for_its_job(code: ExitCode) -> None:
    end = allocation_end(DUE, code)
    expected = (outcome for outcome, codes in MEANINGS.items() if code in codes)
    assert end.outcome is next(expected, AllocationOutcome.NOT_HERE)
    assert (end.job, end.allocation_id, end.code) == ("ab12", 7, code)
    assert code.meaning in end.reason
    said = allocation_end(DUE, code, "ValueError: boom (rank 0)")
    assert (said.outcome, said.reason) == (end.outcome, f"ValueError: boom (rank 0); exit code {code}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGRTMIN + 1])
def test_an_agent_that_a_signal_ends_may_do_better_on_another_node(number: int) -> None:
    end = allocation_end(DUE, -number)
    assert (end.outcome, end.code) == (AllocationOutcome.NOT_HERE, -number)
    assert "killed by" in end.reason
    PoolNode("a", "a-1", ended=end).to_json()


@pytest.mark.parametrize("code", [42, 127, 255])
def test_an_exit_code_that_no_agent_has_is_not_the_jobs_end(code: int) -> None:
    end = allocation_end(DUE, code)
    assert (end.outcome, end.reason) == (
        AllocationOutcome.NOT_HERE,
        f"the job's agent ended with exit code {code}",
    )


def test_a_job_has_its_daemons_file_wherever_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool.toml").write_text('hang-timeout = "60s"\n')
    monkeypatch.chdir(tmp_path)
    given = (
        (["--config=pool.toml", "--preload=none", "--node-id=a"], {}),
        ([], {"ELASTIC_AGENT_CONFIG": "pool.toml"}),
    )
    found = [
        own_words(resolve_daemon(read_argv(words), environ).settings, str(tmp_path))
        for words, environ in given
    ]
    file = f"--config={tmp_path}/pool.toml"
    assert found == [(file, "--preload=none"), (file,)]
    assert own_words(resolve_daemon(read_argv([]), {}).settings, "/x") == ()
