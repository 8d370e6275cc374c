"""Reads shared memory and limits."""

from __future__ import annotations

import os
import resource
import tempfile

from ..rules.machine import SHARED_MEMORY, LimitFacts, SharedMemoryFacts
from .directories import file_system_of

CAP_IPC_LOCK = 14
SOMAXCONN = "/proc/sys/net/core/somaxconn"


def probe_shared_memory(place: str = SHARED_MEMORY) -> SharedMemoryFacts:
    try:
        room = os.statvfs(place)
        kind = file_system_of(place)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return SharedMemoryFacts(problem=error.strerror or str(error))
    return SharedMemoryFacts(
        file_system=kind,
        total_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
    )


def probe_limits() -> LimitFacts:
    """Of this process, which has the agent's."""
    try:
        with open(SOMAXCONN) as file:
            somaxconn = int(file.read())
    except (OSError, ValueError):
        somaxconn = None
    return LimitFacts(
        open_files=_limits(resource.RLIMIT_NOFILE),
        locked_bytes=_limits(resource.RLIMIT_MEMLOCK),
        somaxconn=somaxconn,
        locks_freely=_locks_freely(),
    )


def _locks_freely() -> bool:
    """Only in the first user namespace: the kernel asks there whether this user may lock more than the limit."""
    try:
        with open("/proc/self/uid_map") as file:
            first = file.read().split() == ["0", "0", str(2**32 - 1)]
        with open("/proc/self/status") as file:
            effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return first and bool(effective >> CAP_IPC_LOCK & 1)


def _limits(number: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(number)
    return _limit(soft), _limit(hard)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY or value < 0 else value
