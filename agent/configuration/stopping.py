"""When a job restarts, how its workers stop, and when training that stands still is given up.

Of the timeouts above one training step, and above a planned stop, each follows from the one below it: one that fires
too early hides the finding of another that knows more. `docs/tuning.md` has the ladder.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Literal

from .parse import (
    MOST_REPLICAS,
    SIZE,
    NoticeSource,
    Option,
    OptionGroup,
    Parser,
    duration,
    read_hang_timeout,
    read_notice,
    read_restarts,
    read_signals,
    whole_number,
)
from .rendezvous import SLURM

STOPPING = OptionGroup("Restarts and stopping")
MAX_RESTARTS: Option[int | None] = STOPPING.option(
    "max-restarts",
    Parser("a whole number of restarts from 0 to 1000000, or auto", read_restarts, metavar="N"),
    "restarts after failures of workers on all nodes (auto: no limit with progress, 3 in a row without)",
    default="auto",
)
STOP_GRACE: Option[float] = STOPPING.option(
    "stop-grace",
    duration(0.0),
    "planned stop: from its beginning to SIGKILL, longer than the longest step. Workers that call step() have two"
    " thirds of it to end by themselves after a common last step, then SIGTERM; 0 kills at once",
    default="30s",
    torchrun="shutdown-timeout",
)
MEMORY_CHECKPOINTS: Option[int | None] = STOPPING.option(
    "memory-checkpoints",
    SIZE,
    "memory in /dev/shm for the newest states, two copies of each; off: checkpoints are only on disk, and training"
    " waits for it (default: half of /dev/shm)",
)
MEMORY_REPLICAS: Option[int] = STOPPING.option(
    "memory-replicas",
    whole_number(0, MOST_REPLICAS, "nodes"),
    "so many other nodes keep this node's newest shards in their memory: each needs (2 + 2N) x its shards. 0: a node"
    " that is lost takes its shards with it",
    default="1",
)
SIGNALS_TO_HANDLE: Option[tuple[signal.Signals, ...]] = STOPPING.option(
    "signals-to-handle",
    Parser(
        "names of signals with commas between, like SIGTERM,SIGXCPU, that a process may handle",
        read_signals,
        metavar="NAMES",
    ),
    "signals that let this node leave the job, besides SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2",
    default="",
)

NOTICE: Option[NoticeSource] = STOPPING.option(
    "notice",
    Parser("auto, aws, gcp, azure, off, or file:PATH with a path from / on", read_notice, metavar="SOURCE"),
    "who says that this machine goes away: then the node leaves in time. auto: the metadata server of the cloud that"
    " the firmware names. A file that is there is a notice, of the seconds or instant (RFC 3339) in it, else 30 s",
    default="auto",
)

TIMEOUTS = OptionGroup("Timeouts of training")
HANG_TIMEOUT: Option[float | Literal["auto"] | None] = TIMEOUTS.option(
    "hang-timeout",
    Parser(
        "a duration from 1 s to 168 h, in seconds or like 500ms, 30s, 5m; auto, or off",
        read_hang_timeout,
        metavar="DURATION",
    ),
    "workers without progress for that long have failed: no step or save where they report steps, else no output,"
    " processor time or bytes; longer than the longest step, evaluation and save. auto: 5 times what is usual, at least"
    " 30 s, once a rank is found that keeps the others waiting",
    default="auto",
)


@dataclass(frozen=True, slots=True)
class StopConfig:
    """Seconds until SIGKILL: from the beginning of a planned stop, and from SIGTERM after another worker failed."""

    grace_s: float = STOP_GRACE.field()
    failure_grace_s: float = 1.0
    """Another worker failed: from SIGTERM to SIGKILL."""
    kill_timeout_s: float = 60.0
    """From SIGKILL until what does not end costs this node its place."""
    just_in_time_grace_s: float = 2.0
    """Before `failure_grace_s`, for workers that guard their last step."""
    more_signals: tuple[signal.Signals, ...] = SIGNALS_TO_HANDLE.field()
    """Besides those that the agent handles in any case, of which some may be named here, too."""
    job_ends_at: int | None = None
    """Slurm ends the job then. Unix time; the only instant here that is not monotonic: another machine has named it."""
    notice: NoticeSource = NOTICE.field()
    requeues: bool = SLURM.field()
    """The scheduler starts again what ends with an exit code that says so, and repeats SIGTERM."""


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """When training that stands still is given up; docs/tuning.md has the whole ladder."""

    hang: float | Literal["auto"] | None = HANG_TIMEOUT.field()
    """None: never."""

    @property
    def hang_s(self) -> float | None:
        """The user's own limit; None where it is auto, or where there is none."""
        return self.hang if isinstance(self.hang, float) else None

    @property
    def process_group_s(self) -> float | None:
        """None: torch's or the script's own."""
        return None if self.hang_s is None else self.hang_s * PROCESS_GROUP_PER_HANG


PROCESS_GROUP_PER_HANG = 2.0
"""A process group's timeout, in hang limits."""

WATCHDOG_PER_PROCESS_GROUP = 1.5
"""The watchdog's heartbeat, in process-group timeouts."""

DRAIN_PER_STOP_GRACE = 2 / 3
"""The time of a drain, in stop graces."""

LAST_SAVE_S = 10.0
"""How long a stop waits for a save that a worker had ordered before it was stopped. One that ended by itself has waited
for it. A node that brings to disk what no other node has in memory may take a stop grace, if that is longer."""

LEAST_SAVE_S = 1.0
"""For the last saves after a handover that took all of their time: the disk writer has saved meanwhile."""

LEAVING_S = 5.0
"""What a planned stop takes beside: at most 3 s until the others stop with this node
(`LEAVE_TOGETHER_S` in `rendezvous`), and the rest to reap the workers and to give the lease back."""

HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def drain_timeout_s(stop: StopConfig) -> float:
    return stop.grace_s * DRAIN_PER_STOP_GRACE


def last_save_s(grace_s: float, *, rescues: bool) -> float:
    return max(LAST_SAVE_S, grace_s) if rescues else LAST_SAVE_S


def last_saves_s(
    now: float, grace_s: float, *, rescues: bool, handing_since: float = math.inf, saved_by: float = math.inf
) -> float:
    """How long a handover may take from `now` on, or the last saves after it: they share the time of one last save that
    rescues.

    `handing_since` is when the handover began, if there was one; by `saved_by` this machine goes away.
    """
    shared_s = handing_since + last_save_s(grace_s, rescues=True) - now
    own_s = last_save_s(grace_s, rescues=rescues)
    return max(0.0, min(own_s, max(LEAST_SAVE_S, shared_s), saved_by - now))


def whole_stop_s(grace_s: float) -> float:
    """At most so long after a first SIGTERM an agent has left its job, with a stop grace of `grace_s`."""
    return grace_s + last_save_s(grace_s, rescues=True) + LEAVING_S


def longest_grace_s(limit_s: float) -> float:
    """The stop grace whose `whole_stop_s` is this limit; 0 where the limit is too short for any."""
    return max(0.0, min((limit_s - LEAVING_S) / 2, limit_s - LEAVING_S - LAST_SAVE_S))


def leaves_in_s(left_s: float, grace_s: float) -> float:
    """When to begin a whole stop, of the time that is left of a job; never before its half."""
    return max(left_s - whole_stop_s(grace_s), left_s / 2, 0.0)


NOTICE_S = 120.0
"""A notice that comes earlier is not acted on before: the machine is paid for, and the notice may be withdrawn."""


def obeys_before_s(grace_s: float) -> float:
    """So long before the end of this machine a stop begins, if the notice comes in time."""
    return max(NOTICE_S, whole_stop_s(grace_s))


def watchdog_s(process_group_s: float) -> int:
    return math.ceil(process_group_s * WATCHDOG_PER_PROCESS_GROUP)
