"""The memory of killed workers' GPUs: no worker is started again before it is really free, or the wait is over.

The driver may give it back seconds after the process is gone, and workers that start meanwhile run out of memory. So a
*reading* (what no living process accounts for, by device) is taken before the first generation, the *baseline*, and
then after the end of each until it is back to about that.

Another process does the readings (see `memory_reader`), and is kept warm, so that memory that is free already costs
a recovery only the milliseconds of one question, asked while the next world is being agreed. Nothing is waited for
without a GPU, without nvidia-ml-py, or once the reader has ended or not answered: then it is not asked again.

Invariant: each wait is bounded, by --gpu-memory-wait or, while the reader is silent, by `ANSWER_S` if that is less.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ...common.events import Event
from ...common.io_thread import IoThread
from .asked_process import AskedProcess

log = logging.getLogger(__name__)

READER = Path(__file__).with_name("memory_reader.py")

SLACK_MIB = 512.0
"""So much more than the baseline is still free: about what a CUDA context takes."""

LOOK_AGAIN_S = 0.1

ANSWER_S = 15.0
"""A driver that is well needs milliseconds, and seconds for the first answer of a machine with many GPUs."""


def watched(gpus: Sequence[str], wait_s: float) -> tuple[tuple[str, ...], str]:
    """Those of `gpus` to wait for, and the sentence for --check-config; empty without any."""
    names = tuple(gpus)
    if not names:
        return (), ""
    if not wait_s:
        return (), "GPU memory: a restart does not wait for it"
    if find_spec("pynvml") is None:
        return (), "GPU memory: a restart does not wait for it, because nvidia-ml-py is not installed"
    return names, f"GPU memory: a restart waits up to {wait_s:g} s until {', '.join(names)} have it back"


class GpuMemory:
    """Waits for the GPUs' memory. For the main thread: the reader process dies with the thread that starts it."""

    def __init__(
        self,
        devices: Sequence[str],
        wait_s: float,
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """Without `devices` there is never a wait."""
        self._devices = devices
        self._wait_s = wait_s
        self._environment = environment
        self._io = io
        self._post = post
        self._clock = clock
        self.pids: tuple[int, ...] = ()
        """Of the reader, also when it no longer counts: it may hang in the driver, and then no signal ends it."""
        self._reader: AskedProcess | None = None
        self._baseline: Sequence[float] = ()
        self._reading: Sequence[float] = ()
        self._since = 0.0
        self._until: float | None = None
        """The end of the present wait."""
        self._most_mib = 0.0
        """That was seen not to be free in the present wait."""
        self._asked_at: float | None = None
        self._look_at: float | None = None

    def start(self) -> None:
        """Ask for the baseline; until it is known, no worker may start either."""
        if not self._devices:
            return
        command = [sys.executable, str(READER), *self._devices]
        self._reader = AskedProcess(
            command,
            self._environment,
            self._io,
            lambda pid, message: self._post(partial(self.handle, pid, message)),
        )
        self.pids = (self._reader.pid,)
        self.workers_gone(self._clock())

    @property
    def waiting(self) -> bool:
        """No worker may be started now."""
        return self._until is not None

    def workers_gone(self, now: float) -> None:
        """No process of ours is left that could use a GPU."""
        if self._reader is not None:
            self._since, self._until, self._reading, self._most_mib = now, now + self._wait_s, (), 0.0
            self._ask(now)

    def turn(self, now: float) -> float | None:
        """Drive the wait on; the instant at which there is more to do."""
        if self._until is None:
            return None
        silent_at = self._asked_at + ANSWER_S if self._asked_at is not None else None
        if silent_at is not None and now >= silent_at:
            self._dismiss(f"NVML has not answered for {ANSWER_S:g} s")
            return None
        if now >= self._until:
            self._give_up()
            return None
        if self._look_at is not None and now >= self._look_at:
            self._ask(now)
        return min(at for at in (self._until, silent_at, self._look_at) if at is not None)

    def handle(self, pid: int, message: bytes) -> None:
        """An answer of the reader, or its end: that is empty."""
        if self._reader is None or pid != self._reader.pid:
            return
        now = self._clock()
        try:
            reading = json.loads(message) if message else "the process that reads it has ended"
        except ValueError:
            reading = f"the process that reads it says {message[:200]!r}"
        if not isinstance(reading, list):
            self._dismiss(str(reading))
            return
        self._asked_at = None
        if self._until is None:
            return  # the wait was given up
        self._reading, self._baseline = reading, self._baseline or reading
        self._most_mib = max(self._most_mib, self._held_mib)
        if self._held_mib > SLACK_MIB:
            self._look_at = now + LOOK_AGAIN_S
            return
        if self._most_mib > SLACK_MIB:
            waited_s = now - self._since
            log.info("GPU memory: %.0f MiB were given back within %.1f s", self._most_mib, waited_s)
        self._baseline = [min(pair) for pair in zip(self._baseline, reading, strict=True)]
        self._until = None

    def close(self) -> None:
        """The agent is ending."""
        if self._reader is not None:
            self._reader.kill()
            self._reader = None

    def _give_up(self) -> None:
        held = (
            f"{self._held_mib:.0f} MiB more in use than before" if self._reading else "no answer of NVML yet"
        )
        log.warning(
            "GPU memory: %s, %.1f s after the workers ended; not waiting any longer", held, self._wait_s
        )
        self._baseline = self._reading or self._baseline  # it may be another process', and stay
        self._until = None

    @property
    def _held_mib(self) -> float:
        return max(now - before for now, before in zip(self._reading, self._baseline, strict=True))

    def _ask(self, now: float) -> None:
        assert self._reader is not None
        if self._asked_at is not None:
            return
        self._asked_at, self._look_at = now, None
        self._reader.ask()

    def _dismiss(self, problem: str) -> None:
        """It may hang in the driver, where no signal reaches it: it is left behind."""
        log.warning("GPU memory is not waited for any more: %s", problem)
        self._until = None
        self.close()
