"""Reads the settings from the file, the environment and the command line, and makes one checked `Config` of them.

Words: a *layer* is what one source says; a *setting* is a value with its *origin*, the words by which a person
finds the place to change it. Precedence: defaults < file < environment < command line, option by option. Only the
command goes as a whole: a layer that says what to run also says with which arguments, so that no weaker layer's
arguments reach another layer's script.

Invariant: every layer is read to its end and every problem of all layers is reported, also of a value that a
stronger layer replaces; either there is a complete `Config`, or a `ConfigError` with all problems. Nothing is
started, written or opened but the configuration file.

The command line is walked here and not by argparse, which gives up at the first problem.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Generic, TypeVar, cast

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
from .options import (
    ARGS,
    BACKEND,
    CONFIG_FILE,
    DEVICE_PINNING,
    ENDPOINT,
    FAILURE_GRACE,
    HTTP_ADDRESS,
    IGNORED_RDZV_CONF_KEYS,
    IGNORED_TORCHRUN_OPTIONS,
    IGNORED_TORCHRUN_SHORTS,
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
    NNODES,
    NO_PYTHON,
    NODE_ID,
    NPROC_PER_NODE,
    OPTIONS,
    PORT_RANGE,
    RDZV_CONF,
    RDZV_CONF_KEYS,
    SCRIPT,
    STANDALONE,
    STOP_GRACE,
    TARGETS,
    VIRTUAL_LOCAL_RANK,
    WORKER_VARIABLES,
    Option,
    Source,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

ENV_PREFIX = "ELASTIC_AGENT_"
TORCHRUN_ENV_PREFIX = "PET_"
MOST_FILE_BYTES = 1 << 20

COMMAND_KINDS: dict[str, CommandKind] = {
    SCRIPT.name: "script",
    MODULE.name: "module",
    NO_PYTHON.name: "binary",
}
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

# A shorthand goes first, so that within one source the option it stands for wins.
_SHORTHANDS_FIRST = sorted(OPTIONS, key=lambda option: not option.shorthand)


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value in force. `origin` is "--min-nodes", "ELASTIC_AGENT_MIN_NODES", "FILE: min-nodes" or "default"."""

    value: T
    origin: str
    text: str = ""


@dataclass(slots=True)
class Layer:
    """What one source says: settings, by option name, and what was wrong or without effect in it.

    `broken` names the options whose value could not be read; relations with them cannot be judged.
    """

    given: dict[str, Setting[object]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def put(self, option: Option[object], text: str, origin: str) -> None:
        """Read one written value. A later one for the same option replaces it."""
        try:
            value = option.kind.parse(text)
        except ValueError as error:
            self.broken.add(option.name)
            self.problems.append(Problem(origin, text, option.kind.expects, str(error) or _advice(option)))
            return
        if option is NNODES:
            counts = cast(NodeCounts, value)
            self.put(MIN_NODES, str(counts.min), origin)
            self.put(MAX_NODES, str(counts.max), origin)
        elif option is RDZV_CONF:
            for key, part in cast("tuple[tuple[str, str], ...]", value):
                self._put_rdzv_conf(key, part, f"{origin} {key}")
        elif option is VIRTUAL_LOCAL_RANK:
            if value:
                self.put(DEVICE_PINNING, "mask", origin)
        else:
            self.given[option.name] = Setting(value, origin, text)

    def _put_rdzv_conf(self, key: str, text: str, origin: str) -> None:
        if key in RDZV_CONF_KEYS:
            self.put(RDZV_CONF_KEYS[key], text, origin)
        elif key in IGNORED_RDZV_CONF_KEYS:
            self.warnings.append(f"{origin} has no effect here and is ignored")
        else:
            self.unknown(origin, key, RDZV_CONF_KEYS, "one of " + ", ".join(RDZV_CONF_KEYS))

    def unknown(self, origin: str, name: str, known: Iterable[str], expected: str) -> None:
        guess = _closest(name, known)
        advice = f"did you mean {guess}?" if guess else "see elastic-agent --help"
        self.problems.append(Problem(origin, None, expected, advice))


# --- One reader per source ---


def read_argv(argv: Sequence[str]) -> Layer:
    """Options up to the first word that is none; that word is the script, and all after it are its arguments.

    After an unknown option nobody knows which word is the script: the walk goes on to find further problems, but
    nothing is then said about the script.
    """
    layer = Layer()
    flags = {
        f"--{name}": option for option in OPTIONS if Source.CLI in option.sources for name in option.names
    }
    flags |= {option.short: option for option in OPTIONS if option.short}
    ignored = {f"--{name}": name for name in IGNORED_TORCHRUN_OPTIONS} | IGNORED_TORCHRUN_SHORTS
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--" and words:
            _put_command(layer, SCRIPT, words.pop(0), words, "command line: script")
            break
        if not word.startswith("-"):
            _put_command(layer, SCRIPT, word, words, "command line: script")
            break
        written, equals, text = word.partition("=")
        flag = written.replace("_", "-")
        option = flags.get(flag)
        if option is None and flag not in ignored:
            layer.unknown(written, flag, flags, "an option of elastic-agent")
            layer.broken.add(SCRIPT.name)
            guess = flags.get(_closest(flag, flags))
            if not equals and not (guess and guess.flag) and words and not words[0].startswith("-"):
                words.pop(0)
            continue
        if option is not None and option.flag:
            layer.put(option, text if equals else "true", written)
            continue
        if not equals:
            if not words or words[0].startswith("--") or words[0] in flags:
                expected = option.kind.expects if option else "a value"
                layer.problems.append(Problem(written, None, expected, f"write {written} VALUE"))
                layer.broken.add(option.name if option else "")
                continue
            text = words.pop(0)
        if option is None:
            layer.warnings.append(f"{written} is ignored: {IGNORED_TORCHRUN_OPTIONS[ignored[flag]]}")
        elif option in TARGETS:
            _put_command(layer, option, text, words, written)
            break
        else:
            layer.put(option, text, written)
    return layer


def _put_command(layer: Layer, target: Option[object], text: str, args: Sequence[str], origin: str) -> None:
    layer.put(target, text, origin)
    layer.given[ARGS.name] = Setting(tuple(args), origin, shlex.join(args))


def read_environ(environ: Mapping[str, str]) -> Layer:
    """`ELASTIC_AGENT_*`, and torchrun's `PET_*` where the two mean the same, the former being stronger."""
    layer = Layer()
    for option in _SHORTHANDS_FIRST:
        name = _variable(TORCHRUN_ENV_PREFIX, option.torchrun)
        if option.torchrun and name in environ:
            layer.put(option, environ[name], name)
    for torchrun, reason in IGNORED_TORCHRUN_OPTIONS.items():
        name = _variable(TORCHRUN_ENV_PREFIX, torchrun)
        if name in environ:
            layer.warnings.append(f"{name} is ignored: {reason}")
    variables = {
        _variable(ENV_PREFIX, name): option
        for option in _SHORTHANDS_FIRST
        if Source.ENV in option.sources
        for name in option.names
    }
    for name, option in variables.items():
        if name in environ:
            layer.put(option, environ[name], name)
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in variables and name not in WORKER_VARIABLES:
            layer.unknown(name, name, variables, "a variable that elastic-agent knows")
    return layer


def read_file(path: str) -> Layer:
    """A flat TOML file with the options' names as keys."""
    layer = Layer()
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise ValueError(f"it is larger than {MOST_FILE_BYTES} bytes")
        document = tomllib.loads(content.decode())
    # RecursionError: what the parser makes of a few thousand brackets.
    except (OSError, ValueError, RecursionError) as error:
        advice = f"it cannot be used: {error}"
        layer.problems.append(Problem(f"configuration file {path}", None, "a readable TOML file", advice))
        layer.broken.add(SCRIPT.name)
        return layer
    keys = {
        name: option for option in _SHORTHANDS_FIRST if Source.FILE in option.sources for name in option.names
    }
    entries: dict[str, tuple[str, object]] = {}  # by option name: the key as written, and its value
    for key, value in document.items():
        name = key.replace("_", "-")
        option = keys.get(name)
        if option is None:
            layer.unknown(f"{path}: {key}", name, keys, "a key that elastic-agent knows")
        elif option.name in entries:
            advice = f"keep either it or {entries[option.name][0]}"
            layer.problems.append(Problem(f"{path}: {key}", None, "each setting only once", advice))
        else:
            entries[option.name] = (key, value)
    for option in _SHORTHANDS_FIRST:
        if option.name not in entries:
            continue
        key, value = entries[option.name]
        text = _toml_text(option, value)
        if text is None:
            expected = "a list of texts" if option is ARGS else "a text, a number, true or false"
            layer.problems.append(Problem(f"{path}: {key}", str(value), expected, _advice(option)))
            layer.broken.add(option.name)
        else:
            layer.put(option, text, f"{path}: {key}")
    return layer


def _toml_text(option: Option[object], value: object) -> str | None:
    """The text a person would have written on the command line, or None for what has no such text."""
    if option is ARGS and isinstance(value, list):
        words = [_toml_text(SCRIPT, word) for word in value]
        return None if None in words else shlex.join(cast("list[str]", words))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0")  # never an exponent, which no kind reads
    if isinstance(value, int | str):
        return str(value)
    return None


# --- Merge, derive, check ---


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
    if endpoint is not None and endpoint.port == 0 and endpoint.host in LOOPBACK:
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


def _variable(prefix: str, name: str) -> str:
    return prefix + name.upper().replace("-", "_")


def _advice(option: Option[object]) -> str:
    return "correct it, or leave it out" + (f" (default: {option.default})" if option.default else "")


def _closest(name: str, known: Iterable[str]) -> str:
    """The known name a misspelt one was probably meant to be, or nothing. Its beginning counts for more."""
    names = sorted(known)
    begun = [candidate for candidate in names if len(name) > 3 and candidate.startswith(name)]
    return next(iter(begun + get_close_matches(name, names, n=1, cutoff=0.7)), "")


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
