"""Makes one checked `Config` of all sources: merges them, derives what follows, and checks the whole.

Precedence: defaults < file < environment < command line, option by option. Only the command goes as a whole: a source
that has something to run also has its arguments, so that no weaker one's arguments reach another one's script.

Invariant: either there is a complete `Config`, or a `ConfigError` with all problems of all sources, also of a value
that a stronger one replaces. Nothing is started, written or opened but the configuration file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from ...rendezvous.etcd import ETCD
from ...rendezvous.local import LOCAL
from ...worker.ranks.cluster_environment import first_node, port_of
from ..common.folders import pool_folder, pool_folder_here
from .check import check_relations
from .config import (
    ARGS,
    CONFIG_FILE,
    DEVICES_PER_WORKER,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NO_PYTHON,
    NODES_MULTIPLE_OF,
    NPROC_PER_NODE,
    RUN_PATH,
    SCRIPT,
    TARGETS,
    Command,
    CommandKind,
    Config,
    ConfigError,
    Problem,
)
from .load import TARGET_SWITCHES, Setting, Settings, read_environ, read_file
from .parse import NodeCounts, Option
from .rendezvous import (
    ALONE,
    BACKEND,
    DEFAULT,
    DEFAULT_POOL,
    ENDPOINT,
    ETCD_OPTIONS,
    JOB_ID,
    LAST_CALL,
    LOCAL_POOL,
    MASTER_ADDR,
    MASTER_PORT,
    MEETING,
    NODE_RANK,
    POOL,
    SLURM,
    STANDALONE,
    STATIC_HOST,
    STATIC_PORT,
    STORES,
    EtcdConfig,
    RendezvousConfig,
    StoreAddress,
)
from .stopping import STOP_GRACE, StopConfig, longest_grace_s

T = TypeVar("T")

COMMAND_KINDS: dict[str, CommandKind] = {
    SCRIPT.name: "script",
    MODULE.name: "module",
    NO_PYTHON.name: "binary",
}
_MEETING = frozenset(option.name for option in (*MEETING, *ETCD_OPTIONS))
_HOSTED_HERE = frozenset(((host, 0),) for host in ("localhost", "127.0.0.1", "::1"))
"""Endpoints that mean, to torchrun as well: this agent hosts the store."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked configuration, where each part of it came from, and what was given without effect."""

    config: Config
    settings: Settings
    warnings: tuple[str, ...]


def resolve(
    command_line: Settings, environ: Mapping[str, str], fresh_id: Callable[[], str], *, runs: bool = True
) -> Resolved:
    """Merge all sources into one `Config`. `fresh_id` names a job whose store this agent starts itself.

    `runs`: there has to be something to run. Raises `ConfigError` with all problems of all sources.
    """
    settings = _merged(command_line, environ, fresh_id)
    return _resolved(settings, environ, None if runs else _command(settings) or Command("script", ""))


def resolve_daemon(command_line: Settings, environ: Mapping[str, str]) -> Resolved:
    """As `resolve`, for an agent that has nothing to run and waits for jobs in a pool: the pool's store takes the place
    of a job's. Raises `ConfigError`."""
    settings = _merged(command_line, environ, lambda: "", of_pool=True, hosts=True)
    multiple = settings[NODES_MULTIPLE_OF]
    if multiple.value != 1:
        settings.problems.append(
            multiple.problem("1 for a daemon, as each job has its own", "give it to elastic-agent submit")
        )
    return _resolved(settings, environ, Command("script", ""), of_pool=True)


def resolve_pool(command_line: Settings, environ: Mapping[str, str]) -> RendezvousConfig:
    """Where a pool's store is, for commands; that of this machine where none is named. Raises `ConfigError`."""
    settings = _merged(command_line, environ, lambda: "", of_pool=True)
    return _meeting_place(settings, of_pool=True)


def resolve_meeting_place(command_line: Settings, environ: Mapping[str, str]) -> RendezvousConfig | None:
    """Where the nodes of a job meet, for commands that run nothing; None when no address of a store is given.

    Raises `ConfigError` with all problems of all sources but those of relations that concern only running.
    """
    settings = _merged(command_line, environ, lambda: "")
    place = _meeting_place(settings, of_pool=False)
    return place if settings[ENDPOINT].value is not None else None


def _meeting_place(settings: Settings, *, of_pool: bool) -> RendezvousConfig:
    rules = check_relations(settings, of_pool=of_pool)
    problems = [*settings.problems, *(problem for involved, problem in rules if involved & _MEETING)]
    if problems:
        raise ConfigError(problems)
    return _rendezvous(settings)


def job_problems(command_line: Settings) -> list[Problem]:
    """What contradicts itself in the options of a job for a pool, whatever its nodes are like."""
    settings = _merged(command_line, {}, lambda: "", of_pool=True)
    rules = check_relations(settings, of_pool=True)
    elsewhere = _MEETING | {target.name for target in TARGETS}
    return [problem for involved, problem in rules if not involved & elsewhere]


def offers_node(command_line: Settings, environ: Mapping[str, str]) -> bool:
    """No source has anything to run."""
    return _command(_merged(command_line, environ, lambda: "")) is None


def _resolved(
    settings: Settings, environ: Mapping[str, str], command: Command | None = None, *, of_pool: bool = False
) -> Resolved:
    """`command`: what stands for one where there is none to run. `of_pool`: of a daemon that waits for jobs."""
    rules = check_relations(settings, of_pool=of_pool)
    problems = [*settings.problems, *(problem for _, problem in rules)]
    command = command or _command(settings)
    if command is None and not settings.broken & {target.name for target in TARGETS}:
        advice = (
            "write it after the options, or set script, module or no-python in the file or the environment"
        )
        problems.append(Problem("command line", None, "a script to run", advice))
    if problems:
        raise ConfigError(problems)
    assert command is not None, "else it is a problem"
    warnings = (*settings.warnings, *_alone_under_srun(settings, environ))
    return Resolved(_config(settings, command), settings, warnings)


def _merged(
    command_line: Settings,
    environ: Mapping[str, str],
    fresh_id: Callable[[], str],
    *,
    of_pool: bool = False,
    hosts: bool = False,
) -> Settings:
    """All sources as one, before the relations between the settings are checked. `of_pool`: the store is a pool's own,
    and no job's in it; `hosts`: it may be for this agent to host it."""
    environment = read_environ(environ)
    path = {**environment.given, **command_line.given}.get(CONFIG_FILE.name)
    sources = [read_file(str(path.value))] if path else []
    merged = Settings()
    for source in (*sources, environment, command_line):
        merged.problems += source.problems
        merged.warnings += source.warnings
        merged.broken |= source.broken
        targets = [source[target] for target in TARGETS if target in source]
        if targets:
            for option in (*TARGETS, ARGS):
                merged.given.pop(option.name, None)
        for extra in targets[1:]:
            merged.problems.append(
                extra.problem("one thing to run", f"keep either it or {targets[0].origin}")
            )
        merged.given |= source.given if source is not command_line else _meant(command_line, environ)
    derive_slurm(merged, environ)
    if of_pool:
        _derive_pool(merged)

    def folder(pool: str) -> Path:
        return pool_folder(environ) if hosts else pool_folder_here(environ, pool)

    _derive(merged, fresh_id, folder)
    return merged


def _meant(command_line: Settings, environ: Mapping[str, str]) -> dict[str, Setting[object]]:
    """PET_MODULE and PET_NO_PYTHON turn the script word into a module or a program."""
    given = dict(command_line.given)
    for name, target in TARGET_SWITCHES.items():
        if environ.get(name, "0") not in ("", "0") and SCRIPT.name in given:
            script = given.pop(SCRIPT.name)
            given[target.name] = replace(script, origin=f"{script.origin} ({name})")
    return given


_Folder: TypeAlias = Callable[[str], Path]
"""For the store of the pool of this name, when it has no other place."""


def _derive(settings: Settings, fresh_id: Callable[[], str], folder: _Folder) -> None:
    """Fill in what follows from other settings, with warnings about what was overruled."""
    if settings[STANDALONE].value:
        origin = settings[STANDALONE].origin
        alone: list[tuple[Option[object], object]] = [
            (MIN_NODES, 1),
            (MAX_NODES, 1),
            (NODES_MULTIPLE_OF, 1),
            (BACKEND, ALONE.name),
            (ENDPOINT, None),
            *((option, option.default_value) for option in ETCD_OPTIONS),
        ]
        for option, value in alone:
            if option in settings and settings[option].value != value:
                settings.warnings.append(f"{settings[option].origin} is ignored: {origin} overrules it")
            settings.derive(option, value, origin)
    if MIN_NODES not in settings and NODES_MULTIPLE_OF in settings:
        settings.derive(MIN_NODES, settings[NODES_MULTIPLE_OF].value, "default: nodes-multiple-of")
    if settings[MAX_NODES].value is None:
        settings.derive(MAX_NODES, settings[MIN_NODES].value, "default: min-nodes")
    settings.warnings += _derive_static(settings)
    _derive_meeting_place(settings, fresh_id, folder)


def _derive_pool(settings: Settings) -> None:
    """A daemon's store is that of its pool, on this machine where none is named."""
    settings.derive(JOB_ID, settings[POOL].value or DEFAULT_POOL, settings[POOL].origin)
    settings.derive(POOL, None, "the pool's own store")
    backend, address = settings[BACKEND].value, settings[ENDPOINT].value
    if address is None and backend is None:
        settings.derive(BACKEND, LOCAL.name, "default: the pool of this machine")
    elif address is None and backend == DEFAULT.name:
        settings.derive(ENDPOINT, StoreAddress((LOCAL_POOL,)), "default: the pool of this machine")


def _derive_static(settings: Settings) -> list[str]:
    """torchrun's static form is a c10d store at its master's address. Returns what is ignored beside an endpoint."""
    host, port = settings[MASTER_ADDR], settings[MASTER_PORT]
    rank, backend = settings[NODE_RANK], settings[BACKEND]
    given = any(setting.value is not None for setting in (host, port))  # a rank alone only orders the nodes
    if settings[STANDALONE].value or not (given or backend.text == "static"):
        return []
    for option in (MASTER_ADDR, MASTER_PORT):  # the endpoint has it from now on
        settings.derive(option, None, settings[option].origin)
    ignored = [setting.origin for setting in (host, port) if setting.value is not None]
    if settings[ENDPOINT].value is not None:
        return [f"{origin} is ignored: nodes meet at {settings[ENDPOINT].origin}" for origin in ignored]
    if settings[MAX_NODES].value == 1:
        return [f"{origin} is ignored: one node meets no other" for origin in ignored]
    if backend.value in (None, DEFAULT.name):
        origins = [setting.origin for setting in (host, port, rank, backend) if not setting.is_default]
        place = (host.value or STATIC_HOST, port.value or STATIC_PORT)
        settings.derive(ENDPOINT, StoreAddress((place,)), ", ".join(origins))
        return []
    return [f"{origin} is ignored: a {backend.value} store has another address" for origin in ignored]


def _derive_meeting_place(settings: Settings, fresh_id: Callable[[], str], folder: _Folder) -> None:
    address, origin = settings[ENDPOINT].value, settings[ENDPOINT].origin
    if settings[BACKEND].value is None and address is not None and address.backend is not None:
        settings.derive(BACKEND, address.backend, origin)
    kind = STORES[settings[BACKEND].value or DEFAULT.name]
    if address is None and kind.of_one_machine:
        pool = settings[POOL].value or settings[JOB_ID].value or DEFAULT_POOL
        address = StoreAddress((), kind.name, folder=folder(pool))
        settings.derive(ENDPOINT, address, "default: this user's folder on this machine")
    if address is not None and not kind.cluster and address.hosts in _HOSTED_HERE:
        address = None
        settings.derive(ENDPOINT, None, f"{origin}: port 0, this agent hosts the store")
    if address is not None and kind.port is not None:
        settings.derive(ENDPOINT, address.with_ports(kind.port), origin)
    if settings[BACKEND].value is None:
        if address is None and settings[MAX_NODES].value == 1:
            settings.derive(BACKEND, ALONE.name, "default: one node, no endpoint")
        else:
            settings.derive(BACKEND, DEFAULT.name, "default: more than one node, or an endpoint")
    if settings[JOB_ID].value is None and not kind.outlives_job:  # else the user chooses one: `check`
        if address is None:
            settings.derive(JOB_ID, fresh_id(), "default: new for every start")
        else:
            settings.derive(JOB_ID, "default", "default: the store belongs to one job")


def _alone_under_srun(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """Nothing is taken from Slurm without being asked for: many trainings, one on each node, may be meant."""
    nodes = started_apart(environ)
    if nodes and settings[MAX_NODES].value == 1 and not settings[STANDALONE].value:
        yield (
            f"srun has started this on {nodes} nodes, and each of them trains alone: --slurm makes one job of them, "
            "--standalone says that this is meant"
        )


def _command(settings: Settings) -> Command | None:
    for target in TARGETS:
        text = settings[target].value
        if text is not None:
            kind = "run-path" if settings[RUN_PATH].value else COMMAND_KINDS[target.name]
            return Command(kind, text, settings[ARGS].value)
    return None


def _filled(part: type[T], settings: Settings, **known: object) -> T:
    """A part of `Config` whose fields have the values of their options, but for the `known` ones."""
    values = dict(known)
    for field in fields(cast(Any, part)):
        if field.name not in known:
            option = field.metadata.get("option")
            if option is not None:
                values[field.name] = settings[option].value
            elif is_dataclass(field.default):
                values[field.name] = _filled(type(field.default), settings)
    return part(**values)


def _config(settings: Settings, command: Command) -> Config:
    max_nodes = settings[MAX_NODES].value
    assert max_nodes is not None  # `_derive` filled it in
    nodes = NodeCounts(settings[MIN_NODES].value, max_nodes)
    return _filled(
        Config,
        settings,
        command=command,
        nodes=nodes,
        rendezvous=_rendezvous(settings),
        stop=_filled(StopConfig, settings, job_ends_at=settings.job_ends_at),
    )


def _rendezvous(settings: Settings) -> RendezvousConfig:
    backend, job_id, address = settings[BACKEND].value, settings[JOB_ID].value, settings[ENDPOINT].value
    assert backend is not None  # `_derive` filled these in
    assert job_id is not None  # or `check` has refused it
    return _filled(
        RendezvousConfig,
        settings,
        backend=backend,
        endpoints=address.endpoints if address is not None else (),
        folder=address.folder if address is not None else None,
        etcd=_etcd(settings, address) if backend == ETCD.name else None,
        job_id=job_id,
    )


def _etcd(settings: Settings, address: StoreAddress | None) -> EtcdConfig:
    prefix = address.prefix if address is not None else None
    return _filled(EtcdConfig, settings, prefix=prefix or EtcdConfig().prefix)


# --- --slurm ---
#
# What any source has given stays as it is. A *step* is what one `srun` started; `SLURM_STEP_*` are of the step, which
# may have fewer nodes than the job. A batch script has no step, and runs on the first node alone.

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

    texts = {what: environ.get(name, "") for what, name in _NUMBERS.items()}
    number = {what: int(text) for what, text in texts.items() if re.fullmatch("[0-9]{1,11}", text)}
    nodes = number.get("nodes") or number.get("nodes of job") or 1
    list_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    host = ""
    if "job" not in number:
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
