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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from .... import __version__
from ....rendezvous.text import NAME
from ...common.exits import ExitCode, exit_codes
from ...configuration.config import HELP, LOG_DIR, SCRIPT, ConfigError
from ...configuration.load import read_argv, read_environ
from ...configuration.parse import PATH, Group, Option
from ...configuration.settings import Settings
from ...output.journal import JobEvent, journals, read_file
from ...output.log_files import FLIGHT_RECORDS, is_run, log_directory, newest_run
from ...output.masking import masked, secrets_in
from ..store_command import CannotDo, one_line_errors


def run_command(
    name: str,
    words: Sequence[str],
    usage: str,
    options: Sequence[Option[Any]],
    work: Callable[[Path, Settings], None],
) -> int:
    """Returns an `ExitCode`. The first word is the run, without it the newest of all is taken; `work` gets its
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
    code: ExitCode
    reason: Exception
    if problems:
        code, reason = ExitCode.BAD_CONFIG, ConfigError(problems)
    else:
        try:
            with one_line_errors(ExitCode.STOPPED_BY_SIGINT):
                folder = find_run(run, given_log_dir(command_line))
                if run is None:
                    print(f"elastic-agent {name}: {folder}, the newest run there", file=sys.stderr)
                work(folder, command_line)
            return 0
        except CannotDo as error:
            code, reason = error.code, error
        except BrokenPipeError:
            return ExitCode.OUTPUT_CLOSED
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


def find_run(run: str | None, log_dir: Path | None) -> Path:
    """The folder of `run`, which is a folder or the name of a job; None: the newest of all. `log_dir`: of --log-dir.
    Raises CannotDo."""
    directory = None
    try:
        if run is not None and (folder := Path(run)).is_dir() and is_run(folder):
            return folder
        directory = log_directory(log_dir, own=log_dir is None)
        named = run is None or NAME.fullmatch(run) is not None
        found = newest_run(directory, run) if directory is not None and named else None
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
        if not files:
            reason = f"{folder} has no events-NODE.jsonl: name the folder of a run"
            raise CannotDo(ExitCode.NOT_FOUND, reason)
    except OSError as error:
        raise CannotDo(ExitCode.NOT_FOUND, f"{error.filename}: {error.strerror}") from None
    for parts in files.values():
        yield _events_in(parts)


def _events_in(parts: Iterable[Path]) -> Iterator[JobEvent]:
    try:
        for part in parts:
            yield from read_file(part)
    except OSError as error:
        raise CannotDo(ExitCode.NOT_FOUND, f"{error.filename}: {error.strerror}") from None


MOST_OF_A_FILE = 2 * 2**20
MOST_FILES = 20_000
MOST_IN_ALL = 512 * 2**20

_TEXTS = re.compile(r".*\.(log|txt|toml)|events-.+\.jsonl(\.1)?")


@dataclass(slots=True)
class Bundled:
    """What the archive contains, and what it does not."""

    files: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    """One line for each file that was cut or left out."""


def write_bundle(
    archive: IO[bytes], run: Path, about: Callable[[Bundled], str], known: Collection[str]
) -> Bundled:
    """Everything below the folder `run`, in a folder of the same name; `known` are secrets' values. Raises
    OSError when the archive cannot be written."""
    done = Bundled()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in _files(run, done):
            name = path.relative_to(run)
            try:
                content = _content(path, name, done)
            except OSError as error:
                done.notes.append(f"{name}: left out: {error.strerror}")
                continue
            if FLIGHT_RECORDS not in name.parts:
                text = content.decode(errors="replace")
                content = masked(text, known).encode(errors="replace")
            if done.bytes + len(content) > MOST_IN_ALL:
                done.notes.append(f"{name}: left out: the archive is full")
                continue
            _add(tar, f"{run.name}/{name}", content)
            done.files += 1
            done.bytes += len(content)
        text = masked(about(done), known)
        _add(tar, f"{run.name}/about.txt", text.encode(errors="replace"))
    return done


def _files(run: Path, done: Bundled) -> Iterator[Path]:
    """The newest generations first: if the archive is full, old files are left out."""
    found = []
    for folder, _, names in os.walk(run):
        found += [Path(folder, name) for name in names]
    found.sort(key=lambda path: (-_generation(path.relative_to(run)), str(path)))
    for path in found[:MOST_FILES]:
        name = path.relative_to(run)
        if _TEXTS.fullmatch(path.name) or FLIGHT_RECORDS in name.parts:
            yield path
        elif not path.name.startswith("."):
            done.notes.append(f"{name}: left out: no file of the agent's")
    if len(found) > MOST_FILES:
        done.notes.append(f"{len(found) - MOST_FILES} files more are left out")


def _generation(name: Path) -> int:
    """The generation in a file's path; files without one count as the newest."""
    found = re.fullmatch(r"gen(\d{1,18})", name.parts[0])
    return int(found[1]) if found else 2**63


def _content(path: Path, name: Path, done: Bundled) -> bytes:
    # A worker may have put anything there: no link to elsewhere, and no pipe that would make us wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not a regular file")
        if found.st_size > MOST_OF_A_FILE:
            done.notes.append(f"{name}: the last {MOST_OF_A_FILE} of {found.st_size} bytes")
            file.seek(-MOST_OF_A_FILE, os.SEEK_END)
            file.readline()  # half a line may be half a secret
        return file.read(MOST_OF_A_FILE)


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


def _work(folder: Path, command_line: Settings) -> None:
    folder = folder.resolve()
    target = command_line[OUTPUT].value or Path(f"{folder.name}.tar.gz")
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb") as archive:
                done = write_bundle(archive, folder, _about, secrets_in(os.environ))
        except BaseException:
            target.unlink()
            raise
    except OSError as error:
        reason = f"{target}: {error.strerror}; name another with --output"
        raise CannotDo(ExitCode.NOT_HERE, reason) from None
    print(target, flush=True)
    print(
        f"elastic-agent diagnose: {done.files} files. Secrets that were recognized are masked; look through the "
        "archive before you send it to others",
        file=sys.stderr,
    )


def _about(done: Bundled) -> str:
    lines = [
        f"elastic-agent {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{done.files} files, {done.bytes} bytes",
        *done.notes,
    ]
    return "\n".join(lines) + "\n"
