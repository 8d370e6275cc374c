"""From a worker's crash to the report of it: it waits for the worker's last lines, is examined and shown everywhere."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...rendezvous.records import Failure
from ..common.events import Event
from ..common.ports import find_owner
from ..machine.cgroups import OomKills, find_counter
from ..machine.gpus import GpuHealth
from ..output.worker_logs import WorkerLogs
from .environment import Node, error_file
from .failures.causes import Cause, CauseTable
from .failures.examination import FailedWorker, Remains, describe_failure, hang_failure
from .failures.gpu_news import gpu_news
from .failures.kernel_log import KernelLog, KernelNews, address, pids_are_the_kernels
from .failures.summary import summarize
from .failures.worker_failure import FailureInvalid, WorkerFailure, fingerprint
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
    ) -> WorkerFailure:
        """`not_kept`: the worker had done the last step of a planned change, and no Checkpointer has kept its state."""
        number, rank = group.generation, group.ranks[crash.local_rank]
        own_gpus = self._node.machine.gpus_of(crash.local_rank)
        faults = self._gpus.faults
        self._gpus.told(own_gpus)
        log_file = self._logs.log_file(number, rank)
        worker = FailedWorker(self._node.name, number, rank, crash.local_rank, log_file, master_port)
        remains = Remains(
            crash.returncode,
            error_file(self._node, number, crash.local_rank),
            self._logs.tail(number, rank),
            self._oom_kills.lately(now),
            self._kernel_news(group, crash.local_rank),
            gpu_news(faults, own_gpus),
            not_kept,
            crash.asked,
        )
        return describe_failure(worker, remains, self.causes, partial(find_owner, "0.0.0.0"))

    def hang(self, group: WorkerGroup, local_rank: int, summary: str) -> WorkerFailure:
        """Of a worker that runs, and is stuck."""
        number, rank = group.generation, group.ranks[local_rank]
        log_file = self._logs.log_file(number, rank)
        return hang_failure(FailedWorker(self._node.name, number, rank, local_rank, log_file), summary)

    def _kernel_news(self, group: WorkerGroup, local_rank: int) -> KernelNews:
        devices = self._node.machine.devices_of(local_rank)
        pid = group.pid(local_rank) if self._pids_are_the_kernels else 0
        addresses = frozenset(address(device.address) for device in devices if device.address)
        return KernelNews(self._kernel_log.events(), pid, addresses)


def report_of(failure: WorkerFailure, cause: Cause, known_as: str = "") -> Failure:
    """For the other nodes. `known_as` is the fingerprint of a failure that the agent has made of a hang."""
    return Failure(
        failure.generation,
        known_as or fingerprint(failure),
        failure.summary,
        failure.to_json(),
        failure.cause,
        cause.action,
        cause.collateral,
        cause.outside,
        failure.node,
        failure.rank,
    )


def show(
    failure: Failure, own: Sequence[WorkerFailure], causes: CauseTable, evidence: str = ""
) -> WorkerFailure | None:
    """The block for a tired person. Returns the worker that is to blame, if one is.

    `own`: the failures on this node in the same generation. Any agent may have written `failure.detail`.
    `evidence`: what this node has kept of that generation, see `EvidenceKeeper.where`.
    """
    try:
        first = WorkerFailure.from_json(failure.detail) if failure.detail else None
    except FailureInvalid as error:
        log.warning("the failure's details in the store are not usable: %s", error)
        first = None
    if first is None:
        kept = f"; evidence: {evidence}" if evidence else ""
        log.error("generation %d failed: %s%s", failure.generation, failure.summary, kept)
        return None
    here = next((mine for mine in own if mine.rank == first.rank), None)
    others = [mine for mine in own if mine.rank != first.rank]
    log.error("%s", summarize(here or first, others, causes.named(first.cause).hint, evidence))
    return here or first
