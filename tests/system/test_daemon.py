"""Daemons of a pool on this machine, with their jobs: what they share, what they outlive, and what they say."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.pool.records import Outcome
from tests.etcd_servers import etcd_cluster

from .harness import HELD_STORES, TORCH_PRELOADED, planted
from .lockstep_job import LockstepJob
from .networks import Network, network
from .pools import SHORT_LEASE, Pool

COUNTED = Path(__file__).parents[2] / "examples" / "counted.py"


def test_two_jobs_that_need_both_nodes_run_one_after_the_other(pool: Pool) -> None:
    pool.daemons("a", "b")
    first = pool.submit("--min-nodes=2", "--env=MARK=first")
    second = pool.submit("--min-nodes=2", "--name=later")
    starts = pool.starts(first, 2)
    assert {(start["node"], start["world"]) for start in starts} == {("a", 2), ("b", 2)}
    assert {start["cwd"] for start in starts} == {os.path.realpath(pool.folder)}
    assert {start["env"]["MARK"] for start in starts} == {"first"}
    assert not pool.starts_of(second)
    pool.end_job(first)
    assert len(pool.starts(second, 2)) == 2
    assert pool.wait(first) == ExitCode.SUCCESS
    pool.end_job(second, 5)
    assert pool.wait(second) == ExitCode.FAILED
    listed = json.loads(pool.command("jobs", "--json").stdout)["jobs"]
    assert [(one["job"], one["state"]) for one in listed] == [(first, "succeeded"), (second, "failed")]
    assert listed[1]["name"] == "later"
    ended = [event["at"] for event in pool.events(what="end", job=first)]
    assert max(ended) < min(start["at"] for start in pool.starts_of(second))


def test_a_job_gives_a_node_back_and_takes_it_again_without_losing_a_step(pool: Pool) -> None:
    pool.daemons("a", "b")
    lockstep = LockstepJob(pool.job)
    trains = pool.submit("--max-nodes=2", script=lockstep.script)
    two = pool.job.wait_for_training(world=2)
    between = pool.submit()
    pool.starts(between, 1)
    one = pool.job.wait_for_training(world=1, after=two.number)
    lockstep.check_nothing_lost(two, one)
    pool.end_job(between)
    assert pool.wait(between) == ExitCode.SUCCESS
    again = pool.job.wait_for_training(world=2, after=one.number)
    lockstep.check_nothing_lost(one, again)
    assert pool.command("cancel", trains).returncode == ExitCode.SUCCESS
    assert pool.wait(trains) == ExitCode.STOPPED_BY_SIGTERM


@pytest.mark.long
def test_a_job_of_torch_does_each_step_once_while_its_nodes_come_and_go(pool: Pool) -> None:
    for name in HELD_STORES:
        del pool.environment[name]
    pool.daemons("a", "b")
    folder = pool.folder / "counted"
    folder.mkdir()

    def steps() -> list[tuple[int, int]]:
        """With the size of the world that has done each."""
        file = folder / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(number), int(world)) for number, world in map(str.split, lines)]

    counted = pool.submit("--max-nodes=2", TORCH_PRELOADED, script=(COUNTED, folder, "100000"))
    pool.job.wait_for(lambda: any(world == 2 for _, world in steps()), "both nodes to train")
    between = pool.submit()
    pool.starts(between, 1)
    pool.end_job(between)
    assert pool.wait(between) == ExitCode.SUCCESS
    alone = len(steps())
    pool.job.wait_for(lambda: any(world == 2 for _, world in steps()[alone:]), "both nodes to train again")
    (folder / "enough").touch()
    assert pool.wait(counted) == ExitCode.SUCCESS
    done = [number for number, _ in steps()]
    assert done == list(range(1, len(done) + 1))


def test_a_job_goes_on_elsewhere_when_its_daemon_is_killed_which_then_comes_back(pool: Pool) -> None:
    daemons = {daemon.name: daemon for daemon in pool.daemons("a", "b", options=(SHORT_LEASE,))}
    first = pool.submit()
    here = pool.starts(first, 1)[0]["node"]
    waiting = pool.submit("--min-nodes=2")
    daemons.pop(here).kill()
    (other,) = daemons
    assert pool.starts(first, 2)[1]["node"] == other
    assert pool.view().plan.run_of(first).attempt == 2  # type: ignore[union-attr]
    assert {worker.node for worker in pool.workers()} == {other}
    again = pool.daemon(here, SHORT_LEASE)
    pool.offered(again)
    pool.end_job(first)
    assert pool.wait(first) == ExitCode.SUCCESS
    pool.starts(waiting, 2)
    pool.end_job(waiting)
    assert pool.wait(waiting) == ExitCode.SUCCESS


@pytest.mark.long
def test_a_queue_outlives_all_daemons_and_the_last_job_is_reported_truthfully(pool: Pool) -> None:
    (only,) = pool.daemons("a", options=(SHORT_LEASE,))
    done, running, waiting = pool.submit(), pool.submit(), pool.submit()
    pool.end_job(done, 3)
    pool.starts(running, 1)
    only.kill()
    asked = pool.command("jobs", "--json")
    assert [one["job"] for one in json.loads(asked.stdout)["jobs"]] == [done, running, waiting]
    pool.daemon("a", SHORT_LEASE)
    assert pool.starts(running, 2)[1]["node"] == "a"
    states = {one["job"]: one for one in json.loads(pool.command("jobs", "--json").stdout)["jobs"]}
    assert list(states) == [done, running, waiting]
    assert [states[job]["state"] for job in states] == ["failed", "running", "waiting"]
    pool.end_job(running)
    pool.end_job(waiting)
    assert pool.wait(waiting) == ExitCode.SUCCESS
    results = {result.job: result for result in pool.view().results}
    assert [(results[job].outcome, results[job].attempts) for job in (done, running, waiting)] == [
        (Outcome.FAILED, 1),
        (Outcome.SUCCEEDED, 2),
        (Outcome.SUCCEEDED, 1),
    ]


def test_jobs_are_cancelled_where_they_are(pool: Pool) -> None:
    pool.daemons("a")
    running, waiting = pool.submit(), pool.submit()
    pool.starts(running, 1)
    assert pool.command("cancel", waiting).returncode == ExitCode.SUCCESS
    assert pool.wait(waiting) == ExitCode.STOPPED_BY_SIGTERM
    assert pool.command("cancel", running).returncode == ExitCode.SUCCESS
    assert pool.wait(running) == ExitCode.STOPPED_BY_SIGTERM
    assert pool.command("cancel", running).returncode == ExitCode.NO_JOB
    assert not pool.workers()
    assert not pool.starts_of(waiting)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount of one process")
def test_a_job_runs_where_its_directory_is(pool: Pool) -> None:
    place = pool.folder / "data"
    (place / "runs").mkdir(parents=True)
    hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {place} && exec "$@"', "sh")
    lacks = pool.daemon("a", enter=hidden)
    pool.offered(lacks)
    missing = pool.submit(f"--directory={place / 'runs'}")
    pool.job.wait_for_text(lacks, f"the job's directory {place / 'runs'} is not there on this node")

    def listed() -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(pool.command("jobs", "--json").stdout)["jobs"][0])

    pool.job.wait_for(lambda: listed()["state"] == "waiting", "the node's refusal in the pool's plan")
    said = listed()
    assert f"a: the job's directory {place / 'runs'} is not there on this node" in said["detail"]
    pool.daemon("b")
    (start,) = pool.starts(missing, 1)
    assert start["node"] == "b"
    assert start["cwd"] == os.path.realpath(place / "runs")
    pool.end_job(missing)
    assert pool.wait(missing) == ExitCode.SUCCESS


@pytest.mark.long
def test_a_job_whose_agent_is_killed_goes_on_elsewhere(pool: Pool) -> None:
    pool.daemons("a", "b")
    one = pool.submit()
    (first,) = pool.starts(one, 1)
    os.kill(pool.job_agent(one), signal.SIGKILL)
    second = pool.starts(one, 2)[1]
    assert second["node"] != first["node"]
    refusal = pool.view().plan.refusals_of(one)[first["node"]]
    assert refusal.reason == "the job's agent was killed by SIGKILL"
    pool.end_job(one)
    assert pool.wait(one) == ExitCode.SUCCESS


def test_a_daemon_that_is_stopped_leaves_by_plan_and_its_job_waits(pool: Pool) -> None:
    (only,) = pool.daemons("a")
    one = pool.submit()
    pool.starts(one, 1)
    only.signal(signal.SIGTERM)
    assert only.exit_code(within_s=20) == ExitCode.STOPPED_BY_SIGTERM
    assert not pool.workers()
    assert not only.says("left without")
    pool.daemon("a")
    pool.starts(one, 2)
    run = pool.view().plan.run_of(one)
    assert run is not None
    assert (run.attempt, run.in_vain) == (2, 0), "it has left as it was asked to"
    pool.end_job(one)
    assert pool.wait(one) == ExitCode.SUCCESS


@pytest.mark.long
@pytest.mark.parametrize("thread", ["job-agent", "store-requests"])
def test_a_daemon_without_one_of_its_threads_ends_with_its_own_code(pool: Pool, thread: str) -> None:
    broken = pool.daemon("a", environment={**planted(f"dies {thread}")})
    if thread == "job-agent":
        pool.offered(broken)
        pool.command("submit", *pool.place, "--", str(pool.script), str(pool.folder))
    assert broken.exit_code(within_s=30) == ExitCode.AGENT_FAILED
    assert broken.says(f"the thread {thread} has failed")
    assert not pool.workers()


@pytest.fixture
def net() -> Iterator[Network]:
    with network("store", "a", "b", "c", "d") as net:
        yield net


def test_three_machines_share_jobs_that_a_fourth_submits_and_go_on_without_a_lost_one(
    pool: Pool, net: Network
) -> None:
    with etcd_cluster(places=[net["store"].place]) as etcd:
        ((host, port),) = etcd.endpoints
        refused = pool.command("submit", f"--rdzv-endpoint=etcd://{host}:{port}", "--", "train.py")
        assert refused.returncode == ExitCode.BAD_CONFIG
        assert "--etcd-insecure" in refused.stderr
        pool.place = (f"--rdzv-endpoint=etcd://{host}:{port}", "--etcd-insecure")
        refused = pool.command("submit", *pool.place, "--", "train.py", enter=net["d"].enter)
        assert refused.returncode == ExitCode.NOT_FOUND
        daemons = {name: pool.daemon(name, SHORT_LEASE, enter=net[name].enter) for name in "abc"}
        for agent in daemons.values():
            pool.offered(agent)
        one = pool.submit("--min-nodes=2", "--max-nodes=3", enter=net["d"].enter)
        pool.job.wait_for(lambda: {"a", "b", "c"} in worlds(pool, one), "all three to run it")
        addresses = {start["env"]["MASTER_ADDR"] for start in pool.starts_of(one)}
        assert addresses <= {net[name].address for name in "abc"}
        daemons["b"].kill()
        pool.job.wait_for(lambda: {"a", "c"} == worlds(pool, one)[-1], "the others to go on")
        net["c"].unplug()
        pool.job.wait_for_text(daemons["c"], f"running job {one}(.|\n)*waiting for the pool's store, which")
        net["c"].heal()
        pool.job.wait_for_text(daemons["c"], f"running job {one}(.|\n)*waiting for (.|\n)*running job {one}")
        pool.end_job(one)
        assert pool.wait(one) == ExitCode.SUCCESS
        assert not pool.workers()


def worlds(pool: Pool, job: str) -> list[set[str]]:
    """The nodes of each world that was whole, oldest first."""
    found: dict[tuple[int, str], set[str]] = {}
    for start in pool.starts_of(job):
        key = start["world"], start["env"]["ELASTIC_AGENT_GENERATION"]
        found.setdefault(key, set()).add(start["node"])
    return [nodes for (world, _), nodes in found.items() if len(nodes) == world]


@pytest.mark.long
def test_daemons_that_are_stopped_together_leave_without_a_word_of_trouble(pool: Pool) -> None:
    daemons = pool.daemons("a", "b", "c")
    one = pool.submit("--min-nodes=3")
    pool.starts(one, 3)
    for daemon in daemons:
        daemon.signal(signal.SIGTERM)
    assert {daemon.exit_code(within_s=20) for daemon in daemons} == {ExitCode.STOPPED_BY_SIGTERM}
    assert not pool.workers()
    others = pool.daemons("d", "e", "f")
    pool.starts(one, 6)
    for daemon in others:
        daemon.signal(signal.SIGTERM)
    assert {daemon.exit_code(within_s=20) for daemon in others} == {ExitCode.STOPPED_BY_SIGTERM}
    said = "".join([daemon.text for daemon in daemons + others] + [log.read_text() for log in pool.logs()])
    assert "could not sign off" not in said
