"""Reports the ranks that the coordinator finds slower than the others, on every node: log lines, events and metrics."""

from __future__ import annotations

import logging

from ...health.metrics import Metrics
from ...rendezvous.coordinator.stragglers import in_words
from ...rendezvous.node.snapshot import NodeSnapshot
from ...rendezvous.records import World
from ...rendezvous.statements.paces import Comparison, Paces, Straggler
from ..output.journal import Journal, Kind

log = logging.getLogger(__name__)


class StragglerWatch:
    """Reports each rank once when it becomes slow, and once when it no longer is. For the main thread."""

    def __init__(self, metrics: Metrics, journal: Journal) -> None:
        self._metrics = metrics
        self._journal = journal
        self._seen: tuple[World | None, Comparison | None, Paces | None] = (None, None, None)
        self._named: dict[int, Straggler] = {}
        """The stragglers at present, by rank."""
        self._generation = 0
        self._shown: set[int] = set()
        """Local ranks whose ratio the metrics have."""

    def update(self, snapshot: NodeSnapshot) -> None:
        """Call after each turn of the driver."""
        seen = snapshot.world, snapshot.comparison, snapshot.paces
        if seen == self._seen:
            return
        self._seen = seen
        world, comparison, paces = seen
        if world is None or world.generation != self._generation:
            self._named = {}  # its ranks have ended
            self._generation = world.generation if world is not None else 0
        if comparison is not None:
            self._tell(comparison)
        self._measure(snapshot, comparison, paces)

    def _tell(self, comparison: Comparison) -> None:
        before, self._named = self._named, {straggler.rank: straggler for straggler in comparison.stragglers}
        for rank, straggler in self._named.items():
            if rank not in before:
                self._note(straggler, in_words(straggler, comparison.usual_us), slow=True)
        for rank, straggler in before.items():
            if rank not in self._named:
                recovered = f"rank {rank} on node {straggler.node} is as fast as the others again"
                self._note(straggler, recovered, slow=False)

    def _note(self, straggler: Straggler, text: str, *, slow: bool) -> None:
        log.log(logging.WARNING if slow else logging.INFO, "%s", text)
        self._journal.note(
            Kind.STRAGGLER,
            text,
            rank=straggler.rank,
            about=straggler.node,
            cause="slow" if slow else "recovered",
        )

    def _measure(self, snapshot: NodeSnapshot, comparison: Comparison | None, paces: Paces | None) -> None:
        """Set the metrics of this node's ranks: their own time beside the median."""
        member = snapshot.world.member(snapshot.incarnation) if snapshot.world is not None else None
        ratios: dict[int, float] = {}
        if member is not None and comparison is not None and comparison.usual_us and paces is not None:
            own = paces.own_us if paces.generation == comparison.generation else ()
            ratios = {local_rank: own_us / comparison.usual_us for local_rank, own_us in enumerate(own)}
        first = member.first_rank if member is not None else 0
        self._metrics.compared(
            {local_rank: (ratio, first + local_rank in self._named) for local_rank, ratio in ratios.items()},
            gone=self._shown - ratios.keys(),
        )
        self._shown = set(ratios)
