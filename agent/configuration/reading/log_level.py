"""The agent's log level: LOGLEVEL in its environment, a name of a level of Python's logging, or a number."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping

from ..config import Problem

VARIABLE = "LOGLEVEL"


def log_level(environ: Mapping[str, str]) -> int | None:
    """INFO by default; None when the variable holds no level.

    >>> log_level({"LOGLEVEL": "debug"}), log_level({"LOGLEVEL": "15"}), log_level({"LOGLEVEL": "trace"})
    (10, 15, None)
    """
    word = environ.get(VARIABLE, "").strip().upper() or "INFO"
    if re.fullmatch("[0-9]{1,9}", word):
        return int(word)
    level = logging.getLevelName(word)
    return level if isinstance(level, int) else None


def check_log_level(environ: Mapping[str, str]) -> Iterator[Problem]:
    if log_level(environ) is None:
        expected = "DEBUG, INFO, WARNING, ERROR or CRITICAL, in any case, or a whole number"
        yield Problem(VARIABLE, environ[VARIABLE], expected, "correct it, or unset it and it is INFO")
