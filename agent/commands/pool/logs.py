"""`elastic-agent logs JOB`: what a job of a pool prints, from the daemons of its nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ....pool.records import Job
from ....pool.view import PoolView
from ....rendezvous.store.interface import Store
from ...common.exits import PoolCode
from ...configuration.parse import YES_OR_NO, Option, whole_number
from ...configuration.settings import Settings
from ..store_command import CannotDo, pause
from .live_view import LiveView, code_of
from .log_reader import JobLog, RankLog
from .pool_command import find_job, pool_command

_USAGE = """\
usage: elastic-agent logs JOB [--rank N] [--follow]

Shows what the agents of a job of a pool print, its workers' lines among it, on all its nodes: with the node's name
before each line where there are several. With --rank it is what that rank of the newest generation prints, on stdout
and stderr as it does. With --follow it goes on until the job has ended; the exit code is then that of wait.
"""

FOLLOW_S = 0.5
"""Between two looks at the files of a job that goes on."""
_MOST_RANKS = 1 << 20

RANK: Option[int | None] = Option(
    "rank", whole_number(0, _MOST_RANKS), "of one worker alone, of its newest generation", metavar="N"
)
FOLLOW: Option[bool] = Option(
    "follow", YES_OR_NO, "go on until the job has ended", default="false", flag=True
)

Reader: TypeAlias = JobLog | RankLog


def main(words: Sequence[str]) -> int:
    return pool_command("logs", words, _USAGE, _logs, RANK, FOLLOW, subject="JOB")


def _logs(store: Store, view: PoolView, name: str, settings: Settings) -> int:
    job, rank, live = find_job(view, name), settings[RANK].value, LiveView(store, view)
    reader = JobLog(job.job, show, say) if rank is None else RankLog(job.job, rank, show, say)
    if settings[FOLLOW].value:
        code = follow(live, job, reader)
        return code if code is not None else PoolCode.INTERRUPTED
    reader.read(view, all_of_it=True)
    reader.finish()
    if reader.found:
        return PoolCode.DONE
    if waits := live.waits_for(job):
        say(f"job {job.job} ({job.name}) waits and has printed nothing: {waits}")
        return PoolCode.DONE
    if rank is not None:
        raise CannotDo(PoolCode.NO_JOB, f"no node has a file of rank {rank} of job {job.job} ({job.name})")
    raise CannotDo(
        PoolCode.NO_JOB, f"no node has anything of job {job.job} ({job.name}): {_places(live, job)}"
    )


def follow(
    live: LiveView, job: Job, reader: Reader, interrupted: Callable[[], bool] = lambda: False
) -> int | None:
    """Until the job has ended: its code, as `wait` has it. None as soon as it is `interrupted`."""
    waited_for, first = "", True
    while not interrupted():
        if (result := live.view.result_of(job.job)) is not None:
            reader.read(live.view, all_of_it=True)
            reader.finish()
            say(f"job {job.job} ({job.name}): {result.outcome.value}: {result.reason}")
            return code_of(result)
        if live.state(job.job) is None:
            raise CannotDo(PoolCode.NO_JOB, f"job {job.job} is not in the pool any more")
        if (waits := live.waits_for(job)) and waits != waited_for:
            say(f"job {job.job} ({job.name}) waits: {waits}")
        waited_for = waits
        more = reader.read(live.view, all_of_it=first)
        first = False
        pause(0.0)
        live.wait(0.0 if more else FOLLOW_S)
    return None


def show(stream: str, lines: bytes) -> None:
    output = sys.stderr if stream == "stderr" else sys.stdout
    output.flush()
    output.buffer.write(lines)
    output.buffer.flush()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _places(live: LiveView, job: Job) -> str:
    result = live.view.result_of(job.job)
    places = [f"{node}:{path}" for node, path in result.logs.items()] if result is not None else []
    return f"it was in {', '.join(places)}" if places else "it has printed nothing yet, or its nodes are gone"
