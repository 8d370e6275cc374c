"""Below --log-dir: a folder for each run of a job, in it one for each generation; and which of them are kept.

    DIR/<job>-<run>/gen<generation>/rank<rank>/{stdout,stderr}.log
    DIR/<job>-<run>/gen<generation>/{evidence,flight_records}/
    DIR/<job>-<run>/events-<node>.jsonl
    DIR/<job>-<run>/configuration-<node>.toml

All nodes and all lives of a node's agent have one run in common, so that on a shared disk one folder holds all ranks.
The newest runs and generations are kept. Deleted is only what bears our mark, belongs to the user of this run and is
locked by no agent: another user's run stays, and one that goes on, however old it is.

The logs of workers and the file of events are written by one thread that does nothing else, so that only it waits for
the disk.

A disk may be full, read-only or gone, which is an error; or it does not answer (a dead NFS, a frozen file system), and
then its writers stand still for as long as it does. Workers must do neither. What finds no room in the queue is
dropped and counted. There is one warning of each. An event never waits, and has room of its own behind workers' lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...threads import Thread
from ..common.events import Backlog
from ..common.folders import own_path

QUEUE_MAX = 4 * 1024 * 1024
"""Bytes that may wait for a disk."""
EVENTS_MAX = 1024 * 1024
"""Bytes of what does not wait for room, which may wait behind them."""
PATIENCE_S = 1.0
"""How long workers may be kept waiting for room, once."""
COMPLAINS_S = 300.0
"""How often the log says that a disk refuses, at most."""
CLOSE_S = 1.0
"""How long the end of the agent waits for the disk to take the last lines and events."""
OLDER = ".1"
"""The suffix of the older part of a file that has a bound."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LogFile:
    """One file, of which only the thread touches `fd` and `size`."""

    path: Path
    count_lost: Callable[[int], object] = lambda size: None
    """Called with how many bytes were dropped."""
    most_bytes: float = math.inf
    """A file that is full is renamed, with `OLDER` behind its name, in place of the one before."""
    by_lines: bool = False
    """The last line of an earlier life may have been cut: disk full, agent killed."""
    fd: int = -1
    size: int = 0
    written: bool = False
    """It was made."""
    failed: bool = False
    """The last write did. The next one is tried all the same."""


class LogFiles(Backlog[tuple[Callable[[], None], LogFile | None, int]]):
    """Does in order what waits for the disk of this agent's files."""

    def __init__(self) -> None:
        super().__init__("log-files")
        self._run: RunFolder | None = None
        """Of the thread."""
        self._still = False
        """The log has that the disk stands still."""
        self._complained_at = -math.inf
        """When the log said that the disk refuses, of one file for all."""

    def begin(self, folder: Path, generation: int = 0) -> None:
        """From now on no agent deletes this run. Of a `generation`: what is older than it keeps is deleted."""
        self.do(partial(self._begin, folder, generation))

    def do(self, action: Callable[[], None]) -> None:
        """In the thread, when all before it is done."""
        self.put((action, None, 0), 0, math.inf)

    def open(self, file: LogFile) -> LogFile:
        self.do(partial(self._tried, file, partial(self._open, file)))
        return file

    def save(self, file: LogFile, data: bytes, patience_s: float = 0.0) -> None:
        """May wait for room for so long."""
        write = partial(self._tried, file, partial(self._write, file, data), len(data))
        most = QUEUE_MAX if patience_s else QUEUE_MAX + EVENTS_MAX
        self.put((write, file, len(data)), len(data), most, patience_s)

    def finish(self, file: LogFile) -> None:
        """It is closed when all is written."""
        self.do(partial(self._close, file))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """The end: waits so long for what is left."""
        self.do(self._leave)
        super().close()
        if not self.join(timeout_s):
            _log.warning("the last lines of workers and events may be missing: the disk stands still")

    def _do(self, work: tuple[Callable[[], None], LogFile | None, int]) -> None:
        work[0]()

    def _refused(self, work: tuple[Callable[[], None], LogFile | None, int]) -> None:
        _, file, size = work
        if file is not None:
            file.count_lost(size)
        if not self._still:
            self._still = True
            _log.warning(
                "the disk of the worker logs and events stands still: training goes on, and what finds no room in "
                "memory meanwhile is missing there"
            )

    def _moved(self) -> None:
        self._still = self._still and bool(self._waiting)

    # Everything below runs in the thread.

    def _begin(self, folder: Path, generation: int) -> None:
        if self._run is None or self._run.path != folder:
            self._leave()
            self._run = RunFolder(folder)
        run = self._run
        with contextlib.suppress(OSError):  # a disk that fails here fails the files, too, where it is logged
            run.hold()
            if generation:
                Thread(partial(_prune, run, generation), "log-folders", lambda: None).start()

    def _leave(self) -> None:
        if self._run is not None:
            self._run.release()

    def _open(self, file: LogFile) -> None:
        if self._run is not None:
            with contextlib.suppress(OSError):  # without locks nothing is deleted, and all is written
                self._run.hold()  # it may have been removed
        file.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file.fd = os.open(file.path, flags, 0o640)
        file.size, file.written = os.fstat(file.fd).st_size, True
        if file.by_lines and file.size:
            write_all(file.fd, b"\n")

    def _write(self, file: LogFile, data: bytes) -> None:
        if file.fd >= 0 and file.size + len(data) > file.most_bytes:
            os.replace(file.path, f"{file.path}{OLDER}")
            self._close(file)
        if file.fd < 0:
            self._open(file)
        write_all(file.fd, data)
        file.size += len(data)

    def _tried(self, file: LogFile, work: Callable[[], None], size: int = 0) -> None:
        try:
            work()
            file.failed = False
        except OSError as error:
            self._close(file)
            file.failed = True
            if size:
                file.count_lost(size)
            if time.monotonic() >= self._complained_at + COMPLAINS_S:
                self._complained_at = time.monotonic()
                _log.warning(
                    "worker logs and events are not written, as %s: %s; the job goes on, and workers' lines go to the "
                    "console: make room or set another --log-dir",
                    file.path,
                    error.strerror,
                )

    def _close(self, file: LogFile) -> None:
        if file.fd >= 0:
            with contextlib.suppress(OSError):  # an error of a network disk at close was told at write
                os.close(file.fd)
        file.fd = -1


def _prune(run: RunFolder, generation: int) -> None:
    with contextlib.suppress(OSError):
        run.prune(generation)


def write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


KEPT_RUNS, KEPT_GENERATIONS = 100, 10
"""The newest of each, the present one included. Many jobs of a pool have one folder, and a busy day of others must not
delete what one of them has left to look at."""

MARK = ".elastic-agent"
FLIGHT_RECORDS = "flight_records"
"""Below the folder of a generation: dumps of torch's recorder, binary, with names of groups, sizes and stacks."""
_GENERATION = re.compile(r"gen([0-9]{1,18})")
_OF_NODES = re.compile(r"events-.+\.jsonl(\.1)?|configuration-.+\.toml")


def own_logs() -> Path:
    """This user's folder for files of workers where none is given: the same each time, so that old runs are deleted
    there, too. Nothing is made. Raises OSError where there is no place for it."""
    return own_path("elastic_agent_logs_")


def run_folder(directory: Path, job: str, run: str) -> Path:
    return directory / f"{job}-{run}"


def newest_run(directory: Path, job: str | None) -> Path | None:
    """The folder of the newest run in `directory`, of this job or of any; None: there is none. Raises OSError."""
    runs = [
        (at, folder)
        for folder in directory.iterdir()
        if job is None or folder.name.rpartition("-")[0] == job
        if (at := _marked_at(folder)) is not None
    ]
    return max(runs)[1] if runs else None


def is_run(folder: Path) -> bool:
    """An agent has written there, also if this is a copy. Raises OSError."""
    names = [path.name for path in folder.iterdir()]
    return any(name == MARK or _GENERATION.fullmatch(name) or _OF_NODES.fullmatch(name) for name in names)


class RunFolder:
    """This agent's part in the folder of one run. `hold` and `prune` may take as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = -1

    def hold(self) -> None:
        """From now on no agent deletes it. Again where it was removed. Raises OSError."""
        if self._mark >= 0 and (self.path / MARK).exists():
            return
        self.release()
        self.path.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        mark = os.open(self.path / MARK, flags, 0o640)
        try:
            os.utime(mark)  # by which runs are sorted
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(mark)
            raise
        self._mark = mark

    def release(self) -> None:
        if self._mark >= 0:
            os.close(self._mark)
            self._mark = -1

    def prune(self, generation: int) -> None:
        """Deletes what is older than the runs and generations that are kept. Raises OSError."""
        for folder in self.path.iterdir():
            found = _GENERATION.fullmatch(folder.name)
            if found and int(found[1]) <= generation - KEPT_GENERATIONS:
                shutil.rmtree(folder, ignore_errors=True)
        owner = self.path.stat().st_uid
        others = [
            folder
            for folder in self.path.parent.iterdir()
            if folder != self.path and folder.lstat().st_uid == owner
        ]
        runs = sorted(
            ((at, folder) for folder in others if (at := _marked_at(folder)) is not None), reverse=True
        )
        for _, folder in runs[KEPT_RUNS - 1 :]:
            delete_run(folder)


def _marked_at(folder: Path) -> float | None:
    """When an agent last began to write there; None if it is none of our folders."""
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            return (folder / MARK).lstat().st_mtime
    return None


def delete_run(folder: Path) -> None:
    """If it is one, and no agent holds it. The mark goes last, so that what could not be deleted is tried again."""
    with contextlib.suppress(OSError):
        mark = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for each in folder.iterdir():
                if _GENERATION.fullmatch(each.name):
                    shutil.rmtree(each, ignore_errors=True)
                elif _OF_NODES.fullmatch(each.name):
                    each.unlink(missing_ok=True)
            if os.listdir(folder) == [MARK]:
                shutil.rmtree(folder)
        finally:
            os.close(mark)
