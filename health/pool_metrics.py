"""The numbers that a node's daemon publishes of its pool. docs/metrics.md lists them, like those of an agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .checks.table import AT_JOIN
from .families import Counter, Gauge, Level, Page, Row

SEAT_OUTCOMES = ("succeeded", "failed", "left", "refused", "not_here")


class PoolMetrics(Page):
    """Each series carries `pool` and `node`."""

    pool_member = Row(Level, "1 while this node has its place in the pool and follows all others, else 0.")
    pool_coordinator = Row(Level, "1 while this node decides which node runs which job, else 0.")
    pool_node_busy = Row(Level, "1 while an agent of a job runs on this node, else 0.")
    pool_nodes = Row(Gauge, "Nodes of the pool; absent while this node does not follow it.")
    pool_idle_nodes = Row(Gauge, "Nodes of the pool that have no job and may be given one.")
    pool_queued_jobs = Row(Gauge, "Jobs of the pool that wait for nodes.")
    pool_running_jobs = Row(Gauge, "Jobs of the pool that have nodes.")
    pool_job_agents_ended_total = Row(
        Counter,
        "Agents of jobs that have ended on this node, by what that means: succeeded and failed decide their job, left "
        "was asked to, refused decides if no other node runs it, not_here can be tried on other nodes.",
        outcome=SEAT_OUTCOMES,
    )

    pool_node_check_outcome = Row(
        Gauge,
        "How the newest check of this node by its daemon (--check) ended: 0 ok, 1 warn, 2 fail; absent where that is "
        "not known.",
        check=AT_JOIN,
    )

    def __init__(self, pool: str, node: str, clock: Callable[[], float]) -> None:
        super().__init__({"pool": pool, "node": node}, {}, clock)

    def checked(self, severities: Mapping[str, float | None]) -> None:
        """By check; what is not among them is unknown now."""
        with self.lock:
            for check in AT_JOIN:
                self.pool_node_check_outcome.set(severities.get(check), check=check)
