"""The agent of one job on this node, as a child process of the daemon.

It is the `elastic-agent` of any other job, in a session of its own. It leaves its job by plan when the daemon ends,
however that ends, and what it prints goes to a file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...threads import Thread

_PR_SET_PDEATHSIG = 1
_DAEMON_ENDED = signal.SIGUSR1
"""The kernel may send it once for each thread of the daemon. A second SIGTERM would cut the workers' grace short."""


@dataclass(frozen=True, slots=True)
class JobAgentEnded:
    """The job's agent of this ticket has ended with this code, as `subprocess` counts it."""

    ticket: int
    code: int


class JobAgent:
    """For the main thread: the child gets its signal when the thread ends that started it."""

    def __init__(self, ticket: int, post: Callable[[JobAgentEnded], None]) -> None:
        self.ticket = ticket
        self._post = post
        self._process: subprocess.Popen[bytes] | None = None
        self.leaves = False

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], directory: str, output: Path
    ) -> None:
        """Raises OSError."""
        output.parent.mkdir(parents=True, exist_ok=True)
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with output.open("ab") as file:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "elastic_agent", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, _DAEMON_ENDED),
            )
        Thread(lambda: self._post(JobAgentEnded(self.ticket, process.wait())), "job-agent").start()

    def leave(self) -> None:
        """Ask it to leave the job by plan; a second time ends it at once."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
            self.leaves = True
