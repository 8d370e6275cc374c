"""What a daemon answers over HTTP about itself: probes, and numbers of its pool and of the job that runs here. What
jobs print here is in `logs`.

docs/metrics.md lists the numbers of the pool, like those of an agent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from ..agent.common.http_client import NoAnswer, get
from ..agent.main.heartbeat import STUCK_AFTER_S
from ..health.http import Page, PageRequest, Probe
from ..health.metrics import CONTENT_TYPE, Gauge, MetricRow, Registry
from ..rendezvous.errors import RecordInvalid, StoreError
from ..rendezvous.records import NodeRecord, node_key
from ..rendezvous.store.interface import Store, run_prefix
from .records import PoolCounts

log = logging.getLogger(__name__)

JOB_METRICS_S = 2.0
"""The job's agent has so long to answer a scrape, and the store to say where that agent is."""
MOST_JOB_METRICS = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DaemonSnapshot:
    """All that other threads read of a daemon, as of its newest turn."""

    turned_at: float
    tracks: bool = False
    status: str = "looking for the pool's store"
    job: str | None = None
    """That runs here."""
    counts: PoolCounts = field(default_factory=PoolCounts)


class PoolMetrics(Registry):
    """Each series carries `pool` and `node`."""

    pool_nodes = MetricRow(Gauge, "Nodes of the pool; absent while this node does not follow it.")
    pool_idle_nodes = MetricRow(Gauge, "Nodes of the pool that have no job and may be given one.")
    pool_queued_jobs = MetricRow(Gauge, "Jobs of the pool that wait for nodes.")
    pool_running_jobs = MetricRow(Gauge, "Jobs of the pool that have nodes.")

    def __init__(self, pool: str, node: str) -> None:
        super().__init__({"pool": pool, "node": node}, {})


class DaemonPages:
    """All methods are for any thread."""

    def __init__(self, metrics: PoolMetrics, node: str, clock: Callable[[], float]) -> None:
        self._metrics, self._node, self._clock = metrics, node, clock
        self.snapshot = DaemonSnapshot(clock())
        """The newest: the main thread replaces it."""
        self.store: Store | None = None
        """Once it is found."""

    def liveness(self) -> Probe:
        silent_s = self._clock() - self.snapshot.turned_at
        return Probe(silent_s < STUCK_AFTER_S, f"the main loop turned {silent_s:.1f} s ago")

    def readiness(self) -> Probe:
        """Can it be given a job, or does it run one?"""
        now = self.snapshot
        return Probe(now.tracks, now.status)

    def metrics(self) -> bytes:
        now, metrics = self.snapshot, self._metrics
        with metrics.lock:
            metrics.pool_nodes.set(now.counts.nodes if now.tracks else None)
            metrics.pool_idle_nodes.set(now.counts.idle_nodes if now.tracks else None)
            metrics.pool_queued_jobs.set(now.counts.queued_jobs if now.tracks else None)
            metrics.pool_running_jobs.set(now.counts.running_jobs if now.tracks else None)
            return metrics.render()

    def all_metrics(self, _: PageRequest) -> Page:
        """The daemon's own, and behind them those of the job's agent on this node, whose `run_id` is the job's id.

        So one place per node is enough for Prometheus, whatever runs there. A job's agent that does not answer in time
        costs its own part of the page alone.
        """
        return Page(HTTPStatus.OK, CONTENT_TYPE, self.metrics() + self._of_job().encode())

    def _of_job(self) -> str:
        job, key = self.snapshot.job, node_key(self._node)
        if job is None or self.store is None:
            return ""
        try:
            entries = self.store.read((run_prefix(job) + key,)).entries
            place = NodeRecord.from_json(key, entries[0].value).http if entries else None
            return get(place, "/metrics", time.monotonic, JOB_METRICS_S, MOST_JOB_METRICS) if place else ""
        except (OSError, NoAnswer, StoreError, RecordInvalid) as error:
            log.debug("no metrics of job %s: %s", job, error)
            return ""
