"""What a job needs while it trains steadily: memory and processor time, from /proc.

Memory is PSS: a page that several processes share counts once in all of them together. Processor time is that of all
processes of the node but the workers, which do the training: a helper that an agent keeps is part of its price.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PROC = Path("/proc")
TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


def pss_mb(pids: Iterable[int], proc: Path = PROC) -> float:
    """Of those that still live, in millions of bytes."""
    total_kb = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total_kb += parse_pss_kb((proc / str(pid) / "smaps_rollup").read_text())
    return total_kb * 1024 / 1e6


def parse_pss_kb(smaps_rollup: str) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB$", smaps_rollup, re.MULTILINE)
    return int(found[1]) if found else 0


def processor_s(pids: Iterable[int], proc: Path = PROC) -> dict[int, float]:
    """Seconds of processor time since its start, by process."""
    used = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            used[pid] = (int(fields[11]) + int(fields[12])) * TICKS_S
    return used


def spent_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Between two looks; of a process that is new all that it has used."""
    return sum(used - before.get(pid, 0.0) for pid, used in after.items())


def family(root: Iterable[int], proc: Path = PROC) -> set[int]:
    """These processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = list(root)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found
