"""What the commands about a job have in common: their help, the options of the store, how they end."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ...rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused, StoreUnavailable
from ...rendezvous.records import WORLD_KEY, World
from ...rendezvous.store.interface import Entry, Store
from ...threads import Thread
from ..common.exits import ExitCode, exit_codes
from ..configuration.config import CONFIG_FILE, HELP, ConfigError
from ..configuration.load import read_argv
from ..configuration.parse import Option
from ..configuration.rendezvous import RendezvousConfig
from ..configuration.settings import Settings
from ..rendezvous_io.store_opening import open_to_look

ANSWER_S = 10.0
"""How long the store may take at the beginning."""
STDOUT = 1
LATE_S = 1.0
"""How long after its timeout a command is given to say by itself how far it has come."""


class CannotDo(Exception):
    """Not done, or not all of it; the text has the reason and what to try."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def store_command(
    name: str,
    words: Sequence[str],
    usage: str,
    meeting_place: Callable[[str | None, Settings], RendezvousConfig],
    work: Callable[[Store, RendezvousConfig, str, Settings, float], None],
    *options: Option[Any],
    timeout: Option[float] | None = None,
) -> int:
    """Returns an `ExitCode`. The first word is the node or job, and both callables get it.

    `meeting_place` raises ConfigError with all problems, that of a wrong first word too; `work` raises CannotDo,
    StoreError and RecordInvalid. `options` are the command's own. `timeout` is another one, for all that the command
    does: `work` gets the seconds that are left of it, and is not waited for if the store keeps it for longer.
    """
    options = options if timeout is None else (*options, timeout)
    subject = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if subject is not None else words, options)
    if HELP in command_line:
        print(command_help(usage, options))
        return 0

    def run() -> int:
        place = meeting_place(subject, command_line)
        assert subject is not None, "a problem of the configuration"
        limit_s = math.inf if timeout is None else command_line[timeout].value
        ends_at = time.monotonic() + limit_s

        def left() -> float:
            return max(0.0, ends_at - time.monotonic())

        def ask() -> None:
            place.kind.load()
            with contextlib.closing(open_to_look(place, min(ANSWER_S, left()))) as store:
                work(store, place, subject, command_line, left())

        _within(limit_s, ask, place)
        return 0

    return told(name, run)


def told(name: str, work: Callable[[], int]) -> int:
    """What the work returns, or the code of why it has failed, which is said in one line."""
    code: ExitCode
    reason: Exception
    try:
        with one_line_errors(ExitCode.STOPPED_BY_SIGINT):
            return work()
    except CannotDo as error:
        code, reason = error.code, error
    except (ConfigError, StoreRefused) as error:
        code, reason = ExitCode.BAD_CONFIG, error
    except (StoreMismatch, RecordInvalid) as error:
        code, reason = ExitCode.MISMATCH, error
    except StoreError as error:
        code, reason = ExitCode.NO_ANSWER, error
    print(f"elastic-agent {name}: {reason}", file=sys.stderr)
    return code


def _within(limit_s: float, work: Callable[[], None], place: RendezvousConfig) -> None:
    """Raises what `work` raises, and StoreUnavailable if it has not ended in time: a request may last for longer."""
    if limit_s == math.inf:
        work()
        return
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    no_thread = StoreUnavailable("no thread could be started: allow more processes")
    Thread(run, "store-command", lambda: done.set_exception(no_thread)).start()
    try:
        done.result(limit_s + LATE_S)
    except FutureTimeout as late:
        where = ", ".join(map(str, place.endpoints)) or str(place.folder)
        raise StoreUnavailable(
            f"the store at {where} gave no answer within {limit_s:g} s; what was asked may have been done: look with "
            "elastic-agent status. Check that the store runs, that --rdzv-endpoint names its address, and that no "
            "firewall closes the port"
        ) from late


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


def command_help(usage: str, options: Iterable[Option[Any]]) -> str:
    """`options` are the command's own."""
    store = "Also the options of the agent's rendezvous and of etcd, and their variables: elastic-agent --help-all."
    own = [option.help_text() for option in (*options, HELP, CONFIG_FILE)]
    return "\n".join([usage, *own, "", store, "", *exit_codes()])


@contextlib.contextmanager
def one_line_errors(interrupted: int) -> Iterator[None]:
    """No log line of torch, and Ctrl-C ends the process at once and from anywhere: a KeyboardInterrupt may come where
    Python ignores it, or where it breaks a lock."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(interrupted))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
