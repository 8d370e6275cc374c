"""`elastic-agent wait JOB`: returns when a job of a pool has ended, with an exit code that says how."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ....pool.view import PoolView
from ....rendezvous.store.interface import Store
from ...common.exits import PoolCode
from ...configuration.settings import Settings
from ..store_command import CannotDo
from .live_view import LiveView, code_of
from .pool_command import find_job, pool_command
from .progress import Progress

_USAGE = """\
usage: elastic-agent wait JOB

Waits until a job of a pool has ended, and shows on stderr how it goes. The exit code is 0 if it has succeeded; that of
its agent, as in docs/configuration.md, if it has failed; or one of those below.
"""

LOOK_S = 2.0


def main(words: Sequence[str]) -> int:
    return pool_command("wait", words, _USAGE, _wait, subject="JOB")


def _wait(store: Store, view: PoolView, name: str, _: Settings) -> int:
    job, live = find_job(view, name), LiveView(store, view)
    progress = Progress(store, job, sys.stderr)
    while True:
        if (state := live.state(job.job)) is None:
            raise CannotDo(PoolCode.NO_JOB, f"job {job.job} is not in the pool any more")
        progress.show(state)
        if (result := live.view.result_of(job.job)) is not None:
            progress.end()
            return code_of(result)
        live.wait(LOOK_S)
