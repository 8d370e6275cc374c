"""This node's GPUs while the agent lives: no worker starts before its GPU's memory is free, and what breaks is found.

NVML may hang, most of all on a sick GPU. So another process asks it (`health/checks/gpus.py`) and is kept, with NVML
open, so that an answer takes milliseconds. It dies with the agent; one that no signal ends is left behind. Without GPUs
there is no such process, and nothing is asked.

*Memory.* The driver may give it back seconds after a killed worker is gone, and workers that start meanwhile run out of
it. So a *reading* (what no living process accounts for, by device) is taken before the first generation, the
*baseline*, and then after the end of each until it is back to about that. Each wait is bounded, and there is none while
an answer is late.

*Health.* NVML is asked when the agent starts, and then when a worker has failed: what is worse than in the first answer
is a fault. Each wait for an answer has a bound (`overdue` ends it), and NVML is not asked again while an answer is
late. A fault stays one until the failure of a worker of that GPU has told of it: what an answer shows that is late, or
that is about another worker's GPU, still counts at a later failure.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ...health.checks.finding import ISOLATED, probe_command
from ...health.checks.gpus import (
    GPU_READING,
    HEALTH,
    MEMORY,
    GpuFault,
    NvmlFacts,
    faults_since,
    moved_on,
)
from ..common.events import Event, IoThread
from ..workers.processes.helper import start_helper

log = logging.getLogger(__name__)

READER = "elastic_agent.health.checks.gpus"

SLACK_MIB = 512.0
"""So much more than the baseline is still free: about what a CUDA context takes."""

LOOK_AGAIN_S = 0.1

FIRST_S = 5.0
"""For how long the first workers wait for the first reading. One that comes later is still the baseline."""

_CHUNK = 4096


class NvmlReader:
    """The process that asks NVML, for `GpuMemory` and `GpuHealth`. For the main thread: it dies with the thread that
    starts it. A question of one that hangs does not hold up the other's."""

    def __init__(
        self,
        gpus: Sequence[str],
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
    ) -> None:
        """`gpus` as NVML knows them; without any there is no process, and no answer."""
        self._gpus, self._environment, self._io, self._post = gpus, environment, io, post
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptor = -1
        self._begun = b""
        """Of the next answer. For the io thread."""
        self.on_memory: Callable[[Sequence[float] | str], object] = lambda answer: None
        self.on_health: Callable[[NvmlFacts], object] = lambda answer: None
        """Called in the main loop with each answer; with the problem, when nothing is to be asked any more."""

    def start(self) -> None:
        """Raises OSError."""
        if not self._gpus:
            return
        command = [*probe_command(sys.executable, READER, flags=ISOLATED), *self._gpus]
        self._process = process = start_helper(
            command, self._environment, subprocess.PIPE, subprocess.PIPE, subprocess.DEVNULL
        )
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._io.watch(self._descriptor, self._read)

    @property
    def pids(self) -> tuple[int, ...]:
        """Also when it no longer counts: it may hang in the driver, and then no signal ends it."""
        return (self._process.pid,) if self._process is not None else ()

    def ask(self, question: bytes) -> bool:
        """Whether an answer comes, or its end."""
        if self._process is None:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question)
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and its last event comes
        return True

    def close(self) -> None:
        """The agent is ending."""
        if self._process is not None:
            self._process.kill()

    def _read(self) -> None:
        data = os.read(self._descriptor, _CHUNK)
        *answers, self._begun = (self._begun + data).split(b"\n")
        for answer in answers:
            self._post(partial(self._answered, answer))
        if not data:
            self._io.forget(self._descriptor)
            self._post(partial(self._answered, b""))

    def _answered(self, answer: bytes) -> None:
        try:
            if answer.startswith(b"{"):
                self.on_health(GPU_READING.decode(answer))
                return
            if answer:
                self.on_memory(json.loads(answer))
                return
            problem = "the process that asks NVML has ended"
        except ValueError as error:
            problem = f"the process that asks NVML gives no usable answer: {error}"
        self.on_memory(problem)
        self.on_health(NvmlFacts(problem=problem))


class GpuMemory:
    """Waits for the GPUs' memory. For the main thread."""

    def __init__(self, reader: NvmlReader, wait_s: float, clock: Callable[[], float]) -> None:
        """`wait_s`: at most, after the end of each generation."""
        self._reader, self._wait_s, self._clock = reader, wait_s, clock
        self._asks = True
        self._asked = False
        """There is a question without an answer."""
        self._baseline: Sequence[float] = ()
        self._reading: Sequence[float] = ()
        """The newest one of the present wait."""
        self._since = 0.0
        self._until: float | None = None
        """The end of the present wait."""
        self._most_mib = 0.0
        """That was seen not to be free in the present wait."""
        self._look_at: float | None = None

    def start(self) -> None:
        """Ask for the baseline; for `FIRST_S` no worker may start before it is known."""
        self._reader.on_memory = self.handle
        self._wait(self._clock(), min(FIRST_S, self._wait_s))

    @property
    def waiting(self) -> bool:
        """No worker may be started now."""
        return self._until is not None

    def workers_gone(self, now: float) -> None:
        """No process of ours is left that could use a GPU."""
        self._wait(now, self._wait_s)

    def turn(self, now: float) -> float | None:
        """Drive the wait on; the instant at which there is more to do."""
        if self._until is None:
            return None
        if now >= self._until:
            self._give_up(self._until)
            return None
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            self._asked = self._reader.ask(MEMORY)
        return min(self._until, self._look_at or self._until)

    def handle(self, reading: Sequence[float] | str) -> None:
        """An answer of the reader; a text is a problem, and an empty one needs no words."""
        if not self._asks:
            return
        if isinstance(reading, str):
            if reading:
                log.warning("GPU memory is not waited for any more: %s", reading)
            self._until, self._asks = None, False
            return
        self._asked = False
        self._baseline = self._baseline or reading
        if self._until is None:
            return  # the wait was given up
        self._reading, now = reading, self._clock()
        self._most_mib = max(self._most_mib, self._held_mib)
        if self._held_mib > SLACK_MIB:
            self._look_at = now + LOOK_AGAIN_S
            return
        if self._most_mib > SLACK_MIB:
            waited_s = now - self._since
            log.info("GPU memory: %.0f MiB were given back within %.1f s", self._most_mib, waited_s)
        self._baseline = [min(pair) for pair in zip(self._baseline, reading, strict=True)]
        self._until = None

    def _wait(self, now: float, at_most_s: float) -> None:
        if self._asks and not self._asked:
            self._asked = self._reader.ask(MEMORY)
            if self._asked:
                self._since, self._until, self._reading, self._most_mib = now, now + at_most_s, (), 0.0
                self._look_at = None

    def _give_up(self, until: float) -> None:
        held = (
            f"{self._held_mib:.0f} MiB more in use than before" if self._reading else "no answer of NVML yet"
        )
        waited_s = until - self._since
        log.warning("GPU memory: %s, %.1f s after the workers ended; not waiting any longer", held, waited_s)
        self._baseline = self._reading or self._baseline  # it may be another process', and stay
        self._until = None

    @property
    def _held_mib(self) -> float:
        return max(now - before for now, before in zip(self._reading, self._baseline, strict=True))


class GpuHealth:
    """For the main thread."""

    def __init__(self, reader: NvmlReader) -> None:
        self._reader = reader
        self._asks = True
        self._baseline: NvmlFacts | None = None
        self._reading: NvmlFacts | None = None
        self._asked = False
        """There is a question without an answer."""
        self._late = False
        """It has not come in time."""
        self._next_baseline: NvmlFacts | None = None
        self._warned = False

    def start(self) -> None:
        """Ask for the baseline, without waiting for it."""
        self._reader.on_health = self.handle
        self._ask()

    def generation_begins(self) -> None:
        """What has been told until now concerns earlier workers."""
        self._baseline = self._next_baseline

    def worker_failed(self) -> None:
        """Ask what NVML says now."""
        self._ask()
        if self._asked and self._baseline is None:
            self._warn("NVML has not answered since this agent started")

    @property
    def waiting(self) -> bool:
        """The answer may still come in time."""
        return self._asked and not self._late and self._baseline is not None

    def overdue(self) -> None:
        """The failure is reported without the answer."""
        if self.waiting:
            self._late = True
            self._warn("NVML does not answer in time")

    def handle(self, reading: NvmlFacts) -> None:
        """An answer of the reader. Without the driver's library there is no problem to speak of: the check
        `gpu-visible` names it."""
        if not self._asks:
            return
        if reading.absent or reading.problem:
            if reading.problem:
                self._warn(reading.problem)
            self._asks = self._asked = False
            return
        if self._baseline is None:
            self._baseline = self._next_baseline = reading
        self._asked = self._late = False
        self._reading = reading

    def reported(self, gpus: Collection[str]) -> None:
        """The failure of a worker of these GPUs tells of their faults: these are none in later generations."""
        if self._next_baseline is not None and self._reading is not None:
            self._next_baseline = moved_on(self._next_baseline, self._reading, gpus)

    @property
    def faults(self) -> tuple[GpuFault, ...]:
        """That the newest reading shows, and the baseline does not."""
        if self._baseline is None or self._reading is None:
            return ()
        return faults_since(self._baseline, self._reading)

    def _ask(self) -> None:
        if self._asks and not self._asked:
            self._asked = self._reader.ask(HEALTH)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: a restart does not wait for it, and the cause of a failure is found without it (said once)",
                problem,
            )
