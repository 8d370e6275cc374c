"""Is memory scarce on this machine, or in the agent's cgroup? Read from /proc and cgroups (version 2), and judged.

*Pressure* is little memory left, or tasks that stand still because others' memory has to be reclaimed first (PSI: the
kernel's share of the last ten seconds). What has been given up under pressure comes back only when there is clearly
more than what made it go: else it would come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Memory is scarce when less than this is available, or more of the time is lost."""

    least_share: float = 0.05
    """Of all memory, but at most `least_bytes`: on a large machine a twentieth is much."""
    least_bytes: int = 1024 * MIB
    most_stalled: float = 20.0
    """Per cent of the last ten seconds in which some task waited for memory."""
    relief: float = 1.5
    """So many times the least must be available again before the pressure is over."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the machine, or of a cgroup: bytes that could be had, of all, and PSI's some avg10 as far as there is one."""

    available: int
    total: int
    stalled: float = 0.0
    of: str = "this machine"


def pressure(policy: MemoryPolicy, memory: Memory, *, before: bool) -> str:
    """Why memory is scarce; empty if it is not. `before`: it was when last asked."""
    least = min(policy.least_bytes, int(policy.least_share * memory.total))
    most_stalled = policy.most_stalled
    if before:
        least, most_stalled = int(policy.relief * least), most_stalled / policy.relief
    if memory.available < least:
        return f"{memory.of} has {memory.available // MIB} MiB left of {memory.total // MIB} MiB"
    if memory.stalled > most_stalled:
        return f"tasks of {memory.of} wait for memory {memory.stalled:.0f} % of the time"
    return ""


def read_memory(cgroup: Path | None, proc: Path = Path("/proc")) -> tuple[Memory, ...]:
    """Of the machine, and of each cgroup with a limit from this one upwards. What cannot be read is left out."""
    found = [_machine(proc)]
    for folder in (cgroup, *cgroup.parents) if cgroup is not None else ():
        found.append(_cgroup(folder))
        if folder.name == "cgroup":
            break
    return tuple(memory for memory in found if memory is not None)


def _machine(proc: Path) -> Memory | None:
    fields = _fields(proc / "meminfo")
    try:
        available, total = fields["MemAvailable:"] * 1024, fields["MemTotal:"] * 1024
    except KeyError:
        return None
    return Memory(available, total, _stalled(proc / "pressure/memory"))


def _cgroup(folder: Path) -> Memory | None:
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no limit is the word max
        return None
    # What was read from files and is not in use goes first when memory is needed.
    cache = _fields(folder / "memory.stat").get("inactive_file", 0)
    return Memory(limit - used + cache, limit, _stalled(folder / "memory.pressure"), f"the cgroup {folder}")


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _stalled(file: Path) -> float:
    try:
        some = file.read_text().split()
    except OSError:  # PSI is off
        return 0.0
    shares = dict(word.partition("=")[::2] for word in some[1:4])
    try:
        return float(shares["avg10"])
    except (KeyError, ValueError):
        return 0.0


Reader = Callable[[], tuple[Memory, ...]]
