"""What a node runs for its part of a job, and what the end of that means: pure functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ...pool.member import Assignment
from ...pool.records import SeatEnd, SeatOutcome, short
from ..common.exits import ExitCode, signal_name
from ..configuration.config import (
    CONFIG_FILE,
    HTTP_ADDRESS,
    LOG_DIR,
    MAX_NODES,
    MIN_NODES,
    NODE_ID,
    NODES_MULTIPLE_OF,
)
from ..configuration.options import OPTIONS
from ..configuration.rendezvous import ETCD_OPTIONS, EXPECTED_NODES, JOB_ID, MEETING, POOL
from ..configuration.settings import Settings
from ..configuration.stopping import RUN_AGAIN

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

_FAILED = frozenset({ExitCode.WORKERS_FAILED, ExitCode.CRASH_LOOP, ExitCode.NOT_ON_DISK})
_REFUSED = frozenset({ExitCode.UNLIKE_THE_JOB, ExitCode.STORE_MISMATCH, ExitCode.BAD_CONFIG})
_LEFT = frozenset({ExitCode.STOPPED_BY_SIGTERM, ExitCode.STOPPED_BY_SIGINT, ExitCode.LEFT_IN_TIME})


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
        (EXPECTED_NODES.name, sum(not seat.leaving for seat in assignment.run.seats)),
    ]
    if assignment.run.attempt > 1:
        decided.append((RUN_AGAIN.name, "true"))
    named = dict(decided)
    return [*own, *job.options, *(f"--{name}={value}" for name, value in named.items()), *job.command]


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


def seat_end(assignment: Assignment, code: int, error: str = "") -> SeatEnd:
    """`code`: of the job's agent, as `subprocess` counts it. `error`: why it ended so, if it has said that."""
    ticket, job = assignment.seat.ticket, assignment.job.job
    if code < 0:
        reason = f"the job's agent was killed by {signal_name(-code)}"
        return SeatEnd(job, ticket, SeatOutcome.NOT_HERE, code, reason)
    known = next((one for one in ExitCode if one == code), None)
    if known is None:
        return SeatEnd(
            job, ticket, SeatOutcome.NOT_HERE, code, f"the job's agent ended with exit code {code}"
        )
    outcome = SeatOutcome.NOT_HERE
    if known is ExitCode.SUCCESS:
        outcome = SeatOutcome.SUCCEEDED
    elif known in _FAILED:
        outcome = SeatOutcome.FAILED
    elif known in _REFUSED:
        outcome = SeatOutcome.REFUSED
    elif known in _LEFT:
        outcome = SeatOutcome.LEFT
    reason = (
        f"{short(error, _MOST_ERROR)}; exit code {code}" if error else f"exit code {code}: {known.meaning}"
    )
    return SeatEnd(job, ticket, outcome, code, reason)
