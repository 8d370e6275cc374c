"""A process of the agent's own beside the workers, such as the disk writer: started anew when it has ended.

It dies with the agent, and no signal to all of a service ends it (`start_helper`). What it reads or writes may
hang in the kernel, so the agent waits for its end for a bounded time, and then leaves it behind.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...common.events import IoThread
from ...common.exits import describe_exit
from .proc import KILL_WAIT_S, process_status, reap_within
from .workers import start_helper

log = logging.getLogger(__name__)


class Helper:
    """One process at a time. For the main thread: the process dies with the thread that starts it."""

    def __init__(self, io: IoThread, ended: Callable[[], object]) -> None:
        """`ended` is called in the io thread once for each process; then `reap` it."""
        self._io = io
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,) if self._process is not None else ()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], stdin: int, pass_fds: Sequence[int] = ()
    ) -> None:
        """Raises OSError."""
        process = start_helper(command, environment, stdin, pass_fds=pass_fds)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            end(process)
            raise
        self._process = process
        self._io.watch(pidfd, partial(self._readable, pidfd))

    def reap(self) -> str:
        """How the process has ended; empty where there is none any more."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        return describe_exit(process.wait())

    def release(self) -> subprocess.Popen[bytes] | None:
        """The process, for the caller to wait for."""
        process, self._process = self._process, None
        return process

    def end(self, consequence: str = "") -> None:
        """It has nothing to finish. `consequence`: of its being left behind."""
        process = self.release()
        if process is not None:
            end(process, consequence)

    def _readable(self, pidfd: int) -> None:
        self._io.forget(pidfd)
        os.close(pidfd)
        self._ended()


def end(process: subprocess.Popen[bytes], consequence: str = "") -> None:
    """It may be in the middle of a write to a disk that is dead, and then never ends."""
    process.kill()
    if reap_within(process, KILL_WAIT_S) is None:
        log.warning(
            "%s. It was killed, and is left behind%s", process_status(f"/proc/{process.pid}"), consequence
        )
