"""Processes of the agent's own beside the workers, such as the disk writer, and how each is tied to the agent's life.

A helper dies with the agent, and no signal to all of a service ends it (`start_helper`). It is started anew when it has
ended. What it reads or writes may hang in the kernel, so the agent waits for its end for a bounded time, and then
leaves it behind.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.events import IoThread
from ...common.exits import describe_exit
from .guard import IGNORED
from .proc import KILL_WAIT_S, has_ended, process_status, reap_within

if TYPE_CHECKING:
    from .proc import Child

log = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("shim.py")


def job_python(environ: Mapping[str, str]) -> str:
    """The interpreter of the workers; torchrun's variable may name another than ours."""
    return environ.get("PYTHON_EXEC", sys.executable)


def tied(command: Sequence[str], cpus: Sequence[int] = (), *, helper: bool = False) -> list[str]:
    """The same command, through the shim: it dies with this process, and with the thread that starts it.

    It runs on these CPUs only, if any are given. A `helper` is the agent's own process.
    """
    shim = [sys.executable, "-I", "-S", str(SHIM), str(os.getpid())]
    return [*shim, cpus_word(cpus), "--helper" if helper else "--", *command]


def start_helper(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    stdout: int = subprocess.DEVNULL,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process of the agent's own, which no signal to all processes ends, from its very first moment.

    It dies with this process, like a worker. The signals are blocked until the shim ignores them. Raises OSError.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        return subprocess.Popen(
            tied(command, helper=True),
            env=dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def cpus_word(cpus: Sequence[int]) -> str:
    """For `shim.keep_to`."""
    return ",".join(map(str, cpus))


class Helper:
    """One process at a time. For the main thread: the process dies with the thread that starts it."""

    def __init__(self, io: IoThread, ended: Callable[[], object]) -> None:
        """`ended` is called in the io thread once for each process; then `reap` it."""
        self._io = io
        self._ended = ended
        self._process: Child | None = None
        self._left: list[Child] = []
        """Killed, and not ended yet. They are still children of this process, and none that a worker has left."""

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> tuple[int, ...]:
        self._left = [each for each in self._left if reap_within(each, 0.0) is None]
        return tuple(each.pid for each in (self._process, *self._left) if each is not None)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int,
        pass_fds: Sequence[int] = (),
        stderr: int | None = None,
    ) -> None:
        """Raises OSError."""
        self.watch(start_helper(command, environment, stdin, stderr=stderr, pass_fds=pass_fds))

    def watch(self, process: Child) -> None:
        """One that was started in another way. Raises OSError: it has been ended then."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            end(process)
            raise
        self._process = process
        self._io.watch(pidfd, partial(self._readable, pidfd))

    def reap(self) -> str:
        """How the process has ended; empty where there is none any more, or another one runs."""
        if self._process is None or not has_ended(self._process.pid):
            return ""
        process, self._process = self._process, None
        return describe_exit(process.wait())

    def release(self) -> Child | None:
        """The process, for the caller to wait for."""
        process, self._process = self._process, None
        return process

    def end(self, consequence: str = "") -> None:
        """It has nothing to finish. `consequence`: of its being left behind."""
        process = self.release()
        if process is not None and not end(process, consequence):
            self._left.append(process)

    def _readable(self, pidfd: int) -> None:
        self._io.forget(pidfd)
        os.close(pidfd)
        self._ended()


def end(process: Child, consequence: str = "") -> bool:
    """Whether it has ended: it may be in the middle of a write to a disk that is dead, and then never does."""
    os.kill(process.pid, signal.SIGKILL)  # it is our child, and not yet reaped
    ended = reap_within(process, KILL_WAIT_S) is not None
    if not ended:
        log.warning(
            "%s. It was killed, and is left behind%s", process_status(f"/proc/{process.pid}"), consequence
        )
    return ended
