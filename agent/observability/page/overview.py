"""The state of a job for the page: the report of `elastic-agent status`, small enough to be sent often.

A pure function. A node is a row of values, so that a thousand nodes take a tenth of a megabyte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ....rendezvous.coordinator.exclusions import in_words, left_out
from ....rendezvous.records import Failure
from ...output.masking import masked
from ..accounting.step_rate import Rates
from ..status.pages import Checkpoint, NodeStatus, worker_of
from ..status.report import JobReport, NodeReport, as_json

SCHEMA = 1

COLUMNS = (
    *("node", "first_rank", "slots", "state", "coordinates", "leaving", "workers", "step", "step_age_s"),
    *("checkpoint", "checkpoint_age_s", "lease_age_s", "lease_ttl_s", "address", "notice"),
)
"""The names of the values in a row of `nodes`."""

_JOB_KEYS = (
    *("job", "state", "generation", "phase_age_s", "world_size", "group_world_size", "result", "cause"),
    *("restarts", "step", "coordinator", "waiting_for", "complete", "notes"),
)


def overview(
    job: JobReport | None,
    problem: str,
    failure: Failure | None,
    rates: Rates,
    at: float,
    secrets: Collection[str] = (),
) -> dict[str, Any]:
    """`job` is None while the job cannot be read, which `problem` explains. `at`: the wall clock. `secrets` are masked
    in the texts of failures."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "at": round(at, 3),
        "problem": problem,
        "rates": as_json(rates),
        "failure": _failure(failure, secrets),
        "excluded": [],
        "job": None,
    }
    if job is not None:
        document["job"] = {key: as_json(getattr(job, key)) for key in _JOB_KEYS}
        document["columns"] = COLUMNS
        document["nodes"] = [_row(node) for node in job.nodes]
        document["checkpoints"] = list(_checkpoints(job.nodes))
        document["excluded"] = list(_excluded(job, secrets))
    return document


def _row(node: NodeReport) -> list[Any]:
    status = node.status
    saved = status.checkpoint if status is not None else None
    return [
        node.node,
        node.first_rank,
        node.slots,
        node.state,
        node.coordinates,
        node.leaving,
        status.workers if status is not None else 0,
        status.step if status is not None else 0,
        _rounded(status.step_s if status is not None else None),
        saved.step if saved is not None else None,
        _rounded(saved.age_s if saved is not None else None),
        _rounded(status.lease_s if status is not None else None),
        status.lease_ttl_s if status is not None else None,
        str(node.address) if node.address is not None else "",
        status.notice if status is not None else "",
    ]


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 1) if seconds is not None else None


def _checkpoints(nodes: Iterable[NodeReport]) -> Iterable[dict[str, Any]]:
    """The newest checkpoint of each tier, its age, and how many nodes have it."""
    statuses = [node.status for node in nodes if node.status is not None]

    def of(status: NodeStatus) -> dict[str, Checkpoint | None]:
        return {"memory": status.memory, "replica": status.replica, "disk": status.checkpoint}

    for tier in ("memory", "replica", "disk"):
        known = [found for status in statuses if (found := of(status)[tier]) is not None]
        if known:
            step = max(found.step for found in known)
            newest = [found for found in known if found.step == step]
            ages = [found.age_s for found in newest if found.age_s is not None]
            yield {
                "tier": tier,
                "step": step,
                "age_s": _rounded(min(ages, default=None)),
                "nodes": len(newest),
            }


def _excluded(job: JobReport, secrets: Collection[str]) -> Iterable[dict[str, str]]:
    """The nodes that are excluded now, the newest first."""
    if job.result is None:
        for one in reversed(list(left_out(job.exclusions).values())):
            yield {"node": one.node, "text": masked(f"node {one.node} is {in_words(one)}", secrets)}


def _failure(failure: Failure | None, secrets: Collection[str]) -> dict[str, Any] | None:
    if failure is None:
        return None
    worker = worker_of(failure)
    known: dict[str, Any] = {
        "generation": failure.generation,
        "summary": masked(failure.summary, secrets),
        "cause": failure.cause,
        "action": failure.action.value,
    }
    if failure.rank is not None:
        known |= {"rank": failure.rank, "node": failure.node}
    if worker is not None:
        known |= {
            "summary": masked(worker.summary, secrets),
            "traceback": masked(worker.traceback or "", secrets),
            "log_tail": masked("\n".join(worker.log_tail), secrets),
            "log_file": worker.log_file,
        }
    return known
