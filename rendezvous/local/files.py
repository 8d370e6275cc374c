"""The files of a local store in its folder, and who may host there."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreRefused, StoreUnavailable

MOST_PATH_BYTES = 107
"""Of a UNIX socket's path: the kernel's limit."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """The files of the store of one pool. Several pools may have the same folder."""

    folder: Path
    job: str
    lasting: Path | None = None
    """A folder for what outlives the machine's restart; None: in `folder`, too."""

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.job}.sock"

    @property
    def state(self) -> Path:
        return (self.lasting or self.folder) / f"{self.job}.state"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.job}.lock"

    def check(self) -> None:
        """Raises StoreRefused."""
        path = os.fsencode(self.socket)
        if len(path) > MOST_PATH_BYTES:
            raise StoreRefused(
                f"the path {self.socket} has {len(path)} bytes, a UNIX socket's at most {MOST_PATH_BYTES}: choose a "
                "shorter folder (--rdzv-endpoint local:///FOLDER) or a shorter name of the pool"
            )


class HostedAlready(StoreUnavailable):
    """Another process hosts the store, or is about to."""


class HostLock:
    """The process that holds it hosts the store; the kernel releases it with the process, however that ends."""

    def __init__(self, files: StoreFiles) -> None:
        """Raises HostedAlready and OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fds = [os.open(files.lock, flags, 0o600)]
        try:
            fcntl.flock(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise HostedAlready(
                f"another process hosts the store of pool {files.job} in {files.folder}"
            ) from error
        with suppress(OSError):
            # systemd-tmpfiles leaves a folder alone, with all in it, while someone has a lock on it.
            self._fds.append(os.open(files.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fcntl.flock(self._fds[1], fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def user_of(peer: socket.socket) -> int:
    """User id of the process at the other end."""
    return _credentials(peer)[1]


def process_of(peer: socket.socket) -> int:
    """Process id of the other end; 0: it is in another process namespace."""
    return max(0, _credentials(peer)[0])


def _credentials(peer: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(pid), int(uid)


def start_of(pid: int) -> int:
    """When this process began, as the kernel counts; 0 when it has ended, waited for or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[19]) if fields[0] not in (b"Z", b"X") else 0
    except (OSError, IndexError, ValueError):
        return 0
