"""Below --log-dir: a folder for each run of a job, in it one for each generation; and which of them are kept.

    DIR/<job>-<run>/gen<generation>/rank<rank>/{stdout,stderr}.log
    DIR/<job>-<run>/gen<generation>/{evidence,flight_records}/
    DIR/<job>-<run>/events-<node>.jsonl
    DIR/<job>-<run>/configuration-<node>.toml

All nodes and all lives of a node's agent have one run in common, so that on a shared disk one folder holds all ranks.
The newest runs and generations are kept. Deleted is only what bears our mark, belongs to the user of this run and is
locked by no agent: another user's run stays, and one that goes on, however old it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
from pathlib import Path

from ..common.folders import own_path

log = logging.getLogger(__name__)

KEPT_RUNS = 10
KEPT_GENERATIONS = 10
"""The newest of each, the present one included."""

MARK = ".elastic-agent"
FLIGHT_RECORDS = "flight_records"
"""Below the folder of a generation: dumps of torch's recorder, binary, with names of groups, sizes and stacks."""
_GENERATION = re.compile(r"gen([0-9]{1,18})")
_OF_NODES = re.compile(r"events-.+\.jsonl(\.1)?|configuration-.+\.toml")


def log_directory(given: Path | None, *, own: bool) -> Path | None:
    """Below it are the files of workers; None: there are none. Nothing is made.

    `own`: none is given, but one of this user's alone is wanted, the same each time, so that old runs are deleted
    there, too. Raises OSError where there is no place for that.
    """
    return own_logs() if own else given


def own_logs() -> Path:
    """This user's folder for files of workers where none is given. Raises OSError where there is no place for it."""
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
        """From now on no agent deletes it. Raises OSError."""
        if self._mark >= 0:
            return
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
