"""What the commands about a pool have in common: how they find it, read it, write to it, and end."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ....pool.records import Job
from ....pool.view import SCOPES, PoolView
from ....rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused
from ....rendezvous.store.interface import Store
from ...common.exits import PoolCode
from ...configuration.config import HELP, ConfigError, Problem
from ...configuration.derive import resolve_pool
from ...configuration.load import read_argv
from ...configuration.options import TARGETS
from ...configuration.parse import Option
from ...configuration.rendezvous import RendezvousConfig
from ...configuration.settings import Settings
from ...rendezvous_io.store_opening import open_to_look
from ..store_command import ANSWER_S, CannotDo, command_help, one_line_errors


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
