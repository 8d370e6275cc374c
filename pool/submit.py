"""`elastic-agent submit [OPTIONS] -- train.py`: puts a job into a pool's queue, and prints its id."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

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
    Problem,
)
from ..agent.configuration.derive import job_problems
from ..agent.configuration.load import Settings
from ..agent.configuration.parse import TEXT, Option, Parser
from ..agent.configuration.rendezvous import (
    JOB_ID,
    JOIN_TIMEOUT,
    LAST_CALL,
    LEASE_TTL,
    NODE_RANK,
    SLURM,
    STANDALONE,
)
from ..rendezvous.errors import RecordInvalid, StoreUnavailable
from ..rendezvous.store.interface import Compare, Put, Store
from .commands import pool_command, present_user, read_view, say, state_of
from .job_agent import OF_THE_POOL
from .records import Job, PoolView

_USAGE = """\
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
    return pool_command("submit", words, _USAGE, _submit, NAME, ENV, DIRECTORY, check=_check)


def _read_env(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in _NEXT_VARIABLE.split(text) if part]
    if not all(_VARIABLE.fullmatch(name) and equals for name, equals, _ in pairs):
        raise ValueError
    return tuple((name, value) for name, _, value in pairs)


def _check(settings: Settings) -> list[Problem]:
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
    script = settings[SCRIPT].value if SCRIPT in settings else None
    if (
        script is not None
        and os.path.isdir(job.directory)
        and not os.path.exists(os.path.join(job.directory, script))
    ):
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
    flag: Mapping[str, tuple[str, ...]] = {
        SCRIPT.name: ("--",),
        MODULE.name: ("-m",),
        NO_PYTHON.name: ("--no-python",),
    }
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
        command=(*flag[target.name], text, *args),
        environment=dict(settings[ENV].value),
        directory=os.path.abspath(settings[DIRECTORY].value or directory),
        min_nodes=least,
        max_nodes=most if most is not None else least,
        submitted_at=now,
        submitted_by=present_user(),
        nodes_multiple_of=settings[NODES_MULTIPLE_OF].value,
    )
