"""Reads a worker's own report of its error: torch's *error file*, which `@record` writes for an uncaught exception, or
the last Python traceback in its output.

The user's program has written both. Reading them never raises, whatever they contain, and long texts are cut.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....rendezvous.text import clean as clean_line

LAST_WORDS = 3
"""The last lines in which a program without a traceback says why it ended."""

_ERROR_FILE_MAX = 1024 * 1024
_EXCEPTION_MAX = 2048
_TRACEBACK_MAX = 16 * 1024

# torch puts "[rank3]: " before each line of an uncaught exception once a process group exists.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# A traceback's frame; faulthandler's `File "x", line 1 in f` has no comma and is no Python exception.
_FRAME = re.compile(r'^\s+File ".*", line \d+(, in .*)?$')
_CRASH = re.compile(r"Fatal Python error: |terminate called |Segmentation fault|Aborted")
_DETAIL = re.compile(r"nccl\w+:|Last error:|Cuda failure|.*\bfailed\b")
_MOST_DETAIL = 4
_HEADER = "Traceback (most recent call last):"
_SECONDS = re.compile("[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """From an error file or a traceback."""

    exception: str | None = None
    traceback: str | None = None
    raised_at: int | None = None
    """Seconds since the epoch, as the worker wrote it."""


def read_error_file(path: Path) -> ErrorReport | None:
    """The error file that torch's `@record` wrote; None without one that can be used, whatever it contains."""
    try:
        report = json.loads(_read_regular_file(path))
        message = report["message"]
        details = report if isinstance(message, str) else message.get("extraInfo")
        text = message if isinstance(message, str) else message["message"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    if not isinstance(text, str) or not text:
        return None
    details = details if isinstance(details, dict) else {}
    traceback = details.get("py_callstack")
    if isinstance(traceback, str):
        traceback = cut(clean_lines(traceback).strip("\n"), _TRACEBACK_MAX, keep_end=True)
    else:
        traceback = None
    exception = cut(clean_lines(text), _EXCEPTION_MAX)
    return ErrorReport(exception, traceback, raised_at=_instant(details.get("timestamp")))


def _instant(timestamp: object) -> int | None:
    """Seconds since the epoch: torch writes them as a string, older versions as a number."""
    text = str(timestamp)
    return int(text) if _SECONDS.fullmatch(text) else None


def find_traceback(lines: Sequence[str]) -> ErrorReport | None:
    """The last Python traceback in a log's last lines, even if its beginning is no longer among them."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    frame = next((at for at in reversed(range(len(lines))) if _FRAME.match(lines[at])), None)
    if frame is None:
        return None
    end = next((at for at in range(frame + 1, len(lines)) if lines[at] and not lines[at][0].isspace()), None)
    if end is None:
        return None
    start = next((at for at in reversed(range(frame)) if lines[at] == _HEADER), 0)
    return ErrorReport(
        exception=cut(lines[end], _EXCEPTION_MAX),
        traceback=cut("\n".join(lines[start : end + 1]), _TRACEBACK_MAX, keep_end=True),
    )


def find_last_words(lines: Sequence[str]) -> ErrorReport | None:
    """The traceback of a process that then aborted or crashed: only the report of that may follow it."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    end = next((at for at, line in enumerate(lines) if _CRASH.match(line)), len(lines))
    words = [line for line in lines[:end] if line.strip()]
    found = find_traceback(words)
    return found if found is not None and found.exception in words[-LAST_WORDS:] else None


def detail_after(exception: str, lines: Sequence[str]) -> str:
    """NCCL's own lines of detail, which torch prints below the exception; empty without any."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    at = next((at for at in reversed(range(len(lines))) if lines[at] == exception), len(lines))
    return "\n".join(line for line in lines[at + 1 : at + 1 + _MOST_DETAIL] if _DETAIL.match(line))


def _read_regular_file(path: Path) -> bytes:
    # A worker chose what lies there: no link to elsewhere, and no pipe that would make the agent wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content = os.read(fd, _ERROR_FILE_MAX + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
    return content if len(content) <= _ERROR_FILE_MAX else b""


# --- Texts that the user's program has written: cleaned, cut, and never refused


def clean(text: str) -> str:
    """One line without control characters, which can be encoded."""
    return clean_line(text.encode("utf-8", "backslashreplace").decode()).rstrip()


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def cut(text: str, most: int, *, keep_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return "..." + text[len(text) - most + 3 :] if keep_end else text[: most - 3] + "..."
