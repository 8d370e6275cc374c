"""The failure of one worker, as data: where, with which exception and cause, and where to read on.

Invariant: every text in a `WorkerFailure` is bounded, has nothing that a terminal obeys, and can be encoded; only an
exception and a traceback have several lines. Its JSON form stays within `MAX_JSON` bytes, because it travels through
the store to the other nodes.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from ....codec import Codec, Count, Invalid, Text, Within
from ....rendezvous.text import CauseName
from .texts import clean, clean_lines, cut, first_line

HANG_SIGNAL = signal.SIGABRT
"""Ends a worker that hangs: PYTHONFAULTHANDLER makes it print the stacks of its threads first."""

MAX_JSON = 4096
_SCHEMA = 4
SUMMARY_MAX = 500
_FINGERPRINT_MAX = 300

_TEXTS = {"node": 256, "summary": 400, "exception": 500, "traceback": 1400, "log_file": 500}
"""Bytes that each may take in the JSON form. With `_LOG_TAIL`, the numbers and the names they stay below MAX_JSON."""
_LOG_TAIL = 800

# What changes from run to run in a message: UUIDs, addresses and hashes, names of temporary files, numbers.
_VARYING = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]+\b|\btmp\w{6,}|\d+",
    re.IGNORECASE,
)

_LINE = {name: Text(most, clean=clean) for name, most in _TEXTS.items()}
_LINES = {name: Text(most, clean=clean_lines) for name, most in _TEXTS.items()}


class FailureInvalid(ValueError):
    """A text is not the JSON form of a `WorkerFailure`: another program or version wrote it. Do not show it."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One worker's end. `summary` is one line that stands alone; `exception` is `Type: message`."""

    rank: Annotated[int, Within(0, 2**31 - 1)]
    local_rank: Annotated[int, Within(0, 2**31 - 1)]
    node: Annotated[str, _LINE["node"]]
    generation: Count
    returncode: Annotated[int, Within(-128, 255)]
    cause: CauseName
    """The name of a row of the table in `causes`, or of a row that the user has added."""
    summary: Annotated[str, _LINE["summary"]]
    exception: Annotated[str, _LINES["exception"]] | None = None
    traceback: Annotated[str, _LINES["traceback"]] | None = None
    log_tail: tuple[Annotated[str, Text(_LOG_TAIL, clean=clean)], ...] = ()
    log_file: Annotated[str, _LINE["log_file"]] | None = None
    raised_at: Count | None = None
    """Seconds since the epoch, by the worker's clock, if its error file says so."""
    collateral: bool = False
    """It follows from the end of another worker."""

    def to_json(self) -> str:
        """A small form: the ends of the traceback and of the log, at most `MAX_JSON` bytes of ASCII."""
        texts = {name: text for name in _TEXTS if (text := getattr(self, name)) is not None}
        small: dict[str, Any] = {
            name: _fit(text, _TEXTS[name], keep_end=name == "traceback") for name, text in texts.items()
        }
        small["log_tail"] = _last_that_fit(self.log_tail, _LOG_TAIL)
        return _CODEC.encode(replace(self, **small)).decode().rstrip()

    @staticmethod
    def from_json(text: str) -> WorkerFailure:
        """Raises `FailureInvalid` for everything that `to_json` does not write."""
        try:
            return _CODEC.decode(text.encode(errors="surrogatepass"))
        except Invalid as error:
            raise FailureInvalid(str(error)) from error


_CODEC: Codec[WorkerFailure] = Codec((WorkerFailure,), version=_SCHEMA, most_bytes=MAX_JSON)


def fingerprint(failure: WorkerFailure) -> str:
    """The same text for the same failure in another generation, on another rank or node; for crash loops."""
    ended = f"signal {-failure.returncode}" if failure.returncode < 0 else f"exit code {failure.returncode}"
    if failure.exception is None:
        return ended
    return f"{ended}: {_VARYING.sub('#', first_line(failure.exception))}"[:_FINGERPRINT_MAX]


def _fit(text: str, most_bytes: int, *, keep_end: bool = False) -> str:
    """`text` cut until its JSON form is within its budget."""
    size, fitting = len(text), text
    while len(json.dumps(fitting)) > most_bytes:
        size = size * 9 // 10
        fitting = cut(text, size + 3, keep_end=keep_end)
    return fitting


def _last_that_fit(lines: Sequence[str], most_bytes: int) -> tuple[str, ...]:
    """At least the end of the last one."""
    kept: tuple[str, ...] = ()
    for line in reversed(lines):
        if kept and len(json.dumps((line, *kept))) > most_bytes:
            break
        kept = (_fit(line, most_bytes - 2, keep_end=True), *kept)
    return kept
