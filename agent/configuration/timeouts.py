"""The ladder of timeouts above one training step, for a collective that does not end:

    step  <  hang limit  <  process-group timeout  <  watchdog's heartbeat

And another one, above a planned stop:

    step  <  time of a drain  <  stop grace  <  time of a whole stop (`whole_stop_s`)  <=  service manager's limit

The *hang limit* is this agent's: no progress is seen. The *process-group timeout* is torch's: it names the collective,
and ends the process. The *heartbeat* watches the thread that watches the collectives, where that is itself stuck in
CUDA. A rung that fires too early hides the finding of one that knows more, so each is derived from the one below it,
unless the user has chosen it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .stopping import StopConfig, TimeoutConfig

PROCESS_GROUP_PER_HANG = 2.0
"""A process group's timeout, in hang limits, where the user has chosen none."""

WATCHDOG_PER_PROCESS_GROUP = 1.5
"""The watchdog's heartbeat, in process-group timeouts."""

DRAIN_PER_STOP_GRACE = 2 / 3
"""The time of a drain, in stop graces, where the user has chosen none."""

LAST_SAVE_S = 10.0
"""How long a stop waits for a save that a worker had ordered before it was stopped. One that ended by itself has waited
for it. A node that brings to disk what no other node has in memory may take a stop grace, if that is longer."""

LEAST_SAVE_S = 1.0
"""For the last saves after a handover that took all of their time: the disk writer has saved meanwhile."""

LEAVING_S = 5.0
"""What a planned stop takes beside: at most 3 s until the others stop with this node
(`LEAVE_TOGETHER_S` in `rendezvous`), and the rest to reap the workers and to give the lease back."""

HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def process_group_s(chosen: TimeoutConfig) -> float | None:
    """None: torch's or the script's own."""
    if chosen.process_group_s is not None:
        return chosen.process_group_s
    return None if chosen.hang_s is None else chosen.hang_s * PROCESS_GROUP_PER_HANG


def drain_timeout_s(stop: StopConfig) -> float:
    return stop.drain_timeout_s if stop.drain_timeout_s is not None else stop.grace_s * DRAIN_PER_STOP_GRACE


def last_save_s(grace_s: float, *, rescues: bool) -> float:
    return max(LAST_SAVE_S, grace_s) if rescues else LAST_SAVE_S


def last_saves_s(
    now: float, grace_s: float, *, rescues: bool, handing_since: float = math.inf, saved_by: float = math.inf
) -> float:
    """How long a handover may take from `now` on, or the last saves after it with another handover after them: they
    share the time of one last save that rescues.

    `handing_since` is when the first handover began, if there was one; by `saved_by` this machine goes away.
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


_NO_LIMIT: Mapping[object, str] = {None: "no hang limit", "auto": "hang limits that are learned"}


def ladder(chosen: TimeoutConfig) -> str:
    """In words, for --check-config."""
    group_s = process_group_s(chosen)
    if group_s is None:
        return f"{_NO_LIMIT[chosen.hang]}; process group and watchdog as torch and the script have them"
    hang = f"hang limit {chosen.hang_s:g} s" if chosen.hang_s is not None else _NO_LIMIT[chosen.hang]
    whose = "chosen" if chosen.process_group_s is not None else "twice the hang limit"
    return f"{hang} < process group {group_s:g} s ({whose}) < watchdog's heartbeat {watchdog_s(group_s)} s"
