"""A return code in words, as `subprocess` counts it: negative for a process that a signal ended."""

from __future__ import annotations

import signal

from ...common.exits import signal_name

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
    """`oom_killed`: the kernel has counted an out-of-memory kill among the workers."""
    if returncode < 0:
        number = -returncode
        hint = _OOM_HINT if number == signal.SIGKILL and oom_killed else _SIGNAL_HINTS.get(number)
        return f"killed by {signal_name(number)} (signal {number}{f'; {hint}' if hint else ''})"
    if 128 < returncode <= 128 + signal.SIGRTMAX:
        return f"exit code {returncode} (a shell's way to say: killed by {signal_name(returncode - 128)})"
    hint = _CODE_HINTS.get(returncode)
    return f"exit code {returncode}{f' ({hint})' if hint else ''}"
