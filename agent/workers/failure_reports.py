"""From a worker's crash to the report of it: it waits for the worker's last lines, is examined and shown everywhere."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ...rendezvous.records import Failure
from ..common.events import Event
from ..common.ports import find_owner
from ..machine.cgroups import OomKills, find_counter
from ..machine.gpus import GpuHealth
from ..output.worker_logs import WorkerLogs
from .environment import Node, error_file
from .failures.causes import CauseTable
from .failures.error_report import ErrorReport, read_error_file
from .failures.failure import HANG_SIGNAL, describe_failure, hang_failure, summarize
from .failures.post_mortem import KernelLog, PostMortem, address, gpu_events, pids_are_the_kernels
from .processes.workers import WorkerGroup

log = logging.getLogger(__name__)

KNOWN_WITHIN_S = 0.5
"""A failure is reported after so long without what is not known then: the rest of the worker's last lines, which are
read and written first, and what NVML says."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker that has failed. It is examined when its last lines have been read and NVML has answered, or when that
    takes too long."""

    local_rank: int
    returncode: int
    at: float
    due_at: float
    asked: bool = False
    """It was asked to end, so it has not failed; but it may have begun to before."""


@dataclass(slots=True)
class Crashes:
    """The crashes of one generation that are not examined yet, the first first."""

    _waiting: deque[Crash] = field(default_factory=deque)
    _read: int = 0
    """The last lines of so many of them are here."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def due_at(self) -> float | None:
        return self._waiting[0].due_at if self._waiting else None

    def add(self, crash: Crash) -> None:
        self._waiting.append(crash)

    def read(self, local_rank: int) -> None:
        """The lines of this worker are here, and so are those of all that crashed before it."""
        for number, crash in enumerate(self._waiting, 1):
            if crash.local_rank == local_rank:
                self._read = max(self._read, number)

    @property
    def first_is_read(self) -> bool:
        return self._read > 0

    def overdue(self, now: float) -> bool:
        """The first of them waits for too long."""
        return bool(self._waiting) and now >= self._waiting[0].due_at

    def ready(self, now: float, *, lines: bool, gpus: bool) -> Iterator[Crash]:
        """Those to be examined now. `lines`, `gpus`: whether last lines, and NVML, are waited for."""
        while self.overdue(now) or (self._waiting and not gpus and (self._read or not lines)):
            self._read = max(0, self._read - 1)
            yield self._waiting.popleft()


class Examiner:
    """Finds out why a worker failed, from what it left behind and what the machine says. For the main thread."""

    def __init__(
        self, node: Node, causes: CauseTable, logs: WorkerLogs, gpus: GpuHealth, post: Callable[[Event], None]
    ) -> None:
        self.causes = causes
        """Those that it knows."""
        self._node = node
        self._logs = logs
        self._gpus = gpus
        self._post = post
        self._tail_late = False
        """The log disk did not answer in time when it was last asked to: until it does, no crash waits for it."""
        self._oom_kills = OomKills(find_counter())
        self._kernel_log = KernelLog()
        self._pids_are_the_kernels = pids_are_the_kernels()

    def update(self, now: float) -> None:
        """Call on each turn: out-of-memory kills are only known by when their counter changes."""
        self._oom_kills.update(now)

    def generation_begins(self) -> None:
        """What the kernel and NVML have said until now concerns earlier workers."""
        self._kernel_log.forget()
        self._gpus.generation_begins()

    def prepare(self, group: WorkerGroup, local_rank: int, ready: Callable[[], object]) -> None:
        """Ask for what is to come of a worker that has ended: its last lines, and what NVML says. `ready` is posted
        when all that it has printed is read, and is in its log files."""
        self._logs.drain(group.generation, group.ranks[local_rank], lambda: self._post(ready))
        self._gpus.worker_failed()

    def log_disk_answers(self) -> None:
        """Call it at each `ready`, of earlier generations too."""
        self._tail_late = False

    def ready(self, crashes: Crashes, now: float) -> Iterator[Crash]:
        """Those whose facts are here, and those that have waited for them too long."""
        if crashes.overdue(now):
            self._tail_late = self._tail_late or not crashes.first_is_read
            self._gpus.overdue()
        return crashes.ready(now, lines=not self._tail_late, gpus=self._gpus.waiting)

    def examine(
        self, group: WorkerGroup, crash: Crash, master_port: int, now: float, *, not_kept: bool
    ) -> Failure:
        """`not_kept`: the worker had done the last step of a planned change, and no Checkpointer has kept its state."""
        local_rank, rank = crash.local_rank, group.ranks[crash.local_rank]
        machine, faults = self._node.machine, self._gpus.faults
        own_gpus = machine.gpus_of(local_rank)
        self._gpus.told(own_gpus)
        addresses = (device.address for device in machine.devices_of(local_rank))
        report = read_error_file(error_file(self._node, group.generation, local_rank))
        worker = replace(
            self._worker(group, local_rank, crash.returncode),
            report=report or ErrorReport(),
            log_tail=self._logs.tail(group.generation, rank),
            master_port=master_port,
            asked=crash.asked,
            not_kept=not_kept,
            oom_killed=self._oom_kills.lately(now),
            kernel=self._kernel_log.events(),
            pid=group.pid(local_rank) if self._pids_are_the_kernels else 0,
            devices=frozenset(map(address, filter(None, addresses))),
            own_gpus=gpu_events(faults, own_gpus, of_worker=True),
            other_gpus=gpu_events(faults, own_gpus, of_worker=False),
        )
        return describe_failure(worker, self.causes, partial(find_owner, "0.0.0.0"))

    def hang(self, group: WorkerGroup, local_rank: int, summary: str, known_as: str) -> Failure:
        """Of a worker that runs, and is stuck. `known_as`: the fingerprint."""
        return hang_failure(self._worker(group, local_rank, -HANG_SIGNAL), self.causes, summary, known_as)

    def _worker(self, group: WorkerGroup, local_rank: int, returncode: int) -> PostMortem:
        number, rank = group.generation, group.ranks[local_rank]
        log_file = self._logs.log_file(number, rank)
        return PostMortem(self._node.name, number, rank, local_rank, returncode, log_file=log_file)


def show(failure: Failure, own: Sequence[Failure], causes: CauseTable, evidence: str = "") -> Failure | None:
    """Log it for the operator. Returns it if a worker is to blame, with all that this node knows of that.

    `own`: the failures on this node in the same generation. `evidence`: what this node has kept of that generation,
    see `EvidenceKeeper.where`.
    """
    if failure.local_rank is None:
        kept = f"; evidence: {evidence}" if evidence else ""
        log.error("generation %d failed: %s%s", failure.generation, failure.summary, kept)
        return None
    first = next((mine for mine in own if mine.rank == failure.rank), failure)
    others = [mine for mine in own if mine.rank != failure.rank]
    log.error("%s", summarize(first, others, causes.named(first.cause).hint, evidence))
    return first
