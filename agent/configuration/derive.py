"""Makes one checked `Config` of all sources: merges them, derives what follows, and checks the whole.

Precedence: defaults < file < environment < command line, option by option. Only the command goes as a whole: a source
that has something to run also has its arguments, so that no weaker one's arguments reach another one's script.

Invariant: either there is a complete `Config`, or a `ConfigError` with all problems of all sources, also of a value
that a stronger one replaces. Nothing is started, written or opened but the configuration file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from ...rendezvous.etcd.kind import ETCD
from ...rendezvous.local.kind import LOCAL
from ..common.folders import pool_folder, pool_folder_here
from .check import check_relations
from .config import (
    ARGS,
    CONFIG_FILE,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NO_PYTHON,
    NODES_MULTIPLE_OF,
    RUN_PATH,
    SCRIPT,
    Config,
    ConfigError,
    Problem,
)
from .load import read_environ, read_file
from .options import TARGETS
from .parse import Option, StoreAddress
from .rendezvous import (
    BACKEND,
    DEFAULT_POOL,
    ENDPOINT,
    ETCD_OPTIONS,
    JOB_ID,
    LOCAL_POOL,
    MASTER_ADDR,
    MASTER_PORT,
    MEETING,
    NODE_RANK,
    POOL,
    STANDALONE,
    STATIC_HOST,
    STATIC_PORT,
    EtcdConfig,
    RendezvousConfig,
)
from .settings import TARGET_SWITCHES, Setting, Settings
from .slurm import derive_slurm, started_apart
from .stopping import StopConfig
from .values import ALONE, DEFAULT, STORES, Command, CommandKind, NodeCounts

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


def resolve(command_line: Settings, environ: Mapping[str, str], fresh_id: Callable[[], str]) -> Resolved:
    """Merge all sources into one `Config`. `fresh_id` names a job whose store this agent starts itself.

    Raises `ConfigError` with all problems of all sources: print it and end with its code.
    """
    return _resolved(_merged(command_line, environ, fresh_id), environ)


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


def resolve_check(
    command_line: Settings, environ: Mapping[str, str], fresh_id: Callable[[], str]
) -> Resolved:
    """As `resolve`, for a command that may leave out what there is to run. Raises `ConfigError`."""
    settings = _merged(command_line, environ, fresh_id)
    return _resolved(settings, environ, _command(settings) or Command("script", ""), of_pool=False)


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
        if source.causes.value:
            merged.causes = source.causes
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
        causes=settings.causes.value,
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
