"""The agent's own error file: schedulers that start torchrun read there why a job failed (TORCHELASTIC_ERROR_FILE).

It has the form that torch's `@record` writes on torchrun: the first failed worker's error, or else the agent's own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...threads import Thread
from ..workers.failures.worker_failure import WorkerFailure

log = logging.getLogger(__name__)

VARIABLE = "TORCHELASTIC_ERROR_FILE"

WITHIN_S = 5.0
"""A disk that does not answer keeps the agent from its end no longer than this."""


def write_error_file(
    environ: Mapping[str, str], code: int, reason: str, failure: WorkerFailure | None, at_s: float
) -> None:
    """To the file that the variable names, if it does. `at_s` is the time of day."""
    path = environ.get(VARIABLE)
    if not path:
        return
    write = partial(_write, path, json.dumps(error_report(code, reason, failure, at_s)))
    writing = Thread(write, "error-file", otherwise=write)
    writing.start()
    writing.join(WITHIN_S)
    if writing.is_alive():
        log.warning("the error file %s (%s) is not written within %g s", path, VARIABLE, WITHIN_S)


def _write(path: str, text: str) -> None:
    scratch = f"{path}.{os.getpid()}"
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)  # who waits for the file never reads half of it
    except OSError as error:
        log.warning("the error file %s (%s) is not written: %s", path, VARIABLE, error)
        with contextlib.suppress(OSError):
            os.unlink(scratch)


def error_report(code: int, reason: str, failure: WorkerFailure | None, at_s: float) -> dict[str, Any]:
    """`code` and `reason` are the agent's. The time is that of the failure, where the worker has written it."""
    if failure is None:
        extra = {"py_callstack": "", "timestamp": str(int(at_s))}
        return {"message": {"message": reason, "extraInfo": extra, "errorCode": code}}
    extra = {
        "py_callstack": failure.traceback or "\n".join(failure.log_tail),
        "timestamp": str(int(at_s) if failure.raised_at is None else failure.raised_at),
        "rank": str(failure.rank),
        "node": failure.node,
    }
    message = failure.exception or failure.summary
    return {"message": {"message": message, "extraInfo": extra, "errorCode": failure.returncode}}
