"""Which rank this process has, as its launcher says: an agent or torchrun, Slurm, MPI, Kubeflow, or none.

Pure: the variables come in, and a `Place` or an error that says what to set comes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ClusterEnvironmentError

_MPI = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("an MPI launcher", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a job. `launcher` names what said so."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """0 for a job of one process, which needs no store."""

    def variables(self) -> dict[str, str]:
        """What `torch.distributed` reads with `env://`."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def detect(environ: Mapping[str, str]) -> Place | None:
    """None where the variables of torch are set already, by an agent, torchrun or a person.

    Raises ClusterEnvironmentError where a launcher was found whose variables do not suffice.
    """
    torchs = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if len(torchs) == 2:
        return None
    if torchs:
        missing = "WORLD_SIZE" if torchs == ["RANK"] else "RANK"
        raise ClusterEnvironmentError(f"{torchs[0]} is set, and {missing} is not: set both, or neither")
    # mpirun may have been started in a step of Slurm, whose variables its processes inherit.
    for launcher, rank, size, local_rank in _MPI:
        if rank in environ and size in environ:
            return _of_mpi(launcher, environ, rank, size, local_rank)
    # srun sets both; the shell of a batch job has only the first.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _slurm(environ)
    if "PET_NNODES" in environ and "PET_NODE_RANK" in environ:
        return _kubeflow(environ)
    return Place("one process", 0, 1, 0)


def _slurm(environ: Mapping[str, str]) -> Place:
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR", "")
    try:
        address = address or first_node(nodes)
    except ValueError as error:
        raise ClusterEnvironmentError(f"{error}: set MASTER_ADDR to the host of rank 0") from None
    job = _number(environ, "SLURM_JOB_ID", 0)
    return _place("Slurm", environ, rank, size, _number(environ, "SLURM_LOCALID", 0), address, job)


def _of_mpi(launcher: str, environ: Mapping[str, str], rank: str, size: str, local_rank: str) -> Place:
    world_size = _number(environ, size)
    address = environ.get("MASTER_ADDR", "")
    if not address and world_size > 1:
        raise ClusterEnvironmentError(
            f"{launcher} started {world_size} processes, and says of none of them where it runs: set MASTER_ADDR to "
            "the host of rank 0 (mpirun -x MASTER_ADDR=...)"
        )
    local = _number(environ, local_rank, _number(environ, rank))
    return _place(launcher, environ, _number(environ, rank), world_size, local, address, 0)


def _kubeflow(environ: Mapping[str, str]) -> Place:
    nodes, workers = environ["PET_NNODES"], environ.get("PET_NPROC_PER_NODE", "1")
    if not nodes.isdecimal() or workers not in ("1", "auto"):
        raise ClusterEnvironmentError(
            f"PET_NNODES={nodes} and PET_NPROC_PER_NODE={workers} are for a launcher, and this process was started "
            "without one: start it with elastic-agent or torchrun, which read these variables"
        )
    address = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
    if not address and nodes != "1":
        raise ClusterEnvironmentError(
            f"PET_NNODES is {nodes}: set PET_MASTER_ADDR to the host of node rank 0"
        )
    rank, port = _number(environ, "PET_NODE_RANK"), _number(environ, "PET_MASTER_PORT", 0)
    return _place("Kubeflow", environ, rank, int(nodes), 0, address, 0, port)


def _place(
    launcher: str,
    environ: Mapping[str, str],
    rank: int,
    world_size: int,
    local_rank: int,
    address: str,
    job: int,
    port: int = 0,
) -> Place:
    if not 0 <= rank < world_size:
        raise ClusterEnvironmentError(f"{launcher} says that this is rank {rank} of {world_size} processes")
    if world_size == 1:
        return Place(launcher, 0, 1, local_rank)
    port = _number(environ, "MASTER_PORT", port)
    if not port and not job:
        raise ClusterEnvironmentError(
            f"{launcher} started {world_size} processes, and names no port: set MASTER_PORT to one that is free where "
            "rank 0 runs, the same for all"
        )
    return Place(launcher, rank, world_size, local_rank, address, port or port_of(job))


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ClusterEnvironmentError(f"{name} is {text!r}, expected a whole number")
    return int(text)


# ---------------------------------------------------------------- Slurm
#
# What Slurm's environment says of a job step: for workers that srun has started itself, and for agents.
#
# Pure. What an error means for a person depends on the option that would replace the value, so callers say that.


FIRST_PORT, PORTS = 20000, 10000
"""Below the ports that Linux gives to outgoing connections."""

PORTS_BETWEEN_STEPS = 997
"""Steps keep away from jobs with the next numbers, which may share a node."""


def port_of(job: int, step: int = 0, restarts: int = 0) -> int:
    """The same on all nodes, where none is given: two steps of one job, and two jobs, rarely have the same.

    A job that was requeued has another one, for what had the last one may have it still.

    >>> port_of(1234567), port_of(1234567, step=1), port_of(1234567, step=1, restarts=1)
    (24567, 25564, 26561)
    """
    return FIRST_PORT + (job + PORTS_BETWEEN_STEPS * (step + restarts)) % PORTS


def first_node(node_list: str) -> str:
    """The first host in Slurm's short form. Raises ValueError.

    >>> first_node("gpu[07-09,12],cpu3")
    'gpu07'
    """
    host, rest = "", node_list
    while found := re.match(
        r"([^\[\],]+)|\[(\w+)[-,\w]*\]", rest
    ):  # each bracket begins with its first host's number
        host += found[1] or found[2]
        rest = rest[found.end() :]
    if not host or (rest and not rest.startswith(",")):
        raise ValueError(f"Slurm's list of nodes is {node_list!r}")
    return host
