"""Which folder a command about a run means: the one that is named, or the newest run of a job."""

from __future__ import annotations

from pathlib import Path

from ....rendezvous.text import NAME
from ...output.log_folders import log_directory, newest_run


class NoRun(Exception):
    """There is none, and why."""


def find_run(run: str, log_dir: Path | None) -> Path:
    """`run` is a folder, or the name of a job; `log_dir` is given. Raises NoRun."""
    if (folder := Path(run)).is_dir():
        return folder
    try:
        directory = log_directory(log_dir, own=log_dir is None)
        found = newest_run(directory, run) if directory is not None and NAME.fullmatch(run) else None
    except OSError as error:
        raise NoRun(f"{run}: {error.strerror or error}; see --log-dir") from None
    if found is None:
        where = f"{run} is no folder, and {directory} has no run of a job of this name"
        raise NoRun(f"{where}; see --log-dir")
    return found
