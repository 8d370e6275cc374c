"""Shared by the commands about a run's files: they find the run's folder, show help, and end with the same codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....rendezvous.text import NAME
from ...common.exits import Code, CommandCode, exit_codes
from ...configuration.config import HELP, LOG_DIR, SCRIPT, ConfigError
from ...configuration.load import read_argv, read_environ
from ...configuration.parse import Option
from ...configuration.settings import Settings
from ...output.log_folders import is_run, log_directory, newest_run
from ..store_command import CannotDo, one_line_errors


class NoRun(Exception):
    """No folder of a run was found; the text says where."""


def run_command(
    name: str,
    words: Sequence[str],
    usage: str,
    options: Sequence[Option[Any]],
    work: Callable[[Path, Settings], None],
) -> int:
    """Returns a `CommandCode`. The first word is the run, without it the newest of all is taken; `work` gets its
    folder, and raises CannotDo."""
    run = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if run is not None else words, options)
    if HELP in command_line:
        print(run_help(usage, options))
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    problems = command_line.problems
    if SCRIPT in command_line:
        problems.append(command_line[SCRIPT].problem("one run", "leave it out"))
    code: Code
    reason: Exception
    if problems:
        code, reason = CommandCode.BAD_CONFIG, ConfigError(problems)
    else:
        try:
            with one_line_errors(CommandCode.INTERRUPTED):
                folder = find_run(run, given_log_dir(command_line))
                if run is None:
                    print(f"elastic-agent {name}: {folder}, the newest run there", file=sys.stderr)
                work(folder, command_line)
            return 0
        except NoRun as error:
            code, reason = CommandCode.NOT_FOUND, error
        except CannotDo as error:
            code, reason = error.code, error
        except BrokenPipeError:
            return CommandCode.OUTPUT_CLOSED
    print(f"elastic-agent {name}: {reason}", file=sys.stderr)
    return code


def run_help(usage: str, options: Iterable[Option[Any]]) -> str:
    """`options`: of the command's own, beside --log-dir."""
    where = replace(
        LOG_DIR, help="the folder of the runs (default: where agents without it keep their files)"
    )
    return "\n".join(
        [usage, *(option.help_text() for option in (*options, where)), "", *exit_codes(CommandCode)]
    )


def given_log_dir(command_line: Settings) -> Path | None:
    """The --log-dir of the command line, else of the environment."""
    return (command_line if LOG_DIR in command_line else read_environ(os.environ))[LOG_DIR].value


def find_run(run: str | None, log_dir: Path | None) -> Path:
    """The folder of `run`, which is a folder or the name of a job; None: the newest of all. `log_dir`: of --log-dir.
    Raises NoRun."""
    directory = None
    try:
        if run is not None and (folder := Path(run)).is_dir() and is_run(folder):
            return folder
        directory = log_directory(log_dir, own=log_dir is None)
        named = run is None or NAME.fullmatch(run) is not None
        found = newest_run(directory, run) if directory is not None and named else None
    except OSError as error:
        raise NoRun(f"{run or directory or '--log-dir'}: {error.strerror or error}; see --log-dir") from None
    if found is None and run is None:
        raise NoRun(f"no run is in {directory}: name the folder of one, or see --log-dir")
    if found is None:
        where = f"{run} is no folder of a run, and {directory} has no run of a job of this name"
        raise NoRun(f"{where}; see --log-dir")
    return found
