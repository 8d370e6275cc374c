"""What NVML says of this node's GPUs: asked when the agent starts, and then when a worker has failed.

NVML may hang, most of all on a sick GPU. So another process asks it (`health/checks/probes/gpu_watch.py`) and is kept,
with NVML open, so that an answer takes milliseconds. Its first answer is the *baseline*; what is worse later is a fault
(`health/checks/rules/gpu_faults.py`). Without GPUs there is no such process, and nothing is asked.

Invariant: nobody waits for an answer without a bound (`overdue` ends the wait), nor for a second one while the first is
late. A fault stays one until the failure of a worker of that GPU has told of it: what an answer shows that is late, or
that is about another worker's GPU, still counts at a later failure.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ....codec import Invalid
from ....health.checks.probe_process import ISOLATED, probe_command
from ....health.checks.rules.gpu_faults import GpuFault, described, faults_since, moved_on
from ....health.checks.rules.gpus import GPU_READING, NvmlFacts
from ...common.events import Event
from ...common.io_thread import IoThread
from .asked_process import AskedProcess

log = logging.getLogger(__name__)

_READER = "elastic_agent.health.checks.probes.gpu_watch"


class GpuHealth:
    """For the main thread: the reader process dies with the thread that starts it."""

    def __init__(
        self,
        gpus: Sequence[str],
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[Event], None],
        count: Callable[[str], None] = lambda result: None,
    ) -> None:
        """`gpus` as NVML knows them; without any, nothing is ever asked. `count` takes the result of each question
        after the first: "ok", "late", "failed"."""
        self._gpus = gpus
        self._environment = environment
        self._io = io
        self._post = post
        self._count = count
        self.pids: tuple[int, ...] = ()
        """Of the reader, also when it no longer counts: it may hang in the driver, and then no signal ends it."""
        self._reader: AskedProcess | None = None
        self._baseline: NvmlFacts | None = None
        self._reading: NvmlFacts | None = None
        self._asked = False
        """There is a question without an answer."""
        self._late = False
        """It has not come in time."""
        self._next_baseline: NvmlFacts | None = None
        self.on_reading: Callable[[], object] = lambda: None
        """Called when there is a new reading."""
        self._said = False

    def start(self) -> None:
        """Ask for the baseline. Nobody waits for it."""
        if not self._gpus:
            return
        command = [*probe_command(sys.executable, _READER, flags=ISOLATED), *self._gpus]
        self._reader = AskedProcess(
            command,
            self._environment,
            self._io,
            lambda pid, message: self._post(partial(self.handle, pid, message)),
        )
        self.pids = (self._reader.pid,)
        self._ask()

    def generation_begins(self) -> None:
        """What has been told until now concerns earlier workers."""
        self._baseline = self._next_baseline

    def worker_failed(self) -> None:
        """Ask what NVML says now."""
        if self._reader is None:
            return
        if self._baseline is None:
            self._say("NVML has not answered since this agent started")
        self._ask()

    @property
    def waiting(self) -> bool:
        """The answer may still come in time."""
        return self._asked and not self._late and self._baseline is not None

    def overdue(self) -> None:
        """The failure is reported without the answer."""
        if self.waiting:
            self._late = True
            self._count("late")
            self._say("NVML does not answer in time")

    def handle(self, pid: int, message: bytes) -> None:
        """An answer of the reader, or its end: that is empty."""
        if self._reader is None or pid != self._reader.pid:
            return
        if not message:
            self._dismiss("the process that asks NVML has ended")
            return
        try:
            reading = GPU_READING.decode(message)
        except Invalid as error:
            self._dismiss(f"the process that asks NVML gives no usable answer: {error}")
            return
        if reading.absent or reading.problem:
            self._dismiss(reading.problem)
            return
        if self._baseline is not None:
            self._count("ok")
        else:
            self._baseline = self._next_baseline = reading
        self._asked = self._late = False
        self._reading = reading
        self.on_reading()

    def told(self, gpus: Collection[str]) -> None:
        """The failure of a worker of these GPUs tells of their faults: these are none in later generations."""
        if self._next_baseline is not None and self._reading is not None:
            self._next_baseline = moved_on(self._next_baseline, self._reading, gpus)

    @property
    def faults(self) -> tuple[GpuFault, ...]:
        """That the newest reading shows, and the baseline does not."""
        if self._baseline is None or self._reading is None:
            return ()
        return faults_since(self._baseline, self._reading)

    @property
    def text(self) -> str:
        """The newest reading, for people."""
        if self._baseline is None or self._reading is None:
            return ""
        return described(self._baseline, self._reading)

    def close(self) -> None:
        """The agent is ending."""
        if self._reader is not None:
            self._reader.kill()
            self._reader = None
        self._asked = False

    def _ask(self) -> None:
        if self._reader is not None and not self._asked:
            self._asked = True
            self._reader.ask()

    def _dismiss(self, problem: str) -> None:
        """Without the driver's library there is no problem to speak of: the check `gpu-visible` names it."""
        if self._baseline is not None:
            self._count("failed")
        if problem:
            self._say(problem)
        self.close()

    def _say(self, problem: str) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "%s: a restart does not wait for it, and the cause of a failure is found without it (said once)",
                problem,
            )
