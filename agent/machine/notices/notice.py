"""What a source of notices can say, and how it writes an instant. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeAlias

from ...common.http_client import Reply

DEFAULT_S = 30.0
"""From a notice that names no instant to the end of the machine, where its source promises nothing else."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes away."""

    text: str
    """Who says so, and what happens."""
    ends_at: float | None = None
    """Unix time; None: the source names no instant."""
    within_s: float | None = DEFAULT_S
    """Without an instant: so long after the notice was first read; None: there is no deadline, and so no hurry."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Something may happen to this machine, or does not end it: worth a line in the log."""

    text: str


RETRY_S = 5.0
"""Until the next poll at a network or a command that gives no answer."""


class SourceUnreachable(Exception):
    """A source gives no answer; the text says why. Asking again may help."""

    def __init__(self, why: str, again_s: float = RETRY_S) -> None:
        """`again_s`: until the next poll."""
        super().__init__(why)
        self.again_s = again_s


class BadResponse(Exception):
    """A source has answered with what none of its answers looks like; the text quotes it."""


@dataclass(frozen=True, slots=True)
class Question:
    """One HTTP request to a metadata server."""

    path: str
    headers: Mapping[str, str]
    method: str = "GET"


Ask: TypeAlias = Callable[[Question], Reply]
"""Sends one question to the metadata server. Raises SourceUnreachable."""


class Source(Protocol):
    @property
    def interval_s(self) -> float:
        """Seconds between two polls."""

    def poll(self) -> Notice | Hint | None:
        """What it says now. Raises SourceUnreachable and BadResponse."""


_RFC3339 = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[Tt ](?P<time>\d\d:\d\d:\d\d)(\.\d{1,9})?(?P<zone>[Zz]|[+-]\d\d:\d\d)",
    re.ASCII,
)


def read_rfc3339(text: str) -> float:
    """Unix time, to the second before. Raises ValueError.

    >>> read_rfc3339("2026-01-02T03:04:05Z") - read_rfc3339("2026-01-02T03:04:05.9+01:00")
    3600.0
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError("no instant of RFC 3339")
    zone = "+00:00" if match["zone"] in "Zz" else match["zone"]
    return datetime.fromisoformat(f"{match['date']}T{match['time']}{zone}").timestamp()


def read_http_date(text: str) -> float:
    """Unix time of "Mon, 19 Sep 2016 18:29:47 GMT". Raises ValueError."""
    try:
        found = parsedate_to_datetime(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)).timestamp()
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise ValueError("no date of HTTP") from error


def quoted(raw: bytes | str) -> str:
    """A short, printable form for messages."""
    return repr(raw if len(raw) <= 80 else raw[:80])
