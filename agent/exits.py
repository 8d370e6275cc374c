"""The agent's exit codes: what a service manager, a pod's restart rule or a script learns from how it ended.

The numbers are a published interface: none is ever given a second meaning. 64 to 78 follow sysexits.h,
128 + n is a shell's way to say "ended by signal n". `docs/configuration.md` shows the same table.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

_C = TypeVar("_C", bound="_Code")


class _Code(IntEnum):
    """One way to end; `meaning` is the sentence for the operator."""

    meaning: str

    def __new__(cls: type[_C], code: int, meaning: str) -> _C:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


class ExitCode(_Code):
    """How an agent ends."""

    SUCCESS = 0, "every worker of the last generation ended with exit code 0"
    WORKERS_FAILED = 1, "workers kept failing until the restart budget (--max-restarts) was used up"
    CRASH_LOOP = 3, "workers failed several generations in a row without any progress"
    STORE_LOST = 69, "the rendezvous store went away and did not come back in time; workers were stopped"
    NO_NETWORK = (
        71,
        "no interface or route to the other nodes came up within --network-wait; starting again later may work",
    )
    JOIN_TIMEOUT = 75, "fewer than --min-nodes nodes met within --join-timeout; starting again later may work"
    STORE_MISMATCH = 76, "the store holds another job's data, or data of a newer version"
    BAD_CONFIG = (
        78,
        "a setting cannot work here: bad value, node id or port taken, too few devices, etcd refuses us",
    )
    STOPPED_BY_SIGINT = 130, "stopped by SIGINT (Ctrl-C), after the workers were stopped"
    STOPPED_BY_SIGTERM = 143, "stopped by SIGTERM, after the workers were stopped"


class StatusCode(_Code):
    """How `elastic-agent status` ends. `docs/status.md` shows the same table."""

    SHOWN = 0, "the job was shown, in whatever state it is"
    NO_AGENT = 66, "no agent of this user runs on this machine"
    NO_JOB = 67, "the store answers, and holds nothing of a job of this name"
    NO_ANSWER = 69, "the store or the agent that was asked did not answer in time"
    MISMATCH = 76, "what answers is another job's store, another program, or another version of elastic-agent"
    BAD_CONFIG = 78, "a setting cannot work here, or the store refuses us"
    INTERRUPTED = 130, "stopped by SIGINT (Ctrl-C), the usual end of --watch"
    OUTPUT_CLOSED = 141, "nobody read the output any more"


class DrainCode(_Code):
    """How `elastic-agent drain` ends. `docs/rendezvous.md` shows the same table."""

    LEFT = 0, "the node has left the job"
    NO_NODE = 66, "no live node of the job has this name"
    NO_JOB = 67, "the store holds nothing of a job of this name, or the job has ended"
    NO_ANSWER = 69, "the store did not answer in time; if the node was asked, it may still leave"
    TIMED_OUT = 75, "the node was asked, and has not left within --timeout; it may still do so"
    MISMATCH = 76, "the store holds another job's data, or data of another version of elastic-agent"
    BAD_CONFIG = 78, "a setting cannot work here, or the store refuses us"
    INTERRUPTED = 130, "stopped by SIGINT (Ctrl-C); the node leaves all the same, if it was asked"


class CannotStart(Exception):
    """This agent cannot begin its work. Nothing is running yet: end with `code`, and say why."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
