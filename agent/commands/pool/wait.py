"""`elastic-agent wait JOB`: returns when a job of a pool has ended, with an exit code that says how."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from ....pool.records import JobResult, Outcome
from ....pool.view import SCOPES, PoolView
from ....rendezvous.errors import Compacted
from ....rendezvous.store.interface import Store
from ...common.exits import PoolCode
from ...configuration.reading.settings import Settings
from .jobs import states
from .pool_command import find_job, pool_command, read_view

_USAGE = """\
usage: elastic-agent wait JOB

Waits until a job of a pool has ended, and shows on stderr how it goes. The exit code is 0 if it has succeeded; that of
its agent, as in docs/configuration.md, if it has failed; or one of those below.
"""

LOOK_S = 5.0


def main(words: Sequence[str]) -> int:
    return pool_command("wait", words, _USAGE, _wait, subject="JOB")


def _wait(store: Store, view: PoolView, name: str, _: Settings) -> int:
    job, shown = find_job(view, name).job, ""
    while True:
        state = next((one for one in states(view, time.time()) if one.job == job), None)
        if state is not None and (line := f"job {job}: {state.state}: {state.detail}") != shown:
            shown = line
            print(line, file=sys.stderr, flush=True)
        if (result := next((one for one in view.results if one.job == job), None)) is not None:
            return code_of(result)
        snapshot = store.read(SCOPES)
        watch = store.watch(SCOPES, snapshot.revision)
        try:
            view.read(snapshot)
            if not any(one.job == job for one in view.results):
                watch.next(LOOK_S)
        except Compacted:
            pass
        finally:
            watch.close()
        view = read_view(store)


def code_of(result: JobResult) -> int:
    if result.outcome is Outcome.SUCCEEDED:
        return PoolCode.DONE
    if result.outcome is Outcome.FAILED:
        return result.code or PoolCode.FAILED
    return PoolCode.CANCELLED if result.outcome is Outcome.CANCELLED else PoolCode.UNABLE
