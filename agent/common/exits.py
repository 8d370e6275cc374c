"""Exit codes: what a service manager, a pod's restart rule or a script learns from how an agent or a command ended.

The numbers are a published interface: none is ever given a second meaning. 64 to 78 follow sysexits.h
in the main, 128 + n is a shell's way to say "ended by signal n". `docs/configuration.md` shows the same table.
"""

from __future__ import annotations

import errno
import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """One way to end; `meaning` is the sentence for the operator."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    SUCCESS = 0, "every worker ended with exit code 0; of a command: it is done"
    FAILED = 1, "workers failed, and no restart helped; of a command: a check or the job failed"
    CRASH_LOOP = 3, "one failure came again and again, or is an error of the script itself"
    UNLIKE_THE_JOB = 65, "this node's --lease-ttl, --store-outage-grace or script is not the job's"
    NOT_FOUND = 66, "there is no such node, agent, run or pool"
    NO_JOB = 67, "there is nothing of a job of this name, or it has ended or is cancelled"
    UNABLE = 68, "the pool could not run the job"
    NO_ANSWER = 69, "the store did not answer in time; what a command asked may be done all the same"
    AGENT_FAILED = 70, "a part of the agent failed in a way that it was not made for; workers were stopped"
    NO_NETWORK = 71, "no way to the other nodes came up in time; later may work"
    NOT_ON_DISK = 72, "all ended with exit code 0, but the disk has not taken the last save: the log says why"
    NOT_HERE = 73, "this machine cannot: devices, files, threads, a port, a node id, a check; another may"
    UNKILLABLE = 74, "processes did not end after SIGKILL: a device or disk of the machine hangs"
    LATER = 75, "too few nodes met within --join-timeout; of a command: not within --timeout"
    MISMATCH = 76, "the store is another job's or of a newer version, or what answers is another program"
    BAD_CONFIG = 78, "no machine could run this: a bad value or contradiction, or the store refuses us"
    LOOP_STUCK = 79, "the agent's main loop stood still: it could no longer answer for its workers"
    LEFT_IN_TIME = 80, "with --slurm: left by plan after a warning; the job goes on when it is started again"
    STOPPED_BY_SIGINT = 130, "stopped by SIGINT (Ctrl-C)"
    OUTPUT_CLOSED = 141, "the reader of the command's output has closed it"
    STOPPED_BY_SIGTERM = 143, "stopped by SIGTERM; of wait: the job was cancelled"


ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What ends the agent: the second one cuts the workers' grace short."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends some time before it ends the job, like Slurm's --signal: leave by plan, and take the time. So
are those that only --signals-to-handle names."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal without a name"


def code_of_leave(number: int | None, *, requeues: bool) -> ExitCode:
    """Of an agent that leaves by this signal, or, None, before a known end of its machine or job. `requeues`: the
    scheduler may start the job again."""
    if requeues and number not in ENDINGS:
        return ExitCode.LEFT_IN_TIME
    return ExitCode.STOPPED_BY_SIGINT if number == signal.SIGINT else ExitCode.STOPPED_BY_SIGTERM


class CannotDo(Exception):
    """What a command was asked is not done, or not all of it: end with `code`. The text says why, and what to try."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class CannotStart(CannotDo):
    """This agent cannot begin its work. Nothing is running yet."""


# --- What this machine lacks: no failure of the script

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


class NoTemporaryDirectory(OSError):
    """No place can hold a temporary file now, or what held ours was removed."""


def lack_in(error: BaseException) -> str:
    """The error, and what to do about it; empty for one that is no lack of this machine."""
    if isinstance(error, NoTemporaryDirectory):
        return str(error)
    remedy = REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error}: {remedy}" if remedy else ""


# --- How another process has ended, in words

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGABRT: "the program gave up: often a C++ exception or NCCL's watchdog",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that became shorter",
    signal.SIGILL: "an instruction that this processor lacks: built for another machine",
    signal.SIGKILL: "a user, a batch system or a user-space memory killer sent it",
    signal.SIGSEGV: "a fault in native code; `python -X faulthandler` shows where",
    signal.SIGTERM: "something asked it to stop",
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
