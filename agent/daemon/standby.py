"""The daemon's end of its standby: keeps one while it may, and hands it out to become the agent of a job.

A job whose agent could not be like a process that starts with it gets none, and starts cold: Python, and what workers
are forked from, have read some of their environment when they started. What is found later to be different, as a
--preload of the job's own, costs the time to preload again and nothing else.

Invariant: a standby that was handed out is never offered again.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from ..workers.preloader.fidelity import env_rules
from .hand_over import pair
from .job_agent import StandbyProcess, start_child

log = logging.getLogger(__name__)

CALM_S = 20.0
"""The first steps of a job are left alone for so long before a standby is made for the next one."""

RETRY_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses before a standby that has ended by itself is replaced; the last one for ever."""

HEALTHY_S = 60.0
"""A standby that has waited for so long had nothing to do with the trouble of those before it."""

SEARCH_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


class Standby:
    """For the main thread: what it starts ends with the thread that starts it."""

    def __init__(
        self,
        preloads: Sequence[str],
        store: str,
        environment: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        """Without words of --preload there is none, ever. `store` is the kind of the pool's."""
        self._preloads, self._store = tuple(preloads), store
        self._environment = environment
        self._clock = clock
        self._directory = os.getcwd()
        self._waiting: StandbyProcess | None = None
        self._failures = 0
        self._start_at = clock()

    @property
    def pid(self) -> int | None:
        return self._waiting.process.pid if self._waiting is not None else None

    def turn(self, now: float) -> float | None:
        """Replace one that is gone; the instant at which there is more to do."""
        if not self._preloads:
            return None
        if self._waiting is not None and self._waiting.process.poll() is not None:
            self._lost(self._waiting, now)
        if self._waiting is not None:
            return None
        if now < self._start_at:
            return self._start_at
        self._start(now)
        return None if self._waiting is not None else self._start_at

    def take(self, environment: Mapping[str, str], directory: str) -> StandbyProcess | None:
        """For one job with this environment, in this directory; None where it must start cold."""
        now = self._clock()
        waiting = self._waiting
        if waiting is None:
            return None
        if waiting.process.poll() is not None:
            self._lost(waiting, now)
            return None
        if why := why_cold(self._environment, environment, self._directory, directory):
            log.info("the job's agent starts cold: %s", why)
            return None
        self._waiting, self._start_at, self._failures = None, now + CALM_S, 0
        return waiting

    def idle(self, now: float) -> None:
        """The node has nothing to do: no reason to wait any longer."""
        if not self._failures:
            self._start_at = now

    def close(self) -> None:
        """The daemon ends."""
        self._start_at = float("inf")
        if (waiting := self._waiting) is not None:
            self._waiting = None
            waiting.end()

    def _start(self, now: float) -> None:
        ours, theirs = pair()
        try:
            with theirs:
                process = start_child(
                    ["elastic_agent.standby", str(theirs.fileno()), ",".join(self._preloads), self._store],
                    signal.SIGKILL,
                    env=dict(self._environment),
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            self._failed(f"it cannot be started: {error}", now)
            return
        self._waiting = StandbyProcess(process, ours, now)

    def _lost(self, waiting: StandbyProcess, now: float) -> None:
        self._waiting = None
        waiting.channel.close()
        if now >= waiting.since + HEALTHY_S:
            self._failures = 0
        self._failed(f"it ended with {waiting.process.returncode}", now)

    def _failed(self, why: str, now: float) -> None:
        pause_s = RETRY_S[min(self._failures, len(RETRY_S) - 1)]
        self._failures += 1
        self._start_at = now + pause_s
        log.warning("the process that waits for the next job is gone: %s; another in %g s", why, pause_s)


def why_cold(environment: Mapping[str, str], of_job: Mapping[str, str], directory: str, of_its: str) -> str:
    """Why a process that was started in this environment and directory cannot be what the job's would be."""
    if different := env_rules.obstacle(environment, of_job):
        return different
    for name in SEARCH_PATHS if directory != of_its else ():
        if not all(entry.startswith("/") for entry in of_job.get(name, "/").split(":")):
            return f"{name} is {of_job[name]!r}, which depends on the directory"
    return ""
