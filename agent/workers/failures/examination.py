"""Finds out why a worker ended, from what it left behind: its error file, its last lines, and its exit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...common.ports import PortOwner
from ..processes.exit_words import describe_exit
from .causes import HANG, UNKNOWN, Cause, CauseTable
from .error_report import ErrorReport, detail_after, find_last_words, find_traceback, read_error_file
from .facts import BY_ITSELF, Facts, MachineEvent, Trouble
from .gpu_news import GpuNews
from .kernel_log import KernelNews
from .ports import notes_of_ports, says_port_taken
from .texts import clean, cut, first_line
from .worker_failure import HANG_SIGNAL, SUMMARY_MAX, WorkerFailure

_NOTE_MAX = 250
"""The most characters of notes at the end of a summary."""


@dataclass(frozen=True, slots=True)
class FailedWorker:
    """Which worker it was. `master_port` is its MASTER_PORT."""

    node: str
    generation: int
    rank: int
    local_rank: int
    log_file: Path | None = None
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class Remains:
    """What a worker left behind, and what the machine says of it. `log_tail`: its last lines. `oom_killed`: the kernel
    has killed a process of this agent for its memory."""

    returncode: int
    error_file: Path | None = None
    log_tail: Sequence[str] = ()
    oom_killed: bool = False
    kernel: KernelNews | None = None
    """The kernel's messages since the worker was started."""
    gpus: GpuNews = field(default_factory=GpuNews)
    """What NVML shows."""
    not_kept: bool = False
    """The worker had done the last step of a planned change, and no Checkpointer had kept its state."""
    asked: bool = False
    """The agent had asked the worker to end, but it may have failed before."""


def describe_failure(
    worker: FailedWorker, remains: Remains, causes: CauseTable, owner_of: Callable[[int], PortOwner]
) -> WorkerFailure:
    """The failure of this worker, with its cause. `owner_of` finds the process that holds a taken port."""
    log_tail = tuple(map(clean, remains.log_tail))
    report = (None if remains.error_file is None else read_error_file(remains.error_file)) or ErrorReport()
    notes = (
        ["in its drain: no Checkpointer has kept the state after its last step"] if remains.not_kept else []
    )
    notes += [report.note] if report.note else []
    exception = report.exception or ""
    found = _traceback(remains.returncode, log_tail, remains.asked) if not exception else None
    if found is not None:
        report = found
        exception = "\n".join(filter(None, (found.exception, detail_after(found.exception or "", log_tail))))
    events = remains.kernel.about(exception) if remains.kernel is not None else ()
    oom_killed = remains.oom_killed or any(event.trouble is Trouble.OUT_OF_MEMORY for event in events)
    facts = Facts(remains.returncode, exception, log_tail, oom_killed, events, report.inner)
    cause, events = _classify(causes, facts, remains.gpus)
    summary = describe_exit(remains.returncode, oom_killed)
    said = report.inner[0] if report.inner else exception
    if report.exception is not None:
        summary += f": {first_line(report.exception)}"
    elif cause.name == "port":
        said = says_port_taken(log_tail)
        summary += f": {said}"
    notes += [f"the first of them: {first_line(one)}" for one in report.inner[:1]]
    notes += notes_of_ports(said, worker.master_port, owner_of if cause.name == "port" else None)
    notes += [f"{event.by}: {event.text}" for event in events[:1]]
    return WorkerFailure(
        worker.rank,
        worker.local_rank,
        worker.node,
        worker.generation,
        remains.returncode,
        cause.name,
        _noted(summary, notes),
        report.exception,
        report.traceback,
        log_tail,
        _name_of(worker.log_file),
        report.raised_at,
        cause.collateral,
    )


def _classify(causes: CauseTable, facts: Facts, gpus: GpuNews) -> tuple[Cause, tuple[MachineEvent, ...]]:
    """The cause, and the reports of the machine that belong to it. A broken GPU of the worker is the cause of what a
    broken GPU may look like, that of another worker here only of an end that follows from another one; both are the
    cause of what nothing else explains. What ended otherwise, as by an error of the script, has its own cause: the
    fault may have been there for hours."""
    cause = causes.classify(facts)
    follows = cause.collateral or cause.name == UNKNOWN.name
    news = (*(gpus.own if follows or cause.of_gpu else ()), *(gpus.others if follows else ()))
    if not news:
        return cause, facts.events
    facts = replace(facts, events=(*facts.events, *news))
    return causes.classify(facts), facts.events


def _traceback(returncode: int, log_tail: Sequence[str], asked: bool) -> ErrorReport | None:
    """The exception that ended the worker, from its last lines. A worker that a signal ended may have logged, and
    survived, other exceptions before. But it may also have failed first, and crashed or been asked to end on its way
    out: then the exception is the last thing in its output."""
    if returncode > 0:
        return find_traceback(log_tail)
    return find_last_words(log_tail) if asked or -returncode in BY_ITSELF else None


def hang_failure(worker: FailedWorker, summary: str) -> WorkerFailure:
    """The failure of a worker that the agent ends because it hangs."""
    return WorkerFailure(
        worker.rank,
        worker.local_rank,
        worker.node,
        worker.generation,
        -HANG_SIGNAL,
        HANG.name,
        cut(summary, SUMMARY_MAX),
        log_file=_name_of(worker.log_file),
    )


def _noted(summary: str, notes: Sequence[str]) -> str:
    end = cut("".join(f"; {note}" for note in notes), _NOTE_MAX)
    return cut(summary, SUMMARY_MAX - len(end)) + end


def _name_of(log_file: Path | None) -> str | None:
    return None if log_file is None else clean(str(log_file))
