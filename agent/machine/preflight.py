"""What settings name on this machine, found wanting at once, and not hours later: folders, memory, the
source of notices, and the module or program that workers are to run.

That one is looked for where they will look, and nothing of it is run: of a module only its outermost package, and
only where workers run in our interpreter. That a script is a file, `configuration.check` checks.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sys
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from ..checkpoints.folder import SHARED_MEMORY
from ..common.exits import CannotStart, ExitCode, NoTemporaryDirectory
from ..common.folders import own_path
from ..configuration.config import Config, ConfigError, Problem
from ..configuration.values import Command, NoticeSource
from ..workers.processes.run_files import MAX_PARENT_BYTES, run_directory_parent
from ..workers.processes.workers import job_python


def check_resources(config: Config, environ: Mapping[str, str]) -> None:
    """Raises ConfigError with all that cannot work."""
    problems = [
        *_log_dir(config.logs.given_directory),
        *_memory(config.memory_checkpoints),
        *_notice(config.stop.notice),
        *_run_directory(environ),
    ]
    if problems:
        raise ConfigError(problems)


def _log_dir(directory: Path | None) -> Iterator[Problem]:
    if directory is None:
        return
    there = directory.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        found = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        found = f"this user may not write to {there}"
    else:
        return
    expected = f"a folder that is there or can be made, but {found}"
    yield Problem("--log-dir", str(directory), expected, "name another, or leave it out", here=True)


def _memory(limit: int | None) -> Iterator[Problem]:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return  # there is none, and then the agent goes on without
    room = found.f_blocks * found.f_frsize
    if limit is not None and limit > room:
        given = f"{limit / 2**30:g}GiB"
        expected = f"at most what {SHARED_MEMORY} holds, {room / 2**30:.1f} GiB"
        advice = "lower it, or make that larger (Docker: --shm-size, the chart: sharedMemory)"
        yield Problem("--memory-checkpoints", given, expected, advice, here=True)


def _notice(source: NoticeSource) -> Iterator[Problem]:
    """A file that is not there is no notice."""
    path = source.path
    if (
        source.kind == "file"
        and os.path.exists(path)
        and not (os.path.isfile(path) and os.access(path, os.R_OK))
    ):
        expected = "a regular file that this user may read, or none yet"
        yield Problem("--notice", str(source), expected, "name another, or remove what is there", here=True)


def _run_directory(environ: Mapping[str, str]) -> Iterator[Problem]:
    if run_directory_parent(environ) is None:
        expected = f"a folder that takes a new file now, of at most {MAX_PARENT_BYTES} bytes, for the agent's sockets"
        advice = "name one in TMPDIR"
        try:
            own_path("")
        except NoTemporaryDirectory as error:
            advice = str(error)
        yield Problem("TMPDIR", environ.get("TMPDIR"), expected, advice, here=True)


def check_target(command: Command, environ: Mapping[str, str]) -> None:
    """Raises ConfigError: no restart helps what is not there."""
    if command.kind == "binary" and shutil.which(command.target, path=environ.get("PATH")) is None:
        found = "this file may not be run" if os.path.isfile(command.target) else "there is none of this name"
        expected = f"a program that exists and may be run, but {found}"
        advice = f"check its name and PATH, or write its path, seen from {os.getcwd()}"
        raise ConfigError([Problem("--no-python", command.target, expected, advice)])
    ours = job_python(environ) == sys.executable
    if command.kind == "module" and ours and (missing := _missing(command.target.partition(".")[0])):
        advice = (
            f"check its name; Python looks in {os.getcwd()}, in PYTHONPATH and among what is installed for it"
        )
        raise ConfigError([Problem("-m", command.target, f"a module, but {missing}", advice)])


def refuse_bad_syntax(command: Command, environ: Mapping[str, str]) -> None:
    """Raises CannotStart for a script that this Python cannot parse. What is odd, such as its encoding, the workers
    find out."""
    path, script = command.target, command.kind in ("script", "run-path")
    if not script or not path.endswith(".py") or job_python(environ) != sys.executable:
        return
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except (OSError, SyntaxError, ValueError):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source, path)
    except SyntaxError as error:
        found = f"{type(error).__name__}: {error.msg}: {(error.text or '').strip()}"
        reason = f"{path}, line {error.lineno}: {found}; correct the script"
        raise CannotStart(ExitCode.CRASH_LOOP, reason) from error
    except (ValueError, RecursionError, MemoryError):
        return


def _missing(package: str) -> str:
    """What is not there; empty when it is, or when that is not certain."""
    try:
        spec = importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    except (ImportError, ValueError, AttributeError):
        return ""
    return f"there is no module {package!r}" if spec is None else ""
