"""The content of every format that has a schema version, pinned by that version: names of fields and values of enums.

A reader of another version must refuse what it would misread, and say which version it found. A change of what a format
holds raises its version, and is pinned here.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import pytest

from elastic_agent.agent.machine import agents_here
from elastic_agent.agent.observability import status as pages
from elastic_agent.pool import records as pool_records
from elastic_agent.rendezvous import records

FORMATS: dict[str, tuple[int, tuple[type, ...]]] = {
    "records": (
        records.SCHEMA,
        (
            records.NodeRecord,
            records.World,
            records.StopAt,
            records.PeerStatus,
        ),
    ),
    "pool": (pool_records.SCHEMA, (pool_records.Plan, *pool_records.RECORDS.values())),
    "status pages": (pages.SCHEMA, (pages.NodeStatus, pages.JobStatus)),
    "run file": (agents_here.SCHEMA, (agents_here.RunFile,)),
}

PINNED: dict[str, tuple[int, dict[str, str]]] = {
    "records": (
        21,
        {
            "NodeRecord": (
                "node incarnation address port slots http limits program node_rank "
                "hosts_store leaving ready generation conditions failure step progress seen role memory "
                "recheck suspicion hang_report paces comparison"
            ),
            "World": (
                "job generation phase members master cause restarts step result final_saver limits "
                "limits_of program unproven exclusions standbys run inquiry"
            ),
            "StopAt": "generation step paused",
            "PeerStatus": "node incarnation generation confirmed_s whole_s",
            "Endpoint": "address port",
            "Paces": "generation timed step_us own_us",
            "PaceComparison": "generation usual_us stragglers",
            "Straggler": "node rank own_us",
            "Limits": "min_nodes max_nodes last_call_s max_restarts nodes_multiple_of",
            "Program": "name digest arguments lease_ttl_s outage_grace_s",
            "Condition": "stable notified polling overdue drained state_saved succeeded stopped",
            "Failure": (
                "generation fingerprint summary cause action collateral outside node rank local_rank returncode "
                "exception traceback log_tail log_file"
            ),
            "Action": "restart stop end exclude-node free",
            "GenerationProgress": "generation loaded reached",
            "Phase": "running draining last_step stopping ended",
            "Member": "node incarnation slots first_rank http role",
            "Cause": "kind node detail failure",
            "Restarts": (
                "failures without_progress fingerprint same_fingerprint at_load bad_state culprit "
                "blamed exclusions free_retries from_outside"
            ),
            "Result": "succeeded restarts_exhausted crash_loop final_failure store_host_left",
            "Exclusion": "node life cause reason fingerprint times by_operator readmitted",
            "Recheck": "times passed summary",
            "Standby": "node memory",
            "CauseKind": "start failure join leave lost withdrawn success",
            "BadState": "generation step",
            "HangSuspicion": "generation why urgency",
            "Urgency": "early overdue last",
            "HangReport": "generation inquiry ranks",
            "RankReport": "rank doing step still_s collective where recorded",
            "Recorded": "still_s fresh groups",
            "InGroup": "group size entered waits_in collective",
            "RankActivity": "gone stopped uninterruptible in_save in_collective waits works other",
            "HangProbe": "number urgency finding why node rank",
            "HangFinding": "healthy unclear doubtful likely certain",
        },
    ),
    "pool": (
        6,
        {
            "Plan": "allocation_ids attempts",
            "PoolNode": ("node incarnation most_nodes running ended leaving problem http token"),
            "Endpoint": "address port",
            "Job": (
                "job name options command environment directory min_nodes max_nodes "
                "submitted_at submitted_by nodes_multiple_of cancelled_by"
            ),
            "JobResult": "job outcome reason code attempts started_at ended_at nodes",
            "Attempt": "job attempt started_at allocations ending left in_vain refusals",
            "AllocationEnd": "job allocation_id outcome code reason",
            "Outcome": "succeeded failed cancelled unable",
            "Allocation": "node incarnation id leaving",
            "Refusal": "reason until",
        },
    ),
    "status pages": (
        11,
        {
            "NodeStatus": (
                "node incarnation state waiting_for phase_s "
                "workers step step_age_s checkpoint memory replica lease_age_s "
                "lease_ttl_s backoff_s notice notice_s checks partners_unreachable"
            ),
            "JobStatus": "job world nodes coordinator complete agent",
            "Checkpoint": "step age_s",
            "Finding": "check outcome summary advice",
            "Outcome": "fail warn unknown ok",
            "World": "records 21",
            "NodeRecord": "records 21",
        },
    ),
    "run file": (
        1,
        {
            "RunFile": "http store",
            "Endpoint": "address port",
        },
    ),
}


def parts(annotation: Any) -> Iterator[Any]:
    """The classes, and the alternatives of a `Literal`, that an annotation names."""
    held = isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, enum.Enum))
    if held or typing.get_origin(annotation) is Literal:
        yield annotation
    for inner in typing.get_args(annotation):
        yield from parts(inner)


def content(roots: tuple[type, ...]) -> dict[str, str]:
    """By name of the class, or of the field that has a `Literal`; a class that is itself a format has none here."""
    found: dict[str, str] = {}
    waiting: list[type] = list(roots)
    others = {cls: name for name, (_, owned) in FORMATS.items() for cls in owned if cls not in roots}
    while waiting:
        cls = waiting.pop(0)
        if cls.__name__ in found:
            continue
        if cls in others:
            found[cls.__name__] = f"{others[cls]} {FORMATS[others[cls]][0]}"
        elif issubclass(cls, enum.Enum):
            found[cls.__name__] = " ".join(str(member.value) for member in cls)
        else:
            hints = typing.get_type_hints(cls)
            found[cls.__name__] = " ".join(field.name for field in fields(cls))
            for field in fields(cls):
                for part in parts(hints[field.name]):
                    if isinstance(part, type):
                        waiting.append(part)
                    else:
                        found[f"{cls.__name__}.{field.name}"] = " ".join(map(str, typing.get_args(part)))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_holds_changes_with_its_version(name: str) -> None:
    version, roots = FORMATS[name]
    assert (version, content(roots)) == PINNED[name], f"raise the version of {name}, and pin its content here"
