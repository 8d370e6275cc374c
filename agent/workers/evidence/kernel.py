"""Reads from /proc what worker processes do: states, where and for what threads wait, processor time, memory.

Only small files of /proc are read, none of which waits for the process. `maps`, `smaps`, `cmdline` and `environ` would
wait for a process that holds its memory's lock in the kernel, and the last two may have secrets: none of them is read.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ....rendezvous.text import clean
from ...common.kernel_files import read
from ..processes.proc import Stat, debugger_of, sleeps_of, stat_of
from .facts import ProcessFacts, ThreadFacts

MOST_CHILDREN = 32
"""Of one worker."""
MOST_THREADS = 256
"""Of one process."""
_MOST_TEXT = 160
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

_CALLS = {
    "x86_64": {
        0: "read",
        1: "write",
        7: "poll",
        19: "readv",
        20: "writev",
        23: "select",
        34: "pause",
        35: "nanosleep",
        43: "accept",
        45: "recvfrom",
        47: "recvmsg",
        61: "wait4",
        73: "flock",
        74: "fsync",
        75: "fdatasync",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        128: "rt_sigtimedwait",
        247: "waitid",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
        288: "accept4",
        44: "sendto",
        46: "sendmsg",
        42: "connect",
    },
    "aarch64": {
        63: "read",
        64: "write",
        65: "readv",
        66: "writev",
        72: "pselect6",
        73: "ppoll",
        22: "epoll_pwait",
        32: "flock",
        82: "fsync",
        83: "fdatasync",
        95: "waitid",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        137: "rt_sigtimedwait",
        202: "accept",
        203: "connect",
        206: "sendto",
        207: "recvfrom",
        211: "sendmsg",
        212: "recvmsg",
        242: "accept4",
        260: "wait4",
    },
}
"""Of the calls in which a process may stand for long, the numbers by machine."""

_READS = ("read", "readv", "recvfrom", "recvmsg", "accept", "accept4", "flock")
_WRITES = ("write", "writev", "sendto", "sendmsg", "connect", "fsync", "fdatasync")
_OF_DESCRIPTOR = frozenset((*_READS, *_WRITES))
"""Their first argument is a descriptor."""


@dataclass(frozen=True, slots=True)
class Times:
    """What a thread has used up to an instant: processor time, and how often it went to sleep by itself."""

    cpu_s: float
    sleeps: int


def children_of(stats: Mapping[int, Stat], pid: int) -> list[int]:
    """All processes below it, the nearest first."""
    found, at = [pid], 0
    while at < len(found) and len(found) <= MOST_CHILDREN:
        found += [child for child, stat in stats.items() if stat.parent == found[at]]
        at += 1
    return found[1 : MOST_CHILDREN + 1]


def times_of(pid: int, proc: str = "/proc") -> dict[int, Times]:
    """By thread."""
    folder = f"{proc}/{pid}/task"
    found = {}
    for tid in _threads(folder):
        if (stat := stat_of(f"{folder}/{tid}")) is not None:
            found[tid] = Times(stat.own_ticks * _TICK_S, sleeps_of(f"{folder}/{tid}"))
    return found


def process_facts(
    pid: int,
    before: Mapping[int, Times],
    now: Mapping[int, Times],
    window_s: float,
    sockets: Callable[[], Mapping[str, str]],
    proc: str = "/proc",
) -> ProcessFacts:
    """Without its stacks. `before` and `now` are its times, so far apart; `sockets` the machine's, by inode."""
    folder = f"{proc}/{pid}"
    stat = stat_of(folder)
    if stat is None:
        return ProcessFacts(pid, "", 0, ())
    tids = sorted(_threads(f"{folder}/task"), key=lambda tid: (tid != pid, tid))[:MOST_THREADS]
    threads = tuple(
        _within(facts, before.get(facts.tid), now.get(facts.tid), window_s)
        for tid in tids
        if (facts := _thread(f"{folder}/task/{tid}", sockets)) is not None
    )
    resident = read(f"{folder}/statm").split()
    memory = int(resident[1]) * _PAGE if len(resident) > 1 else 0
    return ProcessFacts(
        pid,
        clean(stat.name),
        stat.parent,
        threads,
        memory,
        devices=_has_device(folder),
        debugger=clean(debugger_of(folder)),
    )


def _thread(folder: str, sockets: Callable[[], Mapping[str, str]]) -> ThreadFacts | None:
    stat = stat_of(folder)
    if stat is None:
        return None
    call, on = _call(folder, sockets) if stat.state != "R" else ("", "")
    channel = read(f"{folder}/wchan")
    return ThreadFacts(
        int(stat.pid),
        clean(stat.name),
        stat.state,
        channel="" if channel == "0" else clean(channel),
        call=call,
        on=on,
    )


def _within(facts: ThreadFacts, before: Times | None, now: Times | None, window_s: float) -> ThreadFacts:
    if before is None or now is None or window_s <= 0:
        return facts
    return replace(facts, cpu_s=now.cpu_s - before.cpu_s, wakes=(now.sleeps - before.sleeps) / window_s)


def _call(folder: str, sockets: Callable[[], Mapping[str, str]]) -> tuple[str, str]:
    """The system call in which the thread waits, and what is behind its descriptor."""
    number, *arguments = read(f"{folder}/syscall").split()[:2] or [""]
    if not number.isdigit():
        return "", ""
    call = _CALLS.get(platform.machine(), {}).get(int(number), number)
    if call not in _OF_DESCRIPTOR or not arguments:
        return call, ""
    try:
        on = os.readlink(f"{folder}/fd/{int(arguments[0], 16)}")
    except (OSError, ValueError):
        return call, ""
    if on.startswith("socket:["):
        on = sockets().get(on[len("socket:[") : -1], on)
    return call, clean(on)[:_MOST_TEXT]


def _threads(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder)]
    except OSError:
        return []


def _has_device(folder: str) -> bool:
    try:
        names = os.listdir(f"{folder}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{folder}/fd/{name}").startswith(_DEVICES):
                return True
        except OSError:
            continue
    return False


# --- Sockets


def sockets_of(tables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The addresses of each TCP socket by its inode, from texts of /proc/net/tcp and tcp6 by name.

    >>> row = "0: 0100007F:1F90 0200007F:C350 01 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    >>> sockets_of([("tcp", "header\\n" + row)])
    {'4711': 'tcp 127.0.0.1:8080 to 127.0.0.2:50000'}
    """
    found = {}
    for name, text in tables:
        for row in text.splitlines()[1:]:
            fields = row.split()
            if len(fields) > 9:
                found[fields[9]] = f"{name} {_address(fields[1])} to {_address(fields[2])}"
    return found


def read_sockets(proc: str = "/proc") -> dict[str, str]:
    """This network namespace's, which is the workers', too."""
    return sockets_of((name, read(f"{proc}/self/net/{name}")) for name in ("tcp", "tcp6"))


def _address(text: str) -> str:
    """The kernel writes words of the machine's order."""
    address, _, port = text.partition(":")
    try:
        words = bytes.fromhex(address)
        packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
    except ValueError:
        return text
