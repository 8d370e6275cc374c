"""Notices of a file or a command: for whatever knows that this machine goes away and is no cloud of ours.

A file that is there is a notice, and so is a command that ends with exit code 0, by what it has printed. The contents
are the deadline:

    (nothing)                 30 s from now on
    45                        so many seconds: of a file since it was written, of a command since it said so first
    2026-01-02T03:04:05Z      that instant (RFC 3339)

Anything else counts as nothing: that a machine goes away matters more than how its end is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from .notice import DEFAULT_S, Notice, SourceUnreachable, quoted, read_rfc3339

MAX_BYTES = 4096
"""That are read of either."""

COMMAND_S = 5.0
"""A command that takes longer is ended, and has said nothing."""


def read_contents(raw: bytes, said_by: str, since: float | None = None) -> Notice:
    """`since`: the Unix time from which seconds count; None: since the notice is first read."""
    text = raw.decode("latin-1").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", text):
        within_s, words = float(text), f"{float(text):g} s"
    else:
        try:
            return Notice(f"{said_by} says that this machine goes away at {text}", read_rfc3339(text))
        except ValueError:
            within_s, words = DEFAULT_S, f"{DEFAULT_S:g} s"
            if text:
                words += f", as {quoted(text)} is neither seconds nor an instant"
    ends_at = since + within_s if since is not None else None
    return Notice(f"{said_by} says that this machine goes away within {words}", ends_at, within_s)


@dataclass(frozen=True, slots=True)
class WatchedFile:
    """A source."""

    path: str
    interval_s: float = 0.25

    def poll(self) -> Notice | None:
        try:
            with open(self.path, "rb", opener=_open_at_once) as file:
                return read_contents(
                    file.read(MAX_BYTES), f"the file {self.path}", os.fstat(file.fileno()).st_mtime
                )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceUnreachable(f"{self.path}: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    """A pipe without a writer would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(frozen=True, slots=True)
class WatchedCommand:
    """A source: a program without arguments."""

    program: str
    environment: Mapping[str, str]
    interval_s: float = 5.0

    def poll(self) -> Notice | None:
        try:
            with subprocess.Popen(
                [self.program],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as process:
                try:
                    printed, _ = process.communicate(timeout=COMMAND_S)
                finally:
                    with contextlib.suppress(ProcessLookupError):  # what it has left behind, too
                        os.killpg(process.pid, signal.SIGKILL)
        except subprocess.TimeoutExpired:
            raise SourceUnreachable(f"{self.program} has not ended within {COMMAND_S:g} s") from None
        except OSError as error:
            raise SourceUnreachable(f"{self.program} cannot be started: {error.strerror}") from error
        if process.returncode != 0:
            return None
        return read_contents(printed[:MAX_BYTES], f"the command {self.program}")
