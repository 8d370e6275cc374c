"""A node's part of a job: the command line of the job's agent there, its process, and what its end means for the job.

The agent is the `elastic-agent` of any other job, as a child process of the daemon in a session of its own: the spare
agent, which becomes it, or a process that is started for it. It leaves its job by plan when the daemon is asked to
end, and is killed with a daemon that is killed.

A *spare agent* waits to be the agent of a job, with all that takes long done already. The daemon starts it while the
node is idle, as `elastic-agent --await-job`. It has imported what an agent needs, and holds a fork server, from which
the job's workers will be forked. Everything that the job decides (directory, environment, console, log level, signals,
cgroup) it takes over with the job, as a process does that starts with it. Invariant: one that was handed out is never
offered again.

It may be sent its job before it is ready. It answers before it does anything for the job. So one that has ended without
an answer has started nothing, and the job's agent may be started in another way.

A job whose agent could not be like a process that starts with it starts cold: Python, and what workers are forked from,
have read some of their environment when they started. What is found later to be different, as a --preload of the job's
own, costs the time to preload again and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .. import __file__ as _package
from ..agent.common.events import ThreadFailed, run_next
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
from ..agent.configuration.rendezvous import ETCD_OPTIONS, JOB_ID, LAST_CALL, MEETING, POOL, STORES
from ..agent.main.process import ERROR_FILE
from ..agent.output.masking import masked, secrets_in
from ..agent.workers.processes import spare_wire as wire
from ..agent.workers.processes.imported import obstacle
from ..codec import Invalid
from ..threads import Thread
from .member import Assignment
from .records import AllocationEnd, Outcome, short

if TYPE_CHECKING:
    from ..agent.main.assembly import PreparedProcess

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- its command line

OF_THE_POOL: frozenset[str] = frozenset(
    option.name
    for option in (
        *(*MEETING, *ETCD_OPTIONS),
        *(NODE_ID, MIN_NODES, MAX_NODES, NODES_MULTIPLE_OF, HTTP_ADDRESS, LOG_DIR, CONFIG_FILE),
    )
)
"""Options of a job's agents that its pool decides, not who submits the job."""


def agent_words(
    assignment: Assignment, node: str, store: Mapping[str, str], own: Sequence[str], logs: str
) -> list[str]:
    """The command line of the job's agent on this node, without the program.

    `store` are the options of the pool's store by name, and others that this daemon decides; `own` the words with which
    its operator has set options of all jobs here; those of the job are stronger.
    """
    job = assignment.job
    decided: dict[str, object] = {
        **store,
        POOL.name: store[JOB_ID.name],
        JOB_ID.name: job.job,
        NODE_ID.name: node,
        MIN_NODES.name: job.min_nodes,
        MAX_NODES.name: job.max_nodes,
        NODES_MULTIPLE_OF.name: job.nodes_multiple_of,
        LOG_DIR.name: logs,
    }
    if len(assignment.run.staying) <= job.min_nodes:
        decided[LAST_CALL.name] = "0s"  # a world needs them all, and no others are on their way
    return [*own, *job.options, *(f"--{name}={value}" for name, value in decided.items()), *job.command]


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


# ---------------------------------------------------------------- its process

_PR_SET_PDEATHSIG = 1
_PACKAGES_PARENT = str(Path(_package).parents[1])

_RUN = f"""\
import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv.pop(1))
import os, runpy, traceback
try:
    import ctypes
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d})
    if os.getppid() != int(sys.argv.pop(1)): sys.exit("elastic-agent: the daemon has ended; nothing was started")
    runpy.run_module("elastic_agent", run_name="__main__", alter_sys=True)
except Exception: traceback.print_exc(); os._exit({ExitCode.AGENT_FAILED:d})
"""
"""As `python -m` does, with four differences. What a job has in its directory is not taken for a part of us. We are
found where this daemon was, also if that is no place where Python looks by itself. It ties itself to the daemon's life:
`preexec_fn` may deadlock beside gRPC's threads. And an agent that cannot begin, as where it is installed badly, is no
failure of the job's workers.
"""


def start_agent(words: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """`elastic-agent WORDS...`, which is killed when this thread ends. Raises OSError."""
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN, _PACKAGES_PARENT, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **how,
        )
    except ValueError as error:  # a byte or a letter that no command line and no variable can have
        raise OSError(f"cannot be started: {error}") from error


class JobAgent:
    """For the main thread: the child is killed when the thread ends that started it."""

    def __init__(
        self,
        command: wire.BecomeAgent,
        output: BinaryIO,
        spare: SpareAgent,
        ended: Callable[[int, str], object],
    ) -> None:
        """Starts it: as the spare agent, or as a process of its own. What it prints goes to the file. `ended` is called
        in another thread, with its exit code as `subprocess` counts it, and why, as far as it has said that. Raises
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
        taken = spare.hand_over(command, output.fileno())
        self.was_spare = taken is not None
        self._process = taken or start_agent(
            command.words,
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
        self._call(code, masked(error, secrets_in(self._environment)))

    @property
    def has_ended(self) -> bool:
        """Also where the thread that waits for it has failed."""
        return self._process.poll() is not None

    def leave(self) -> None:
        """Ask it to leave the job by plan; a second time ends it at once. One that was stopped goes on, to obey."""
        if self._process.poll() is None:
            self.leaves = True
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # nothing where the first one has ended it by now


# ---------------------------------------------------------------- the spare agent, as its daemon sees it

TAKEN_WITHIN_S = 10.0
"""One that is ready answers at once; but it may have just been started, on a machine with too much to do. The daemon
waits meanwhile."""
ENDED_WITHIN_S = 5.0
"""After SIGKILL."""
RETRY_S = 60.0
"""The pause before one that has ended by itself is replaced."""
SEARCH_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


class SpareAgent:
    """For the main thread: what it starts ends with the thread that starts it."""

    def __init__(
        self,
        preloads: Sequence[str],
        store: str,
        environment: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        """Without words of --preload there is none, ever. `store` is the kind of the pool's."""
        self._preloads, self._store = tuple(preloads), store
        self._environment = environment
        self._clock = clock
        self._directory = os.getcwd()
        self._waiting: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        """The process, and this end of its socket."""
        self._start_at = clock()

    def turn(self) -> None:
        """While no job runs here: replace one that is gone."""
        if self._waiting is not None and (code := self._waiting[0].poll()) is not None:
            self._drop(f"it ended with {code}")
        if self._waiting is None and self._preloads and self._clock() >= self._start_at:
            self._start()

    def hand_over(self, command: wire.BecomeAgent, output: int) -> subprocess.Popen[bytes] | None:
        """The process that is the job's agent from now on; None where the job must start cold: then none has begun."""
        if self._waiting is None:
            return None
        if why := why_cold(self._environment, command.environment, self._directory, command.directory):
            log.info("the job's agent starts cold: %s", why)
            return None
        process, channel = self._waiting
        channel.settimeout(TAKEN_WITHIN_S)
        try:
            wire.send(channel, command, [output])
            taken = wire.receive(channel) is not None
        except (OSError, Invalid):  # its end, or its silence
            taken = False
        if not taken:
            self._drop("it has not taken its job")
            return None
        channel.close()
        self._waiting = None
        return process

    def close(self) -> None:
        """Ends the one that waits: it has nothing to finish. If SIGKILL does not end it, it is left."""
        if self._waiting is None:
            return
        (process, channel), self._waiting = self._waiting, None
        channel.close()
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_WITHIN_S)

    def _start(self) -> None:
        ours, theirs = wire.pair()
        words = ("--await-job", str(theirs.fileno()), ",".join(self._preloads), self._store)
        try:
            with theirs:
                environment, passed = dict(self._environment), (theirs.fileno(),)
                process = start_agent(words, env=environment, pass_fds=passed)
        except OSError as error:
            ours.close()
            self._drop(f"it cannot be started: {error}")
            return
        self._waiting = process, ours

    def _drop(self, why: str) -> None:
        self.close()
        self._start_at = self._clock() + RETRY_S
        log.warning("the process that waits for the next job is gone: %s; another in %g s", why, RETRY_S)


def why_cold(environment: Mapping[str, str], of_job: Mapping[str, str], directory: str, of_its: str) -> str:
    """Why a process that was started in this environment and directory cannot be what the job's would be."""
    if different := obstacle(environment, of_job):
        return different
    for name in SEARCH_PATHS if directory != of_its else ():
        if not all(entry.startswith("/") for entry in of_job.get(name, "/").split(":")):
            return f"{name} is {of_job[name]!r}, which depends on the directory"
    return ""


# ---------------------------------------------------------------- the spare agent itself


def await_job(
    descriptor: int, preloads: Sequence[str], store: str
) -> tuple[tuple[str, ...], PreparedProcess] | None:
    """The words of the job's agent, which this process is from now on; None when the daemon has ended.

    `descriptor` is that of the daemon's socket, `preloads` the words of --preload, `store` the kind of the pool's.
    """
    from ..agent.main.assembly import preload, prepare_process  # a daemon needs none of it

    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    prepared = prepare_process()
    STORES[store].load()
    try:
        prepared = preload(prepared, preloads, os.environ)
        received = wire.receive(channel)
        if received is None:
            return None
        command, (output,) = received
        assert isinstance(command, wire.BecomeAgent), "a daemon sends nothing else"
        os.chdir(command.directory)
        run_next(prepared.events, 0.0, _fail)  # what the fork server has said meanwhile
        wire.send(channel, wire.Ready(os.getpid()))
    except (OSError, Invalid) as error:
        log.warning("no job of the daemon can be taken: %s", error)
        return None
    channel.close()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(command.environment)
    time.tzset()
    return command.words, prepared


def _fail(event: object) -> None:
    if isinstance(event, ThreadFailed):
        raise SystemExit(event.reason)


# ---------------------------------------------------------------- what its end means

_MOST_ERROR = 500
"""Characters of what an agent says of its end."""

_OUTCOMES: Mapping[int, Outcome] = {
    ExitCode.SUCCESS: Outcome.SUCCEEDED,
    ExitCode.FAILED: Outcome.FAILED,
    ExitCode.CRASH_LOOP: Outcome.FAILED,
    ExitCode.NOT_ON_DISK: Outcome.FAILED,
}
"""Of an agent that ends in another way it is `UNABLE`."""


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
    outcome = _OUTCOMES.get(code, Outcome.UNABLE)
    return AllocationEnd(assignment.job.job, assignment.allocation.id, outcome, code, reason)
