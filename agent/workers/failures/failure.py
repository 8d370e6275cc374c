"""From all that is known of a worker's end to the `Failure` that travels through the store, and is shown on all nodes.

The node of the failed worker keeps all of it; `small` is what the others get. Every text has been cleaned of what a
terminal obeys, and can be encoded; only an exception and a traceback have several lines.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from ....rendezvous import records
from ....rendezvous.records import Failure
from ...common.exits import describe_exit
from .causes import Cause, CauseTable
from .post_mortem import (
    BY_ITSELF,
    RANK_PREFIX,
    ErrorReport,
    PostMortem,
    clean,
    cut,
    find_last_words,
    find_traceback,
    first_line,
    notes_of_ports,
    says_port_taken,
)

HANG_SIGNAL = signal.SIGABRT
"""Ends a worker that hangs: PYTHONFAULTHANDLER makes it print the stacks of its threads first."""

SUMMARY_MAX = 500
_FINGERPRINT_MAX = 300

# What changes from run to run in a message: UUIDs, addresses and hashes, names of temporary files, numbers.
_VARYING = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]+\b|\btmp\w{6,}|\d+",
    re.IGNORECASE,
)


def describe_failure(worker: PostMortem, causes: CauseTable) -> Failure:
    """The failure of this worker, with its cause."""
    log_tail = tuple(map(clean, worker.log_tail))
    worker = replace(worker, log_tail=log_tail)
    report = worker.report
    notes = (
        ["in its drain: no Checkpointer has kept the state after its last step"] if worker.not_kept else []
    )
    if not report.exception and (found := _traceback(worker)) is not None:
        worker, report = replace(worker, report=found), found
    cause, worker = _classify(causes, worker)
    said = worker.exception or (says_port_taken(worker.words) if cause.name == "port" else "")
    notes += notes_of_ports(said, worker.master_port, taken=cause.name == "port")
    notes += worker.own_gpus[:1] if worker.gpu_failed else ()
    ended = describe_exit(worker.returncode, worker.oom_killed)
    words = f": {cut(first_line(said), SUMMARY_MAX // 2)}" if said else ""
    summary = "; ".join((f"{ended}{words}", *notes))
    known_as = fingerprint(worker.returncode, report.exception)
    return replace(
        failure_of(worker, cause, known_as, summary),
        exception=report.exception,
        traceback=report.traceback,
        log_tail=log_tail,
    )


def failure_of(worker: PostMortem, cause: Cause, known_as: str, summary: str) -> Failure:
    """`known_as`: its fingerprint."""
    return Failure(
        worker.generation,
        known_as,
        cut(summary, SUMMARY_MAX),
        cause.name,
        cause.action,
        cause.collateral,
        cause.outside,
        worker.node,
        worker.rank,
        worker.local_rank,
        worker.returncode,
        log_file=None if worker.log_file is None else clean(str(worker.log_file)),
    )


def _classify(causes: CauseTable, worker: PostMortem) -> tuple[Cause, PostMortem]:
    """The cause, and the worker with what NVML reports if that belongs to it. A broken GPU of the worker is the
    cause of what may look like one, and of an end that follows from another. Else the fault may be hours old."""
    cause = causes.classify(worker)
    if not worker.own_gpus or not (cause.of_gpu or cause.collateral):
        return cause, worker
    worker = replace(worker, gpu_failed=True)
    return causes.classify(worker), worker


def _traceback(worker: PostMortem) -> ErrorReport | None:
    """The exception that ended the worker, from its last lines. A worker that a signal ended may have logged, and
    survived, other exceptions before. But it may also have failed first, and crashed or been asked to end on its way
    out: then the exception is the last thing in its output."""
    if worker.returncode > 0:
        return find_traceback(worker.log_tail)
    by_itself = worker.asked or -worker.returncode in BY_ITSELF
    return find_last_words(worker.log_tail) if by_itself else None


def fingerprint(returncode: int, exception: str | None) -> str:
    """The same text for the same failure in another generation, on another rank or node; for crash loops."""
    ended = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    if exception is None:
        return ended
    return f"{ended}: {_VARYING.sub('#', first_line(exception))}"[:_FINGERPRINT_MAX]


def small(failure: Failure) -> Failure:
    """With the ends of the traceback and of the log: what the other nodes are told fits into each node's record."""
    return replace(
        failure,
        exception=_fit(failure.exception, records.MAX_EXCEPTION),
        traceback=_fit(failure.traceback, records.MAX_TRACEBACK, keep_end=True),
        log_tail=_last_that_fit(failure.log_tail),
        log_file=_fit(failure.log_file, records.MAX_LOG_FILE),
    )


def _fit(text: str | None, most_bytes: int, *, keep_end: bool = False) -> str | None:
    """The text, cut until its JSON form is not larger than that."""
    if text is None:
        return None
    size, fitting = len(text), text
    while len(json.dumps(fitting)) > most_bytes:
        size = size * 9 // 10
        fitting = cut(text, size + 3, keep_end=keep_end)
    return fitting


def _last_that_fit(lines: Sequence[str]) -> tuple[str, ...]:
    """At least the end of the last one."""
    separators = len('", "') * records.MAX_LOG_LINES
    text = _fit(
        "\n".join(map(clean, lines[-records.MAX_LOG_LINES :])),
        records.MAX_LOG_TAIL - separators,
        keep_end=True,
    )
    return tuple(text.split("\n")) if text else ()


def summarize(first: Failure, others: Sequence[Failure], hint: str, evidence: str = "") -> str:
    """The failed generation in the log: which worker failed first, why, where to read on, and who else failed.

    `hint`: from the table of causes. `evidence`: the generation's folder of evidence, which has a folder for each
    node that writes to this disk; or why there is none.
    """
    rule = "=" * 80
    lines = [
        rule,
        f"Worker failure in generation {first.generation}: {_who(first)} failed first",
        f"  cause:    {first.summary}",
        f"  known as: {first.cause}: {hint}",
        f"  log file: {first.log_file or 'none (set --log-dir to keep one per rank)'}",
    ]
    if evidence:
        lines.append(f"  evidence: {evidence}")
    if first.exception is not None and "\n" in first.exception:
        lines += ["  exception:", *_indented(first.exception)]
    shown: set[str] = set()
    if first.traceback is not None:
        lines += ["  traceback:", *_indented(first.traceback)]
        shown.update(first.traceback.split("\n"))
    last = [line for line in first.log_tail if RANK_PREFIX.sub("", line) not in shown]
    if last:
        lines += ["  last lines of its output:", *_indented("\n".join(last))]
    if others:
        lines.append("  failed after it, usually because of it:")
        lines += [f"    {_who(other)}: {other.summary}" for other in others]
    if first.collateral:
        lines.append(
            "  it follows from the end of another worker or from the network; no other cause is known"
        )
    return "\n".join([*lines, rule])


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} (local rank {failure.local_rank} on node {failure.node})"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.split("\n")]
