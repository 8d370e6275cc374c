"""The policy of an agent without options, for tests to change."""

from __future__ import annotations

from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Policy

PLAIN_POLICY = Policy(
    job="job",
    min_nodes=1,
    max_nodes=1,
    nodes_multiple_of=1,
    last_call_s=1.0,
    join_timeout_s=600.0,
    drain_timeout_s=20.0,
    store_outage_grace_s=0.0,
    unleased_s=0.0,
    store_outlives_job=False,
    runs_again=False,
    restarts=RestartPolicy(),
    cool_down_s=60.0,
)
