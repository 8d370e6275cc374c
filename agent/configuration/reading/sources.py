"""Reads each source of settings (command line, environment, file) into a `Layer`, to its end.

Words: a *layer* is the content of one source; a *setting* is a value with its *origin*, the words by which a person
finds the place to change it. Every problem of a source is collected, not only the first: so the command line is not
read by argparse, which stops there.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Generic, TypeVar, cast

from ....worker.wire.environment import WORKER_VARIABLES
from ..config import ARGS, DEVICE_PINNING, MAX_NODES, MIN_NODES, NNODES, SCRIPT, VIRTUAL_LOCAL_RANK, Problem
from ..options import OPTIONS, RDZV_CONF, TARGETS
from ..types.option import Option, Source
from ..types.values import NodeCounts
from .torchrun_spellings import (
    IGNORED_RDZV_CONF_KEYS,
    IGNORED_TORCHRUN_FLAGS,
    IGNORED_TORCHRUN_OPTIONS,
    IGNORED_TORCHRUN_SHORTS,
    RDZV_CONF_KEYS,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

ENV_PREFIX = "ELASTIC_AGENT_"
TORCHRUN_ENV_PREFIX = "PET_"
MOST_FILE_BYTES = 1 << 20

# A shorthand goes first, so that within one source the option it stands for wins.
_SHORTHANDS_FIRST = sorted(OPTIONS, key=lambda option: not option.shorthand)


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


@dataclass(slots=True)
class Layer:
    """The content of one source: settings, by option name, and what was wrong or without effect in it.

    `broken` names the options whose value could not be read; relations with them cannot be judged.
    """

    given: dict[str, Setting[object]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def value(self, option: Option[T]) -> T:
        """Or its default."""
        given = self.given.get(option.name)
        return cast(T, given.value if given is not None else option.default_value)

    def put(self, option: Option[object], text: str, origin: str) -> None:
        """Read one written value. A later one for the same option replaces it."""
        try:
            value = option.parser.parse(text)
        except ValueError as error:
            self.broken.add(option.name)
            advice = str(error) or _advice(option)
            self.problems.append(Problem(origin, option.parser.shown(text), option.parser.expects, advice))
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
        guess = _closest(name, known)
        advice = f"did you mean {guess}?" if guess else "see elastic-agent --help"
        self.problems.append(Problem(origin, None, expected, advice))


# --- One reader per source ---


def read_argv(argv: Sequence[str], more: Sequence[Option[object]] = ()) -> Layer:
    """Options up to the first word that is none; that word is the script, and all after it are its arguments.

    `more` are the options that a sub-command has besides.

    `-m` and `--no-python` have what to run as their value, or, where an option or `--` follows them, stand alone as
    under torchrun: then the first word that is no option is what to run.

    After an unknown option it is not known which word is the script: the walk goes on to find further problems, but
    none of the script.
    """
    layer = Layer()
    flags = {
        f"--{name}": option
        for option in (*OPTIONS, *more)
        if Source.CLI in option.sources
        for name in option.names
    }
    flags |= {option.short: option for option in OPTIONS if option.short}
    ignored = {f"--{name}": name for name in IGNORED_TORCHRUN_OPTIONS} | IGNORED_TORCHRUN_SHORTS
    words = list(argv)
    target: Option[object] = SCRIPT
    target_origin = "command line: script"
    while words:
        word = words.pop(0)
        if word == "--" and words:
            _put_command(layer, target, words.pop(0), words, target_origin)
            break
        if not word.startswith("-"):
            _put_command(layer, target, word, words, target_origin)
            break
        written, equals, text = word.partition("=")
        flag = written.replace("_", "-")
        option = flags.get(flag)
        if flag.removeprefix("--") in IGNORED_TORCHRUN_FLAGS:
            layer.warnings.append(f"{written} is ignored: {IGNORED_TORCHRUN_FLAGS[flag.removeprefix('--')]}")
            continue
        if option is not None and option in TARGETS and not equals and words and words[0].startswith("-"):
            target, target_origin = option, written
            continue
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
                expected = option.parser.expects if option else "a value"
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
            shown = option.parser.shown(str(value))
            layer.problems.append(Problem(f"{path}: {key}", shown, expected, _advice(option)))
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
        return f"{value:.9f}".rstrip("0")  # never an exponent, which no parser reads
    if isinstance(value, int | str):
        return str(value)
    return None


# --- Words ---


def _variable(prefix: str, name: str) -> str:
    return prefix + name.upper().replace("-", "_")


def _advice(option: Option[object]) -> str:
    return "correct it, or leave it out" + (f" (default: {option.default})" if option.default else "")


def _closest(name: str, known: Iterable[str]) -> str:
    """The known name that comes nearest, or nothing. A common beginning counts for more."""
    names = sorted(known)
    begun = [candidate for candidate in names if len(name) > 3 and candidate.startswith(name)]
    return next(iter(begun + get_close_matches(name, names, n=1, cutoff=0.7)), "")
