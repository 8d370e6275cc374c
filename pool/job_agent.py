"""A node's part of a job: the command line of the job's agent there, its process, what it prints, and what its end
means for the job.

The agent is the `elastic-agent` of any other job, as a child process of the daemon in a session of its own: the
standby, which becomes it, or a process that is started for it. It leaves its job by plan when the daemon ends, however
that ends. What it prints goes to DIR/<node>/<job>.log, below the daemon's log directory: the newest `KEPT` are kept,
and those of jobs that go on. The folders of the jobs' runs, with a file for each worker, are beside, as without a pool
(`agent/output/log_files.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ..agent.common.exits import ExitCode, signal_name
from ..agent.configuration.config import (
    CONFIG_FILE,
    HTTP_ADDRESS,
    LOG_DIR,
    MAX_NODES,
    MIN_NODES,
    NODE_ID,
    NODES_MULTIPLE_OF,
    OPTIONS,
)
from ..agent.configuration.load import Settings
from ..agent.configuration.rendezvous import ETCD_OPTIONS, JOB_ID, LAST_CALL, MEETING, POOL
from ..agent.main.process import ERROR_FILE
from ..agent.output.masking import masked, secrets_in
from ..threads import Thread
from .member import Assignment
from .records import MOST_LOG_BYTES, AllocationEnd, AllocationOutcome, short
from .standby import DAEMON_ENDED, AgentCommand, Standby, start_child

OF_THE_POOL: frozenset[str] = frozenset(
    option.name
    for option in (
        *(*MEETING, *ETCD_OPTIONS),
        *(NODE_ID, MIN_NODES, MAX_NODES, NODES_MULTIPLE_OF, HTTP_ADDRESS, LOG_DIR, CONFIG_FILE),
    )
)
"""Options of a job's agents that its pool decides, not who submits the job."""

_MOST_ERROR = 500
"""Characters of what an agent says of its end."""

_OUTCOMES: Mapping[int, AllocationOutcome] = {
    ExitCode.SUCCESS: AllocationOutcome.SUCCEEDED,
    ExitCode.FAILED: AllocationOutcome.FAILED,
    ExitCode.CRASH_LOOP: AllocationOutcome.FAILED,
    ExitCode.NOT_ON_DISK: AllocationOutcome.FAILED,
    ExitCode.UNLIKE_THE_JOB: AllocationOutcome.REFUSED,
    ExitCode.MISMATCH: AllocationOutcome.REFUSED,
    ExitCode.BAD_CONFIG: AllocationOutcome.REFUSED,
    ExitCode.STOPPED_BY_SIGTERM: AllocationOutcome.LEFT,
    ExitCode.STOPPED_BY_SIGINT: AllocationOutcome.LEFT,
    ExitCode.LEFT_IN_TIME: AllocationOutcome.LEFT,
}
"""Of an agent that ends in another way it is `NOT_HERE`."""


def agent_words(
    assignment: Assignment, node: str, store: Mapping[str, str], own: Sequence[str], logs: str
) -> list[str]:
    """The command line of the job's agent on this node, without the program.

    `store` are the options of the pool's store by name, and others that this daemon decides; `own` the words with which
    its operator has set options of all jobs here; those of the job are stronger.
    """
    job = assignment.job
    decided: list[tuple[str, object]] = [
        *store.items(),
        (POOL.name, store[JOB_ID.name]),
        (JOB_ID.name, job.job),
        (NODE_ID.name, node),
        (MIN_NODES.name, job.min_nodes),
        (MAX_NODES.name, job.max_nodes),
        (NODES_MULTIPLE_OF.name, job.nodes_multiple_of),
        (LOG_DIR.name, logs),
    ]
    if len(assignment.run.staying) <= job.min_nodes and not _says(job.options, LAST_CALL.name):
        decided.append((LAST_CALL.name, "0s"))  # a world needs them all, and no others are on their way
    named = dict(decided)
    return [*own, *job.options, *(f"--{name}={value}" for name, value in named.items()), *job.command]


def _says(words: Sequence[str], option: str) -> bool:
    return any(word.split("=")[0] == f"--{option}" for word in words)


def own_words(settings: Settings, folder: str) -> tuple[str, ...]:
    """What a daemon's operator has set for all jobs here, as words of a command line that mean the same wherever a job
    runs: what its command line gives, and its configuration file. `folder` is where the daemon was started."""
    words = tuple(
        f"--{option.name}={settings[option].text}"
        for option in OPTIONS
        if settings[option].origin.startswith("--") and option.name not in OF_THE_POOL
    )
    file = settings[CONFIG_FILE].value
    return words if file is None else (f"--{CONFIG_FILE.name}={os.path.join(folder, file)}", *words)


def allocation_end(assignment: Assignment, code: int, error: str = "") -> AllocationEnd:
    """`code`: of the job's agent, as `subprocess` counts it. `error`: why it ended so, if it has said that."""
    known = next((one for one in ExitCode if one == code), None)
    if code < 0:
        reason = f"the job's agent was killed by {signal_name(-code)}"
    elif known is None:
        reason = f"the job's agent ended with exit code {code}"
    elif error:
        reason = f"{short(error, _MOST_ERROR)}; exit code {code}"
    else:
        reason = f"exit code {code}: {known.meaning}"
    outcome = _OUTCOMES.get(code, AllocationOutcome.NOT_HERE)
    return AllocationEnd(assignment.job.job, assignment.allocation.id, outcome, code, reason)


class JobAgent:
    """For the main thread: the child gets its signal when the thread ends that started it."""

    def __init__(
        self,
        command: AgentCommand,
        output: BinaryIO,
        standby: Standby,
        ended: Callable[[int, str], object],
    ) -> None:
        """Starts it: as the standby, or as a process of its own. What it prints goes to the file. `ended` is called in
        another thread, with its exit code as `subprocess` counts it, and why, as far as it has said that. Raises
        OSError: then nothing was started."""
        # Its name is that of a log, for JobLogs to delete it where a daemon that was killed has left it.
        folder, name = os.path.split(output.name)
        self._error_file = Path(folder, f".{name}.error.log")
        with contextlib.suppress(OSError):
            self._error_file.unlink()
        self._environment = {ERROR_FILE: str(self._error_file), **command.environment}
        command = replace(command, environment=self._environment)
        self._call = ended
        self.leaves = False
        taken = standby.hand_over(command, output.fileno())
        self.was_standby = taken is not None
        self._process = taken or start_child(
            ["elastic_agent", *command.words],
            DAEMON_ENDED,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=command.directory,
            env=command.environment,
        )
        self._await_end()

    def _await_end(self) -> None:
        """As soon as the machine lets a thread start: the job runs meanwhile."""
        Thread(lambda: self._ended(self._process.wait()), "job-agent", self._await_end).start()

    def _ended(self, code: int) -> None:
        try:
            report = json.loads(self._error_file.read_text(errors="replace"))["message"]
            self._error_file.unlink()
            rank = report["extraInfo"].get("rank")
            error = " ".join(report["message"].split()) + (f" (rank {rank})" if rank is not None else "")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            error = ""
        if self.leaves and code == -signal.SIGTERM:
            code = ExitCode.STOPPED_BY_SIGTERM  # it was asked to leave before it could hear that
        self._call(code, masked(error, secrets_in(self._environment)))

    @property
    def has_ended(self) -> bool:
        """Also where the thread that waits for it has failed."""
        return self._process.poll() is not None

    def leave(self) -> None:
        """Ask it to leave the job by plan; a second time ends it at once. One that was stopped goes on, to obey."""
        if self._process.poll() is None:
            self.leaves = True  # before the thread that waits for it can see its end
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # nothing where the first one has ended it by now


# ---------------------------------------------------------------- what it prints

KEPT = 1000
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class JobLogs:
    """Of one node."""

    def __init__(self, root: Path, node: str) -> None:
        self._folder = root / node
        self._unfinished = [log for log in self._folder.glob("*.log") if _is_held(log)]

    def unfinished(self) -> tuple[str, ...]:
        """Jobs of an earlier daemon of this node that have processes here still."""
        self._unfinished = [log for log in self._unfinished if _is_held(log)]
        return tuple(sorted(log.stem for log in self._unfinished))

    def begin(self, job: str) -> BinaryIO:
        """The open file for what the job's agents print here. As long as a process that was started with it lives,
        `unfinished` finds it, and it is not deleted; a disk without locks has none to find. Raises OSError."""
        if _JOB.fullmatch(job) is None:
            raise OSError(f"{job!r} is no name for a file: submit the job anew")
        self._folder.mkdir(parents=True, exist_ok=True)
        output = (self._folder / f"{job}.log").open("a+b")  # NFS locks for sharing what is open for reading
        with contextlib.suppress(OSError):
            os.utime(output.fileno())  # the newest, on a disk without locks, too
            fcntl.flock(output, fcntl.LOCK_SH | fcntl.LOCK_NB)
        Thread(self._prune, "job-logs", lambda: None).start()
        return output

    def _prune(self) -> None:
        """In a thread of its own: a disk takes its time for a thousand files."""
        with contextlib.suppress(OSError):
            for log in sorted(self._folder.glob("*.log"), key=lambda log: log.lstat().st_mtime)[:-KEPT]:
                if not _is_held(log):
                    log.unlink()

    def read(self, job: str, start: int) -> bytes:
        """What the job's agents have printed, from this byte on; `MOST_LOG_BYTES` at most. Raises FileNotFoundError
        when nothing of the job is on this node, and OSError."""
        if _JOB.fullmatch(job) is None:
            raise FileNotFoundError(f"nothing of a job {job!r} is here")
        fd = os.open(self._folder / f"{job}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, MOST_LOG_BYTES, start) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)


def _is_held(output: Path) -> bool:
    """NFS gives this lock only on a file that is open for writing."""
    try:
        file = os.open(output, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
