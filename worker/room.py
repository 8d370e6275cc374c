"""How much memory is left for this process: on the machine, and in the control groups that hold it.

Pages of shared memory count like any others: where they are more than there is, the kernel kills a worker instead of
refusing them. The file system that they are in has a size of its own: where others (data loaders, NCCL) find it full,
they end by SIGBUS. So a copy that would leave too little of either is not made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes."""

    left: int
    total: int
    what: str = "memory"


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """The narrowest; None when the machine does not tell."""
    try:
        told = dict(_pairs((proc / "meminfo").read_text()))
        found = [Room(told["MemAvailable"] * 1024, told["MemTotal"] * 1024)]
        found += _of_cgroups((proc / "self/cgroup").read_text(), cgroups)
    except (OSError, KeyError, ValueError):
        return None
    return min(found, key=lambda one: one.left)


def room_of(folder: str) -> Room | None:
    """The file system of `folder`, which may be smaller than the memory; None when it does not tell."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Room(
        found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, f"the file system of {folder}"
    )


def _of_cgroups(listed: str, root: Path) -> Iterator[Room]:
    """Version 2 is the line of number 0; version 1 has one for each controller."""
    for line in listed.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, top = ("memory.max", "memory.current", "inactive_file"), root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        # A container may see its own group as the root of all.
        relative = PurePosixPath(path).relative_to("/")
        for folder in (top / relative, *(top / parent for parent in relative.parents)):
            if found := _of_one(folder, *names):
                yield found


def _of_one(folder: Path, limit: str, used: str, reclaimable: str) -> Room | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= 2**60:  # version 1 writes a number nobody has for "no limit"
            return None
        in_use = int((folder / used).read_text())
        spare = dict(_pairs((folder / "memory.stat").read_text())).get(reclaimable, 0)
    except (OSError, ValueError):
        return None
    return Room(max(0, int(most) - in_use + spare), int(most))


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 2:
            yield fields[0].removesuffix(":"), int(fields[1])
