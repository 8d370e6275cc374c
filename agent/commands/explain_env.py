"""`elastic-agent explain-env`: the environment of a worker, with who chose each variable, and why.

Takes the options of a run and builds the environment in the same way, for a world that does not exist: what only a
world can decide is shown as `<rank>`. Starts nothing. Of inherited variables, only those for NCCL, torch and other
libraries are shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...rendezvous.records import Cause, CauseKind, Endpoint, NodeRecord, Phase, World, assign_ranks
from ...worker.wire.environment import NAMES
from ..checkpoints.folder import describe_folder
from ..common.variables import USER, Variable, settle
from ..configuration.config import Config
from ..configuration.load import Settings
from ..machine.inventory import Machine, prepare
from ..machine.network import NotReady
from ..output.log_files import FLIGHT_RECORDS, run_folder
from ..workers.environment import WorkerPlace, chosen_variables, worker_env
from .command import run_command

_USAGE = """\
usage: elastic-agent explain-env [options of a run] SCRIPT [arguments]

Prints the variables that you or the agent choose for a worker, each with its value, who chose it and why. Starts
nothing. docs/tuning.md explains how to use it.
"""

NEW_ID = "<new for every start>"
RUN_DIR = Path("<run dir>")
GENERATION = "<generation>"

OF_A_WORLD = frozenset(
    {"RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", NAMES["generation"], NAMES["run"]}
    | {NAMES["master_port"]}
)
"""What no worker can know before there is a world."""

THEIRS = ("NCCL_", "TORCH_", "GLOO_", "TP_", "UCX_", "FI_", "CUDA_", "OMP_", "MKL_", "PYTORCH_")
"""Prefixes of variables for the libraries that the agent configures."""

_COLUMN = 60


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return run_command("explain-env", words, _USAGE, (), _show)


def _show(_: str, command_line: Settings) -> None:
    resolved, machine = prepare(command_line, os.environ, lambda: NEW_ID)
    for warning in resolved.warnings:
        print(f"elastic-agent explain-env: warning: {warning}", file=sys.stderr)
    if isinstance(machine.network, NotReady):
        print(f"elastic-agent explain-env: without the network's: {machine.network.missing}", file=sys.stderr)
    for each in explain(resolved.config, machine, dict(os.environ)):
        assignment = _printable(f"{each.name}={each.value}")
        print(f"{assignment:<{_COLUMN}}  # {each.by}: {_printable(each.reason)}")


def explain(config: Config, machine: Machine, environ: Mapping[str, str]) -> list[Variable]:
    """By who chose them, the user first, and by name. A value that differs between the node's workers is that of each,
    with commas between."""
    by_name: dict[str, list[Variable]] = {}
    for local_rank in range(machine.workers):
        for variable in settle(environ, _chosen(config, machine, local_rank)):
            by_name.setdefault(variable.name, []).append(variable)
    rows = [replace(each[0], value=_value(each)) for each in by_name.values()]
    rows += [
        Variable(name, value, "your own; the agent neither sets nor changes it", by=USER)
        for name, value in environ.items()
        if name.startswith(THEIRS) and name not in by_name
    ]
    return sorted(rows, key=lambda row: (row.by != USER, row.by, row.name))


def _value(variables: Sequence[Variable]) -> str:
    name = variables[0].name
    if name in OF_A_WORLD:
        short = name.removeprefix("ELASTIC_AGENT_").removeprefix("TORCHELASTIC_")
        return f"<{short.lower().replace('_', ' ')}>"
    return ", ".join(dict.fromkeys(variable.value for variable in variables))


def _chosen(config: Config, machine: Machine, local_rank: int) -> tuple[Variable, ...]:
    node = NodeRecord(config.node_id or "<node>", "<incarnation>", "", 0, machine.workers, role=config.role)
    members = assign_ranks((node,))
    job, start = config.rendezvous.job_id, Cause(CauseKind.START)
    some_port = Endpoint("", 1)  # a worker without one has not all variables that are to be explained
    world = World(job, 1, Phase.RUNNING, members, some_port, start, run="<run>")
    records = None
    if config.logs.given_directory is not None and machine.software.has_nccl:
        folder = run_folder(config.logs.given_directory.absolute(), config.rendezvous.job_id, "<run>")
        records = folder / f"gen{GENERATION}" / FLIGHT_RECORDS
    memory = describe_folder(config.memory_checkpoints)
    memory_address = "" if config.solitary else "<address>:<port>"
    place = WorkerPlace(
        world,
        members[0],
        local_rank,
        error_file=RUN_DIR / f"gen{GENERATION}" / "error-<local rank>.json",
        env=replace(
            worker_env("<incarnation>", RUN_DIR, memory, config, memory_address),
            page="/proc/<agent>/fd/<page>",
            stacks="/proc/<agent>/fd/<stacks>",
        ),
        flight_records=records,
    )
    return chosen_variables(config, machine, place)


def _printable(text: str) -> str:
    """On one line, and as nothing that a terminal would obey, or does not know."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
