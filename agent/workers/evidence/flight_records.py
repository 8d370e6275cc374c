"""Asks NCCL's flight recorder for a dump: torch makes a pipe for each rank, and a byte in it is the order.

torch's watchdog reads the pipe within seconds, and writes the dump beside it, also while the main thread waits. On gloo
there is no pipe: its records can be read by the process itself alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

FOLDER = "flight_records"
"""Below the folder of a generation, as `supervision` and the table of variables have it."""


def ask(generation: Path, ranks: Iterable[int]) -> tuple[int, ...]:
    """Those of these ranks whose recorder was asked. `generation` is its folder."""
    return tuple(rank for rank in ranks if _ask(generation / FOLDER / f"pipe_{rank}.pipe"))


def _ask(pipe: Path) -> bool:
    try:
        # A worker may have put anything there: never waits, follows no link, and writes into pipes alone.
        file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # no rank of NCCL, or one that has ended
    try:
        return stat.S_ISFIFO(os.fstat(file).st_mode) and os.write(file, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(file)
