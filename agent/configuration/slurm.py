"""`--slurm`: the settings that follow from the environment of a job step.

Pure: the variables come in, and what they say, with all that is wrong with them, comes out. What any source has given
stays as it is. A *step* is what one `srun` started; `SLURM_STEP_*` are of the step, which may have fewer nodes than the
job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from .stopping import JOB_ENDS_AT, STOP_GRACE, longest_grace_s
from .values import DEFAULT, STORES

KILL_WAIT_S = 30.0
"""Slurm's default KillWait: from the SIGTERM of scancel, preemption or the time limit to SIGKILL."""

START_S = 30.0
"""How long a job of fewer nodes than the step has waits for the others, which srun starts at the same time."""

HOW = "write: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 --cpu-bind=none elastic-agent --slurm SCRIPT"
"""Without --ntasks srun takes the number of the job, and overlooks --ntasks-per-node."""


@dataclass(frozen=True, slots=True)
class Step:
    """One node's view of a job step."""

    job: int
    step: int | None
    """None in a batch script, which runs on the first node alone."""
    restarts: int
    """How often the job was requeued."""
    nodes: int
    tasks: int
    first_node: str
    node_rank: int
    gpus: int
    """Of this node; 0: Slurm says nothing of any."""
    tasks_of_node: int
    ends_at: int | None

    def run_id(self, *, outlives_job: bool) -> str:
        """A store that ends with the job's agents has one name per run, so that a node which Slurm has lost does not
        meet the next run. One that outlives them knows the job, and refuses what its former run would commit."""
        if outlives_job:
            return f"slurm-{self.job}"
        run = f"-r{self.restarts}" if self.restarts else ""
        return f"slurm-{self.job}.{self.step or 0}{run}"


def started_apart(environ: Mapping[str, str]) -> int:
    """The number of nodes on each of which srun has started one task; 0 for anything else, and for one node."""
    nodes, tasks = environ.get("SLURM_STEP_NUM_NODES", ""), environ.get("SLURM_STEP_NUM_TASKS")
    return int(nodes) if re.fullmatch("[0-9]{1,9}", nodes) and tasks == nodes and int(nodes) > 1 else 0


@dataclass(slots=True)
class _Reader:
    """Reads numbers, and goes on after a bad one."""

    environ: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def number(self, *names: str) -> int | None:
        """Of the first name that is set."""
        for name in names:
            text = self.environ.get(name, "")
            if re.fullmatch("[0-9]{1,11}", text):
                return int(text)
            if text:
                self.problem(name, "a whole number", "Slurm sets it: leave it as it was")
                return None
        return None

    def problem(self, name: str, expected: str, advice: str) -> None:
        self.problems.append(Problem(name, self.environ.get(name), expected, advice))


def read_step(environ: Mapping[str, str]) -> tuple[Step | None, list[Problem]]:
    """No step only where there are problems."""
    reader = _Reader(environ)
    if "SLURM_JOB_ID" not in environ:
        reader.problem("SLURM_JOB_ID", "a job of Slurm", f"{HOW}; or leave out --slurm")
        return None, reader.problems
    number = reader.number
    step, nodes = number("SLURM_STEP_ID"), number("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    gpus, tasks_of_node = number("SLURM_GPUS_ON_NODE"), number("SLURM_NTASKS_PER_NODE")
    tasks = number("SLURM_STEP_NUM_TASKS") or 1
    list_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    try:
        host = first_node(environ.get(list_name, ""))
    except ValueError:
        host = ""
        reader.problem(
            list_name, "Slurm's list of nodes", "name the store yourself: --rdzv-endpoint HOST:PORT"
        )
    if step is None and nodes > 1:
        reader.problem("SLURM_NNODES", "an agent on each of these nodes; the batch script runs on one", HOW)
    elif tasks != nodes and step is not None:
        expected = (
            f"one task on each of the step's {nodes} nodes: an agent starts the workers of its node itself"
        )
        reader.problem("SLURM_STEP_NUM_TASKS", expected, HOW)
    found = Step(
        job=number("SLURM_JOB_ID") or 0,
        step=step,
        restarts=number("SLURM_RESTART_COUNT") or 0,
        nodes=nodes,
        tasks=tasks,
        first_node=host,
        node_rank=number("SLURM_NODEID") or 0,
        gpus=gpus or 0,
        tasks_of_node=tasks_of_node or 0,
        ends_at=number("SLURM_JOB_END_TIME") or None,
    )
    return (None if reader.problems else found), reader.problems


def derive_slurm(settings: Settings, environ: Mapping[str, str]) -> None:
    """Fill in what Slurm says, where no source has given it; what is wrong with it joins the other problems."""
    if not settings[SLURM].value:
        return
    step, problems = read_step(environ)
    settings.problems += problems
    if step is None:
        return
    alone = bool(settings[STANDALONE].value)
    if not alone:
        _derive_nodes(settings, step)
        _derive_meeting(settings, step)
    if NPROC_PER_NODE not in settings:
        _derive_workers(settings, step)
    if STOP_GRACE not in settings:
        origin = "Slurm's KillWait, 30 s by default: a whole stop fits in"
        settings.derive(STOP_GRACE, longest_grace_s(KILL_WAIT_S), origin)
    if JOB_ENDS_AT not in settings and step.ends_at is not None:
        settings.derive(JOB_ENDS_AT, step.ends_at, "SLURM_JOB_END_TIME")


def _derive_workers(settings: Settings, step: Step) -> None:
    per_worker, name = settings[DEVICES_PER_WORKER].value or 1, "SLURM_GPUS_ON_NODE"
    workers, rest = divmod(step.gpus, per_worker)
    if rest:
        expected = f"a multiple of {per_worker}, which is --devices-per-worker"
        advice = f"ask Slurm for such a number of GPUs, or name the workers: --nproc-per-node {workers or 1}"
        settings.problems.append(Problem(name, str(step.gpus), expected, advice))
    elif workers:
        settings.derive(NPROC_PER_NODE, workers, name)
    elif step.tasks_of_node:
        settings.derive(NPROC_PER_NODE, step.tasks_of_node, "SLURM_NTASKS_PER_NODE")


def _derive_nodes(settings: Settings, step: Step) -> None:
    origin = "SLURM_STEP_NUM_NODES"
    least, most = settings[MIN_NODES].value, settings[MAX_NODES].value
    if MAX_NODES not in settings:
        settings.derive(MAX_NODES, max(step.nodes, least if MIN_NODES in settings else 1), origin)
    if MIN_NODES not in settings:
        settings.derive(MIN_NODES, step.nodes if most is None else min(step.nodes, most), origin)
    elif LAST_CALL not in settings and least < step.nodes:
        settings.derive(LAST_CALL, START_S, "--slurm: srun starts all nodes at once")
    if NODE_RANK not in settings:
        settings.derive(NODE_RANK, step.node_rank, "SLURM_NODEID")


def _derive_meeting(settings: Settings, step: Step) -> None:
    address, backend = settings[ENDPOINT].value, settings[BACKEND].value
    if backend is None and address is not None:
        backend = address.backend
    kind = STORES.get(backend or DEFAULT.name, DEFAULT)  # "static" is torchrun's word for one
    if JOB_ID not in settings:
        settings.derive(JOB_ID, step.run_id(outlives_job=kind.outlives_job), "SLURM_JOB_ID")
    static = any(option in settings for option in (MASTER_ADDR, MASTER_PORT))
    several = (settings[MAX_NODES].value or 1) > 1
    if address is None and kind is DEFAULT and several and not static:
        place = (step.first_node, port_of(step.job, step.step or 0, step.restarts))
        settings.derive(ENDPOINT, StoreAddress((place,)), "SLURM_STEP_NODELIST, SLURM_JOB_ID")
