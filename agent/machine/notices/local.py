"""Notices of a file or a command: for whatever knows that this machine goes away and is no cloud of ours.

A file that is there is a notice, and so is a command that ends with exit code 0, by what it has printed. The contents
are the deadline:

    (nothing)                 30 s from now on
    45                        so many seconds: of a file since it was written, of a command since it said so first
    1767323045                that instant (Unix time: ten digits)
    2026-01-02T03:04:05Z      that instant (RFC 3339)

Anything else counts as nothing: that a machine goes away matters more than how its end is written. But a file with
such contents may be half written, and counts only when they have stayed the same for `SETTLED_S`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TypeAlias

from .notice import DEFAULT_S, Notice, SourceUnreachable, quoted, read_rfc3339

MAX_BYTES = 4096
"""That are read of either."""

FILE_INTERVAL_S = 0.25

SETTLED_S = 1.0
"""A shell's `tool > PATH` makes the file empty first, and the tool writes later."""

COMMAND_S = 5.0
"""A command that takes longer is killed, and has said nothing."""

KILLED_S = 1.0
"""After SIGKILL, for the kernel. A process of another user (sudo) does not get the signal."""

UNIX_TIME_FROM = 1e9
"""A smaller number is a length of time."""

CANNOT_RUN = (126, 127)
"""Exit codes of the shim, as of shells."""

Tied: TypeAlias = Callable[[Sequence[str]], list[str]]
"""Makes of a command one that dies with this process."""


@dataclass(frozen=True, slots=True)
class End:
    """Of this machine, as contents name it: an instant in Unix time, or a length of time."""

    words: str
    at: float | None = None
    within_s: float = DEFAULT_S


def read_end(text: str) -> End | None:
    """None: it is neither seconds nor an instant."""
    if re.fullmatch(r"[0-9]{1,10}(\.[0-9]{0,9})?", text):
        number = float(text)
        if number < UNIX_TIME_FROM:
            return End(f"within {text} s", within_s=number)
        return End(f"at {datetime.fromtimestamp(number, timezone.utc):%Y-%m-%dT%H:%M:%SZ}", number)
    try:
        return End(f"at {text}", read_rfc3339(text))
    except ValueError:
        return None


def read_contents(raw: bytes, said_by: str, since: float | None = None) -> Notice:
    """`since`: the Unix time from which seconds count; None: since the notice is first read."""
    text = raw.decode("latin-1").strip()
    end = read_end(text)
    if end is None:
        reason = f", as {quoted(text)} is neither seconds nor an instant" if text else ""
        end = End(f"within {DEFAULT_S:g} s{reason}")
    ends_at = since + end.within_s if end.at is None and since is not None else end.at
    return Notice(f"{said_by} says that this machine goes away {end.words}", ends_at, end.within_s)


@dataclass(slots=True)
class WatchedFile:
    """A source. `clock` is monotonic."""

    path: str
    clock: Callable[[], float]
    interval_s: float = FILE_INTERVAL_S
    _polled: bool = False
    _said: Notice | None = None
    _unclear: bytes | None = None
    """The contents, as long as they name no end."""
    _unclear_since: float = 0.0

    def poll(self) -> Notice | None:
        """What contents that have not settled take the place of stays said until then."""
        first, self._polled = not self._polled, True
        found = self._read()
        if found is None:
            self._said = self._unclear = None
            return None
        raw, written_at = found
        if read_end(raw.decode("latin-1").strip()) is not None:
            self._unclear = None
        elif not self._settled(raw, was_there=first):
            return self._said
        self._said = read_contents(raw, f"the file {self.path}", written_at)
        return self._said

    def _settled(self, raw: bytes, *, was_there: bool) -> bool:
        now = self.clock()
        if raw != self._unclear:
            self._unclear, self._unclear_since = raw, -math.inf if was_there else now
        return now - self._unclear_since >= SETTLED_S

    def _read(self) -> tuple[bytes, float] | None:
        """Its beginning, and when it was written. None: it is not there. Raises SourceUnreachable."""
        try:
            self._must_be_regular(os.stat(self.path))  # to open a device may do something
            with open(self.path, "rb", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                self._must_be_regular(status)
                return file.read(MAX_BYTES), status.st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceUnreachable(f"{self.path}: {error.strerror}", FILE_INTERVAL_S) from error

    def _must_be_regular(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise SourceUnreachable(f"{self.path} is no regular file", FILE_INTERVAL_S)


def _open_at_once(path: str, flags: int) -> int:
    """A pipe without a writer would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(slots=True)
class WatchedCommand:
    """A source: a program without arguments."""

    program: str
    environment: Mapping[str, str]
    tied: Tied
    interval_s: float = 5.0
    _left: subprocess.Popen[bytes] | None = field(default=None, compare=False)
    """It could not be killed. No other is started beside it."""

    def poll(self) -> Notice | None:
        if self._left is not None and self._left.poll() is None:
            raise SourceUnreachable(
                f"{self.program} (pid {self._left.pid}) has not ended, and cannot be killed"
            )
        self._left = None
        code, printed = self._run()
        if code is None:
            raise SourceUnreachable(
                f"{self.program} has not ended within {COMMAND_S:g} s, or prints too much"
            )
        if code in CANNOT_RUN:
            raise SourceUnreachable(f"{self.program} cannot be started, or a command in it: exit code {code}")
        return read_contents(printed, f"the command {self.program}") if code == 0 else None

    def _run(self) -> tuple[int | None, bytes]:
        """Its exit code, None if it has not ended in time; and what is in the pipe then, without waiting for the end
        of the pipe, which a child of it may hold open. Raises SourceUnreachable."""
        try:
            process = subprocess.Popen(
                self.tied([self.program]),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise SourceUnreachable(f"{self.program} cannot be started: {error.strerror}") from error
        assert process.stdout is not None
        with process.stdout as pipe:
            try:
                return process.wait(COMMAND_S), _waiting_in(pipe.fileno())
            except subprocess.TimeoutExpired:
                return None, b""
            finally:
                self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """And what it has left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            self._left = process


def _waiting_in(pipe: int) -> bytes:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, MAX_BYTES)
    except BlockingIOError:
        return b""
