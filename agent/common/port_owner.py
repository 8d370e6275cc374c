"""Who keeps a port from being bound, as far as /proc shows it: the answer an operator needs beside "in use".

The socket's inode is in /proc/net/tcp and tcp6, the process that has it open in /proc/<pid>/fd. The second is hidden
for processes of another user or another container, and some ports have no process at all; the answer then says so.
Never raises: it words an error that is already on its way.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class PortOwner:
    """`pid` where it can be seen, and always `words` for the operator."""

    pid: int | None
    words: str


def find_owner(address: str, port: int, proc: Path = Path("/proc")) -> PortOwner:
    """The process that blocks `port` of `address`, an IP address of this machine or the unspecified one."""
    rows = [row for table in ("tcp", "tcp6") for row in _blocking(proc / "net" / table, address, port)]
    if not rows:
        return PortOwner(None, "owner unknown: no process listens there now, it was freed or never listened")
    # A listener's connections have its port too: name the listener if there is one, else any live socket.
    row = min(rows, key=lambda fields: (fields[3] != _LISTEN, fields[9] == "0"))
    uid, inode = row[7], row[9]
    if inode == "0":
        return PortOwner(None, "no process: a closed connection lingers, the kernel frees it within 60 s")
    for pid in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()):
        if _holds(proc / str(pid) / "fd", f"socket:[{inode}]"):
            itself = ", this agent itself: two of its settings name one port" if pid == os.getpid() else ""
            return PortOwner(pid, f"pid {pid}, {_command(proc / str(pid))}{itself}")
    return PortOwner(
        None, f"owner unknown: a process of user id {uid}, hidden in another container or by its user"
    )


def _blocking(table: Path, address: str, port: int) -> list[list[str]]:
    """The rows of /proc/net/tcp or tcp6 whose local end clashes with ours."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:  # tcp6 is absent without IPv6
        return []
    ours = ipaddress.ip_address(address.partition("%")[0])
    clashing = []
    for fields in map(str.split, lines):
        host, _, hex_port = fields[1].partition(":")
        theirs = _kernel_address(host)
        if int(hex_port, 16) == port and (ours == theirs or ours.is_unspecified or theirs.is_unspecified):
            clashing.append(fields)
    return clashing


def _kernel_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """`0100007F` is 127.0.0.1: the kernel prints 32-bit words in the machine's byte order."""
    words = (int(text[i : i + 8], 16) for i in range(0, len(text), 8))
    found = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return (isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found


def _holds(descriptors: Path, target: str) -> bool:
    try:
        return any(os.readlink(entry) == target for entry in descriptors.iterdir())
    except OSError:  # gone meanwhile, or not ours to inspect
        return False


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "which ended meanwhile"
