"""Writes a small file in a directory, makes it durable, and asks how much room there is."""

from __future__ import annotations

import os
import statistics
import tempfile
import time

from ..rules.directories import DirectoryFacts

SAMPLE = b"elastic-agent check\n" * 205
"""About a page."""
TRIES = 3
ENOUGH_S = 0.3
"""No further try once they took so long together."""


def probe_directory(directory: str) -> DirectoryFacts:
    """Of the directory, or of the nearest one above it that exists. Nothing is made: the file there has no name."""
    given = os.path.abspath(directory)
    tried = given
    while not os.path.lexists(tried):
        tried = os.path.dirname(tried)
    exists = tried == given
    problem, fsync_s = "", None
    try:
        fsync_s = _write(tried)
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        room = os.statvfs(tried)
    except OSError as error:
        return DirectoryFacts(tried=tried, exists=exists, problem=problem or error.strerror or str(error))
    return DirectoryFacts(
        tried=tried,
        exists=exists,
        problem=problem,
        file_system=file_system_of(tried),
        free_bytes=room.f_bavail * room.f_frsize if room.f_blocks else None,
        free_inodes=room.f_favail if room.f_files else None,
        fsync_s=fsync_s,
    )


def _write(directory: str) -> float:
    """The median seconds of fsync, over a few writes. Raises OSError."""
    took: list[float] = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        while len(took) < TRIES and sum(took) < ENOUGH_S:
            file.write(SAMPLE)
            began = time.monotonic()
            os.fsync(file.fileno())
            took.append(time.monotonic() - began)
    return statistics.median(took)


def file_system_of(path: str) -> str:
    """The type of the file system, as the kernel names it; empty where it cannot be found out."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", errors="replace") as mounts:
            for mount in mounts:
                fields, _, more = mount.partition(" - ")
                if fields.split()[2] == number:
                    return more.split()[0]
    except (OSError, IndexError):
        pass
    return ""
