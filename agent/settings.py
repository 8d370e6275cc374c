"""Makes one checked `Config` of all layers: who wins, what follows from what, and whether it fits together.

Precedence: defaults < file < environment < command line, option by option. Only the command goes as a whole: a
layer that says what to run also says with which arguments, so that no weaker layer's arguments reach another
layer's script.

Invariant: every problem of all layers is reported, also of a value that a stronger layer replaces; either there
is a complete `Config`, or a `ConfigError` with all problems. Nothing is started, written or opened but the
configuration file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from .config import (
    Command,
    CommandKind,
    Config,
    ConfigError,
    NodeCounts,
    Problem,
    RendezvousConfig,
    StopConfig,
)
from .layers import Layer, Setting, read_environ, read_file
from .options import (
    ARGS,
    BACKEND,
    CONFIG_FILE,
    DEVICE_PINNING,
    ENDPOINT,
    FAILURE_GRACE,
    HTTP_ADDRESS,
    JOB_ID,
    JOIN_TIMEOUT,
    LAST_CALL,
    LEASE_TTL,
    LOCAL_ADDR,
    LOG_DIR,
    MAX_NODES,
    MAX_RESTARTS,
    MIN_NODES,
    MODULE,
    NO_PYTHON,
    NODE_ID,
    NPROC_PER_NODE,
    OPTIONS,
    PORT_RANGE,
    SCRIPT,
    STANDALONE,
    STOP_GRACE,
    TARGETS,
    Option,
    Source,
)

T = TypeVar("T")

COMMAND_KINDS: dict[str, CommandKind] = {
    SCRIPT.name: "script",
    MODULE.name: "module",
    NO_PYTHON.name: "binary",
}
THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


class Settings:
    """The settings in force, by option; an option nobody set has its default."""

    def __init__(self, merged: Mapping[str, Setting[object]]) -> None:
        self._merged = dict(merged)

    def __getitem__(self, option: Option[T]) -> Setting[T]:
        default = Setting(option.default_value, "default", option.default or "")
        return cast("Setting[T]", self._merged.get(option.name, default))

    def __contains__(self, option: Option[object]) -> bool:
        return option.name in self._merged

    def put(self, option: Option[T], value: T, origin: str) -> None:
        self._merged[option.name] = Setting(value, origin, "" if value is None else str(value))

    def lines(self) -> list[str]:
        """Every setting as a TOML line with its origin; the lines are a file that means the same."""
        rows = []
        for option in OPTIONS:
            if option.shorthand or Source.FILE not in option.sources:
                continue
            setting = self[option]
            written = (
                f"# {option.name}: not set"
                if setting.value is None
                else f"{option.name} = {_toml(setting.value)}"
            )
            rows.append((written, setting.origin))
        width = max(len(written) for written, _ in rows if len(written) <= 40)
        return [f"{written:<{width}}  # {_quoted(origin)[1:-1]}" for written, origin in rows]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked configuration, where each part of it came from, and what was given without effect."""

    config: Config
    settings: Settings
    warnings: tuple[str, ...]


def resolve(command_line: Layer, environ: Mapping[str, str], fresh_id: Callable[[], str]) -> Resolved:
    """Merge all layers into one `Config`. `fresh_id` names a job whose store this agent starts itself.

    Raises `ConfigError` with all problems of all layers: print it and end with `ExitCode.BAD_CONFIG`.
    """
    environment = read_environ(environ)
    path = {**environment.given, **command_line.given}.get(CONFIG_FILE.name)
    layers = [read_file(str(path.value))] if path else []
    layers += [environment, command_line]
    problems = [problem for layer in layers for problem in layer.problems]
    warnings = [warning for layer in layers for warning in layer.warnings]
    broken = {name for layer in layers for name in layer.broken}

    settings = Settings(_merge(layers, problems))
    warnings += _derive(settings, fresh_id)
    problems += [problem for involved, problem in check_relations(settings) if not broken & involved]
    command = _command(settings)
    if command is None and not broken & {target.name for target in TARGETS}:
        advice = (
            "write it after the options, or set script, module or no-python in the file or the environment"
        )
        problems.append(Problem("command line", None, "a script to run", advice))
    if problems or command is None:
        raise ConfigError(problems)
    return Resolved(_config(settings, command), settings, tuple(warnings))


def _merge(layers: Sequence[Layer], problems: list[Problem]) -> dict[str, Setting[object]]:
    merged: dict[str, Setting[object]] = {}
    for layer in layers:
        targets = [layer.given[target.name] for target in TARGETS if target.name in layer.given]
        if targets:
            for option in (*TARGETS, ARGS):
                merged.pop(option.name, None)
        for extra in targets[1:]:
            advice = f"keep either it or {targets[0].origin}"
            problems.append(Problem(extra.origin, extra.text, "one thing to run", advice))
        merged |= layer.given
    return merged


def _derive(settings: Settings, fresh_id: Callable[[], str]) -> list[str]:
    """Fill in what follows from other settings; returns warnings about what was overruled."""
    warnings = []
    if settings[STANDALONE].value:
        origin = settings[STANDALONE].origin
        alone: list[tuple[Option[object], object]] = [
            (MIN_NODES, 1),
            (MAX_NODES, 1),
            (BACKEND, "memory"),
            (ENDPOINT, None),
        ]
        for option, value in alone:
            if option in settings and settings[option].value != value:
                warnings.append(f"{settings[option].origin} is ignored: {origin} overrules it")
            settings.put(option, value, origin)
    if settings[MAX_NODES].value is None:
        settings.put(MAX_NODES, settings[MIN_NODES].value, "default: min-nodes")
    endpoint = settings[ENDPOINT].value
    if endpoint is not None and endpoint.port == 0 and endpoint.host in THIS_MACHINE:
        settings.put(ENDPOINT, None, f"{settings[ENDPOINT].origin}: port 0, this agent hosts the store")
    if settings[BACKEND].value is None:
        if settings[ENDPOINT].value is None and settings[MAX_NODES].value == 1:
            settings.put(BACKEND, "memory", "default: one node, no endpoint")
        else:
            settings.put(BACKEND, "c10d", "default: more than one node, or an endpoint")
    if settings[JOB_ID].value is None:
        if settings[ENDPOINT].value is None:
            settings.put(JOB_ID, fresh_id(), "default: new for every start")
        else:
            settings.put(JOB_ID, "default", "default: the store belongs to one job")
    return warnings


def check_relations(settings: Settings) -> list[tuple[set[str], Problem]]:
    """What is wrong between settings that are each right, and with the script; with the options each involves."""
    found: list[tuple[set[str], Problem]] = []

    def expect(
        holds: bool, option: Option[object], expected: str, advice: str, *others: Option[object]
    ) -> None:
        if not holds:
            setting = settings[option]
            origin = f"{option.name} (default)" if setting.origin.startswith("default") else setting.origin
            involved = {option.name, *(other.name for other in others)}
            found.append((involved, Problem(origin, setting.text, expected, advice)))

    least, most = settings[MIN_NODES], cast("Setting[int]", settings[MAX_NODES])
    expect(
        least.value <= most.value,
        MIN_NODES,
        f"at most max-nodes, which is {most.value} ({most.origin})",
        "lower --min-nodes or raise --max-nodes",
        MAX_NODES,
    )
    join, last_call, lease = settings[JOIN_TIMEOUT], settings[LAST_CALL], settings[LEASE_TTL]
    expect(
        join.value > lease.value,
        JOIN_TIMEOUT,
        f"more than lease-ttl, which is {lease.value:g} s ({lease.origin})",
        "raise --join-timeout or lower --lease-ttl",
        LEASE_TTL,
    )
    expect(
        join.value > last_call.value,
        LAST_CALL,
        f"less than join-timeout, which is {join.value:g} s ({join.origin})",
        "lower --last-call or raise --join-timeout",
        JOIN_TIMEOUT,
    )
    backend, endpoint = settings[BACKEND], settings[ENDPOINT]
    expect(
        backend.value != "memory" or most.value == 1,
        BACKEND,
        f"c10d, because max-nodes is {most.value} ({most.origin}) and no other node can join a memory store",
        "use --rdzv-backend c10d or --max-nodes 1",
        MAX_NODES,
        MIN_NODES,
    )
    expect(
        backend.value != "memory" or endpoint.value is None,
        BACKEND,
        f"c10d, because an endpoint is given ({endpoint.origin}) and a memory store has none",
        "leave out --rdzv-endpoint or --rdzv-backend",
        ENDPOINT,
    )
    expect(
        endpoint.value is None or endpoint.value.port != 0,
        ENDPOINT,
        "a port from 1 to 65535, or localhost:0",
        "choose one port for all nodes, or leave the endpoint out and this agent hosts the store",
    )
    script = settings[SCRIPT]
    if script.value is not None:
        expect(
            os.path.isfile(script.value) and os.access(script.value, os.R_OK),
            SCRIPT,
            "a Python file that exists and can be read",
            f"check the path, seen from {os.getcwd()}, and its permissions",
        )
    return found


def _command(settings: Settings) -> Command | None:
    for target in TARGETS:
        text = settings[target].value
        if text is not None:
            return Command(COMMAND_KINDS[target.name], text, settings[ARGS].value)
    return None


def _config(settings: Settings, command: Command) -> Config:
    backend, job_id, max_nodes = settings[BACKEND].value, settings[JOB_ID].value, settings[MAX_NODES].value
    assert backend is not None  # `_derive` filled these in
    assert job_id is not None
    assert max_nodes is not None
    return Config(
        command=command,
        nodes=NodeCounts(settings[MIN_NODES].value, max_nodes),
        nproc_per_node=settings[NPROC_PER_NODE].value,
        device_pinning=settings[DEVICE_PINNING].value,
        rendezvous=RendezvousConfig(
            backend=backend,
            endpoint=settings[ENDPOINT].value,
            job_id=job_id,
            join_timeout_s=settings[JOIN_TIMEOUT].value,
            last_call_s=settings[LAST_CALL].value,
            lease_ttl_s=settings[LEASE_TTL].value,
        ),
        node_id=settings[NODE_ID].value,
        local_addr=settings[LOCAL_ADDR].value,
        port_range=settings[PORT_RANGE].value,
        max_restarts=settings[MAX_RESTARTS].value,
        stop=StopConfig(settings[STOP_GRACE].value, settings[FAILURE_GRACE].value),
        log_dir=settings[LOG_DIR].value,
        http_address=settings[HTTP_ADDRESS].value,
    )


# --- Words ---


def _toml(value: object) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(str(word)) for word in value)}]"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """A TOML string of ASCII characters, which every terminal can show."""
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'
