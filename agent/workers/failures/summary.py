"""The summary of a failed generation in the log: which worker failed first, why, where to read on, who else failed."""

from __future__ import annotations

from collections.abc import Sequence

from .error_report import RANK_PREFIX
from .worker_failure import WorkerFailure


def summarize(first: WorkerFailure, others: Sequence[WorkerFailure], hint: str, evidence: str = "") -> str:
    """`hint`: from the table of causes. `evidence`: the generation's folder of evidence, which has a folder for each
    node that writes to this disk; or why there is none."""
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


def _who(failure: WorkerFailure) -> str:
    return f"rank {failure.rank} (local rank {failure.local_rank} on node {failure.node})"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.split("\n")]
