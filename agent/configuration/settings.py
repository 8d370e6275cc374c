"""Settings: values with their origins, and what was wrong or without effect where they were read.

The tables of torchrun's spellings that have no option of their own are here, too.

Words: a *setting* is a value with its *origin*, the words by which a person finds the place to change it. Every problem
is collected, not only the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Generic, TypeVar, cast

from .config import (
    ARGS,
    DEVICE_PINNING,
    LOG_LEVEL,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NNODES,
    NO_PYTHON,
    PREFIX_TEMPLATE,
    SCRIPT,
    VIRTUAL_LOCAL_RANK,
    Problem,
)
from .options import OPTIONS, RDZV_CONF
from .parse import Option, Source
from .stopping import STOP_GRACE
from .values import NodeCounts, UserCause

T = TypeVar("T")


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
    causes: Setting[tuple[UserCause, ...]] = field(default_factory=lambda: Setting((), "default"))
    """The rows `[[cause]]`, which only a file can have."""
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
        elif option is VIRTUAL_LOCAL_RANK:
            if value:
                self.put(DEVICE_PINNING, "mask", origin)
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
        guess = closest(name, known)
        advice = f"did you mean {guess}?" if guess else "see elastic-agent --help-all"
        self.problems.append(Problem(origin, None, expected, advice))

    def lines(self) -> list[str]:
        """Every setting as a TOML line with its origin, those that a source gave first; the lines are a file that means
        the same."""
        rows, causes = [], []
        for option in OPTIONS:
            if option.shorthand or Source.FILE not in option.sources:
                continue
            setting = self[option]
            unset = setting.value is None
            written = f"# {option.name}: not set" if unset else f"{option.name} = {_quoted(setting.text)}"
            rows.append((written, setting.origin))
        for cause in self.causes.value:
            parts = ", ".join(f"{key} = {_quoted(text)}" for key, text in cause.parts.items())
            causes.append(f"{{{parts}}}")
        if causes:
            rows.append((f"cause = [{', '.join(causes)}]", self.causes.origin))
        rows.sort(key=lambda row: row[1].startswith("default"))
        width = max(len(written) for written, _ in rows if len(written) <= 40)
        return [f"{written:<{width}}  # {_quoted(origin)[1:-1]}" for written, origin in rows]


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
