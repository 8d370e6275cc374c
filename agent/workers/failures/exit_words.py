"""A return code in words, as `subprocess` counts it: negative for a process that a signal ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ...common.exits import signal_name
from .worker_failure import Reason

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGABRT: "the program gave up: often a C++ exception or NCCL's watchdog",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that became shorter",
    signal.SIGFPE: "arithmetic in native code, such as an integer division by zero",
    signal.SIGILL: "an instruction that this processor lacks: built for another machine",
    signal.SIGKILL: "often the kernel's out-of-memory killer or an operator",
    signal.SIGSEGV: "a fault in native code; `python -X faulthandler` shows where",
    signal.SIGTERM: "something asked it to stop",
    signal.SIGUSR1: "such as Slurm's --signal sends to all processes; this one does not handle it",
    signal.SIGUSR2: "such as Slurm's --signal sends to all processes; this one does not handle it",
}
_OOM_HINT = "the kernel's out-of-memory killer: no memory was left on this machine or in its cgroup"
_CODE_HINTS = {126: "the command could not be run", 127: "the command was not found"}


@dataclass(frozen=True, slots=True)
class ExitDescription:
    text: str
    reason: Reason


def describe_exit(returncode: int, oom_killed: bool = False) -> ExitDescription:
    """`oom_killed`: the kernel counted an out-of-memory kill among the workers meanwhile."""
    if returncode == 0:
        return ExitDescription("exit code 0", "ok")
    if returncode < 0:
        number = -returncode
        if number == signal.SIGKILL and oom_killed:
            return ExitDescription(f"killed by SIGKILL (signal 9; {_OOM_HINT})", "oom")
        hint = f"; {_SIGNAL_HINTS[number]}" if number in _SIGNAL_HINTS else ""
        return ExitDescription(f"killed by {signal_name(number)} (signal {number}{hint})", "signal")
    if 128 < returncode <= 128 + signal.SIGRTMAX:
        by = f"a shell's way to say: killed by {signal_name(returncode - 128)}"
        return ExitDescription(f"exit code {returncode} ({by})", "signal")
    hint = f" ({_CODE_HINTS[returncode]})" if returncode in _CODE_HINTS else ""
    return ExitDescription(f"exit code {returncode}{hint}", "unknown")
