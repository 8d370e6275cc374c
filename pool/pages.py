"""What a daemon answers over HTTP: probes, numbers of its pool and of the job that runs here, and what jobs print here.

docs/metrics.md lists the numbers of the pool, like those of an agent.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from ..agent.common.http_client import NoAnswer, get
from ..agent.main.heartbeat import STUCK_AFTER_S
from ..health.http import TEXT, Page, PageRequest, Probe
from ..health.metrics import CONTENT_TYPE, Gauge, Level, MetricRow, Registry
from ..rendezvous.errors import RecordInvalid, StoreError
from ..rendezvous.records import NodeRecord, node_key
from ..rendezvous.store.interface import Store, run_prefix
from .job_agent import JobLogs
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

    pool_member = MetricRow(
        Level, "1 while this node has its place in the pool and follows all others, else 0."
    )
    pool_nodes = MetricRow(Gauge, "Nodes of the pool; absent while this node does not follow it.")
    pool_idle_nodes = MetricRow(Gauge, "Nodes of the pool that have no job and may be given one.")
    pool_queued_jobs = MetricRow(Gauge, "Jobs of the pool that wait for nodes.")
    pool_running_jobs = MetricRow(Gauge, "Jobs of the pool that have nodes.")

    def __init__(self, pool: str, node: str) -> None:
        super().__init__({"pool": pool, "node": node}, {})


class DaemonPages:
    """All methods but `begin` are for any thread."""

    def __init__(
        self, metrics: PoolMetrics, node: str, logs: JobLogs, token: str, clock: Callable[[], float]
    ) -> None:
        """The token in this node's record opens the logs: who reads the store may read them."""
        self._metrics, self._node, self._clock = metrics, node, clock
        self._logs, self._token = logs, token
        self._parts: tuple[Callable[[], DaemonSnapshot], Store] | None = None

    def begin(self, newest: Callable[[], DaemonSnapshot], store: Store) -> None:
        self._parts = newest, store

    def _newest(self) -> DaemonSnapshot:
        return self._parts[0]() if self._parts is not None else DaemonSnapshot(self._clock())

    def liveness(self) -> Probe:
        silent_s = self._clock() - self._newest().turned_at
        return Probe(silent_s < STUCK_AFTER_S, f"the main loop turned {silent_s:.1f} s ago")

    def readiness(self) -> Probe:
        """Can it be given a job, or does it run one?"""
        now = self._newest()
        return Probe(now.tracks, now.status)

    def metrics(self) -> bytes:
        now, metrics = self._newest(), self._metrics
        with metrics.lock:
            metrics.pool_member.set(now.tracks)
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
        job, key = self._newest().job, node_key(self._node)
        if job is None or self._parts is None:
            return ""
        try:
            entries = self._parts[1].read((run_prefix(job) + key,)).entries
            place = NodeRecord.from_json(key, entries[0].value).http if entries else None
            return get(place, "/metrics", time.monotonic, JOB_METRICS_S, MOST_JOB_METRICS) if place else ""
        except (OSError, NoAnswer, StoreError, RecordInvalid) as error:
            log.debug("no metrics of job %s: %s", job, error)
            return ""

    def job_log(self, request: PageRequest) -> Page:
        """A piece of what a job has printed here."""
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            missing = b"the token in this node's record of the pool is missing\n"
            return Page(HTTPStatus.UNAUTHORIZED, TEXT, missing)
        try:
            piece = self._logs.read(request.query.get("job", ""), int(request.query.get("start", 0)))
        except FileNotFoundError:
            return Page(HTTPStatus.NOT_FOUND, TEXT, b"nothing of this job is here\n")
        except (ValueError, OverflowError, OSError) as error:
            return Page(HTTPStatus.BAD_REQUEST, TEXT, f"{type(error).__name__}\n".encode())
        return Page(HTTPStatus.OK, "application/octet-stream", piece)
