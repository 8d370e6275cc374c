"""The events of the main loop. Every thread of the agent puts them on one queue; only the main loop acts on them.

All are frozen, so that a thread can hand one over and forget it. Instants are seconds on the monotonic clock.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ...health.checks.finding import Finding
from ...rendezvous.errors import StoreError
from ...rendezvous.liveness.failure_detector import Peer, ProbeResult
from ...rendezvous.node.drain import Beyond, End
from ...rendezvous.records import StopAt
from ...rendezvous.statements.inquiry import Testimony
from ...rendezvous.store.interface import Change, LeaseId
from ...rendezvous.store.requests import Answer, Request, Subscription
from ...worker.wire.messages import FromGuard, ReplicationReport, Report
from .exits import ExitCode


@dataclass(frozen=True, slots=True)
class Answered:
    request: Request
    answer: Answer


@dataclass(frozen=True, slots=True)
class Unanswered:
    request: Request
    error: StoreError


@dataclass(frozen=True, slots=True)
class Changed:
    subscription: Subscription
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class WatchCompacted:
    """The watch of this subscription has missed changes."""

    subscription: Subscription


@dataclass(frozen=True, slots=True)
class LeaseConfirmed:
    lease: LeaseId
    asked_at: float


@dataclass(frozen=True, slots=True)
class LeaseGone:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class StoreGone:
    """One of the threads at the store posts nothing any more. Where it has failed, a `ThreadFailed` came before."""

    reason: str
    code: ExitCode = ExitCode.NOT_HERE


@dataclass(frozen=True, slots=True)
class StoreMismatched:
    """Another job's or another version's store answers where this job's did."""

    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    """What came of asking a peer at `asked_at` who it is."""

    peer: Peer
    finding: ProbeResult
    asked_at: float


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process of this worker has ended, which was seen at that instant, and can be reaped."""

    generation: int
    local_rank: int
    at: float


@dataclass(frozen=True, slots=True)
class TailReady:
    """All that this worker, which has failed, has printed is read, and is in its log files."""

    generation: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """A look at the workers of this generation is over. It only wakes the main loop, which looks at the `Look`
    itself."""

    generation: int


@dataclass(frozen=True, slots=True)
class StoreServerMessage:
    """A message of the process that serves the workers' stores. Empty: it has ended."""

    pid: int
    message: bytes


@dataclass(frozen=True, slots=True)
class SpareReadable:
    """The socket of the preloaded process, or of a spare, can be read: a message, or its end."""

    descriptor: int


@dataclass(frozen=True, slots=True)
class GpuMemoryMessage:
    """A message of the process that reads the GPUs' memory. Empty: it has ended."""

    pid: int
    message: bytes


@dataclass(frozen=True, slots=True)
class GpuHealthMessage:
    """A message of the process that reads what NVML says of the GPUs. Empty: it has ended."""

    pid: int
    message: bytes


@dataclass(frozen=True, slots=True)
class WriterWanted:
    """There is an order to write a checkpoint, and no process to do it."""


@dataclass(frozen=True, slots=True)
class WriterEnded:
    """The process that writes checkpoints has ended."""


@dataclass(frozen=True, slots=True)
class MemoryServerWanted:
    """There is something to do for the process that serves copies in memory to other nodes, and no such process."""


@dataclass(frozen=True, slots=True)
class MemoryServerEnded:
    """That process has ended."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What only this node had in memory is on others, or the time for that is over."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """What that process says of the replicas."""

    report: ReplicationReport


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker's report, and when it was received."""

    report: Report
    at: float

    @property
    def generation(self) -> int:
        return self.report.generation


@dataclass(frozen=True, slots=True)
class JustInTimeMessage:
    """A message of a worker that takes part in just-in-time saves. None: it no longer does."""

    generation: int
    local_rank: int
    message: FromGuard | None


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker that asked after `step` whether a planned change lets it go on got this answer. GoOn is no event."""

    generation: int
    local_rank: int
    step: int
    answer: End | Beyond


@dataclass(frozen=True, slots=True)
class WorkerKept:
    """A worker that was to end has kept the state after its last step, and ends now."""

    generation: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class StopRead:
    """Where the workers of a draining generation are to end; None: the store does not have it, or did not answer."""

    generation: int
    stop: StopAt | None


@dataclass(frozen=True, slots=True)
class SavesFinished:
    """The disk writer has done what was ordered, or has had its time."""

    lost: str = ""
    """Why the last save is not on disk; empty: it is on disk, or there was none."""


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread of this process has ended as it should not, or could not be started."""

    name: str
    problem: str
    code: ExitCode = ExitCode.AGENT_FAILED

    @property
    def reason(self) -> str:
        """Of this process' end, and what to do about it."""
        report = "; report it with the traceback above" if self.code is ExitCode.AGENT_FAILED else ""
        return f"the thread {self.name} has failed: {self.problem}{report}"


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """This machine goes away at `deadline`, or earlier than was known, or later. The text says who says so."""

    text: str
    deadline: float | None
    """None: at no known instant. The node leaves at once, and without hurry."""


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """It does not go away."""


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """All checks of this node have run (--check)."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class NodeRechecked:
    """The checks of this node, which is excluded, have run after its cool-down."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Signs:
    """What one worker and its descendants have used since they began, and the length of its output."""

    processor_s: float
    moved_bytes: int
    """Bytes read and written through files, pipes and most sockets."""
    output_bytes: int
    wakes: int = 0
    """How often its main thread has waited for something, and gone on."""
    debugger: str = ""
    """What traces the worker now, for people; empty: nothing does."""
    stirs: bool = False
    """One of its threads, or of its children's, does so again and again. Looked for while nothing else moves."""


@dataclass(frozen=True, slots=True)
class SignsRead:
    """What the workers here had used at that instant, by local rank."""

    generation: int
    at: float
    seen: Mapping[int, Signs]


@dataclass(frozen=True, slots=True)
class Testified:
    """The answer to an inquiry: what the workers here do."""

    testimony: Testimony

    @property
    def generation(self) -> int:
        return self.testimony.generation


GenerationEvent: TypeAlias = (
    SignsRead
    | Testified
    | WorkersSeen
    | WorkerExited
    | TailReady
    | Reported
    | JustInTimeMessage
    | WorkerAnswered
    | WorkerKept
    | StopRead
)
"""What the workers of one generation do, and what follows from it."""

Event: TypeAlias = (
    Answered
    | Unanswered
    | Changed
    | WatchCompacted
    | LeaseConfirmed
    | LeaseGone
    | StoreGone
    | StoreMismatched
    | Probed
    | GenerationEvent
    | StoreServerMessage
    | GpuMemoryMessage
    | GpuHealthMessage
    | WriterWanted
    | WriterEnded
    | MemoryServerWanted
    | MemoryServerEnded
    | HandedOver
    | Replicated
    | SpareReadable
    | SavesFinished
    | ThreadFailed
    | Signalled
    | NoticeGiven
    | NoticeWithdrawn
    | NodeChecked
    | NodeRechecked
)

_E = TypeVar("_E")


class Handlers:
    """Which function handles which event: a table by the event's type."""

    def __init__(self) -> None:
        self.by_type: dict[type, Callable[[Any, float], object]] = {}

    def on(self, kind: type[_E], handle: Callable[[_E, float], object]) -> None:
        """`handle` gets each event of this type, and the instant at which it is handled."""
        self.by_type[kind] = handle

    def handle(self, event: object, now: float) -> None:
        self.by_type[type(event)](event, now)

    def handle_next(
        self, events: queue.SimpleQueue[Any], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """The next event, if one comes within that time, and all that wait behind it."""
        try:
            self.handle(events.get(timeout=timeout_s), clock())
            while True:
                self.handle(events.get_nowait(), clock())
        except queue.Empty:
            pass
