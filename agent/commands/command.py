"""What all commands have in common: their help, the store that some of them ask, their errors, and how they end."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused
from ...rendezvous.records import WORLD_KEY, World
from ...rendezvous.store.interface import Entry, Store
from ..common.exits import CannotDo, ExitCode
from ..configuration.config import ARGS, CONFIG_FILE, HELP, SCRIPT, ConfigError
from ..configuration.load import Settings, read_argv
from ..configuration.parse import Option
from ..configuration.rendezvous import RendezvousConfig
from ..rendezvous_io.store_opening import open_to_look, quiet_torch

ANSWER_S = 10.0
"""How long the store may take at the beginning."""
STDOUT = 1
EXIT_CODES = "What the exit codes mean: elastic-agent --help."
STORE_OPTIONS = (
    "Also the options of the agent's rendezvous and of etcd, and their variables: elastic-agent --help."
)


def run_command(
    name: str,
    words: Sequence[str],
    usage: str,
    options: Iterable[Option[Any]],
    work: Callable[[str, Settings], int | None],
    *,
    takes: str = "",
    of_store: bool = False,
) -> int:
    """Returns what `work` does (None: done), or the code of why it has failed, which is said in one line.

    The command `takes` a word that is for `work` alone, before or behind the options, like NODE; or [RUN], before them,
    if it may be left out; else it is empty. `options` are the command's own; one `of_store` has those of the rendezvous
    besides. `work` raises ConfigError, CannotDo, StoreError and RecordInvalid.
    """
    options = tuple(options)
    named = bool(takes and words) and not words[0].startswith("-")
    first, words = (words[0], words[1:]) if named else ("", words)
    command_line = read_argv(words, options)
    if takes.isalpha() and not first and SCRIPT in command_line and not command_line[ARGS].value:
        first = str(command_line.given.pop(SCRIPT.name).value)  # it stands behind the options
    if HELP in command_line:
        shown = [option.help_text() for option in (*options, *([CONFIG_FILE] if of_store else []))]
        print("\n".join([usage, *shown, "", *([STORE_OPTIONS] if of_store else []), EXIT_CODES]))
        return ExitCode.SUCCESS
    code: ExitCode
    reason: Exception
    try:
        if takes.isalpha() and not first:
            advice = f"expected {takes}; write elastic-agent {name} {takes}"
            raise CannotDo(ExitCode.BAD_CONFIG, advice)
        with one_line_errors():
            return work(first, command_line) or ExitCode.SUCCESS
    except CannotDo as error:
        code, reason = error.code, error
    except (ConfigError, StoreRefused) as error:
        code, reason = getattr(error, "code", ExitCode.BAD_CONFIG), error
    except (StoreMismatch, RecordInvalid) as error:
        code, reason = ExitCode.MISMATCH, error
    except StoreError as error:
        code, reason = ExitCode.NO_ANSWER, error
    print(f"elastic-agent {name}: {reason}", file=sys.stderr)
    return code


@contextlib.contextmanager
def opened(place: RendezvousConfig) -> Iterator[Store]:
    """The store there, for a look. Raises CannotDo and StoreError."""
    quiet_torch()
    place.kind.load()
    with contextlib.closing(open_to_look(place, ANSWER_S)) as store:
        yield store


def world_of(job: str, entries: Iterable[Entry]) -> World | None:
    """The world among them. Raises RecordInvalid, and StoreMismatch when it is another job's."""
    text = next((entry.value for entry in entries if entry.key == WORLD_KEY), None)
    world = None if text is None else World.from_json(text)
    if world is not None and world.job != job:
        raise StoreMismatch(
            f"the store holds job {world.job!r}, not {job!r}: check --rdzv-endpoint and --rdzv-id"
        )
    return world


def pause(seconds: float) -> None:
    """Between two looks at what goes on. Raises BrokenPipeError as soon as nobody reads our standard output any more:
    there may be nothing to write for long, which would show it."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
    if any(event & gone for _, event in poll.poll(seconds * 1000)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table's lines."""
    rows = tuple(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def printable(text: str) -> str:
    """On one line, and as nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ctrl-C ends the process at once and from anywhere: a KeyboardInterrupt may come where Python ignores it, or where
    it breaks a lock."""
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(ExitCode.STOPPED_BY_SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
