"""What the commands about a pool have in common: how they find it, read it, write to it, and end."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...agent.commands.store_command import ANSWER_S, CannotDo, command_help, one_line_errors
from ...agent.common.exits import ExitCode, PoolCode
from ...agent.configuration.config import HELP, ConfigError, Problem
from ...agent.configuration.derive import resolve_pool
from ...agent.configuration.load import read_argv
from ...agent.configuration.options import TARGETS
from ...agent.configuration.parse import Option
from ...agent.configuration.rendezvous import RendezvousConfig
from ...agent.configuration.settings import Settings
from ...agent.rendezvous_io.store_opening import open_to_look
from ...rendezvous.errors import (
    Compacted,
    RecordInvalid,
    StoreError,
    StoreMismatch,
    StoreRefused,
    StoreUnavailable,
)
from ...rendezvous.store.interface import Store, Watch
from ..records import Job, JobResult, Outcome
from ..schedule import why_waiting
from ..view import SCOPES, JobState, PoolView, states


def pool_command(
    name: str,
    words: Sequence[str],
    usage: str,
    work: Callable[[Store, PoolView, str, Settings], int],
    *options: Option[Any],
    subject: str = "",
    check: Callable[[Settings], list[Problem]] | None = None,
) -> int:
    """Returns a `PoolCode`, or what `work` returns. With a `subject` the first word is one, and `work` gets it.

    `check`, of a command with something to run, finds more problems of the options before the store is asked; `work`
    raises CannotDo, StoreError and RecordInvalid.
    """
    named = bool(subject and words) and not words[0].startswith("-")
    first = words[0] if named else ""
    command_line = read_argv(words[1:] if named else words, options)
    if HELP in command_line:
        print(command_help(usage, PoolCode, options))
        return 0
    reason: Exception
    try:
        with one_line_errors(PoolCode.INTERRUPTED):
            place = _place(command_line, (check or _nothing_to_run)(command_line))
            if subject and not first:
                raise CannotDo(
                    PoolCode.BAD_CONFIG, f"expected {subject}; write elastic-agent {name} {subject}"
                )
            with contextlib.closing(open_to_look(place, ANSWER_S)) as store:
                return work(store, read_view(store), first, command_line)
    except CannotDo as error:
        code, reason = error.code, error
    except (ConfigError, StoreRefused) as error:
        code, reason = PoolCode.BAD_CONFIG, error
    except (StoreMismatch, RecordInvalid) as error:
        code, reason = PoolCode.MISMATCH, error
    except StoreError as error:
        code, reason = PoolCode.NO_ANSWER, error
    except BrokenPipeError:
        return PoolCode.OUTPUT_CLOSED
    print(f"elastic-agent {name}: {reason}", file=sys.stderr)
    return code


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
        raise CannotDo(PoolCode.NO_JOB, f"the pool has no job {name!r}: elastic-agent jobs lists them")
    ids = ", ".join(job.job for job in found)
    raise CannotDo(PoolCode.NO_JOB, f"{name!r} may be any of {ids}: write one of these")


def present_user() -> str:
    """USER@HOST as this process sees itself: for people, and not authenticated."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}@{socket.gethostname()}"


OUTAGE_S = 60.0
"""The store may be away for so long before a command that follows a job gives up."""
RETRY_S = 0.5

_CODES = {
    Outcome.SUCCEEDED: PoolCode.DONE,
    Outcome.CANCELLED: PoolCode.CANCELLED,
    Outcome.TIMED_OUT: PoolCode.UNABLE,
    Outcome.UNABLE: PoolCode.UNABLE,
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
        self._away_since: float | None = None

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
        except Compacted:
            self.close()
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            self._tolerate(error)
            time.sleep(min(RETRY_S, timeout_s))
        else:
            self._away_since = None

    def _tolerate(self, error: StoreError) -> None:
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= OUTAGE_S:
            raise error

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
        return result.code if result.code in _OF_AGENTS else PoolCode.FAILED
    return _CODES[result.outcome]
