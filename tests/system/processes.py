"""The processes of a test's job and their sockets, as /proc has them. Not a test.

A job's processes have a marker in their environment, which agents, workers and their children inherit. A zombie counts
as gone: states are read from /proc/PID/stat.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from elastic_agent.agent.rendezvous_io.store_opening import StoreMemory

MARKER = "SYSTEM_TEST_JOB"
"""The variable that names the job."""


@dataclass(frozen=True, slots=True)
class Process:
    """A living process of a job. Pid and start time together name it for ever."""

    pid: int
    started: str
    environment: Mapping[str, str]
    parent: int = field(compare=False)
    session: int = field(compare=False)

    @property
    def node(self) -> str:
        return self.environment["ELASTIC_AGENT_NODE"]

    @property
    def generation(self) -> int | None:
        """None for an agent, its guard and the process with the workers' store, which are no workers."""
        number = self.environment.get("ELASTIC_AGENT_GENERATION")
        return int(number) if number is not None else None

    def __str__(self) -> str:
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            command = "?"
        return f"pid {self.pid}, generation {self.generation}: {command}"


def look_at(pid: int) -> Process | None:
    """None when it is gone, and while its environment cannot be read: it is starting or ending."""
    try:
        environment = _read(f"/proc/{pid}/environ")
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].decode().split()
    # While it starts a program, the kernel may show a part of the new environment.
    if fields[0] in ("Z", "X") or not environment.endswith(b"\0"):
        return None
    return Process(pid, fields[19], _variables(environment), parent=int(fields[1]), session=int(fields[3]))


def _read(path: str) -> bytes:
    """Without what `Path` and buffers cost: a job's watcher does this a thousand times a second."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


@functools.lru_cache(maxsize=256)
def _variables(environment: bytes) -> Mapping[str, str]:
    pairs = (item.partition(b"=") for item in environment.split(b"\0") if item)
    return MappingProxyType({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})


def processes_of(job: str) -> list[Process]:
    marker = f"{MARKER}={job}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if marker not in _read(f"/proc/{entry.name}/environ"):
                continue
        except OSError:
            continue
        process = look_at(int(entry.name))
        if process is not None:
            found.append(process)
    return found


class Census:
    """The processes of a job, for one who looks again and again.

    /proc is listed only when the kernel has given a pid since. Of what is there, a process that has been met for a
    second without the job's marker is a stranger, and is not looked at any more: no process that a job starts goes on
    for so long in the environment of the one that started it. Until then it is read now and then: most are of other
    tests. A worker stays one, of the same generation. All others are read each time: a spare becomes a worker, and so
    does what starts one.
    """

    STRANGER_AFTER_S = 1.0
    STRANGER_EVERY_S = 0.2

    def __init__(self, job: str) -> None:
        self._job = job
        self._last_pid = b""
        self._strangers: set[int] = set()
        self._workers: dict[int, Process] = {}
        self._others: dict[int, float] = {}
        """Until when each of them may turn out to be of the job."""
        self._not_before: dict[int, float] = {}
        """When to look again at one of them that had another environment."""
        self._seen: dict[int, tuple[bytes, Process]] = {}
        """Of the others: the environment that was read, and what it says."""

    def take(self) -> list[Process]:
        """All that live. One that has ended may be among them until the next process starts."""
        now = time.monotonic()
        last_pid = _read("/proc/loadavg").split()[-1]
        if last_pid != self._last_pid:
            self._last_pid = last_pid
            self._list(now)
        found = []
        for pid, until in list(self._others.items()):
            if now < self._not_before.get(pid, now):
                continue
            process = self._look_at(pid)
            if process is None or process.environment.get(MARKER) != self._job:
                if now > until:
                    self._strangers.add(pid)
                    self._forget(pid)
                elif process is not None:
                    self._not_before[pid] = now + self.STRANGER_EVERY_S
            elif process.generation is None:
                self._others[pid] = now + self.STRANGER_AFTER_S
                found.append(process)
            else:
                self._workers[pid] = process
                self._forget(pid)
        return [*found, *self._workers.values()]

    def _list(self, now: float) -> None:
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= there
        self._workers = {pid: worker for pid, worker in self._workers.items() if pid in there}
        for pid in self._others.keys() - there:
            self._forget(pid)
        for pid in there - self._strangers - self._workers.keys():
            self._others.setdefault(pid, now + self.STRANGER_AFTER_S)

    def _forget(self, pid: int) -> None:
        del self._others[pid]
        self._seen.pop(pid, None)
        self._not_before.pop(pid, None)

    def _look_at(self, pid: int) -> Process | None:
        try:
            environment = _read(f"/proc/{pid}/environ")
        except OSError:
            return None
        known = self._seen.get(pid)
        if known is not None and known[0] == environment:
            return known[1]
        process = look_at(pid)
        if process is not None:
            self._seen[pid] = environment, process
        return process


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def family(pid: int) -> list[int]:
    """The process and all that live and descend from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if entry.name.isdigit() and fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def listening_ports(pid: int | None = None) -> set[int]:
    """Of one process or of all, by /proc: a trial connection would be one of the disturbances under test."""
    return {local for local, _, state in _sockets(pid) if state == "0A"}


def connected_ports(pid: int) -> set[int]:
    """The other side's, of all connections that this process has."""
    return {remote for _, remote, state in _sockets(pid) if state == "01"}


def _sockets(pid: int | None) -> Iterator[tuple[int, int, str]]:
    """Local port, remote port and the kernel's word for the state of each TCP socket."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir() if pid is not None else ():
        try:
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if pid is None or fields[9] in inodes:
                local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                yield local, remote, fields[3]


def port_for_a_store() -> int:
    """One that all agents are told beforehand, so below the range from which the kernel gives ports to others.

    Nothing is left there of an earlier test whose host was killed: the next host of a job would go on from that.
    """
    taken = listening_ports()
    port = random.SystemRandom().choice([port for port in range(20000, 32000) if port not in taken])
    StoreMemory("default", f"127.0.0.1:{port}").file.unlink(missing_ok=True)
    return port
