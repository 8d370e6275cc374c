"""Which rank a process has, by what its launcher has set."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from elastic_agent.worker import ClusterEnvironmentError, init_process_group
from elastic_agent.worker.ranks.cluster_environment import Place, detect, first_node

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"} | SLURM, None),
        ({}, Place("one process", 0, 1, 0)),
        (SLURM, Place("Slurm", 3, 4, 1, "gpu07", 20000 + 4567)),
        (
            SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            Place("Slurm", 3, 4, 1, "10.0.0.1", 29500),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            Place("one process", 0, 1, 0),
        ),  # the shell of a batch job
        (OPEN_MPI | {"MASTER_ADDR": "h1", "MASTER_PORT": "7"}, Place("Open MPI", 1, 2, 1, "h1", 7)),
        # mpirun in a shell that srun started
        (SLURM | OPEN_MPI | {"MASTER_ADDR": "h1", "MASTER_PORT": "7"}, Place("Open MPI", 1, 2, 1, "h1", 7)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Place("an MPI launcher", 0, 1, 0)),
        (KUBEFLOW, Place("Kubeflow", 1, 2, 0, "job-master-0", 23456)),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, Place("Kubeflow", 0, 1, 0)),
    ],
)
def test_the_launcher_says_which_rank_this_is(environ: dict[str, str], place: Place | None) -> None:
    assert detect(environ) == place


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"} | SLURM, "RANK is not"),
        (OPEN_MPI, "set MASTER_ADDR"),
        (OPEN_MPI | {"MASTER_ADDR": "h1"}, "set MASTER_PORT"),
        (SLURM | {"SLURM_PROCID": "4"}, "rank 4 of 4"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        (SLURM | {"SLURM_STEP_NODELIST": "[", "SLURM_JOB_NODELIST": "["}, "set MASTER_ADDR"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "8"}, "start it with elastic-agent"),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, "start it with elastic-agent"),
        (KUBEFLOW | {"PET_MASTER_ADDR": ""}, "set PET_MASTER_ADDR"),
    ],
)
def test_what_does_not_suffice_is_refused_with_what_to_set(environ: dict[str, str], advice: str) -> None:
    with pytest.raises(ClusterEnvironmentError, match=advice.replace("[", r"\[")):
        detect(environ)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-4]", "n1"),
        ("n[007,9]-ib", "n007-ib"),
        ("n[1-2],m3", "n1"),
        ("a-b.c,d", "a-b.c"),
    ],
)
def test_the_first_of_slurms_nodes(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


@pytest.mark.usefixtures("only_worker")
@pytest.mark.parametrize("arguments", [("gloo",), ("gloo", "env://")])
def test_a_script_that_no_launcher_started_is_a_group_of_one(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", *SLURM, *OPEN_MPI, *KUBEFLOW):
        monkeypatch.delenv(name, raising=False)
    init_process_group(*arguments)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()
