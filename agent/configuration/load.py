"""Reads each source of settings (command line, environment, file) into `Settings`, to its end.

Every problem of a source is collected, not only the first: so the command line is not read by argparse, which stops
there.

The file may have rows `[[cause]]`: causes of failures of the user's own, and changes of built-in ones. Each has a
`name`. A failure has this cause if a line of its exception, or one of its last lines, has the text `contains` in it;
such rows come before all built-in ones, in the order of the file. The row's `action` is the action of the cause. A name
that the agent does not know needs both.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ...rendezvous.records import Action
from ...rendezvous.text import CAUSE
from ...worker.wire.environment import WORKER_VARIABLES
from .config import ARGS, SCRIPT, Problem
from .options import OPTIONS, TARGETS
from .parse import Option, Source
from .settings import IGNORED_TORCHRUN_OPTIONS, VARIABLES, Setting, Settings, closest, correction
from .values import BUILT_IN_CAUSES, UserCause

KEY = "cause"
MOST_ROWS = 32
MOST_TEXT = 500

_NEEDED = {"contains": "a text that it contains", "action": "an action"}
_KEYS = ("name", "contains", "action")
_ACTIONS = {action.value: action for action in Action if action is not Action.EXCLUDE_NODE}
"""A script can print any text, so none of it excludes a node."""
_OF_METRICS = frozenset(("ok", "join", "leave", "lost"))
"""Other values of the metrics' label `reason`, which are no failures."""


def read_causes(value: object, path: str) -> tuple[tuple[UserCause, ...], list[Problem]]:
    """The rows, and all problems in them. `value` is the file's value of `KEY`."""
    origin, rows, problems = f"{path}: {KEY}", [], []
    actions: dict[str, str] = {}
    if (
        not isinstance(value, list)
        or not all(isinstance(row, dict) for row in value)
        or len(value) > MOST_ROWS
    ):
        expected = f"tables, at most {MOST_ROWS} rows"
        advice = "write each as [[cause]], with name, contains and action below it"
        return (), [Problem(origin, None, expected, advice)]
    for number, row in enumerate(value, 1):
        found = list(_cause_problems(row, actions))
        for key, expected, advice in found:
            shown = str(row[key]) if key in row else None
            part = f"{origin} {number}: {key}" if key else f"{origin} {number}"
            problems.append(Problem(part, shown, expected, advice))
        if not found:
            action = _ACTIONS.get(row.get("action", ""))
            rows.append(UserCause(row["name"], row.get("contains", ""), action))
            actions.setdefault(row["name"], row.get("action", ""))
    return tuple(rows), problems


def _cause_problems(row: Mapping[str, object], actions: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The key, "" for the whole row, what is expected, and advice. `actions` are those of the rows before, by name."""
    unknown = [key for key in row if key not in _KEYS]
    for key in unknown:
        advice = "contains = 'TEXT' is a part of a line as it is; a row for each of several texts"
        yield key, "name, contains or action", advice
    name, text, action = (row.get(key) for key in _KEYS)
    named = isinstance(name, str) and CAUSE.fullmatch(name) is not None and name not in _OF_METRICS
    if not named:
        expected = "a name of small letters, digits and _, which begins with a letter and has at most 40"
        yield "name", expected, "like flaky_storage; ok, join, leave and lost are taken"
    one_line = isinstance(text, str) and text.strip() and "\n" not in text and len(text) <= MOST_TEXT
    if text is not None and not one_line:
        expected = f"a text of one line, at most {MOST_TEXT} characters"
        yield "contains", expected, "write a part of the line that tells the cause"
    if action is not None and str(action) not in _ACTIONS:
        yield "action", f"one of {', '.join(_ACTIONS)}", "docs/configuration.md says what each does"
    if unknown or not named:
        return
    missing = [needed for key, needed in _NEEDED.items() if key not in row]
    known = name in BUILT_IN_CAUSES or name in actions
    if missing and (len(missing) == len(_NEEDED) or not known):
        yield "", " and ".join(missing), "add it, or take the name of a known cause"
    before = actions.get(str(name))
    if str(action) in _ACTIONS and before and action != before:
        yield "action", before, "one cause has one action, and an earlier row has this one"


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "ELASTIC_AGENT_"
TORCHRUN_ENV_PREFIX = "PET_"
MOST_FILE_BYTES = 1 << 20

# A shorthand goes first, so that within one source the option it stands for wins.
_SHORTHANDS_FIRST = sorted(OPTIONS, key=lambda option: not option.shorthand)


# --- One reader per source ---


def read_argv(
    argv: Sequence[str],
    more: Sequence[Option[object]] = (),
) -> Settings:
    """Options up to the first word that is none; that word is the script, and all after it are its arguments.

    `more` are the options that a sub-command has besides. `-m` and `--no-python` have what to run as their value,
    or, where an option or `--` follows them, stand alone as under torchrun: then the first word that is no option is
    what to run.

    After an unknown option it is not known which word is the script: the walk goes on to find further problems, but
    none of the script.
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
            meant = f"-{flag}" if f"-{flag}" in flags else flag  # with one dash
            settings.unknown(written, meant, flags, "an option of elastic-agent")
            settings.broken.add(SCRIPT.name)
            if not equals:
                _skip_value(flags.get(closest(flag, flags)), words)
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
    with_one_dash = f"-{written}".replace("_", "-") in flags
    if (
        len(written) > 2
        and not with_one_dash
        and short is not None
        and short not in TARGETS
        and not short.flag
    ):
        return word[:2], True, word[2:]
    return written, bool(equals), text


def _flags(more: Sequence[Option[object]]) -> dict[str, Option[object]]:
    """Each spelling on the command line."""
    flags = {
        f"--{name}": option
        for option in (*OPTIONS, *more)
        if Source.CLI in option.sources
        for name in option.names
    }
    flags |= {option.short: option for option in OPTIONS if option.short}
    return flags


def _skip_value(guess: Option[object] | None, words: list[str]) -> None:
    """Of a flag that is not known, and was probably meant to be `guess`: the next word may be its value."""
    if not (guess and guess.flag) and words and not words[0].startswith("-"):
        words.pop(0)


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
        _variable(TORCHRUN_ENV_PREFIX, option.torchrun): option
        for option in _SHORTHANDS_FIRST
        if option.torchrun
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
        if Source.ENV in option.sources
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
    """A TOML file with the options' names as keys, and rows `[[cause]]`."""
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
        name: option for option in _SHORTHANDS_FIRST if Source.FILE in option.sources for name in option.names
    }
    if KEY in document:
        causes, problems = read_causes(document.pop(KEY), path)
        settings.causes = Setting(causes, f"{path}: {KEY}")
        settings.problems += problems
    entries: dict[str, tuple[str, object]] = {}  # by option name: the key as written, and its value
    for key, value in document.items():
        name = key.replace("_", "-")
        option = keys.get(name)
        if option is None:
            settings.unknown(f"{path}: {key}", name, keys, "a key that elastic-agent knows")
        elif option.name in entries:
            advice = f"keep either it or {entries[option.name][0]}"
            settings.problems.append(Problem(f"{path}: {key}", None, "each setting only once", advice))
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


def _variable(prefix: str, name: str) -> str:
    return prefix + name.upper().replace("-", "_")
