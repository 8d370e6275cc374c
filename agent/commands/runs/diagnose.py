"""`elastic-agent diagnose RUN`: one archive of what a run has left, for whoever is to help.

It reads files, asks nobody and changes nothing. The run may be one that goes on.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from .... import __version__
from ...common.exits import DiagnoseCode
from ...configuration.config import HELP, SCRIPT, ConfigError, Problem
from ...configuration.logs import LOG_DIR
from ...configuration.reading.sources import read_argv, read_environ
from ...configuration.types.option import Group, Option
from ...configuration.types.parsers import PATH
from ...output.masking import secrets_in
from ..store_command import one_line_errors
from .bundle import Bundled, write_bundle
from .run_folders import NoRun, find_run

_USAGE = """\
usage: elastic-agent diagnose RUN [--output FILE.tar.gz] [--log-dir DIR]

Writes logs, evidence, journals and settings of a run into one archive, without what looks like a secret. RUN is the
folder of a run, or the name of a job: then it is the newest run of that job below --log-dir, or where agents without
one keep their files. What other nodes have on disks of their own is not there: copy it into the folder first.
"""

DIAGNOSE_OPTIONS = Group("diagnose")
OUTPUT: Option[Path | None] = DIAGNOSE_OPTIONS.option(
    "output",
    PATH,
    "the archive, which must not be there yet (default: the folder's name with .tar.gz, in the current folder)",
    metavar="FILE",
)


def main(words: Sequence[str]) -> int:
    """Returns a `DiagnoseCode`."""
    run = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if run is not None else words, DIAGNOSE_OPTIONS)
    if HELP in command_line:
        print(_help())
        return DiagnoseCode.WRITTEN
    problems = command_line.problems
    if SCRIPT in command_line:
        problems.append(command_line[SCRIPT].problem("one run", "leave it out"))
    if run is None:
        problems.append(Problem("diagnose", None, "a run", "write its folder or its job first; see --help"))
    if problems or run is None:
        print(f"elastic-agent diagnose: {ConfigError(problems)}", file=sys.stderr)
        return DiagnoseCode.BAD_CONFIG
    given = (command_line if LOG_DIR in command_line else read_environ(os.environ))[LOG_DIR].value
    try:
        with one_line_errors(DiagnoseCode.INTERRUPTED):
            return _bundle(find_run(run, given).resolve(), command_line[OUTPUT].value)
    except NoRun as error:
        print(f"elastic-agent diagnose: {error}", file=sys.stderr)
        return DiagnoseCode.NO_RUN


def _bundle(folder: Path, output: Path | None) -> int:
    target = output or Path(f"{folder.name}.tar.gz")
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb") as archive:
                done = write_bundle(archive, folder, _about, secrets_in(os.environ))
        except BaseException:
            target.unlink()
            raise
    except OSError as error:
        print(
            f"elastic-agent diagnose: {target}: {error.strerror}; name another with --output", file=sys.stderr
        )
        return DiagnoseCode.NOT_WRITTEN
    print(target, flush=True)
    print(
        f"elastic-agent diagnose: {done.files} files. What looks like a secret is masked; look through it before you "
        "send it to others",
        file=sys.stderr,
    )
    return DiagnoseCode.WRITTEN


def _about(done: Bundled) -> str:
    lines = [
        f"elastic-agent {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{done.files} files, {done.bytes} bytes",
        *done.notes,
    ]
    return "\n".join(lines) + "\n"


def _help() -> str:
    codes = [f"  {int(code):>3}  {code.meaning}" for code in DiagnoseCode]
    options = [option.help_text() for option in (*DIAGNOSE_OPTIONS, LOG_DIR)]
    return "\n".join([_USAGE, *options, "", "Exit codes:", *codes])
