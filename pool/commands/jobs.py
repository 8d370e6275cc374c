"""`elastic-agent jobs`, `wait` and `cancel`: the queue of a pool, what runs, how a job ends, and to end one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ...agent.commands.store_command import CannotDo, pause
from ...agent.common.exits import PoolCode
from ...agent.configuration.parse import YES_OR_NO, Option
from ...agent.configuration.settings import Settings
from ...rendezvous.store.interface import Compare, Put, Store
from ...rendezvous.text import counted
from ..records import RESULTS_PREFIX, Cancel, Job, JobResult
from ..view import JobState, PoolView, states
from .pool_command import LiveView, code_of, find_job, pool_command, present_user, read_view

_JOBS_USAGE = """\
usage: elastic-agent jobs [--json] [--watch]

Lists the jobs of a pool, oldest first: those that run, those that wait and what for, and how the others have ended.
"""

_WAIT_USAGE = """\
usage: elastic-agent wait JOB

Waits until a job of a pool has ended, and shows on stderr how it goes, a line for each new state. The exit code is 0 if
it has succeeded, and one of those below if not.
"""

_CANCEL_USAGE = """\
usage: elastic-agent cancel JOB

Ends a job of a pool. One that runs leaves its nodes by plan, so that its newest checkpoint is kept.
"""

SCHEMA = 1
"""Of the JSON document."""
WATCH_S = 1.0
LOOK_S = 2.0
JSON: Option[bool] = Option("json", YES_OR_NO, "one JSON document", default="false", flag=True)
WATCH: Option[bool] = Option(
    "watch", YES_OR_NO, "again each second, until Ctrl-C", default="false", flag=True
)


def jobs(words: Sequence[str]) -> int:
    return pool_command("jobs", words, _JOBS_USAGE, _jobs, JSON, WATCH)


def wait(words: Sequence[str]) -> int:
    return pool_command("wait", words, _WAIT_USAGE, _wait, subject="JOB")


def cancel(words: Sequence[str]) -> int:
    return pool_command("cancel", words, _CANCEL_USAGE, _cancel, subject="JOB")


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


def _wait(store: Store, view: PoolView, name: str, _: Settings) -> int:
    job, live, shown = find_job(view, name), LiveView(store, view), ""
    while True:
        if (state := live.state(job.job)) is None:
            raise CannotDo(PoolCode.NO_JOB, f"job {job.job} is not in the pool any more")
        line = f"job {state.job}: {state.state}: {state.detail}"
        if line != shown:
            shown = line
            print(line, file=sys.stderr, flush=True)
        if (result := live.view.result_of(job.job)) is not None:
            return code_of(result)
        live.wait(LOOK_S)


def _cancel(store: Store, view: PoolView, name: str, _: Settings) -> int:
    print(cancel_job(store, view, find_job(view, name)))
    return PoolCode.DONE


def cancel_job(store: Store, view: PoolView, job: Job) -> str:
    """What was done, in words. Raises CannotDo."""
    if (result := view.result_of(job.job)) is not None:
        raise _has_ended(result)
    cancel = Cancel(job.job, present_user())
    free = Compare(cancel.key, 0), Compare(RESULTS_PREFIX + job.job, 0)
    outcome = store.transact(free, (Put(cancel.key, cancel.to_json()),))
    if outcome.succeeded:
        return f"job {job.job} ({job.name}) is cancelled"
    if (ended := outcome.entries[1]) is not None:
        raise _has_ended(JobResult.from_json(ended.key, ended.value))
    raise CannotDo(PoolCode.OVER, f"job {job.job} is cancelled already, and about to end")


def _has_ended(result: JobResult) -> CannotDo:
    how = f"{result.outcome.value}, {result.reason}"
    return CannotDo(PoolCode.OVER, f"job {result.job} has ended already: {how}")
