"""`--slurm`: what follows from the environment of a job step, what is refused, and that a person's own words win."""

from __future__ import annotations

import pytest

from elastic_agent.agent.configuration.config import Config, ConfigError
from elastic_agent.agent.configuration.derive import Resolved
from elastic_agent.agent.configuration.parse import NodeCounts
from elastic_agent.agent.configuration.stopping import leaves_in_s, longest_grace_s, whole_stop_s
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.worker.ranks.cluster_environment import port_of
from tests.unit.settings import run_resolve

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[01-09]",
    "SLURM_NNODES": "9",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
"""Of the second of three nodes on which srun has started one task each."""

BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu07",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS_PER_NODE": "4",
}
"""Of a batch script on its only node."""

GPUS = {"SLURM_GPUS_ON_NODE": "8"}
PORT = 20000 + 4711 + 2 * 997


def resolved(words: str, environ: dict[str, str], script: str) -> Resolved:
    return run_resolve([*words.split(), script], environ)


def config_of(words: str, environ: dict[str, str], script: str) -> Config:
    return resolved(words, environ, script).config


def test_a_step_is_one_job(script: str) -> None:
    config = config_of("--slurm", TASK | GPUS | {"SLURM_JOB_END_TIME": "1900000000"}, script)
    rendezvous = config.rendezvous
    assert config.nodes == NodeCounts(3, 3)
    assert (rendezvous.backend, rendezvous.endpoints) == ("c10d", (Endpoint("gpu07", PORT),))
    assert (rendezvous.job_id, rendezvous.node_rank) == ("slurm-4711.2", 1)
    assert config.nproc_per_node == 8
    assert config.stop.requeues
    assert config.stop.job_ends_at == 1900000000
    assert whole_stop_s(config.stop.grace_s) == 30.0, "Slurm's default KillWait"


@pytest.mark.parametrize(
    ("words", "environ", "job_id"),
    [
        ("", TASK, "slurm-4711.2"),
        ("", TASK | {"SLURM_RESTART_COUNT": "0"}, "slurm-4711.2"),
        ("", TASK | {"SLURM_RESTART_COUNT": "3"}, "slurm-4711.2-r3"),
        ("", BATCH, "slurm-4711.0"),
        # etcd outlives the run: its fence is also between this run and the one before.
        ("--rdzv-endpoint etcd://127.0.0.1", TASK | {"SLURM_RESTART_COUNT": "3"}, "slurm-4711"),
        ("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1", TASK, "slurm-4711"),
        ("--rdzv-id mine", TASK, "mine"),
    ],
)
def test_the_name_of_the_run(words: str, environ: dict[str, str], job_id: str, script: str) -> None:
    assert config_of(f"--slurm {words}", environ, script).rendezvous.job_id == job_id


@pytest.mark.parametrize(
    ("words", "nodes", "last_call_s"),
    [
        ("", NodeCounts(3, 3), 1.0),
        ("--min-nodes 1", NodeCounts(1, 3), 30.0),
        ("--min-nodes 1 --last-call 5s", NodeCounts(1, 3), 5.0),
        ("--max-nodes 2", NodeCounts(2, 2), 1.0),
        ("--min-nodes 5", NodeCounts(5, 5), 1.0),
        ("--nnodes 2:8", NodeCounts(2, 8), 30.0),
    ],
)
def test_how_many_nodes(words: str, nodes: NodeCounts, last_call_s: float, script: str) -> None:
    config = config_of(f"--slurm {words}", TASK, script)
    assert (config.nodes, config.rendezvous.last_call_s) == (nodes, last_call_s)


@pytest.mark.parametrize(
    ("words", "environ", "workers"),
    [
        ("", TASK, 1),
        ("", TASK | GPUS, 8),
        ("", BATCH, 4),
        ("", BATCH | GPUS, 8),
        ("", BATCH | {"SLURM_GPUS_ON_NODE": "0"}, 4),
        ("--nproc-per-node 2", TASK | GPUS, 2),
        ("--devices-per-worker 2", TASK | GPUS, 4),
        ("--devices-per-worker 2", BATCH, 4),
        ("--devices-per-worker 3 --nproc-per-node 2", TASK | GPUS, 2),
    ],
)
def test_workers_follow_from_gpus_else_tasks(
    words: str, environ: dict[str, str], workers: int, script: str
) -> None:
    assert config_of(f"--slurm {words}", environ, script).nproc_per_node == workers


def test_gpus_that_would_be_left_over_are_a_problem(script: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("--slurm --devices-per-worker 3", TASK | GPUS, script)
    (problem,) = caught.value.problems
    assert str(problem) == (
        "SLURM_GPUS_ON_NODE '8': expected a multiple of 3, which is --devices-per-worker; ask Slurm for such a number "
        "of GPUs, or write --nproc-per-node 2"
    )


@pytest.mark.parametrize(
    ("words", "endpoints"),
    [
        ("--rdzv-endpoint other:1234", (Endpoint("other", 1234),)),
        ("--master-addr other --master-port 1234", (Endpoint("other", 1234),)),
        ("--rdzv-backend static", (Endpoint("gpu07", PORT),)),
        ("--standalone", ()),
    ],
)
def test_a_persons_own_meeting_place_wins(words: str, endpoints: tuple[Endpoint, ...], script: str) -> None:
    assert config_of(f"--slurm {words}", TASK, script).rendezvous.endpoints == endpoints


def test_one_node_meets_no_other(script: str) -> None:
    config = config_of("--slurm", BATCH, script)
    assert (config.rendezvous.backend, config.nodes) == ("memory", NodeCounts(1, 1))


@pytest.mark.parametrize(("words", "grace_s"), [("", 12.5), ("--stop-grace 3s", 3.0)])
def test_a_whole_stop_fits_into_the_time_before_sigkill(words: str, grace_s: float, script: str) -> None:
    assert config_of(f"--slurm {words}", TASK, script).stop.grace_s == grace_s


@pytest.mark.parametrize("limit_s", [16.0, 20.0, 30.0, 120.0, 3600.0])
def test_the_longest_grace_fills_its_limit(limit_s: float) -> None:
    assert whole_stop_s(longest_grace_s(limit_s)) == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("left_s", "grace_s", "in_s"),
    [(3600.0, 12.5, 3570.0), (40.0, 12.5, 20.0), (0.0, 12.5, 0.0), (-5.0, 12.5, 0.0)],
)
def test_a_job_leaves_before_its_end(left_s: float, grace_s: float, in_s: float) -> None:
    assert leaves_in_s(left_s, grace_s) == in_s


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ["SLURM_JOB_ID: expected a job of Slurm"]),
        (TASK | {"SLURM_JOB_ID": ""}, ["SLURM_JOB_ID '': expected a job of Slurm"]),
        (
            TASK | {"SLURM_STEP_NUM_TASKS": "24"},
            ["SLURM_STEP_NUM_TASKS '24': expected one task on each of the step's 3 nodes"],
        ),
        (BATCH | {"SLURM_NNODES": "3"}, ["SLURM_NNODES '3': expected an agent on each of these nodes"]),
        (
            TASK | {"SLURM_NODEID": "x", "SLURM_STEP_NODELIST": "[", "SLURM_RESTART_COUNT": "-1"},
            ["SLURM_STEP_NODELIST '[': expected Slurm's list of nodes; name the store yourself"],
        ),
    ],
)
def test_all_problems_in_one_list(environ: dict[str, str], found: list[str], script: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("--slurm --min-nodes x", environ, script)
    others = [str(problem) for problem in caught.value.problems if "min-nodes" not in problem.origin]
    assert len(others) == len(found) == len(caught.value.problems) - 1
    for problem, beginning in zip(others, found, strict=True):
        assert problem.startswith(beginning)


def test_an_agent_alone_on_each_of_several_nodes_is_warned(script: str) -> None:
    """Nothing is taken from Slurm unasked: a step of many trainings is right, too."""
    (warning,) = resolved("", TASK, script).warnings
    assert "srun has started this on 3 nodes, and each of them trains alone: --slurm" in warning
    for words in ("--standalone", "--nnodes 3 --rdzv-endpoint gpu07:1234", "--slurm"):
        assert not resolved(words, TASK, script).warnings
    assert not resolved("", BATCH, script).warnings


def test_steps_of_one_job_and_jobs_with_the_next_numbers_have_ports_of_their_own() -> None:
    assert len({port_of(job, step) for job in range(100, 200) for step in range(5)}) == 500
    assert all(20000 <= port_of(job, step) < 30000 for job in (1, 9999, 10**9) for step in (0, 7))
