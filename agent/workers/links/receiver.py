"""What the main loop does with the messages of workers: the calls that the links post."""

from __future__ import annotations

from typing import Protocol

from ....rendezvous.node.drain import Beyond, End
from ....worker.wire.messages import FromGuard, ReplicationReport, Report


class Receiver(Protocol):
    """The supervisor. All of it is called in the main loop."""

    def reported(self, report: Report, at: float) -> None:
        """A worker's report, and when it was received."""

    def replicated(self, report: ReplicationReport) -> None:
        """What the memory server says of the replicas."""

    def guard_sent(self, generation: int, local_rank: int, message: FromGuard | None) -> None:
        """A message of a worker that takes part in just-in-time saves. None: it no longer does."""

    def worker_answered(self, generation: int, local_rank: int, step: int, answer: End | Beyond) -> None:
        """A worker that asked after `step` whether a planned change lets it go on got this answer."""

    def worker_kept(self, generation: int, local_rank: int) -> None:
        """A worker that was to end has kept the state after its last step, and ends now."""
