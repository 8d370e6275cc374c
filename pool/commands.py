"""`elastic-agent submit`, `jobs`, `wait`, `logs` and `cancel`: the commands about a pool, and what they have in common:
how they find it, read it, follow a job, and end.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from ..agent.commands.command import opened, pause, run_command
from ..agent.common.exits import CannotDo, ExitCode
from ..agent.configuration.config import (
    ARGS,
    CHECK_CONFIG,
    HTTP_ADDRESS,
    LOG_DIR,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NO_PYTHON,
    NODE_ID,
    NODES_MULTIPLE_OF,
    OPTIONS,
    PRINT_COMPLETION,
    SCRIPT,
    TARGETS,
    VERSION,
    ConfigError,
    Problem,
)
from ..agent.configuration.derive import job_problems, resolve_pool
from ..agent.configuration.load import Settings
from ..agent.configuration.parse import TEXT, YES_OR_NO, Option, Parser
from ..agent.configuration.rendezvous import (
    JOB_ID,
    JOIN_TIMEOUT,
    LAST_CALL,
    LEASE_TTL,
    NODE_RANK,
    SLURM,
    STANDALONE,
)
from ..rendezvous.errors import RecordInvalid, StoreRefused, StoreUnavailable
from ..rendezvous.store.interface import Compare, Put, Store
from ..rendezvous.text import counted
from .job_agent import OF_THE_POOL
from .logs import LogReader
from .records import (
    NODES_PREFIX,
    PLAN_KEY,
    RESULTS_PREFIX,
    SCOPES,
    Job,
    JobResult,
    Outcome,
    Pool,
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
    if not found:
        raise CannotDo(ExitCode.NO_JOB, f"the pool has no job {name!r}: elastic-agent jobs lists them")
    if len(found) > 1:
        ids = ", ".join(job.job for job in found)
        raise CannotDo(ExitCode.NO_JOB, f"{name!r} may be any of {ids}: write one of these")
    return found[0]


def present_user() -> str:
    """USER@HOST as this process sees itself: for people, and not authenticated."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}@{socket.gethostname()}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- submit

_SUBMIT_USAGE = """\
usage: elastic-agent submit [OPTIONS] [--] train.py [ARGUMENTS]
       elastic-agent submit [OPTIONS] -m package.module [ARGUMENTS]

Puts a job into the queue of a pool: of the nodes on which elastic-agent runs without a script. Takes the options of a
run, but for those that the pool decides. Without --rdzv-endpoint the pool is that of this machine. The line on stdout
is the job's id: elastic-agent logs ID --follow shows what it prints, and ends as it does.
"""

NAME: Option[str | None] = Option("name", TEXT, "for people (default: the script's name)")
ENV: Option[tuple[tuple[str, str], ...]] = Option(
    "env",
    Parser("NAME=VALUE,NAME=VALUE", lambda text: _read_env(text)),
    "variables that the workers get besides the daemon's own; for a secret give the name of a file instead",
    default="",
)
DIRECTORY: Option[str | None] = Option(
    "directory", TEXT, "where the job runs, the same on all nodes (default: the present one)"
)
_NOT_OF_JOBS: tuple[Option[Any], ...] = (
    *(NODE_ID, HTTP_ADDRESS, LOG_DIR, JOB_ID, STANDALONE, SLURM, NODE_RANK),
    *(JOIN_TIMEOUT, LAST_CALL, LEASE_TTL, CHECK_CONFIG, PRINT_COMPLETION, VERSION),
)
_SECRET = re.compile(
    r"(?i)(?!.*_(file|path|dir)$).*(secret|passw|token(?!s|iz)|api_?key|access_?key|credential|private_?key)"
)
"""Names of variables that look like one; a file's name is none."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEXT_VARIABLE = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_]*=)")
"""A comma elsewhere belongs to a value."""


def submit(words: Sequence[str]) -> int:
    return pool_command("submit", words, _SUBMIT_USAGE, _submit, NAME, ENV, DIRECTORY, check=_check_submitted)


def _read_env(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in _NEXT_VARIABLE.split(text) if part]
    if not all(_VARIABLE.fullmatch(name) and equals for name, equals, _ in pairs):
        raise ValueError
    return tuple((name, value) for name, _, value in pairs)


def _check_submitted(settings: Settings) -> list[Problem]:
    problems = [
        settings[option].problem("an option of jobs; the pool's daemons decide this one", "leave it out")
        for option in _NOT_OF_JOBS
        if option in settings
    ]
    if not any(target in settings for target in TARGETS):
        problems.append(Problem("command line", None, "a script to run", "write it after the options"))
    for name, _ in settings[ENV].value:
        if _SECRET.match(name):
            expected = "no secret, as all who reach the store can read it"
            advice = "put it into a file that only this user can read on each node, and give the file's name"
            problems.append(Problem(f"--env {name}", None, expected, advice))
    return [*problems, *job_problems(settings)]


def _submit(store: Store, view: PoolView, _: str, settings: Settings) -> int:
    if not view.nodes:
        raise CannotDo(
            ExitCode.NOT_FOUND,
            "no node offers itself to this pool; start elastic-agent without a script on each of its nodes",
        )
    job = job_of(settings, os.getcwd(), time.time())
    most = max(node.most_nodes for node in view.nodes)
    if job.min_nodes > most:
        raise CannotDo(
            ExitCode.BAD_CONFIG,
            f"the job needs {job.min_nodes} nodes, and the pool has at most {most} (--max-nodes of its daemons)",
        )
    script = settings[SCRIPT].value or ""
    if os.path.isdir(job.directory) and not os.path.exists(os.path.join(job.directory, script)):
        raise CannotDo(
            ExitCode.BAD_CONFIG,
            f"{job.directory}, where the job is to run, has no {script}: check its name, or see --directory",
        )
    try:
        text = job.to_json()
    except RecordInvalid as error:
        raise CannotDo(ExitCode.BAD_CONFIG, f"{error.problem}: put it into a file, and name that") from error
    try:
        store.transact((Compare(job.key, 0),), (Put(job.key, text),))
    except StoreUnavailable as error:
        unknown = f"whether job {job.job} is in the queue is not known; elastic-agent jobs tells"
        raise CannotDo(ExitCode.NO_ANSWER, f"{error}; {unknown}") from error
    view = read_view(store)
    state = state_of(view, view.pool(), job, time.time())
    say(f"{job.name}: {state.detail}" if state.state == "waiting" else f"{job.name}: {state.state}")
    print(job.job)
    return ExitCode.SUCCESS


def job_of(settings: Settings, directory: str, now: float) -> Job:
    """As it is written to the store."""
    target = next(target for target in TARGETS if target in settings)
    text, args = str(settings[target].value), settings[ARGS].value
    flag = {MODULE.name: "-m", NO_PYTHON.name: "--no-python"}.get(target.name, "--")
    least, most = settings[MIN_NODES].value, settings[MAX_NODES].value
    decided = OF_THE_POOL | {SCRIPT.name, MODULE.name, NO_PYTHON.name, ARGS.name}
    options = tuple(
        f"--{option.name}={settings[option].text}"
        for option in OPTIONS
        if option in settings and option.name not in decided
    )
    return Job(
        job=uuid.uuid4().hex[:8],
        name=settings[NAME].value or os.path.basename(text),
        options=options,
        command=(flag, text, *args),
        environment=dict(settings[ENV].value),
        directory=os.path.abspath(settings[DIRECTORY].value or directory),
        min_nodes=least,
        max_nodes=most if most is not None else least,
        submitted_at=now,
        submitted_by=present_user(),
        nodes_multiple_of=settings[NODES_MULTIPLE_OF].value,
    )


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
    entry = view.entry(job.key)
    assert entry is not None, "it was found there"
    known = Compare(RESULTS_PREFIX + job.job, 0), Compare(job.key, entry.mod_revision)
    text = replace(job, cancelled_by=present_user()).to_json()
    if job.cancelled_by or not store.transact(known, (Put(job.key, text),)).succeeded:
        already = f"job {job.job} has ended, or is cancelled already: elastic-agent jobs says how"
        raise CannotDo(ExitCode.NO_JOB, already)
    print(f"job {job.job} ({job.name}) is cancelled")
    return ExitCode.SUCCESS


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


def follow(store: Store, view: PoolView, job: Job, log: LogReader | None = None) -> int:
    """Says each new state of the job, and shows what it prints, until it has ended: its code. A store that is away for
    a while costs news, and nothing else. Raises CannotDo, StoreError and RecordInvalid."""
    away = retry_if_exception(
        lambda error: isinstance(error, StoreUnavailable) and not isinstance(error, StoreRefused)
    )
    patient = Retrying(retry=away, stop=stop_after_delay(OUTAGE_S), wait=wait_fixed(RETRY_S), reraise=True)
    told = ""
    while any(one.job == job.job for one in view.jobs):
        result = view.result_of(job.job)
        more = log is not None and log.read(view)
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
    log = LogReader(job.job)
    if settings[FOLLOW].value:
        return follow(store, view, job, log)
    while log.read(view):
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
