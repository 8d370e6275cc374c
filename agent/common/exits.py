"""The agent's exit codes: what a service manager, a pod's restart rule or a script learns from how it ended.

The numbers are a published interface: none is ever given a second meaning. 64 to 78 follow sysexits.h
in the main, 128 + n is a shell's way to say "ended by signal n". `docs/configuration.md` shows the same table.
"""

from __future__ import annotations

import errno
import math
import signal
from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from .folders import NoTemporaryDirectory

_C = TypeVar("_C", bound="Code")


class Code(IntEnum):
    """One way to end; `meaning` is the sentence for the operator."""

    meaning: str

    def __new__(cls: type[_C], code: int, meaning: str) -> _C:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


def exit_codes(codes: Iterable[Code]) -> list[str]:
    """The lines of a command's help that explain its codes."""
    return ["Exit codes:", *(f"  {int(code):>3}  {code.meaning}" for code in codes)]


class ExitCode(Code):
    """How an agent ends."""

    SUCCESS = 0, "every worker of the last generation ended with exit code 0"
    WORKERS_FAILED = (
        1,
        "workers kept failing, in more than one way, until the restarts (--max-restarts) were used up, or failed in a"
        " way that no restart helps",
    )
    CRASH_LOOP = (
        3,
        "one failure came again and again, until the restarts (--max-restarts) were used up, or twice if it is an error"
        " of the script itself, such as an import that fails, or at once if Python cannot compile the script",
    )
    UNLIKE_THE_JOB = (
        65,
        "this node has another --lease-ttl or --store-outage-grace than the job's nodes, or another script",
    )
    STORE_LOST = 69, "the rendezvous store went away and did not come back in time; workers were stopped"
    AGENT_FAILED = (
        70,
        "a part of the agent failed in a way that it was not made for, or could not be started; workers were stopped",
    )
    NO_NETWORK = (
        71,
        "no interface, route or host name that leads to the other nodes came up within --network-wait; starting again"
        " later may work",
    )
    NOT_ON_DISK = (
        72,
        "every worker ended with exit code 0, but the disk has not taken the last save, however often it was tried:"
        " the log says which step and why",
    )
    NOT_HERE = (
        73,
        "this machine cannot run it now: too few devices, descriptors, threads or temporary files, an address,"
        " a port or a node id that is taken or not its own,"
        " or checks of it that fail (--check fail); another machine can, or this one later",
    )
    UNKILLABLE = (
        74,
        "processes of this agent did not end after SIGKILL within --kill-timeout: the machine has a device or disk"
        " that hangs",
    )
    JOIN_TIMEOUT = 75, "fewer than --min-nodes nodes met within --join-timeout; starting again later may work"
    STORE_MISMATCH = 76, "the store holds another job's data, or data of a newer version"
    BAD_CONFIG = (
        78,
        "no machine could run this: bad value, settings that contradict each other, nothing to run, etcd refuses us",
    )
    LOOP_STUCK = 79, "the agent's main loop stood still, so that it could no longer answer for its workers"
    LEFT_IN_TIME = (
        80,
        "with --slurm: left by plan after a warning (SIGUSR1, SIGUSR2, --job-ends-at, --notice); the job is not done"
        " and goes on from its checkpoint when it is started again",
    )
    STOPPED_BY_SIGINT = 130, "stopped by SIGINT (Ctrl-C), after the workers were stopped"
    STOPPED_BY_SIGTERM = 143, "stopped by SIGTERM, after the workers were stopped"


REQUEUE = frozenset(
    {
        ExitCode.STORE_LOST,
        ExitCode.AGENT_FAILED,
        ExitCode.NO_NETWORK,
        ExitCode.NOT_HERE,
        ExitCode.UNKILLABLE,
        ExitCode.JOIN_TIMEOUT,
        ExitCode.LOOP_STUCK,
        ExitCode.LEFT_IN_TIME,
    }
)
"""Another start of the job, there or on other nodes, goes on. A person wanted the end of the others, or has to look."""


TIME_IS_OVER = signal.SIGALRM
"""Of the agent's own timer: the job ends soon (--job-ends-at)."""

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What ends the agent: the second one cuts the workers' grace short."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends some time before it ends the job, like Slurm's --signal: leave by plan, and take the time. So
are the agent's own timer, and those that only --signals-to-handle names."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal without a name"


def code_of_leave(number: int, *, requeues: bool) -> ExitCode:
    """Of an agent that leaves by this signal. `requeues`: the scheduler may start the job again."""
    if requeues and number not in ENDINGS:
        return ExitCode.LEFT_IN_TIME
    return ExitCode.STOPPED_BY_SIGINT if number == signal.SIGINT else ExitCode.STOPPED_BY_SIGTERM


class CommandCode(Code):
    """How a sub-command ends; those about a pool and its jobs end with a `PoolCode`."""

    DONE = 0, "it is done, or shown"
    FAILED = 1, "a check has failed; files that were changed are kept"
    NOT_FOUND = 66, "there is no such node, agent or run"
    NO_JOB = 67, "there is nothing of a job of this name, or it has ended; of report: no account of its time"
    NO_ANSWER = 69, "no answer in time; what was asked may be done all the same: see status"
    CANNOT = 73, "this machine cannot: a file, a device; of exclude: as many nodes are excluded as can be"
    LATER = 75, "not within --timeout, the node may still leave; of forget: the job has live nodes"
    MISMATCH = 76, "what answers is another job's store, another program, or another version of elastic-agent"
    BAD_CONFIG = 78, "a setting cannot work here, or the store refuses us"
    INTERRUPTED = 130, "stopped by SIGINT (Ctrl-C); a node that was asked to leave does so"
    OUTPUT_CLOSED = 141, "the reader of the output has closed it"


class PoolCode(Code):
    """How the commands about a pool end: submit, jobs, cancel, wait and logs. What is said of wait also goes for submit
    and logs with --follow."""

    DONE = 0, "it is done; of wait: the job has succeeded"
    FAILED = 1, "of wait: the job has failed; or 3, 65 or 72, if that is how its agent has ended"
    NO_POOL = 66, "no node offers itself to the pool"
    NO_JOB = (
        67,
        "the pool has no such job, or several of this name; of logs: nothing that it has printed is left",
    )
    UNABLE = 68, "of wait: the job could not run, or its time limit has passed"
    NO_ANSWER = 69, "the pool's store did not answer in time"
    OVER = 75, "the job has ended already, or is cancelled already"
    MISMATCH = 76, "what answers is no pool's store, or one of another version"
    BAD_CONFIG = 78, "a setting cannot work, or the store refuses us; nothing was submitted"
    CANCELLED = 143, "of wait: the job was cancelled"
    INTERRUPTED = 130, "stopped by SIGINT (Ctrl-C); the job goes on"
    OUTPUT_CLOSED = 141, "the reader of the output has closed it; the job goes on"


class CannotStart(Exception):
    """This agent cannot begin its work. Nothing is running yet: end with `code`, and say why."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


# --- What this machine lacks
#
# A lack is no failure of the script. While a job runs, what this node cannot have is tried again for `GIVES_UP_S` by
# this node alone; then it leaves, with exit code 73, as it does at once for a lack at its own start.

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two tries: it doubles."""
GIVES_UP_S = 10.0
MOST_FAILURES = 2

REMEDIES = {
    errno.EMFILE: "this process has no file descriptors left; raise `ulimit -n` (systemd: LimitNOFILE)",
    errno.ENFILE: "this machine has no file descriptors left; end what holds them, or raise fs.file-max",
    errno.EAGAIN: "this user or cgroup has no processes and threads left; raise `ulimit -u` or pids.max (systemd: "
    "TasksMax)",
    errno.ENOBUFS: "this machine's kernel has no memory left for sockets; make room",
    errno.ENOMEM: "this machine or cgroup has no memory left; make room, or raise its limit",
    errno.ENOSPC: "a file system of this machine is full (df and df -i say which); make room",
    errno.EDQUOT: "this user's share of a file system is used up (quota says which); make room",
    errno.EROFS: "a file system of this machine is read-only; mount a writable one there",
}


def lack_in(error: BaseException) -> str:
    """The error, and what to do about it; empty for one that is no lack of this machine."""
    if isinstance(error, NoTemporaryDirectory):
        return str(error)
    remedy = REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error}: {remedy}" if remedy else ""


class Lack:
    """What is lacking in one thread, from the first try that shows it to the one that goes well."""

    def __init__(self) -> None:
        self.over()

    def over(self) -> None:
        self._since = math.inf
        self._tries = self._failures = 0
        self.again_at = -math.inf
        """When there may be another try."""

    def __bool__(self) -> bool:
        return self._tries > 0

    def met(self, now: float, *, failed: bool = False) -> bool:
        """By a try. Whether there may be another. `failed`: a generation fails by it, which is free of cost only for a
        while (`coordinator/restarts`)."""
        if now > self.again_at + GIVES_UP_S:
            self.over()  # of another lack
        self._since = min(self._since, now)
        pause_s = LONGEST_PAUSE_S if failed else FIRST_PAUSE_S * 2.0**self._tries
        self.again_at = now + min(LONGEST_PAUSE_S, pause_s)
        self._tries += 1
        self._failures += failed
        return now < self._since + GIVES_UP_S and self._failures < MOST_FAILURES


# --- How another process has ended, in words

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGABRT: "the program gave up: often a C++ exception or NCCL's watchdog",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that became shorter",
    signal.SIGFPE: "arithmetic in native code, such as an integer division by zero",
    signal.SIGILL: "an instruction that this processor lacks: built for another machine",
    signal.SIGKILL: "a user, a batch system or a user-space memory killer sent it",
    signal.SIGSEGV: "a fault in native code; `python -X faulthandler` shows where",
    signal.SIGTERM: "something asked it to stop",
    signal.SIGUSR1: "such as Slurm's --signal sends to all processes; this one does not handle it",
    signal.SIGUSR2: "such as Slurm's --signal sends to all processes; this one does not handle it",
}
_OOM_HINT = "the kernel's out-of-memory killer: no memory was left on this machine or in its cgroup"
_CODE_HINTS = {126: "the command could not be run", 127: "the command was not found"}


def describe_exit(returncode: int, oom_killed: bool = False) -> str:
    """`returncode` as `subprocess` counts it: negative for a process that a signal ended. `oom_killed`: the kernel has
    counted an out-of-memory kill among the workers."""
    if returncode < 0:
        number = -returncode
        hint = _OOM_HINT if number == signal.SIGKILL and oom_killed else _SIGNAL_HINTS.get(number)
        return f"killed by {signal_name(number)} (signal {number}{f'; {hint}' if hint else ''})"
    if 128 < returncode <= 128 + signal.SIGRTMAX:
        return f"exit code {returncode} (a shell's way to say: killed by {signal_name(returncode - 128)})"
    hint = _CODE_HINTS.get(returncode)
    return f"exit code {returncode}{f' ({hint})' if hint else ''}"
