"""Keeps a disk writer at hand: the process is started when the first order comes, and anew after it has ended.

The agent listens, and the writer inherits the listening socket: an order that comes while there is no writer waits in
the socket until there is one, and a writer that dies takes only its present order with it. Whoever gave that one hears
the end of the connection.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..events import Event, WriterEnded, WriterWanted
from ..processes.failures import describe_exit
from ..processes.workers import tied
from .writer import FINISH

log = logging.getLogger(__name__)

_MODULE = f"{__name__.rpartition('.')[0]}.writer"
_ROOT = Path(__file__).parents[len(_MODULE.split(".")) - 1]
_PROGRAM = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {_MODULE} import main; main(*sys.argv[1:])"
"""Isolated, and with nothing but the standard library and this package to look through, it starts in no time."""

PAUSE_S = 1.0
"""After a writer has ended, so that one that cannot start costs nothing."""


class DiskWriter:
    """For the main thread, which starts the process: it dies with the thread that does."""

    def __init__(
        self,
        path: Path,
        commits: Path,
        reports: Path,
        environment: Mapping[str, str],
        post: Callable[[Event], None],
    ) -> None:
        """`path` is where orders come, `commits` and `reports` are the agent's other sockets."""
        self.path = path
        self._command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(commits), str(reports)]
        self._environment = environment
        self._post = post
        self._process: subprocess.Popen[bytes] | None = None
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="disk-writer", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,) if self._process is not None else ()

    def heard(self, event: WriterWanted | WriterEnded) -> None:
        if isinstance(event, WriterWanted):
            self._launch()
        elif self._process is not None:
            code = self._process.wait()
            log.warning(
                "the disk writer has ended: %s; the next save starts another", describe_exit(code).text
            )
            self._process = None
            self._started.put(0)

    def finish(self, within_s: float) -> None:
        """Let it do all that was ordered, and end; whatever it has not done within that time is left."""
        if self._process is None and select.select([self._socket], [], [], 0)[0]:
            self._launch()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(within_s)
                connection.connect(str(self.path))
                connection.sendall(FINISH)
                process.wait(within_s)
        except (OSError, subprocess.TimeoutExpired):
            log.warning("a save may not be on disk: it was not written within %g s", within_s)
            process.kill()
            process.wait()

    def close(self) -> None:
        """The agent is ending; see `finish`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._socket.close()

    def _launch(self) -> None:
        try:
            self._process = subprocess.Popen(
                tied(self._command),
                env=dict(self._environment),
                stdin=self._socket.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("the disk writer cannot be started, saves make training wait: %s", error)
            self._started.put(0)
        else:
            self._started.put(self._process.pid)

    def _watch(self) -> None:
        """Posts that a writer is wanted, and that it has ended; waits for the main loop to have done what follows."""
        while True:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            try:
                poll.poll()
                self._post(WriterWanted())
                pid = self._started.get()
                if pid:
                    pidfd = os.pidfd_open(pid)
                    ended = select.poll()
                    ended.register(pidfd, select.POLLIN)
                    ended.poll()
                    os.close(pidfd)
                    self._post(WriterEnded())
                    self._started.get()
            except OSError:
                return  # closed, or reaped by `finish`: the agent is ending
            time.sleep(PAUSE_S)
