"""The agent of one job on this node, as a child process of the daemon.

It is the `elastic-agent` of any other job, in a session of its own: the standby, which becomes it, or a process that is
started for it. It leaves its job by plan when the daemon ends, however that ends, and what it prints goes to a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import __file__ as _package
from ...threads import Thread
from ..common.exits import ExitCode
from ..main.error_file import VARIABLE as ERROR_FILE
from ..output.job_folders import hold
from ..output.masking import masked, secrets_in
from .hand_over import AgentCommand, send_job, was_taken

_PR_SET_PDEATHSIG = 1
DAEMON_ENDED = signal.SIGUSR1
"""The kernel may send it once for each thread of the daemon. A second SIGTERM would cut the workers' grace short."""


def signal_at_daemons_end(number: signal.Signals) -> None:
    """For a child that `start_child` has started: from now on it gets this one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


_PACKAGES_PARENT = str(Path(_package).parents[1])

_RUN_MODULE = f"""\
import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv.pop(1))
import os, runpy, traceback
try:
    import ctypes
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv.pop(1)))
    if os.getppid() != int(sys.argv.pop(1)): sys.exit("elastic-agent: the daemon has ended; nothing was started")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except Exception: traceback.print_exc(); os._exit({ExitCode.AGENT_FAILED:d})
"""
"""As `python -m` does, with four differences. What a job has in its directory is not taken for a part of us. We are
found where this daemon was, also if that is no place where Python looks by itself. It ties itself to the daemon's life:
`preexec_fn` may deadlock beside gRPC's threads. And an agent that cannot begin, as where it is installed badly, is no
failure of the job's workers.
"""


def start_child(command: list[str], at_our_end: signal.Signals, **how: Any) -> subprocess.Popen[bytes]:
    """Runs a module of ours, with its arguments. It gets this signal when this thread ends. Raises OSError."""
    tie = [str(int(at_our_end)), str(os.getpid())]
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN_MODULE, _PACKAGES_PARENT, *tie, *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **how,
        )
    except ValueError as error:  # a byte or a letter that no command line and no variable can have
        raise OSError(f"cannot be started: {error}") from error


@dataclass(frozen=True, slots=True)
class JobAgentEnded:
    """The job's agent of this ticket has ended with this code, as `subprocess` counts it."""

    ticket: int
    code: int
    error: str = ""
    """Why, as its error file says; empty without one."""


@dataclass(frozen=True, slots=True)
class NotTaken:
    """The standby has ended, and has not become the job's agent of this ticket: nothing of the job was started."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StandbyProcess:
    """A standby, and this end of its socket."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    since: float

    def end(self) -> None:
        """It has nothing to finish."""
        self.channel.close()
        self.process.kill()
        self.process.wait()


class JobAgent:
    """For the main thread: the child gets its signal when the thread ends that started it."""

    def __init__(
        self, ticket: int, job: AgentCommand, output: Path, post: Callable[[JobAgentEnded | NotTaken], None]
    ) -> None:
        self.ticket = ticket
        # Its name is that of a log, for JobFolders to delete it where a daemon that was killed has left it.
        self._error_file = output.with_name(f".{output.name}.error.log")
        self._job = replace(job, environment={ERROR_FILE: str(self._error_file), **job.environment})
        self._output = output
        self._post = post
        self._process: subprocess.Popen[bytes] | None = None
        self.leaves = False

    def start(self, waiting: StandbyProcess | None = None) -> None:
        """As a process of its own, or as the standby. `NotTaken` follows, and then it may be started again, or
        `JobAgentEnded`. Raises OSError: then nothing follows."""
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._error_file.unlink(missing_ok=True)
            file = self._output.open("ab")
        except OSError:
            if waiting is not None:
                waiting.end()
            raise
        with file:
            hold(file.fileno())
            if waiting is not None:
                self._hand_over(waiting, file.fileno())
                return
            job = self._job
            self._process = process = start_child(
                ["elastic_agent", *job.words],
                DAEMON_ENDED,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=job.directory,
                env=job.environment,
            )
        self._begin(lambda: self._post(self._ended(process.wait())))

    def _ended(self, code: int) -> JobAgentEnded:
        try:
            report = json.loads(self._error_file.read_text(errors="replace"))["message"]
            self._error_file.unlink()
            rank = report["extraInfo"].get("rank")
            error = " ".join(report["message"].split()) + (f" (rank {rank})" if rank is not None else "")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            error = ""
        if self.leaves and code == -signal.SIGTERM:
            code = ExitCode.STOPPED_BY_SIGTERM  # it was asked to leave before it could hear that
        return JobAgentEnded(self.ticket, code, masked(error, secrets_in(self._job.environment)))

    @property
    def has_ended(self) -> bool:
        """Also where the thread that waits for it has failed."""
        return self._process is not None and self._process.poll() is not None

    def leave(self) -> None:
        """Ask it to leave the job by plan; a second time ends it at once. One that was stopped goes on, to obey."""
        if self._process is not None and self._process.poll() is None:
            self.leaves = True  # before the thread that waits for it can see its end
            os.kill(self._process.pid, signal.SIGTERM)
            os.kill(self._process.pid, signal.SIGCONT)

    def _hand_over(self, waiting: StandbyProcess, output: int) -> None:
        self._process = process = waiting.process
        try:
            send_job(waiting.channel, self._job, output)
        except OSError:
            waiting.channel.close()  # which it sees, if it is not gone

        def follow() -> None:
            with waiting.channel:
                taken = was_taken(waiting.channel)
            if not taken:
                process.kill()  # it may stand still
            code = process.wait()
            self._post(self._ended(code) if taken else NotTaken(self.ticket))

        self._begin(follow)

    def _begin(self, waiting: Callable[[], None]) -> None:
        """As soon as the machine lets a thread start: the job runs meanwhile."""
        Thread(waiting, "job-agent", lambda: self._begin(waiting)).start()
