"""Tells the node's agent how far this worker is. The agent's socket is named by `ELASTIC_AGENT_REPORTS`.

Nothing here may ever disturb training: without the variable (torchrun, plain python) every function does nothing;
with it, a datagram goes out only if that costs no waiting, and is lost without a word otherwise. Only the process
that the agent started reports: data-loader processes inherit the variable and stay silent.

The local rank comes from `ELASTIC_AGENT_LOCAL_RANK`: where each worker sees one device, LOCAL_RANK is 0 for all.
"""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import operator
import os
import socket
import time
from collections.abc import Callable, Mapping

from .reports import LoadReport, LoadResult, Report, ReportError, SaveReport, SaveResult, StepReport, encode

logger = logging.getLogger(__name__)

STEP_INTERVAL_S = 0.1


def step(step: int) -> None:
    """Tell the agent that optimizer step number `step` has just finished.

    Call it once per optimizer step, on every rank; it costs a microsecond and neither raises nor waits. The agent
    hears of at most one step per 0.1 s, always of the first, and of the last when the process ends by itself.

        for step in range(start, total_steps):
            train_one(batch)
            elastic_agent.worker.step(step + 1)
    """
    reporter = _reporter or _start()
    reporter.step(step)


def checkpoint_save(step: int, result: SaveResult, duration_s: float, size: int) -> None:
    """Tell the agent how a save ended (rank 0 only)."""
    reporter = _reporter or _start()
    reporter.send(lambda g, r: SaveReport(g, r, step, result, duration_s, size))


def checkpoint_load(step: int, result: LoadResult, duration_s: float) -> None:
    """Tell the agent how a load, or one file of it, ended."""
    reporter = _reporter or _start()
    reporter.send(lambda g, r: LoadReport(g, r, step, result, duration_s))


class Reporter:
    """Sends this process's reports; `environ` says where to and as whom, `clock` is monotonic seconds."""

    def __init__(self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = -math.inf
        self._held_back: int | None = None
        self._pid = os.getpid()
        self._address = environ.get("ELASTIC_AGENT_REPORTS", "")
        self._socket: socket.socket | None = None
        if not self._address:
            return
        try:
            self._generation = int(environ["ELASTIC_AGENT_GENERATION"])
            self._local_rank = int(environ["ELASTIC_AGENT_LOCAL_RANK"])
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        except (KeyError, ValueError, OSError) as error:
            logger.warning("no reports to the agent: address=%s reason=%r", self._address, error)

    def step(self, step: int) -> None:
        if self._socket is None:
            return
        now_s = self._clock()
        if now_s < self._next_s:
            self._held_back = step
            return
        self._next_s = now_s + STEP_INTERVAL_S
        self._send_step(step)

    def flush(self) -> None:
        """Send the step that was held back, if it was the last one."""
        if self._held_back is not None:
            self._send_step(self._held_back)

    def _send_step(self, step: int) -> None:
        self._held_back = None
        self.send(lambda g, r: StepReport(g, r, operator.index(step)))

    def send(self, report: Callable[[int, int], Report]) -> None:
        """Send the report made for this generation and local rank, or drop it."""
        if self._socket is None or os.getpid() != self._pid:
            return
        try:
            self._socket.sendto(encode(report(self._generation, self._local_rank)), self._address)
        except OSError:
            # The agent is restarting, or its queue is full: the next report carries newer news anyway.
            pass
        except (ReportError, TypeError) as error:
            # The caller's mistake, but a wrong progress report must not end a training run.
            self._socket.close()
            self._socket = None
            logger.warning("no more reports to the agent: reason=%s", error)


_reporter: Reporter | None = None


def _start() -> Reporter:
    # Not at import: spares are forked from a process that has imported this module already.
    global _reporter
    is_helper = multiprocessing.parent_process() is not None
    _reporter = Reporter({} if is_helper else os.environ)
    atexit.register(_reporter.flush)
    return _reporter
