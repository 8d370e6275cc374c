"""`elastic-agent events` and `diagnose`, and what all commands about the folder of a run have in common.

They read files, ask no agent and change nothing. The run may still go on.

*events* shows the journals of a run's agents, sorted by time, each event by the clock of the node that wrote it.

*diagnose* packs the files of a run into one archive, to send it to those who help. It has a bounded size, and
everything is masked that looks like a secret. Only the end of a long file is kept: its last lines matter most. Links
are not followed. Only the agents' text files and the dumps of torch's flight recorder are taken. `about.txt` lists
what was left out, and why.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import stat
import sys
import tarfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO

from ... import __version__
from ..common.exits import CannotDo, ExitCode
from ..configuration.config import LOG_DIR, SCRIPT, ConfigError
from ..configuration.load import Settings, read_environ
from ..configuration.parse import PATH, Option, OptionGroup
from ..output.journal import EVENT, EventKind, JobEvent, journals, read_file
from ..output.log_files import FLIGHT_RECORDS, is_run, newest_run, own_logs
from ..output.masking import masked, secrets_in
from .command import run_command

WHERE = replace(LOG_DIR, help="the folder of the runs (default: where agents without it keep their files)")

WHAT_RUN = """\
RUN is the folder of a run, or the name of a job, for
its newest run. Without RUN it is the newest of all runs below --log-dir."""


@contextlib.contextmanager
def folder_of_run(run: str, command_line: Settings) -> Iterator[Path]:
    """That of the run of this name, or of the newest one. Raises ConfigError and CannotDo, also if it is unreadable."""
    if SCRIPT in command_line:
        command_line.problems.append(command_line[SCRIPT].problem("one run", "leave it out"))
    if command_line.problems:
        raise ConfigError(command_line.problems)
    log_dir = (command_line if LOG_DIR in command_line else read_environ(os.environ))[LOG_DIR].value
    try:
        folder = find_run(run, log_dir or own_logs())
        if not run:
            print(f"elastic-agent: {folder}, the newest run there", file=sys.stderr)
        yield folder
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = f"{error.filename or run}: {error.strerror or error}; see --log-dir"
        raise CannotDo(ExitCode.NOT_FOUND, reason) from None


def find_run(run: str, directory: Path) -> Path:
    """The folder of `run`, which is a folder, or the name of a job that has some in `directory`; empty: the newest of
    all. Raises CannotDo and OSError."""
    if run and (folder := Path(run)).is_dir() and is_run(folder):
        return folder
    found = newest_run(directory, run or None)
    if found is None:
        what = f"{run} is no folder of a run, and no run of a job of this name" if run else "no run"
        reason = f"{what} is in {directory}: name the folder of one, or see --log-dir"
        raise CannotDo(ExitCode.NOT_FOUND, reason)
    return found


def journals_in(folder: Path) -> Iterator[Iterator[JobEvent]]:
    """The journal of each node, in the order in which it was written. Raises CannotDo and OSError."""
    files = journals(folder)
    if not files:
        reason = f"{folder} has no events-NODE.jsonl: name the folder of a run"
        raise CannotDo(ExitCode.NOT_FOUND, reason)
    for parts in files.values():
        yield chain.from_iterable(map(read_file, parts))


# --- events

_EVENTS_USAGE = f"""\
usage: elastic-agent events [RUN] [--json] [--log-dir DIR]

Shows the events of a run, of all nodes whose journals are there. {WHAT_RUN}
"""

EVENTS_OPTIONS = OptionGroup("events")
JSON = EVENTS_OPTIONS.flag("json", "one JSON object a line, as in the files")


def events(words: Sequence[str]) -> int:
    return run_command("events", words, _EVENTS_USAGE, [*EVENTS_OPTIONS, WHERE], _show_events, takes="[RUN]")


def _show_events(run: str, command_line: Settings) -> None:
    with folder_of_run(run, command_line) as folder:
        # Those of one node and instant stay as it wrote them.
        found = sorted(chain.from_iterable(journals_in(folder)), key=lambda event: event.at)
    for event in found:
        if command_line[JSON].value:
            print(EVENT.encode(event))
        elif event.kind is not EventKind.ACCOUNTING:  # for other programs
            print(event_in_words(event))
    sys.stdout.flush()


def event_in_words(event: JobEvent) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    where = f"rank {event.rank}" if event.rank is not None else ""
    if event.about and event.kind is EventKind.FAILURE:
        where = f"{where} on {event.about}".strip()
    text = f"{where}: {event.text}" if where and where not in event.text else event.text
    kind = "generation" if event.kind is EventKind.WORLD else event.kind.value.replace("_", " ")
    return f"{moment}  {event.node:<12}  {event.generation:>4}  {kind:<15}  {text}"


# --- diagnose

_DIAGNOSE_USAGE = f"""\
usage: elastic-agent diagnose [RUN] [--output FILE.tar.gz] [--log-dir DIR]

Writes logs, evidence, journals and settings of a run into one archive, with everything masked that looks like a secret.
Copy files from the disks of other nodes into the folder first. {WHAT_RUN}
"""

DIAGNOSE_OPTIONS = OptionGroup("diagnose")
OUTPUT: Option[Path | None] = DIAGNOSE_OPTIONS.option(
    "output",
    PATH,
    "the archive, which must not be there yet (default: the folder's name with .tar.gz, in the current folder)",
)

MOST_OF_A_FILE = 2 * 2**20
MOST_IN_ALL = 512 * 2**20

_TEXTS = re.compile(r".*\.(log|txt|toml)|events-.+\.jsonl(\.1)?")


def diagnose(words: Sequence[str]) -> int:
    return run_command("diagnose", words, _DIAGNOSE_USAGE, [*DIAGNOSE_OPTIONS, WHERE], _pack, takes="[RUN]")


def _pack(run: str, command_line: Settings) -> None:
    with folder_of_run(run, command_line) as found:
        folder = found.resolve()
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


def write_bundle(archive: IO[bytes], run: Path, known: Collection[str]) -> int:
    """Everything below the folder `run`, in a folder of the same name; `known` are secrets' values. Returns the number
    of files. Raises OSError when the archive cannot be written."""
    about = [f"elastic-agent {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    files = size = 0
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in _newest_first(run):
            name = path.relative_to(run)
            is_text = _TEXTS.fullmatch(name.name) is not None
            if not is_text and FLIGHT_RECORDS not in name.parts:
                if not name.name.startswith("."):
                    about.append(f"{name}: left out: no file of the agent's")
                continue
            try:
                content, cut = _content(path)
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


def _newest_first(run: Path) -> list[Path]:
    """All files: if the archive is full, old ones are left out."""
    found = [Path(folder, name) for folder, _, names in os.walk(run) for name in names]
    return sorted(found, key=lambda path: (_written_at(path), path), reverse=True)


def _written_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # the run goes on, and has deleted it meanwhile
        return 0.0


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
