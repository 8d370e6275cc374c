"""Processes as the kernel shows them in /proc: which belong to an agent, where one stands, waiting for the end of a
child.

The guard runs this, too, and starts within 20 ms: no dataclasses, pathlib, re or typing here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, TypeAlias

    Folder: TypeAlias = str | os.PathLike[str]

    class Child(Protocol):
        @property
        def pid(self) -> int: ...

        def wait(self) -> int: ...


def read(path: str | os.PathLike[str]) -> str:
    """A small file of /proc or /sys, stripped; empty for what is not there, or cannot be read now."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def open_here(path: str, flags: int) -> int:
    """A worker chose what lies there: no link to elsewhere, and no pipe for which its reader would wait."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def say(text: str) -> None:
    """A line beside the agent's log, by a process of its own. Lost where the console does not take it."""
    try:
        now = time.strftime("%Y-%m-%d %H:%M:%S%z")
        os.write(2, f"{now} elastic-agent: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


class MemoryFile:
    """In this process' memory, until nobody here uses it any more: another one writes there. Raises OSError."""

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(f"elastic-agent-{name}", os.MFD_CLOEXEC)
        os.fchmod(self.fd, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, most: int, start: int = 0) -> str:
        return os.pread(self.fd, most, start).decode(errors="backslashreplace")

    @property
    def last_line(self) -> str:
        """Empty without one."""
        lines = self.read(_LAST_BYTES, max(0, self.size - _LAST_BYTES)).splitlines()
        return next(filter(None, map(str.strip, reversed(lines))), "")


_LAST_BYTES = 4096

KILL_WAIT_S = 1.0
"""How long the end of a killed process may take before it is left behind."""

_DEAD = ("Z", "X")
_ASLEEP = "D"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
}


class Stat:
    """A process or thread as its file `stat` shows it: see proc(5)."""

    def __init__(self, text: str) -> None:
        head, _, tail = text.rpartition(")")  # a name may have any character
        self.pid, _, self.name = head.partition(" (")
        self.state, *self._fields = tail.split()

    @property
    def parent(self) -> int:
        return int(self._fields[0])

    @property
    def session(self) -> int:
        return int(self._fields[2])

    @property
    def own_ticks(self) -> int:
        return sum(map(int, self._fields[10:12]))

    @property
    def start(self) -> str:
        """The start time, which with the pid names a process until the machine starts anew."""
        return self._fields[18]


def stat_of(folder: Folder) -> Stat | None:
    """`folder` is its place in /proc. None when it is gone."""
    text = read(f"{os.fspath(folder)}/stat")
    return Stat(text) if text else None


def living(pid: int, proc: Folder = "/proc") -> Stat | None:
    """None when the process has ended. One whose first thread has ended while another hangs in the kernel looks like a
    zombie, and lives."""
    folder = f"{os.fspath(proc)}/{pid}"
    stat = stat_of(folder)
    if stat is not None and stat.state in _DEAD and all(state in _DEAD for _, state in _threads(folder)):
        return None
    return stat


def living_since(pid: int) -> str:
    """Its start time; empty when it has ended."""
    stat = living(pid)
    return stat.start if stat is not None else ""


def process_status(folder: Folder) -> str:
    """`folder` is its place in /proc. Empty when it is gone. Of several threads, one that holds the others up."""
    folder = os.fspath(folder)
    stat = stat_of(folder)
    if stat is None:
        return ""
    asleep = next((thread for thread, state in _threads(folder) if state == _ASLEEP), None)
    state = stat.state if asleep is None else _ASLEEP
    where = read(f"{asleep or folder}/wchan")
    kernel = f", in the kernel's {where}" if where not in ("", "0") else ""
    return (
        f"process {stat.pid} ({stat.name}) is {_STATES.get(state, 'in an unknown state')} ({state}){kernel}"
    )


def status_field(folder: Folder, name: str) -> str:
    """Of the file `status` of a process or thread; empty where it is not there."""
    _, _, rest = read(f"{os.fspath(folder)}/status").partition(f"\n{name}:")
    return rest.partition("\n")[0].strip()


def thread_status(thread: int | None) -> str:
    """Of a thread of this process, by its native id."""
    return process_status(f"/proc/self/task/{thread}") or "nothing is known of it"


def _threads(folder: str) -> Iterator[tuple[str, str]]:
    """Place and state of each; they may all end meanwhile."""
    try:
        names = sorted(os.listdir(f"{folder}/task"))
    except OSError:
        return
    for name in names:
        if (stat := stat_of(f"{folder}/task/{name}")) is not None:
            yield f"{folder}/task/{name}", stat.state


# --- The processes of an agent's workers


def find_processes(
    sessions: Collection[int],
    *,
    others: Collection[int] = (),
    spared: Collection[int] = (),
    proc: Folder = "/proc",
) -> dict[int, str]:
    """The living processes of these sessions, those `others`, and all that descends from them: pid and start time.

    The caller, pid 1 and those `spared` are never among them."""
    stats = {}
    children: dict[int, list[int]] = {}
    for pid in (int(name) for name in os.listdir(proc) if name.isdecimal()):
        if pid not in (1, os.getpid(), *spared) and (stat := living(pid, proc)) is not None:
            stats[pid] = stat
            children.setdefault(stat.parent, []).append(pid)
    found: dict[int, str] = {}
    waiting = [pid for pid, stat in stats.items() if pid in others or stat.session in sessions]
    while waiting:
        if (pid := waiting.pop()) not in found:
            found[pid] = stats[pid].start
            waiting += children.get(pid, ())
    return found


def orphans_with(mark: str, since: str, proc: Folder = "/proc") -> Iterator[int]:
    """The processes with this variable in their environment that may be orphans of an agent that started at `since`:
    they are no older, and their parent has ended, or may adopt.

    To read an environment is to wait for a process whose memory the kernel has locked, maybe for ever: to be asked for
    in a process that can be left behind."""
    pids = (int(name) for name in os.listdir(proc) if name.isdecimal())
    stats = {pid: stat for pid in pids if (stat := stat_of(f"{os.fspath(proc)}/{pid}")) is not None}
    adopting, ancestor = {1}, os.getpid()
    while ancestor in stats and ancestor not in adopting:
        adopting.add(ancestor)
        ancestor = stats[ancestor].parent
    # Those that hang in the kernel come last.
    for stat in sorted(stats.values(), key=lambda stat: stat.state == _ASLEEP):
        if int(stat.start) < int(since) or (stat.parent not in adopting and stat.parent in stats):
            continue
        if mark in read(f"{os.fspath(proc)}/{stat.pid}/environ").split("\0"):
            yield int(stat.pid)


# --- Their end


def kill(pid: int) -> bool:
    """False when it has just ended, or is another user's, as those of sudo are."""
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except OSError:
        return False


def has_ended(pid: int) -> bool:
    """Whether a wait for this child would return at once."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def ends_within(pid: int, within_s: float) -> bool:
    """Waits for this child's end, but not longer: a killed process may hang in the kernel."""
    deadline, pause_s = time.monotonic() + within_s, 0.0005
    while not has_ended(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True


def reap_within(child: Child, within_s: float) -> int | None:
    """Its return code; None when it does not end in time, and is left behind."""
    return child.wait() if ends_within(child.pid, within_s) else None
