"""This node as it was found at the start, and what follows from it for one of its workers: the `WorkerSpec`.

Nothing is started here, and nothing written but the folder of a generation.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

from ....rendezvous.records import Member, World
from ....worker.wire.environment import WorkerEnv
from ...common.own_folder import NoTemporaryDirectory
from ...common.variables import compose
from ...configuration.config import Config, LogConfig
from ...machine.inventory import Machine
from ...output.worker_logs import OutputRoute
from ..environment.contract import WorkerPlace, chosen_variables
from ..processes.workers import WorkerSpec

KEPT_GENERATIONS = 3
"""In the run directory, for a person who looks."""


@dataclass(frozen=True, slots=True)
class Node:
    """This node as found at the start: it does not change while the agent lives."""

    name: str
    incarnation: str
    machine: Machine
    run_dir: Path
    env: WorkerEnv
    """What every worker here is given."""
    cgroup: Path | None
    """Below it each generation's workers have one of their own."""
    environment: Mapping[str, str]
    """What the workers inherit: the agent's own, as it was before the agent changed anything for itself."""
    hostname: str = field(default_factory=socket.gethostname)


def worker_spec(
    config: Config,
    node: Node,
    world: World,
    member: Member,
    local_rank: int,
    page: str,
    stacks: str,
    flight_records: Path | None,
) -> WorkerSpec:
    """The worker at `local_rank` of `member`, which is this node; `page` and `stacks` name what it shares with the
    agent."""
    place = WorkerPlace(
        world,
        member,
        local_rank,
        error_file=error_file(node, world.generation, local_rank),
        env=replace(node.env, page=page, stacks=stacks),
        flight_records=flight_records,
    )
    chosen = chosen_variables(config, node.machine, place)
    obstacle = "the command is a program of its own" if config.command.kind == "binary" else ""
    words = {
        "role_name": member.role,
        "rank": place.rank,
        "local_rank": local_rank,
        "hostname": node.hostname,
        "node": node.name,
        "generation": world.generation,
    }
    return WorkerSpec(
        place.rank,
        local_rank,
        compose(node.environment, chosen),
        node.machine.shares[local_rank].cpus,
        obstacle,
        output_routes(config.logs, local_rank, words),
    )


def output_routes(
    logs: LogConfig, local_rank: int, words: Mapping[str, object]
) -> tuple[OutputRoute, OutputRoute]:
    """Of stdout and stderr, by torchrun's rules for `--redirects`, `--tee` and `--local-ranks-filter`.

    A stream that neither of the first two names is on the console alone, as soon as one of them is given. What goes to
    a file and to the console is *tee'd*: of such lines `--duplicate-stdout-filters` makes copies. `words` are those
    that the template of the prefix may have.
    """
    prefix = Template(logs.prefix_template).safe_substitute(words)
    redirects = logs.redirects.of(local_rank) if logs.redirects is not None else 0
    tee = logs.tee.of(local_rank) if logs.tee is not None else 0
    chosen = logs.redirects is not None or logs.tee is not None
    files = logs.directory is not None
    seen = logs.local_ranks is None or local_rank in logs.local_ranks

    def route(stream: int, filters: tuple[str, ...]) -> OutputRoute:
        file = files and (not chosen or bool((redirects | tee) & stream))
        console = seen and (not files or bool(tee & stream) or not redirects & stream)
        return OutputRoute(prefix, file, console, filters if file and console else ())

    return route(1, logs.stdout_filters), route(2, logs.stderr_filters)


def make_directory(node: Node, generation: int) -> None:
    """For files of the workers of one generation. Of those of older ones a few stay. Raises OSError; also where the
    agent's own folder is gone: in a new one, workers could neither ask whether to commit a save nor report."""
    if not os.path.exists(node.env.socket):
        raise NoTemporaryDirectory(
            f"the agent's folder {node.run_dir} was removed, or the sockets in it, at which workers reach this agent: "
            "start it again, and let nothing clean that folder, or name another one in TMPDIR"
        )
    _directory(node, generation).mkdir(exist_ok=True)
    for folder in node.run_dir.glob("gen*"):
        if int(folder.name.removeprefix("gen")) <= generation - KEPT_GENERATIONS:
            shutil.rmtree(folder, ignore_errors=True)


def _directory(node: Node, generation: int) -> Path:
    return node.run_dir / f"gen{generation}"


def error_file(node: Node, generation: int, local_rank: int) -> Path:
    """Where torch writes why the worker failed, in the form that torchrun reads."""
    return _directory(node, generation) / f"error-{local_rank}.json"
