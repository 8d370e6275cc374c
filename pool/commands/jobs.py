"""`elastic-agent jobs`, `wait` and `cancel`, and what all commands about a pool have in common: how they find it, read
it, write to it, follow a job, and end."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...agent.commands.store_command import store_command
from ...agent.common.exits import CannotDo, ExitCode
from ...agent.configuration.config import ConfigError, Problem
from ...agent.configuration.derive import resolve_pool
from ...agent.configuration.options import TARGETS
from ...agent.configuration.parse import YES_OR_NO, Option
from ...agent.configuration.rendezvous import RendezvousConfig
from ...agent.configuration.settings import Settings
from ...rendezvous.errors import (
    Compacted,
    StoreRefused,
    StoreUnavailable,
)
from ...rendezvous.store.interface import Compare, Put, Store, Watch
from ...rendezvous.text import counted
from ..records import RESULTS_PREFIX, SCOPES, Cancel, Job, JobResult, Outcome, PoolView
from ..schedule import why_waiting


def pool_command(
    name: str,
    words: Sequence[str],
    usage: str,
    work: Callable[[Store, PoolView, str, Settings], int],
    *options: Option[Any],
    subject: str = "",
    check: Callable[[Settings], list[Problem]] | None = None,
) -> int:
    """Returns an `ExitCode`, or what `work` returns. With a `subject` the first word is one, and `work` gets it.

    `check`, of a command with something to run, finds more problems of the options before the store is asked; `work`
    raises CannotDo, StoreError and RecordInvalid.
    """

    def find(_: str, command_line: Settings) -> RendezvousConfig:
        return _place(command_line, (check or _nothing_to_run)(command_line))

    def look(store: Store, _: RendezvousConfig, first: str, command_line: Settings) -> int:
        return work(store, read_view(store), first, command_line)

    return store_command(name, words, usage, find, look, *options, subject=subject)


def _nothing_to_run(command_line: Settings) -> list[Problem]:
    given = [command_line[target] for target in TARGETS if target in command_line]
    return [one.problem("nothing more", "leave it out") for one in given]


def _place(command_line: Settings, problems: list[Problem]) -> RendezvousConfig:
    """Where the pool's store is. Raises ConfigError with these problems, too."""
    try:
        place = resolve_pool(command_line, os.environ)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    return place


def read_view(store: Store) -> PoolView:
    """Raises StoreError and RecordInvalid."""
    view = PoolView()
    view.read(store.read(SCOPES))
    return view


def find_job(view: PoolView, name: str) -> Job:
    """By its id, or the beginning of it, or the name if only one job has it. Raises CannotDo."""
    jobs = view.jobs
    exact = [job for job in jobs if job.job == name]
    found = exact or [job for job in jobs if job.job.startswith(name) or job.name == name]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CannotDo(ExitCode.NO_JOB, f"the pool has no job {name!r}: elastic-agent jobs lists them")
    ids = ", ".join(job.job for job in found)
    raise CannotDo(ExitCode.NO_JOB, f"{name!r} may be any of {ids}: write one of these")


def present_user() -> str:
    """USER@HOST as this process sees itself: for people, and not authenticated."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}@{socket.gethostname()}"


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


def states(view: PoolView, now: float) -> Iterator[JobState]:
    results, pool = {result.job: result for result in view.results}, view.pool()
    for job in view.jobs:
        run, result = view.plan.run_of(job.job), results.get(job.job)
        if result is not None:
            state, detail, nodes = result.outcome.value, result.reason, result.nodes
        elif run is not None:
            state = "running" if run.ending is None else "ending"
            detail = f"attempt {run.attempt}" if run.ending is None else run.ending.reason
            nodes = tuple(seat.node for seat in run.seats)
        else:
            state, detail, nodes = "waiting", why_waiting(pool, job, now), ()
        found = JobState(job.job, job.name, state, detail, nodes, job.submitted_at, job.submitted_by)
        if result is not None:
            found = replace(found, code=result.code, started_at=result.started_at, ended_at=result.ended_at)
        yield found if run is None else replace(found, started_at=run.started_at)


OUTAGE_S = 60.0
"""The store may be away for so long before a command that follows a job gives up."""
RETRY_S = 0.5

_CODES = {
    Outcome.SUCCEEDED: ExitCode.SUCCESS,
    Outcome.CANCELLED: ExitCode.STOPPED_BY_SIGTERM,
    Outcome.UNABLE: ExitCode.UNABLE,
}
"""Of a job that has not failed by its own fault."""
_OF_AGENTS = (ExitCode.CRASH_LOOP, ExitCode.UNLIKE_THE_JOB, ExitCode.NOT_ON_DISK)
"""Passed on. An agent's other codes mean something else of these commands: `jobs` shows them."""


class LiveView:
    """Owned by one thread. A store that is away for a while costs news, and nothing else."""

    def __init__(self, store: Store, view: PoolView, clock: Callable[[], float] = time.monotonic) -> None:
        """`view` is what has been read already."""
        self.store, self.view = store, view
        self._clock = clock
        self._watch: Watch | None = None
        self._answered_at = clock()

    def wait(self, timeout_s: float) -> None:
        """Until something has changed, but no longer. Raises RecordInvalid, and StoreError when the store has been away
        for too long."""
        try:
            if self._watch is None:
                snapshot = self.store.read(SCOPES)
                self.view.read(snapshot)
                self._watch = self.store.watch(SCOPES, snapshot.revision)
            else:
                self.view.changed(self._watch.next(timeout_s))
            self._answered_at = self._clock()
        except StoreRefused:
            raise
        except (Compacted, StoreUnavailable):
            self.close()
            if self._clock() - self._answered_at >= OUTAGE_S:
                raise
            time.sleep(min(RETRY_S, timeout_s))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def state(self, job: str) -> JobState | None:
        """None when the pool has forgotten it."""
        return next((one for one in states(self.view, time.time()) if one.job == job), None)

    def waits_for(self, job: Job) -> str:
        """Why it does not run yet; empty when it does, or has ended."""
        waiting = any(one.job == job.job for one in self.view.pool().jobs)
        if not waiting or self.view.plan.run_of(job.job) is not None:
            return ""
        return why_waiting(self.view.pool(), job, time.time())


def code_of(result: JobResult) -> int:
    """The exit code of a command that waits for the job."""
    if result.outcome is Outcome.FAILED:
        return result.code if result.code in _OF_AGENTS else ExitCode.FAILED
    return _CODES[result.outcome]


_JOBS_USAGE = """\
usage: elastic-agent jobs [--json]

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

SCHEMA = 2
"""Of the JSON document."""
LOOK_S = 2.0
JSON: Option[bool] = Option("json", YES_OR_NO, "one JSON document", default="false", flag=True)


def jobs(words: Sequence[str]) -> int:
    return pool_command("jobs", words, _JOBS_USAGE, _jobs, JSON)


def wait(words: Sequence[str]) -> int:
    return pool_command("wait", words, _WAIT_USAGE, _wait, subject="JOB")


def cancel(words: Sequence[str]) -> int:
    return pool_command("cancel", words, _CANCEL_USAGE, _cancel, subject="JOB")


def _jobs(store: Store, view: PoolView, _: str, settings: Settings) -> int:
    found = list(states(view, time.time()))
    if settings[JSON].value:
        jobs = [asdict(one) for one in found]
        print(json.dumps({"schema": SCHEMA, "pool": asdict(view.counts()), "jobs": jobs}), flush=True)
    else:
        print("\n".join(_lines(view, found)), flush=True)
    return ExitCode.SUCCESS


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
            raise CannotDo(ExitCode.NO_JOB, f"job {job.job} is not in the pool any more")
        line = f"job {state.job}: {state.state}: {state.detail}"
        if line != shown:
            shown = line
            print(line, file=sys.stderr, flush=True)
        if (result := live.view.result_of(job.job)) is not None:
            return code_of(result)
        live.wait(LOOK_S)


def _cancel(store: Store, view: PoolView, name: str, _: Settings) -> int:
    print(cancel_job(store, view, find_job(view, name)))
    return ExitCode.SUCCESS


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
    raise CannotDo(ExitCode.NO_JOB, f"job {job.job} is cancelled already, and about to end")


def _has_ended(result: JobResult) -> CannotDo:
    how = f"{result.outcome.value}, {result.reason}"
    return CannotDo(ExitCode.NO_JOB, f"job {result.job} has ended already: {how}")
