"""`--slurm`: the settings that follow from the environment of a job step.

What any source has given stays as it is. A *step* is what one `srun` started; `SLURM_STEP_*` are of the step, which may
have fewer nodes than the job. A batch script has no step, and runs on the first node alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...worker.ranks.launchers.slurm import first_node, port_of
from .config import DEVICES_PER_WORKER, MAX_NODES, MIN_NODES, NPROC_PER_NODE, Problem
from .parse import StoreAddress
from .rendezvous import (
    BACKEND,
    ENDPOINT,
    JOB_ID,
    LAST_CALL,
    MASTER_ADDR,
    MASTER_PORT,
    NODE_RANK,
    SLURM,
    STANDALONE,
)
from .settings import Settings
from .stopping import STOP_GRACE, longest_grace_s
from .values import DEFAULT, STORES

KILL_WAIT_S = 30.0
"""Slurm's default KillWait: from the SIGTERM of scancel, preemption or the time limit to SIGKILL."""

START_S = 30.0
"""How long a job of fewer nodes than the step has waits for the others, which srun starts at the same time."""

HOW = "write: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 --cpu-bind=none elastic-agent --slurm SCRIPT"
"""Without --ntasks srun takes the number of the job, and overlooks --ntasks-per-node."""

_NUMBERS = {
    "job": "SLURM_JOB_ID",
    "restarts": "SLURM_RESTART_COUNT",
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_STEP_NUM_NODES",
    "nodes of job": "SLURM_NNODES",
    "tasks": "SLURM_STEP_NUM_TASKS",
    "rank": "SLURM_NODEID",
    "gpus": "SLURM_GPUS_ON_NODE",
    "tasks of node": "SLURM_NTASKS_PER_NODE",
    "ends at": "SLURM_JOB_END_TIME",
}


def started_apart(environ: Mapping[str, str]) -> int:
    """The number of nodes on each of which srun has started one task; 0 for anything else, and for one node."""
    nodes, tasks = environ.get("SLURM_STEP_NUM_NODES", ""), environ.get("SLURM_STEP_NUM_TASKS")
    return int(nodes) if re.fullmatch("[0-9]{1,9}", nodes) and tasks == nodes and int(nodes) > 1 else 0


def derive_slurm(settings: Settings, environ: Mapping[str, str]) -> None:
    """Fill in what Slurm says, where no source has given it; what is wrong with it joins the other problems."""
    if not settings[SLURM].value:
        return
    problems: list[Problem] = []

    def refuse(name: str, expected: str, advice: str) -> None:
        problems.append(Problem(name, environ.get(name), expected, advice))

    number: dict[str, int] = {}
    for what, name in _NUMBERS.items():
        text = environ.get(name, "")
        if re.fullmatch("[0-9]{1,11}", text):
            number[what] = int(text)
        elif text:
            refuse(name, "a whole number", "Slurm sets it: leave it as it was")
    nodes = number.get("nodes") or number.get("nodes of job") or 1
    list_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    host = ""
    if not environ.get("SLURM_JOB_ID"):
        refuse("SLURM_JOB_ID", "a job of Slurm", f"{HOW}; or leave out --slurm")
    elif "step" not in number and nodes > 1:
        refuse("SLURM_NNODES", "an agent on each of these nodes; the batch script runs on one", HOW)
    elif "step" in number and number.get("tasks", 1) != nodes:
        expected = f"one task on each of the step's {nodes} nodes, whose agent starts the workers there"
        refuse("SLURM_STEP_NUM_TASKS", expected, HOW)
    else:
        try:
            host = first_node(environ.get(list_name, ""))
        except ValueError:
            refuse(list_name, "Slurm's list of nodes", "name the store yourself: --rdzv-endpoint HOST:PORT")
    settings.problems += problems
    if problems:
        return
    if not settings[STANDALONE].value:
        _derive_nodes(settings, nodes, number.get("rank", 0))
        _derive_meeting(settings, number, host)
    if NPROC_PER_NODE not in settings:
        _derive_workers(settings, number)
    if STOP_GRACE not in settings:
        origin = "Slurm's KillWait, 30 s by default: a whole stop fits in"
        settings.derive(STOP_GRACE, longest_grace_s(KILL_WAIT_S), origin)
    settings.job_ends_at = number.get("ends at")


def _derive_workers(settings: Settings, number: Mapping[str, int]) -> None:
    """One for each of this node's GPUs, or so many GPUs; without any as many as tasks."""
    per_worker, gpus = settings[DEVICES_PER_WORKER].value or 1, number.get("gpus", 0)
    if gpus % per_worker:
        expected = f"a multiple of {per_worker}, which is --devices-per-worker"
        advice = f"ask Slurm for such a number of GPUs, or write --nproc-per-node {gpus // per_worker or 1}"
        settings.problems.append(Problem("SLURM_GPUS_ON_NODE", str(gpus), expected, advice))
    elif gpus:
        settings.derive(NPROC_PER_NODE, gpus // per_worker, "SLURM_GPUS_ON_NODE")
    elif number.get("tasks of node"):
        settings.derive(NPROC_PER_NODE, number["tasks of node"], "SLURM_NTASKS_PER_NODE")


def _derive_nodes(settings: Settings, nodes: int, rank: int) -> None:
    origin = "SLURM_STEP_NUM_NODES"
    least, most = settings[MIN_NODES].value, settings[MAX_NODES].value
    if MAX_NODES not in settings:
        settings.derive(MAX_NODES, max(nodes, least if MIN_NODES in settings else 1), origin)
    if MIN_NODES not in settings:
        settings.derive(MIN_NODES, nodes if most is None else min(nodes, most), origin)
    elif LAST_CALL not in settings and least < nodes:
        settings.derive(LAST_CALL, START_S, "--slurm: srun starts all nodes at once")
    if NODE_RANK not in settings:
        settings.derive(NODE_RANK, rank, "SLURM_NODEID")


def _derive_meeting(settings: Settings, number: Mapping[str, int], host: str) -> None:
    """A store that ends with the job's agents has one name per run, so that a node which Slurm has lost does not meet
    the next run. One that outlives them knows the job, and refuses what its former run would commit."""
    job, step, restarts = number["job"], number.get("step", 0), number.get("restarts", 0)
    address, backend = settings[ENDPOINT].value, settings[BACKEND].value
    kind = STORES.get(
        backend or (address and address.backend) or DEFAULT.name, DEFAULT
    )  # "static" is torchrun's
    if JOB_ID not in settings:
        run = f"slurm-{job}.{step}{f'-r{restarts}' if restarts else ''}"
        settings.derive(JOB_ID, f"slurm-{job}" if kind.outlives_job else run, "SLURM_JOB_ID")
    static = any(option in settings for option in (MASTER_ADDR, MASTER_PORT))
    several = (settings[MAX_NODES].value or 1) > 1
    if address is None and kind is DEFAULT and several and not static:
        place = (host, port_of(job, step, restarts))
        settings.derive(ENDPOINT, StoreAddress((place,)), "SLURM_STEP_NODELIST, SLURM_JOB_ID")
