"""`elastic-agent diagnose RUN`: pack the files of a run into one archive, to send it to those who help.

It reads files, asks no agent and changes nothing. The run may still go on. The archive has a bounded size, and
everything is masked that looks like a secret. Only the end of a long file is kept: its last lines matter most. Links
are not followed. Only the agents' text files and the dumps of torch's flight recorder are taken. `about.txt` lists
what was left out, and why.

Here is also what all commands about a run's files share: they find its folder, show help, and end with the same codes.
"""

from __future__ import annotations

import io
import os
import platform
import re
import stat
import sys
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from .... import __version__
from ....rendezvous.text import NAME
from ...common.exits import CannotDo, ExitCode, exit_codes
from ...configuration.config import HELP, LOG_DIR, SCRIPT, ConfigError
from ...configuration.load import Settings, read_argv, read_environ
from ...configuration.parse import PATH, Group, Option
from ...output.journal import JobEvent, journals, read_file
from ...output.log_files import FLIGHT_RECORDS, is_run, newest_run, own_logs
from ...output.masking import masked, secrets_in
from ..store_command import one_line_errors


def run_command(
    name: str,
    words: Sequence[str],
    usage: str,
    options: Sequence[Option[Any]],
    work: Callable[[str | None, Settings], None],
) -> int:
    """Returns an `ExitCode`. The first word is the run; `work` gets it, and raises CannotDo or
    ConfigError."""
    run = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if run is not None else words, options)
    if HELP in command_line:
        print(run_help(usage, options))
        return ExitCode.SUCCESS
    problems = command_line.problems
    if SCRIPT in command_line:
        problems.append(command_line[SCRIPT].problem("one job, or one run", "leave it out"))
    code: ExitCode
    reason: Exception
    try:
        if problems:
            raise ConfigError(problems)
        with one_line_errors(ExitCode.STOPPED_BY_SIGINT):
            work(run, command_line)
        return ExitCode.SUCCESS
    except ConfigError as error:
        code, reason = ExitCode.BAD_CONFIG, error
    except CannotDo as error:
        code, reason = error.code, error
    print(f"elastic-agent {name}: {reason}", file=sys.stderr)
    return code


def run_help(usage: str, options: Iterable[Option[Any]]) -> str:
    """`options`: of the command's own, beside --log-dir."""
    where = replace(
        LOG_DIR, help="the folder of the runs (default: where agents without it keep their files)"
    )
    return "\n".join([usage, *(option.help_text() for option in (*options, where)), "", *exit_codes()])


def given_log_dir(command_line: Settings) -> Path | None:
    """The --log-dir of the command line, else of the environment."""
    return (command_line if LOG_DIR in command_line else read_environ(os.environ))[LOG_DIR].value


def folder_of(name: str, run: str | None, command_line: Settings) -> Path:
    """Of the run that the command `name` is about; the newest of all is named. Raises CannotDo."""
    folder = find_run(run, given_log_dir(command_line))
    if run is None:
        print(f"elastic-agent {name}: {folder}, the newest run there", file=sys.stderr)
    return folder


def find_run(run: str | None, log_dir: Path | None) -> Path:
    """The folder of `run`, which is a folder or the name of a job; None: the newest of all. `log_dir`: of --log-dir.
    Raises CannotDo."""
    directory = None
    try:
        if run is not None and (folder := Path(run)).is_dir() and is_run(folder):
            return folder
        directory = log_dir or own_logs()
        named = run is None or NAME.fullmatch(run) is not None
        found = newest_run(directory, run) if named else None
    except OSError as error:
        reason = f"{run or directory or '--log-dir'}: {error.strerror or error}; see --log-dir"
        raise CannotDo(ExitCode.NOT_FOUND, reason) from None
    if found is not None:
        return found
    where = f"{run} is no folder of a run, and {directory} has no run of a job of this name; see --log-dir"
    if run is None:
        where = f"no run is in {directory}: name the folder of one, or see --log-dir"
    raise CannotDo(ExitCode.NOT_FOUND, where)


def journals_in(folder: Path) -> Iterator[Iterator[JobEvent]]:
    """The journal of each node, in the order in which it was written. Raises CannotDo."""
    try:
        files = journals(folder)
    except OSError as error:
        raise CannotDo(ExitCode.NOT_FOUND, f"{error.filename}: {error.strerror}") from None
    if not files:
        reason = f"{folder} has no events-NODE.jsonl: name the folder of a run"
        raise CannotDo(ExitCode.NOT_FOUND, reason)
    for parts in files.values():
        yield _events_in(parts)


def _events_in(parts: Iterable[Path]) -> Iterator[JobEvent]:
    try:
        for part in parts:
            yield from read_file(part)
    except OSError as error:
        raise CannotDo(ExitCode.NOT_FOUND, f"{error.filename}: {error.strerror}") from None


MOST_OF_A_FILE = 2 * 2**20
MOST_IN_ALL = 512 * 2**20

_TEXTS = re.compile(r".*\.(log|txt|toml)|events-.+\.jsonl(\.1)?")


def write_bundle(archive: IO[bytes], run: Path, known: Collection[str]) -> int:
    """Everything below the folder `run`, in a folder of the same name; `known` are secrets' values. Returns the number
    of files. Raises OSError when the archive cannot be written."""
    about = [f"elastic-agent {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    files = size = 0
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in _files(run):
            is_text = _TEXTS.fullmatch(name.name) is not None
            if not is_text and FLIGHT_RECORDS not in name.parts:
                if not name.name.startswith("."):
                    about.append(f"{name}: left out: no file of the agent's")
                continue
            try:
                content, cut = _content(run / name)
            except OSError as error:
                about.append(f"{name}: left out: {error.strerror}")
                continue
            if is_text:
                content = masked(content.decode(errors="replace"), known).encode(errors="replace")
            if size + len(content) > MOST_IN_ALL:
                about.append(f"{name}: left out: the archive is full")
                continue
            if cut:
                about.append(f"{name}: its end only")
            _add(tar, f"{run.name}/{name}", content)
            files, size = files + 1, size + len(content)
        _add(tar, f"{run.name}/about.txt", masked("\n".join([*about, ""]), known).encode(errors="replace"))
    return files


def _files(run: Path) -> list[Path]:
    """Below the folder. The newest generations first: if the archive is full, old files are left out."""
    found = [Path(folder, name).relative_to(run) for folder, _, names in os.walk(run) for name in names]
    return sorted(found, key=lambda name: (-_generation(name), str(name)))


def _generation(name: Path) -> int:
    """The generation in a file's path; files without one count as the newest."""
    found = re.fullmatch(r"gen(\d{1,18})", name.parts[0])
    return int(found[1]) if found else 2**63


def _content(path: Path) -> tuple[bytes, bool]:
    """And whether it was cut."""
    # A worker may have put anything there: no link to elsewhere, and no pipe that would make us wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not a regular file")
        cut = found.st_size > MOST_OF_A_FILE
        if cut:
            file.seek(-MOST_OF_A_FILE, os.SEEK_END)
            file.readline()  # half a line may be half a secret
        return file.read(MOST_OF_A_FILE), cut


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    tar.addfile(info, io.BytesIO(content))


_USAGE = """\
usage: elastic-agent diagnose [RUN] [--output FILE.tar.gz] [--log-dir DIR]

Writes logs, evidence, journals and settings of a run into one archive, with everything masked that looks like a secret.
RUN is the folder of a run, or the name of a job: then it is the newest run of that job below --log-dir, or where agents
without one keep their files. Without RUN it is the newest run there. Files on the disks of other nodes are not
included: copy them into the folder first.
"""

DIAGNOSE_OPTIONS = Group("diagnose")
OUTPUT: Option[Path | None] = DIAGNOSE_OPTIONS.option(
    "output",
    PATH,
    "the archive, which must not be there yet (default: the folder's name with .tar.gz, in the current folder)",
    metavar="FILE",
)


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return run_command("diagnose", words, _USAGE, DIAGNOSE_OPTIONS, _work)


def _work(run: str | None, command_line: Settings) -> None:
    folder = folder_of("diagnose", run, command_line).resolve()
    target = command_line[OUTPUT].value or Path(f"{folder.name}.tar.gz")
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb") as archive:
                files = write_bundle(archive, folder, secrets_in(os.environ))
        except BaseException:
            target.unlink()
            raise
    except OSError as error:
        reason = f"{target}: {error.strerror}; name another with --output"
        raise CannotDo(ExitCode.NOT_HERE, reason) from None
    print(target, flush=True)
    print(
        f"elastic-agent diagnose: {files} files. Secrets that were recognized are masked; look through the archive "
        "before you send it to others",
        file=sys.stderr,
    )
