"""How much memory is left: on the machine, in the control groups that hold this process, and in a file system.

Pages of shared memory count like any others: where they are more than there is, the kernel kills a worker instead of
refusing them. The file system that they are in has a size of its own: where others (data loaders, NCCL) find it full,
they end by SIGBUS.

No torch here: the agent imports this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .slots import Slots, room_for

MIB = 2**20
_UNITS = (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10))

_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Limit, use, and the row of memory.stat with what was read from files and is not in use: it goes first when memory is
needed. By controller: of version 2, which has one tree for all, and of version 1."""

_NO_LIMIT = 2**60
"""Version 1 writes a number that no machine has."""


def size_text(size: int) -> str:
    """In the largest unit of which it has one, like 1.5 GiB."""
    for unit, least in _UNITS:
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size} bytes"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that could be had, of all."""

    available: int
    total: int
    of: str = "this machine"


def read_memory(proc: Path = Path("/proc")) -> tuple[Memory, ...]:
    """Of the machine, and of each cgroup with a limit that this process is in. What cannot be read is left out."""
    return (*_machine(proc), *_cgroups(proc / "self"))


def file_system(folder: str) -> Memory | None:
    """The one of `folder`, which may be smaller than the memory; None when it cannot be read."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    available, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return Memory(available, total, of=f"the file system of {folder}")


@cache
def own_cgroup(controller: str = "", proc: Path = Path("/proc/self")) -> Path | None:
    """Where this process is in a tree of cgroups: of version 2, or of a controller of version 1. Looked up once.

    None when there is none, or it is out of sight.
    """
    try:
        rows = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        path = next(path for _, names, path in rows if controller in names.split(","))
        mounts = [line.split(" ") for line in (proc / "mountinfo").read_text().splitlines()]
    except (OSError, StopIteration):
        return None
    if ".." in path.split("/"):  # above the root of this process' cgroup namespace
        return None
    for fields in mounts:
        dash = fields.index("-")
        kind, options = fields[dash + 1], fields[-1].split(",")
        if kind == "cgroup2" if not controller else kind == "cgroup" and controller in options:
            root, mounted_at = map(_unescaped, fields[3:5])
            below = os.path.relpath(path, root)
            if below.split("/")[0] != "..":
                return Path(mounted_at, below)
    return None


def upwards(cgroup: Path | None) -> Iterator[Path]:
    """This one, and those around it."""
    for folder in (cgroup, *cgroup.parents) if cgroup is not None else ():
        yield folder
        if folder.name == "cgroup":
            return


def read_rows(file: Path) -> dict[str, int]:
    """The lines of a name and a number; empty when the file cannot be read."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _machine(proc: Path) -> Iterator[Memory]:
    rows = read_rows(proc / "meminfo")
    if rows.keys() >= {"MemAvailable:", "MemTotal:"}:
        yield Memory(rows["MemAvailable:"] * 1024, rows["MemTotal:"] * 1024)


def _cgroups(proc: Path) -> Iterator[Memory]:
    for controller, (limit_file, used_file, unused_row) in _FILES.items():
        for folder in upwards(own_cgroup(controller, proc)):
            try:
                limit = int((folder / limit_file).read_text())
                used = int((folder / used_file).read_text())
            except (OSError, ValueError):  # no limit is the word max
                continue
            if limit < _NO_LIMIT:
                available = limit - used + read_rows(folder / "memory.stat").get(unused_row, 0)
                yield Memory(max(0, available), limit, f"the cgroup {folder}")


def _unescaped(path: str) -> str:
    """As in /proc/self/mountinfo: a blank is written \\040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)


# ---------------------------------------------------------------- room for copies
#
# Whether this node's memory has room for the two slots of one state: the same rule for workers and for replicas.
#
# A slot keeps the memory that it has, so only what two copies need beyond that is asked for. The limit of the agent's
# folder holds for all that is in it; besides, a share of the memory, and of the file system in memory, stays free for
# headers, records and others.
#
# No torch here: the memory server imports this module.


LEAST_FREE = 0.05
"""The share that stays free."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes: of both copies of a state, and those of them that the slots do not have yet."""

    both: int
    grows: int

    @staticmethod
    def of(slots: Slots, size: int) -> Need:
        both = 2 * room_for(size)
        return Need(both, max(0, both - slots.taken()))

    def fits(self, now: Memory) -> bool:
        """What the slots have already is never taken back for it."""
        return not self.grows or now.available - self.grows >= least_free(now)


def limiting_levels(folder: str) -> tuple[Memory, ...]:
    """What limits the memory of `folder` now: the level that has the least left, since a cgroup may be a small part of
    its machine, and the file system."""
    least = min(read_memory(), key=lambda level: level.available, default=None)
    return tuple(level for level in (least, file_system(folder)) if level is not None)


def least_free(now: Memory) -> int:
    """Bytes."""
    return int(LEAST_FREE * now.total)
