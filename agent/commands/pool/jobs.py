"""`elastic-agent jobs`: the queue of a pool, what runs, and how the last jobs have ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ....pool.schedule import what_is_missing, why_waiting
from ....pool.view import PoolView
from ....rendezvous.store.interface import Store
from ....rendezvous.text import counted
from ...common.exits import PoolCode
from ...configuration.parse import YES_OR_NO, Option
from ...configuration.settings import Settings
from ..store_command import pause
from .pool_command import pool_command, read_view

_USAGE = """\
usage: elastic-agent jobs [--json] [--watch]

Lists the jobs of a pool, oldest first: those that run, those that wait and what for, and how the others have ended.
"""

SCHEMA = 1
"""Of the JSON document."""
WATCH_S = 1.0
JSON: Option[bool] = Option("json", YES_OR_NO, "one JSON document", default="false", flag=True)
WATCH: Option[bool] = Option(
    "watch", YES_OR_NO, "again each second, until Ctrl-C", default="false", flag=True
)


@dataclass(frozen=True, slots=True)
class JobState:
    """One job as people see it."""

    job: str
    name: str
    state: str
    """waiting, running, ending, or its outcome."""
    detail: str
    nodes: tuple[str, ...]
    submitted_at: float
    submitted_by: str
    code: int | None = None
    """Exit code of the agent that has decided how it ended."""
    started_at: float | None = None
    """Of the newest attempt."""
    ended_at: float | None = None
    logs: tuple[str, ...] = ()
    """NODE:PATH of what its agents print."""


def main(words: Sequence[str]) -> int:
    return pool_command("jobs", words, _USAGE, _jobs, JSON, WATCH)


def states(view: PoolView, now: float) -> Iterator[JobState]:
    results = {result.job: result for result in view.results}
    pool, live = view.pool(), {node.node: node for node in view.nodes}
    for job in view.jobs:
        code = started_at = ended_at = None
        logs: dict[str, str] = {}
        run, result = view.plan.run_of(job.job), results.get(job.job)
        if result is not None:
            state, detail, nodes = result.outcome.value, result.reason, result.nodes
            code, started_at, ended_at, logs = result.code, result.started_at, result.ended_at, result.logs
        elif run is not None:
            state = "running" if run.ending is None else "ending"
            told = filter(None, (f"attempt {run.attempt}", what_is_missing(pool, job, run)))
            detail = "; ".join(told) if run.ending is None else run.ending.reason
            nodes, started_at = tuple(seat.node for seat in run.seats), run.started_at
            logs = {name: live[name].log_of(job.job) for name in nodes if name in live}
        else:
            state, detail, nodes = "waiting", why_waiting(pool, job, now), ()
        places = tuple(f"{node}:{path}" for node, path in logs.items())
        yield JobState(
            job=job.job,
            name=job.name,
            state=state,
            detail=detail,
            nodes=nodes,
            submitted_at=job.submitted_at,
            submitted_by=job.submitted_by,
            code=code,
            started_at=started_at,
            ended_at=ended_at,
            logs=places,
        )


def _jobs(store: Store, view: PoolView, _: str, settings: Settings) -> int:
    while True:
        found = list(states(view, time.time()))
        if settings[JSON].value:
            document = {
                "schema": SCHEMA,
                "pool": asdict(view.counts()),
                "jobs": [asdict(one) for one in found],
            }
            print(json.dumps(document), flush=True)
        else:
            print("\n".join(_lines(view, found)), flush=True)
        if not settings[WATCH].value:
            return PoolCode.DONE
        pause(WATCH_S)
        view = read_view(store)


def _lines(view: PoolView, found: Sequence[JobState]) -> Iterator[str]:
    counts = view.counts()
    yield f"{counted(counts.nodes, 'node')}, {counts.idle_nodes} idle; {counted(len(found), 'job')}"
    for node in view.nodes:
        if node.problem:
            yield f"{node.node} takes no job: {node.problem}"
    for one in found:
        where = f" on {', '.join(one.nodes)}" if one.nodes else ""
        yield f"{one.job}  {one.state:<10} {one.name}{where}: {one.detail}"
