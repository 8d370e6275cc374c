"""Processes and threads that may not go on: where one stands in the kernel, in words; waiting, but not long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ....rendezvous.fields import shortened

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
}
_ASLEEP = "D"
_NOWHERE = ("", "0")
KILL_WAIT_S = 1.0
"""How long the end of a killed process may take before it is left behind."""


def process_statuses(pids: Iterable[int], proc: Path = Path("/proc")) -> str:
    """Of all these that are there; of many the first few, as they mostly wait for the same thing."""
    return shortened((text for pid in sorted(pids) if (text := standing(proc / str(pid)))), "; ")


def thread_status(thread: int | None) -> str:
    """A thread of this process, by its native id."""
    return standing(Path(f"/proc/self/task/{thread}")) or "nothing is known of it"


@dataclass(frozen=True, slots=True)
class Stat:
    """A process or thread as /proc/PID/stat tells of it."""

    pid: str
    name: str
    state: str
    after_state: tuple[str, ...]
    """The fields behind the state, from the parent's number on: see proc(5)."""

    @property
    def session(self) -> int:
        return int(self.after_state[2])

    @property
    def ticks(self) -> int:
        """Of processor time, with that of its children that have ended."""
        return sum(map(int, self.after_state[10:14]))


def stat_of(folder: Path | str) -> Stat | None:
    """`folder` is its place in /proc. None when it is gone."""
    head, _, tail = _read(f"{folder}/stat").rpartition(")")  # a name may have any character
    if not tail:
        return None
    pid, _, name = head.partition(" (")
    state, *others = tail.split()
    return Stat(pid, name, state, tuple(others))


def standing(folder: Path) -> str:
    """`folder` is its place in /proc. Empty when it is gone. Of several threads, one that holds the others up."""
    stat = stat_of(folder)
    if stat is None:
        return ""
    state = stat.state
    asleep = next((task for task in _tasks(folder) if _state(task) == _ASLEEP), None)
    if asleep is not None:
        state = _ASLEEP
    where = _read((asleep or folder) / "wchan")
    kernel = f", in the kernel's {where}" if where not in _NOWHERE else ""
    return (
        f"process {stat.pid} ({stat.name}) is {_STATES.get(state, 'in an unknown state')} ({state}){kernel}"
    )


def has_ended(pid: int) -> bool:
    """Whether a wait for this child would return at once."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def ends_within(pid: int, within_s: float) -> bool:
    """Waits for this child's end, but not longer: whatever was killed may hang in the kernel."""
    deadline, pause_s = time.monotonic() + within_s, 0.0005
    while not has_ended(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True


def _tasks(folder: Path) -> list[Path]:
    """Of its threads, which may all end meanwhile."""
    try:
        return sorted(folder / "task" / name for name in os.listdir(folder / "task"))
    except OSError:
        return []


def _state(folder: Path) -> str:
    stat = stat_of(folder)
    return stat.state if stat is not None else ""


def _read(path: Path | str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
