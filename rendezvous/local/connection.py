"""A client's connection to the host of a local store. Each wait on it has a deadline of its own."""

from __future__ import annotations

import os
import socket
import stat
import time
from contextlib import suppress

from ...codec import Invalid
from ..errors import StoreError, StoreMismatch, StoreRefused, StoreUnavailable
from ..store.wire import decode_meta
from .files import StoreFiles, user_of
from .frames import FrameInvalid, Frames, frame

_FULL_PAUSE_S = 0.02
"""Between two tries when more connect at once than the host has accepted."""
_READ_BYTES = 256 * 1024
_MOST_BYTES = 2**32


class ConnectionBroken(StoreError):
    """The connection has ended; whether the host has, a new one shows."""


class NotHosted(StoreUnavailable):
    """No process hosts the store now."""


class Connection:
    """Used by one thread at a time; `end` is for any."""

    def __init__(self, connected: socket.socket, job: str) -> None:
        self.host: str | None = None
        """The host's name for its present life; None until it has introduced itself."""
        self._socket, self._job = connected, job
        self._received = Frames(_MOST_BYTES)

    @property
    def idle(self) -> bool:
        """It is connected, and nothing unasked for has come."""
        try:
            self._socket.settimeout(0.0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._received
        except OSError:
            pass
        return False

    def send(self, message: bytes, deadline: float) -> None:
        """Raises TimeoutError and ConnectionBroken: part of the message may be on its way, and nothing can
        follow it."""
        try:
            self._until(deadline)
            self._socket.sendall(frame(message))
        except BlockingIOError as error:
            raise TimeoutError from error
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def receive(self, deadline: float) -> bytes:
        """The next message. Raises TimeoutError, after which it can be called again, ConnectionBroken and
        StoreMismatch."""
        self.meet(deadline)
        return self._take(deadline)

    def meet(self, deadline: float) -> str:
        """The host's name. Raises as `receive` does."""
        if self.host is None:
            introduction = self._take(deadline)
            try:
                self.host = decode_meta(introduction, self._job)
            except Invalid as error:
                raise StoreMismatch(
                    f"the local store of pool {self._job!r} is not ours to join: {error}; use the version of "
                    "elastic-agent that its daemon has"
                ) from error
        return self.host

    def end(self) -> None:
        """A wait under way raises ConnectionBroken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _take(self, deadline: float) -> bytes:
        try:
            while (message := self._received.take()) is None:
                self._until(deadline)
                received = self._socket.recv(_READ_BYTES)
                if not received:
                    raise ConnectionBroken("it was closed there")
                self._received.feed(received)
        except BlockingIOError as error:
            raise TimeoutError from error
        except TimeoutError:
            raise
        except (OSError, FrameInvalid) as error:
            raise ConnectionBroken(str(error)) from error
        return message

    def _until(self, deadline: float) -> None:
        self._socket.settimeout(max(0.0, deadline - time.monotonic()))


def connect(files: StoreFiles, deadline: float) -> Connection:
    """To whatever process hosts the store now; it has still to introduce itself. Raises StoreUnavailable."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        _connect(connected, files, deadline)
        _check_host(user_of(connected), files)
    except BaseException:
        connected.close()
        raise
    return Connection(connected, files.job)


def _check_host(uid: int, files: StoreFiles) -> None:
    """Root believes another user's host only in a folder that not every user could have made. Raises StoreRefused."""
    me = os.geteuid()
    if uid in (me, 0) or (me == 0 and not files.folder.parent.stat().st_mode & stat.S_IWOTH):
        return
    raise StoreRefused(
        f"user {uid} hosts the store in {files.folder}: remove that folder, or name another one"
    )


def _connect(connected: socket.socket, files: StoreFiles, deadline: float) -> None:
    files.check()
    while True:
        try:
            connected.connect(str(files.socket))
            return
        except BlockingIOError:
            if time.monotonic() + _FULL_PAUSE_S >= deadline:
                raise StoreUnavailable(
                    f"the host of the store in {files.folder} accepts no connection: it hangs"
                ) from None
            time.sleep(_FULL_PAUSE_S)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotHosted(
                f"no agent hosts the store of pool {files.job} in {files.folder}: start elastic-agent without a script "
                "on this machine, as the same user"
            ) from error
        except PermissionError as error:
            raise StoreRefused(
                f"{files.folder} belongs to another user: a pool of one machine is for the user that runs its daemon, "
                "and for root"
            ) from error
        except OSError as error:
            raise StoreUnavailable(f"cannot connect to {files.socket}: {error}") from error
