"""Finds out why a worker ended, from what it left behind: its error file, its last lines, and its exit."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ...common.port_owner import PortOwner
from .error_report import ErrorReport, find_traceback, read_error_file
from .exit_words import describe_exit
from .ports import notes_of_ports, says_port_taken, wanted_a_port
from .texts import clean, cut, first_line
from .worker_failure import CAUSE_MAX, HANG_SIGNAL, Reason, WorkerFailure

_NOTE_MAX = 250
"""Of the cause's end, which says what the agent knows of it."""

# What torch raises when NCCL or its TCPStore fails, and what NCCL's watchdog writes before it aborts the process.
_NETWORK_EXCEPTION = re.compile(r"DistBackendError|DistNetworkError|NCCL error|nccl(System|Remote)Error")
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout|watchdog thread terminated with exception"
)
# What the worker library raises on all ranks together, where the next generation would end in the same way. Ranks that
# have other values may have them from a fault, which a restart mends; sharded state is the script's.
_FINAL = re.compile(
    r"(elastic_agent\.worker\.errors\.)?(DirectoryNotShared|OtherRun|Sharded|MeshMismatch|UnsupportedTraining): "
)


def describe_failure(
    *,
    rank: int,
    local_rank: int,
    node: str,
    generation: int,
    returncode: int,
    error_file: Path | None,
    log_tail: Sequence[str],
    log_file: Path | None,
    oom_killed: bool = False,
    master_port: int = 0,
    owner_of: Callable[[int], PortOwner],
    not_kept: bool = False,
) -> WorkerFailure:
    """What is known about this worker's end.

    `master_port`: the MASTER_PORT that the agent has given it. `owner_of` is asked about a port that it found taken.
    `not_kept`: it had done its last step in a planned change, and no Checkpointer had kept the state after it.
    """
    ended = describe_exit(returncode, oom_killed)
    log_tail = tuple(map(clean, log_tail))
    report = (None if error_file is None else read_error_file(error_file)) or ErrorReport()
    notes = ["in its drain: no Checkpointer has kept the state after its last step"] if not_kept else []
    notes += [report.note] if report.note else []
    # A worker that a signal ended may have logged, and survived, any number of exceptions before.
    if report.exception is None and returncode > 0:
        report = find_traceback(log_tail) or report
    cause, reason = ended.text, ended.reason
    if report.exception is not None:
        cause += f": {first_line(report.exception)}"
        if reason in ("unknown", "signal"):
            reason = _reason_of(report.exception)
        notes += notes_of_ports(report.exception, master_port, owner_of if reason == "port" else None)
    elif returncode > 0 and (said := says_port_taken(log_tail)):
        reason = "port"
        cause += f": {said}"
        notes += notes_of_ports(said, master_port, owner_of)
    elif returncode == -signal.SIGABRT and any(_WATCHDOG.search(line) for line in log_tail):
        reason = "nccl"
    return WorkerFailure(
        rank,
        local_rank,
        node,
        generation,
        returncode,
        reason,
        _noted(cause, notes),
        report.exception,
        report.traceback,
        log_tail,
        _name_of(log_file),
        report.raised_at,
    )


def _reason_of(exception: str) -> Reason:
    if wanted_a_port(exception):
        return "port"
    return "nccl" if _NETWORK_EXCEPTION.search(exception) else "exception"


def _noted(cause: str, notes: Sequence[str]) -> str:
    end = cut("".join(f"; {note}" for note in notes), _NOTE_MAX)
    return cut(cause, CAUSE_MAX - len(end)) + end


def hang_failure(
    node: str, generation: int, rank: int, local_rank: int, cause: str, log_file: Path | None
) -> WorkerFailure:
    """The end that the agent makes of a worker that hangs."""
    cause, file = cut(cause, CAUSE_MAX), _name_of(log_file)
    return WorkerFailure(rank, local_rank, node, generation, -HANG_SIGNAL, "hang", cause, log_file=file)


def _name_of(log_file: Path | None) -> str | None:
    return None if log_file is None else clean(str(log_file))


def is_final(failure: WorkerFailure) -> bool:
    """Whether no restart of the job helps, because of its script or its checkpoint directory: a person must act."""
    return failure.exception is not None and _FINAL.match(failure.exception) is not None
