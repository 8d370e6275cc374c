"""`elastic-agent jobs`, `wait`, `logs` and `cancel`, and what all commands about a pool have in common: how they find
it, read it, follow a job, and end.

What a job prints is read from the daemons of its nodes, each of which has its own part; piece by piece, so that a
daemon keeps nothing of who reads, and one that stalls holds nothing up. What cannot be read is said once, and the
others are shown.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from ..agent.commands.command import opened, pause, run_command
from ..agent.common.exits import CannotDo, ExitCode
from ..agent.common.http_client import NoAnswer, request
from ..agent.configuration.config import TARGETS, ConfigError, Problem
from ..agent.configuration.derive import resolve_pool
from ..agent.configuration.load import Settings
from ..agent.configuration.parse import YES_OR_NO, Option
from ..rendezvous.errors import StoreRefused, StoreUnavailable
from ..rendezvous.store.interface import Compare, Put, Store
from ..rendezvous.text import counted
from .records import (
    LOGS_PATH,
    MOST_LOG_BYTES,
    NODES_PREFIX,
    PLAN_KEY,
    RESULTS_PREFIX,
    SCOPES,
    Cancel,
    Job,
    JobResult,
    Outcome,
    Pool,
    PoolNode,
    PoolView,
)
from .schedule import why_waiting


def nothing_to_run(command_line: Settings) -> list[Problem]:
    given = [command_line[target] for target in TARGETS if target in command_line]
    return [one.problem("nothing more", "leave it out") for one in given]


def pool_command(
    name: str,
    words: Sequence[str],
    usage: str,
    work: Callable[[Store, PoolView, str, Settings], int],
    *options: Option[Any],
    subject: str = "",
    check: Callable[[Settings], list[Problem]] = nothing_to_run,
) -> int:
    """Returns an `ExitCode`, or what `work` returns. With a `subject` the first word is one, and `work` gets it.

    `check` finds more problems of the options before the store is asked; `work` raises CannotDo, StoreError and
    RecordInvalid.
    """

    def at_pool(first: str, command_line: Settings) -> int:
        problems = check(command_line)
        try:
            place = resolve_pool(command_line, os.environ)
        except ConfigError as error:
            raise ConfigError([*error.problems, *problems]) from None
        if problems:
            raise ConfigError(problems)
        with opened(place) as store:
            return work(store, read_view(store), first, command_line)

    return run_command(name, words, usage, options, at_pool, takes=subject, of_store=True)


def read_view(store: Store, scopes: tuple[str, ...] = SCOPES) -> PoolView:
    """Raises StoreError and RecordInvalid."""
    view = PoolView()
    view.read(store.read(scopes))
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- jobs


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


def state_of(view: PoolView, pool: Pool, job: Job, now: float) -> JobState:
    """`pool` is that of the view."""
    run, result = view.plan.run_of(job.job), view.result_of(job.job)
    if result is not None:
        state, detail, nodes = result.outcome.value, result.reason, result.nodes
    elif run is not None:
        state = "running" if run.ending is None else "ending"
        detail = f"attempt {run.attempt}" if run.ending is None else run.ending.reason
        nodes = tuple(allocation.node for allocation in run.allocations)
    else:
        state, detail, nodes = "waiting", why_waiting(pool, job, now), ()
    found = JobState(job.job, job.name, state, detail, nodes, job.submitted_at, job.submitted_by)
    if result is not None:
        found = replace(found, code=result.code, started_at=result.started_at, ended_at=result.ended_at)
    return found if run is None else replace(found, started_at=run.started_at)


_JOBS_USAGE = """\
usage: elastic-agent jobs [--json]

Lists the jobs of a pool, oldest first: those that run, those that wait and what for, and how the others have ended.
"""
SCHEMA = 2
"""Of the JSON document."""
JSON: Option[bool] = Option("json", YES_OR_NO, "one JSON document", default="false", flag=True)


def jobs(words: Sequence[str]) -> int:
    return pool_command("jobs", words, _JOBS_USAGE, _jobs, JSON)


def _jobs(store: Store, view: PoolView, _: str, settings: Settings) -> int:
    pool, now = view.pool(), time.time()
    found = [state_of(view, pool, job, now) for job in view.jobs]
    if settings[JSON].value:
        shown = [asdict(one) for one in found]
        print(json.dumps({"schema": SCHEMA, "pool": asdict(view.counts()), "jobs": shown}), flush=True)
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


# ---------------------------------------------------------------- cancel

_CANCEL_USAGE = """\
usage: elastic-agent cancel JOB

Ends a job of a pool. One that runs leaves its nodes by plan, so that its newest checkpoint is kept.
"""


def cancel(words: Sequence[str]) -> int:
    return pool_command("cancel", words, _CANCEL_USAGE, _cancel, subject="JOB")


def _cancel(store: Store, view: PoolView, name: str, _: Settings) -> int:
    job = find_job(view, name)
    wish = Cancel(job.job, present_user())
    free = Compare(wish.key, 0), Compare(RESULTS_PREFIX + job.job, 0)
    outcome = store.transact(free, (Put(wish.key, wish.to_json()),))
    if outcome.succeeded:
        print(f"job {job.job} ({job.name}) is cancelled")
        return ExitCode.SUCCESS
    if (ended := outcome.entries[1]) is None:
        raise CannotDo(ExitCode.NO_JOB, f"job {job.job} is cancelled already, and about to end")
    result = JobResult.read(ended.key, ended.value)
    how = f"{result.outcome.value}, {result.reason}"
    raise CannotDo(ExitCode.NO_JOB, f"job {job.job} has ended already: {how}")


# ---------------------------------------------------------------- wait

OUTAGE_S = 60.0
"""The store may be away for so long before a command that follows a job gives up."""
RETRY_S = 0.5
LOOK_S = 0.5
"""Between two looks at a job that goes on."""

_CODES = {
    Outcome.SUCCEEDED: ExitCode.SUCCESS,
    Outcome.CANCELLED: ExitCode.STOPPED_BY_SIGTERM,
    Outcome.UNABLE: ExitCode.UNABLE,
}
"""Of a job that has not failed by its own fault."""
_OF_AGENTS = (ExitCode.CRASH_LOOP, ExitCode.UNLIKE_THE_JOB, ExitCode.NOT_ON_DISK)
"""Passed on. An agent's other codes mean something else of these commands: `jobs` shows them."""


def code_of(result: JobResult) -> int:
    """The exit code of a command that waits for the job."""
    if result.outcome is Outcome.FAILED:
        return result.code if result.code in _OF_AGENTS else ExitCode.FAILED
    return _CODES[result.outcome]


def follow(store: Store, view: PoolView, job: Job, log: JobLog | None = None) -> int:
    """Says each new state of the job, and shows what it prints, until it has ended: its code. A store that is away for
    a while costs news, and nothing else. Raises CannotDo, StoreError and RecordInvalid."""
    away = retry_if_exception(
        lambda error: isinstance(error, StoreUnavailable) and not isinstance(error, StoreRefused)
    )
    patient = Retrying(retry=away, stop=stop_after_delay(OUTAGE_S), wait=wait_fixed(RETRY_S), reraise=True)
    told = ""
    while any(one.job == job.job for one in view.jobs):
        result = view.result_of(job.job)
        more = log is not None and log.read(view, last=result is not None)
        state = state_of(view, view.pool(), job, time.time())
        line = f"job {job.job} ({job.name}): {state.state}: {state.detail}"
        if line != told and not more:
            told = line
            say(line)
        if result is not None and not more:
            return code_of(result)
        (pause if log is not None else time.sleep)(0.0 if more else LOOK_S)
        view = patient(_look, store, view, job)
    raise CannotDo(ExitCode.NO_JOB, f"job {job.job} is not in the pool any more")


def _look(store: Store, before: PoolView, job: Job) -> PoolView:
    """Of a job that runs only what is about it: the queue may be long."""
    if before.plan.run_of(job.job) is not None:
        view = read_view(store, (PLAN_KEY, NODES_PREFIX, job.key, RESULTS_PREFIX + job.job))
        if view.plan.run_of(job.job) is not None or view.result_of(job.job) is not None:
            return view
    return read_view(store)


_WAIT_USAGE = """\
usage: elastic-agent wait JOB

Waits until a job of a pool has ended, and shows on stderr how it goes, a line for each new state. The exit code is 0 if
it has succeeded, and another if not: see elastic-agent --help.
"""


def wait(words: Sequence[str]) -> int:
    return pool_command("wait", words, _WAIT_USAGE, _wait, subject="JOB")


def _wait(store: Store, view: PoolView, name: str, _: Settings) -> int:
    return follow(store, view, find_job(view, name))


# ---------------------------------------------------------------- logs

ANSWER_S = 3.0
AT_ONCE = 32
"""Nodes that are asked at the same time."""


class Unreadable(Exception):
    """This node's part cannot be read now; the text says why."""


def ask_daemon(node: PoolNode, job: str, start: int) -> bytes:
    """What this node has of the job from this byte on; empty where it has nothing yet. Raises Unreadable."""
    if node.http is None:
        raise Unreadable("its daemon answers on its own loopback only (--http-address)")
    bearer = {"Authorization": f"Bearer {node.token}"}
    target = f"{LOGS_PATH}?{urlencode({'job': job, 'start': start})}"
    try:
        reply = request(node.http, target, time.monotonic, ANSWER_S, MOST_LOG_BYTES, headers=bearer)
    except (OSError, NoAnswer) as error:
        raise Unreadable(f"no answer from {node.http}: {error}") from None
    if reply.status not in (200, 404):
        raise Unreadable(f"its daemon at {node.http} answers with status {reply.status}")
    return reply.body if reply.status == 200 else b""


def nodes_of(view: PoolView, job: str) -> tuple[str, ...]:
    """Nodes that have, or had, a part in the job's newest attempt."""
    result, run = view.result_of(job), view.plan.run_of(job)
    if run is not None:
        return tuple(dict.fromkeys((*run.left, *(allocation.node for allocation in run.allocations))))
    return result.nodes if result is not None else ()


class JobLog:
    """What the job's agents print, on all nodes of its newest attempt. Each of their lines names its node."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._read_to: dict[str, int] = {}
        """By node."""
        self._said: set[str] = set()

    @property
    def found(self) -> bool:
        """Some node has something of the job."""
        return bool(self._read_to)

    def read(self, view: PoolView, *, last: bool) -> bool:
        """Shows the whole lines that are new, and at `last` one that has not ended, too; whether there is more."""
        names, nodes = nodes_of(view, self._job), {node.node: node for node in view.nodes}
        for name in names:
            if name not in nodes:
                self._complain(name, "has left the pool; what it has is in its daemon's --log-dir")
        asked = [nodes[name] for name in names if name in nodes]
        if not asked:
            return False
        with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="ask") as threads:
            pieces = list(threads.map(self._piece, asked))
        for node, piece in zip(asked, pieces, strict=True):
            self._show(node.node, piece, last)
        return any(len(piece) == MOST_LOG_BYTES for piece in pieces)

    def _piece(self, node: PoolNode) -> bytes:
        try:
            return ask_daemon(node, self._job, self._read_to.get(node.node, 0))
        except Unreadable as error:
            self._complain(node.node, f"cannot be read: {error}")
            return b""

    def _show(self, name: str, piece: bytes, last: bool) -> None:
        whole = piece[: piece.rfind(b"\n") + 1]
        if not whole and len(piece) == MOST_LOG_BYTES:
            whole = piece  # a part of a very long line
        elif last and len(piece) < MOST_LOG_BYTES and not piece.endswith(b"\n"):
            whole = piece and piece + b"\n"
        if piece:
            self._read_to[name] = self._read_to.get(name, 0) + min(len(whole), len(piece))
            sys.stdout.flush()
            sys.stdout.buffer.write(whole)
            sys.stdout.buffer.flush()

    def _complain(self, name: str, what: str) -> None:
        if name not in self._said:
            self._said.add(name)
            say(f"node {name} {what}")


_LOGS_USAGE = """\
usage: elastic-agent logs JOB [--follow]

Shows what the agents of a job of a pool print, its workers' lines among it, on all its nodes; each line names its node.
With --follow it goes on until the job has ended; the exit code is then that of wait.
"""
FOLLOW: Option[bool] = Option(
    "follow", YES_OR_NO, "go on until the job has ended", default="false", flag=True
)


def logs(words: Sequence[str]) -> int:
    return pool_command("logs", words, _LOGS_USAGE, _logs, FOLLOW, subject="JOB")


def _logs(store: Store, view: PoolView, name: str, settings: Settings) -> int:
    job = find_job(view, name)
    log = JobLog(job.job)
    if settings[FOLLOW].value:
        return follow(store, view, job, log)
    while log.read(view, last=view.result_of(job.job) is not None):
        pass
    if log.found:
        return ExitCode.SUCCESS
    state = state_of(view, view.pool(), job, time.time())
    if state.state == "waiting":
        say(f"job {job.job} ({job.name}) waits and has printed nothing: {state.detail}")
        return ExitCode.SUCCESS
    raise CannotDo(
        ExitCode.NO_JOB,
        f"no node has anything of job {job.job} ({job.name}): it has printed nothing yet, or its nodes are gone",
    )
