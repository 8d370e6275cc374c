"""Reads each source of settings (command line, environment, file) into `Settings`, to its end.

Words: a *setting* is a value with its *origin*, the words by which a person finds the place to change it. Every problem
of a source is collected, not only the first: so the command line is not read by argparse, which stops there.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Generic, TypeVar, cast

from ...worker.wire.environment import WORKER_VARIABLES
from .config import (
    ARGS,
    LOG_LEVEL,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NNODES,
    NO_PYTHON,
    OPTIONS,
    PREFIX_TEMPLATE,
    RDZV_CONF,
    SCRIPT,
    TARGETS,
    Problem,
)
from .parse import NodeCounts, Option, OptionSource
from .stopping import STOP_GRACE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RDZV_CONF_KEYS = {key: option for option in OPTIONS for key in option.conf}
"""The first key of several for one option is the one to recommend."""

VARIABLES: dict[str, Option[object]] = {
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": PREFIX_TEMPLATE,
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": STOP_GRACE,
    "LOGLEVEL": LOG_LEVEL,
}
"""Besides `PET_*`, and weaker."""

TARGET_SWITCHES: dict[str, Option[str | None]] = {"PET_MODULE": MODULE, "PET_NO_PYTHON": NO_PYTHON}
"""Variables that take the place of a switch on the command line; 0 is off."""

IGNORED_RDZV_CONF_KEYS = frozenset(
    {"timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
    | {"read_timeout", "is_host", "rank", "store_type", "protocol", "etcd_prefix"}
)

# Option, each with one value, and why it can be ignored. Training runs the same without them.
IGNORED_TORCHRUN_OPTIONS = {
    "monitor-interval": "a worker's end is noticed at once, nothing is polled",
    "start-method": "it only concerns functions as entry points",
    "event-log-handler": "events go to the agent's log",
    "exit-barrier-timeout": "an agent waits for no other at its end; --hang-timeout is for ranks that do not end",
    "logs-specs": "--log-dir, --redirects and --tee say where lines go",
}

ENV_PREFIX = "ELASTIC_AGENT_"
TORCHRUN_ENV_PREFIX = "PET_"
MOST_FILE_BYTES = 1 << 20

# A shorthand goes first, so that within one source the option it stands for wins.
_SHORTHANDS_FIRST = sorted(OPTIONS, key=lambda option: not option.shorthand)

T = TypeVar("T")


REMOVED = {
    "allow-other-script": "give all nodes the same script; of --no-python python SCRIPT only the name is compared",
    "away": "of exclude: leave it out, it takes any name, and names the nodes that are there",
    "cause": "leave it out: what follows from a failure is in docs/runbook.md, for all jobs alike",
    "check-directory": "leave it out: the agent does not know where the script keeps its checkpoints",
    "cool-down": "leave it out: an excluded node checks itself after 1 minute, and then after twice the time",
    "device-pinning": "for mask write --virtual-local-rank, for none --devices-per-worker 0",
    "drain-timeout": "leave it out: it is two thirds of --stop-grace",
    "etcd-password": "write the password into a file of mode 600, and --etcd-password-file FILE",
    "exclude-stragglers": "leave it out: stragglers are named; elastic-agent exclude takes the node of one out",
    "exit-timeout": "leave it out: ranks that live on at the end are judged by --hang-timeout like all others",
    "expected-nodes": "write --last-call TIME, which ends when --max-nodes nodes are there",
    "failure-domain": "leave it out: replicas go to the next nodes in an order that racks and zones play no part in",
    "failure-grace": "leave it out: after another worker's failure it is 1 s; --stop-grace is for planned stops",
    "follow": "of submit: write elastic-agent logs JOB --follow; of events: see an agent's page, or /events?since=N",
    "gpu-memory-wait": "leave it out: a restart waits at most 30 s for the memory of killed workers",
    "help-all": "write --help, which shows every option; -h shows the first ones",
    "job-ends-at": "write --notice file:PATH, with that instant in the file; --slurm reads SLURM_JOB_END_TIME",
    "just-in-time-grace": "leave it out: workers that guard their last step have 2 s",
    "kill-timeout": "leave it out: what lives 60 s after SIGKILL costs this node its place",
    "memory-replica-rate": "leave it out; to hold replicas back, limit the interface with tc, or --memory-replicas 0",
    "network-interface": "write --local-addr NAME, which also takes an interface",
    "network-profile": "leave it out, or set NCCL_IB_DISABLE=1 for TCP, NCCL_DEBUG=INFO for what NCCL chooses",
    "network-wait": "leave it out: a network that is missing is waited for up to --join-timeout",
    "otlp-endpoint": "leave it out: recoveries are events, of elastic-agent events --json",
    "picture": "of report: leave it out, elastic_agent_lost_time_seconds_total over time shows it",
    "process-group-timeout": "give init_process_group its timeout=; by default it is twice --hang-timeout",
    "quiet": "write --log-level warning",
    "rank": "of logs: write elastic-agent logs JOB | grep '/N\\]'",
    "run-again": "write another --rdzv-id, or first etcdctl del --prefix /elastic-agent/JOB/",
    "service-stop-limit": "leave it out; a whole stop takes twice --stop-grace and 5 s, and at least 15 s",
    "time-limit": "of submit: elastic-agent cancel JOB, or the script's own limit",
    "watch": "of jobs: write watch elastic-agent jobs",
}
"""Options of earlier versions: what to write instead, or why nothing."""


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value in force. `origin` is "--min-nodes", "ELASTIC_AGENT_MIN_NODES", "FILE: min-nodes" or "default".

    `text` is what was written, as it may be shown.
    """

    value: T
    origin: str
    text: str = ""

    @property
    def is_default(self) -> bool:
        """No source gave it."""
        return self.origin.startswith("default")

    def problem(self, expected: str, advice: str) -> Problem:
        return Problem(self.origin, self.text, expected, advice)


@dataclass(slots=True)
class Settings:
    """The settings of one source, or of all: by option name in `given`, and what was wrong or without effect.

    `broken` names the options whose value could not be read; relations with them cannot be judged.
    """

    given: dict[str, Setting[object]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    job_ends_at: int | None = None
    """Unix time, which only Slurm's environment says."""

    def __getitem__(self, option: Option[T]) -> Setting[T]:
        """An option that is not given has its default."""
        default = Setting(option.default_value, "default", option.default or "")
        return cast("Setting[T]", self.given.get(option.name, default))

    def __contains__(self, option: Option[object]) -> bool:
        return option.name in self.given

    def derive(self, option: Option[T], value: T, origin: str) -> None:
        self.given[option.name] = Setting(value, origin, "" if value is None else str(value))

    def put(self, option: Option[object], text: str, origin: str) -> None:
        """Read one written value. A later one for the same option replaces it."""
        try:
            if "\0" in text:
                raise ValueError("take the NUL byte out: no path, name or argument can have one")
            value = option.parser.parse(text)
        except ValueError as error:
            self.broken.add(option.name)
            advice = str(error) or correction(option)
            self.problems.append(Problem(origin, option.parser.shown(text), option.parser.expects, advice))
            return
        if option not in (SCRIPT, ARGS) and any("\ud800" <= character <= "\udfff" for character in text):
            self.broken.add(option.name)
            self.problems.append(Problem(origin, ascii(text), "a text in UTF-8", correction(option)))
            return
        if option is NNODES:
            counts = cast(NodeCounts, value)
            self.put(MIN_NODES, str(counts.min), origin)
            self.put(MAX_NODES, str(counts.max), origin)
        elif option is RDZV_CONF:
            for key, part in cast("tuple[tuple[str, str], ...]", value):
                self._put_rdzv_conf(key, part, f"{origin} {key}")
        else:
            self.given[option.name] = Setting(value, origin, option.parser.shown(text))

    def _put_rdzv_conf(self, key: str, text: str, origin: str) -> None:
        if key in RDZV_CONF_KEYS:
            self.put(RDZV_CONF_KEYS[key], text, origin)
        elif key in IGNORED_RDZV_CONF_KEYS:
            self.warnings.append(f"{origin} has no effect here and is ignored")
        else:
            self.unknown(origin, key, RDZV_CONF_KEYS, "one of " + ", ".join(RDZV_CONF_KEYS))

    def unknown(self, origin: str, name: str, known: Iterable[str], expected: str) -> None:
        if advice := REMOVED.get(name.removeprefix("ELASTIC_AGENT_").lower().replace("_", "-").strip("-")):
            self.problems.append(Problem(origin, None, "no such option any more", advice))
            return
        guess = closest(name, known)
        advice = f"did you mean {guess}?" if guess else "see elastic-agent --help"
        self.problems.append(Problem(origin, None, expected, advice))

    def lines(self) -> list[str]:
        """Every setting as a TOML line with its origin, those that a source gave first; the lines are a file that means
        the same."""
        rows = []
        for option in OPTIONS:
            if option.shorthand or OptionSource.FILE not in option.sources:
                continue
            setting = self[option]
            unset = setting.value is None
            written = f"# {option.name}: not set" if unset else f"{option.name} = {_quoted(setting.text)}"
            rows.append((written, setting.origin))
        rows.sort(key=lambda row: row[1].startswith("default"))
        width = max(len(written) for written, _ in rows if len(written) <= 40)
        return [f"{written:<{width}}  # {_quoted(origin)[1:-1]}" for written, origin in rows]


# --- One reader per source ---


def read_argv(
    argv: Sequence[str],
    more: Sequence[Option[object]] = (),
) -> Settings:
    """Options up to the first word that is none; that word is the script, and all after it are its arguments.

    `more` are the options that a sub-command has besides. `-m` and `--no-python` have what to run as their value,
    or, where an option or `--` follows them, stand alone as under torchrun: then the first word that is no option is
    what to run.

    After an unknown option it is not known which word is its value, or the script: there is no problem with that.
    """
    settings = Settings()
    flags = _flags(more)
    ignored = {f"--{name}": name for name in IGNORED_TORCHRUN_OPTIONS}
    words = list(argv)
    target: Option[object] = SCRIPT
    target_origin = "command line: script"
    while words:
        word = words.pop(0)
        if word == "--" and words:
            _put_command(settings, target, words.pop(0), words, target_origin)
            break
        if not word.startswith("-"):
            _put_command(settings, target, word, _after_dashes(words), target_origin)
            break
        written, equals, text = _parted(word, flags)
        flag = written.replace("_", "-")
        option = flags.get(flag)
        if option is not None and option in TARGETS:
            if target is not SCRIPT:
                advice = f"keep either it or {target_origin}"
                settings.problems.append(Problem(written, None, "one thing to run", advice))
                settings.broken.add(SCRIPT.name)
            if not equals and words and words[0].startswith("-"):
                target, target_origin = option, written
                continue
        if option is None and flag not in ignored:
            settings.unknown(written, flag, flags, "an option of elastic-agent")
            settings.broken.add(SCRIPT.name)
            continue
        if option is not None and option.flag:
            settings.put(option, text if equals else "true", written)
            continue
        if not equals:
            if not words or words[0].startswith("--") or words[0] in flags:
                expected = option.parser.expects if option else "a value"
                settings.problems.append(Problem(written, None, expected, f"write {written} VALUE"))
                settings.broken.add(option.name if option else "")
                continue
            text = words.pop(0)
        if option is None:
            settings.warnings.append(f"{written} is ignored: {IGNORED_TORCHRUN_OPTIONS[ignored[flag]]}")
        elif option in TARGETS:
            _put_command(settings, option, text, _after_dashes(words), written)
            break
        else:
            settings.put(option, text, written)
    return settings


def _after_dashes(words: Sequence[str]) -> Sequence[str]:
    """A `--` right behind what to run is no argument of it, as under torchrun; a later one is."""
    return words[1:] if words[:1] == ["--"] else words


def _parted(word: str, flags: Mapping[str, Option[object]]) -> tuple[str, bool, str]:
    """The flag, whether its value is in the same word, and that value: `--tee=3`, or `-t3` for a short flag."""
    written, equals, text = word.partition("=")
    short = flags.get(word[:2])
    if len(written) > 2 and short is not None and short not in TARGETS and not short.flag:
        return word[:2], True, word[2:]
    return written, bool(equals), text


def _flags(more: Sequence[Option[object]]) -> dict[str, Option[object]]:
    """Each spelling on the command line."""
    flags = {
        f"--{name}": option
        for option in (*OPTIONS, *more)
        if OptionSource.CLI in option.sources
        for name in option.names
    }
    flags |= {option.short: option for option in OPTIONS if option.short}
    return flags


def _put_command(
    settings: Settings, target: Option[object], text: str, args: Sequence[str], origin: str
) -> None:
    settings.put(target, text, origin)
    settings.given[ARGS.name] = Setting(tuple(args), origin, shlex.join(args))


def read_environ(environ: Mapping[str, str]) -> Settings:
    """`ELASTIC_AGENT_*`, and torchrun's `PET_*` where the two mean the same, the former being stronger.

    A variable of torchrun's that is empty counts as one that is not there: so most of torchrun's defaults are written.
    """
    settings = Settings()
    theirs = VARIABLES | {
        _variable(TORCHRUN_ENV_PREFIX, option.torchruns): option
        for option in _SHORTHANDS_FIRST
        if option.torchruns
    }
    for name, option in theirs.items():
        if environ.get(name):
            settings.put(option, environ[name], name)
    for torchrun, reason in IGNORED_TORCHRUN_OPTIONS.items():
        name = _variable(TORCHRUN_ENV_PREFIX, torchrun)
        if name in environ:
            settings.warnings.append(f"{name} is ignored: {reason}")
    variables = {
        _variable(ENV_PREFIX, name): option
        for option in _SHORTHANDS_FIRST
        if OptionSource.ENV in option.sources
        for name in option.names
    }
    for name, option in variables.items():
        if name in environ:
            settings.put(option, environ[name], name)
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in variables and name not in WORKER_VARIABLES:
            settings.unknown(name, name, variables, "a variable that elastic-agent knows")
    return settings


def read_file(path: str) -> Settings:
    """A TOML file with the options' names as keys."""
    settings = Settings()
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise ValueError(f"it is larger than {MOST_FILE_BYTES} bytes")
        document = tomllib.loads(content.decode())
    # RecursionError: what the parser makes of a few thousand brackets.
    except (OSError, ValueError, RecursionError) as error:
        advice = f"it cannot be used: {error}"
        settings.problems.append(Problem(f"configuration file {path}", None, "a readable TOML file", advice))
        settings.broken.add(SCRIPT.name)
        return settings
    keys = {
        name: option
        for option in _SHORTHANDS_FIRST
        if OptionSource.FILE in option.sources
        for name in option.names
    }
    found = [(keys.get(key.replace("_", "-")), key, value) for key, value in document.items()]
    for option, key, value in sorted(found, key=lambda each: each[0] is not None and not each[0].shorthand):
        if option is None:
            settings.unknown(f"{path}: {key}", key.replace("_", "-"), keys, "a key that elastic-agent knows")
        elif (text := _toml_text(option, value)) is None:
            expected = "a list of texts" if option is ARGS else "a text, a number, true or false"
            shown = option.parser.shown(str(value))
            settings.problems.append(Problem(f"{path}: {key}", shown, expected, correction(option)))
            settings.broken.add(option.name)
        else:
            settings.put(option, text, f"{path}: {key}")
    return settings


def _toml_text(option: Option[object], value: object) -> str | None:
    """The text a person would have written on the command line, or None for what has no such text."""
    if option is ARGS and isinstance(value, list):
        words = [_toml_text(SCRIPT, word) for word in value]
        return None if None in words else shlex.join(cast("list[str]", words))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0")  # never an exponent, which no parser reads
    if isinstance(value, int | str):
        return str(value)
    return None


# --- Words ---


def comment(text: str) -> str:
    """A TOML comment of ASCII characters, which stays one whatever the text is."""
    return f"# {_plain(text)}"


def _quoted(text: str) -> str:
    """A TOML string."""
    return '"' + _plain(text, escaped='"\\') + '"'


def _plain(text: str, escaped: str = "") -> str:
    """In ASCII characters, which every terminal can show; those in `escaped` are written by number, too."""
    return "".join(c if " " <= c <= "~" and c not in escaped else f"\\U{ord(c):08x}" for c in text)


def correction(option: Option[object]) -> str:
    return "correct it, or leave it out" + (f" (default: {option.default})" if option.default else "")


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that comes nearest, or nothing. A common beginning counts for more."""
    names = sorted(known)
    begun = [candidate for candidate in names if len(name) > 3 and candidate.startswith(name)]
    return next(iter(begun + get_close_matches(name, names, n=1, cutoff=0.7)), "")


def _variable(prefix: str, name: str) -> str:
    return prefix + name.upper().replace("-", "_")
