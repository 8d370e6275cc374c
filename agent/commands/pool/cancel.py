"""`elastic-agent cancel JOB`: the end of a job of a pool, whether it runs or waits."""

from __future__ import annotations

from collections.abc import Sequence

from ....pool.records import RESULTS_PREFIX, Cancel, Job, JobResult
from ....pool.view import PoolView
from ....rendezvous.store.interface import Compare, Put, Store
from ...common.exits import PoolCode
from ...configuration.settings import Settings
from ..store_command import CannotDo
from .pool_command import find_job, pool_command, present_user

_USAGE = """\
usage: elastic-agent cancel JOB

Ends a job of a pool. One that runs leaves its nodes by plan, so that its newest checkpoint is kept.
"""


def main(words: Sequence[str]) -> int:
    return pool_command("cancel", words, _USAGE, _cancel, subject="JOB")


def _cancel(store: Store, view: PoolView, name: str, _: Settings) -> int:
    print(cancel(store, view, find_job(view, name)))
    return PoolCode.DONE


def cancel(store: Store, view: PoolView, job: Job) -> str:
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
