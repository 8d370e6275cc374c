"""A real Prometheus scrapes a real health server and answers queries about it."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from elastic_agent.health.http import Answers, HealthServer, Probe
from tests.observed import a_metrics
from tests.prometheus_server import prometheus


def test_prometheus_scrapes_the_agent_and_answers_queries(tmp_path: Path) -> None:
    metrics = a_metrics("run-1", "node-a", started_at_s=time.time())
    metrics.rendezvous_generation.set(7)
    ok = Probe(True, "ok")
    server = HealthServer(
        socket.create_server(("127.0.0.1", 0)), Answers(metrics.render, lambda: ok, lambda: ok)
    )
    server.start()
    target = "{}:{}".format(*server.address)
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [{"job_name": "elastic-agent", "static_configs": [{"targets": [target]}]}],
    }
    config_file = tmp_path / "prometheus.yml"
    config_file.write_text(json.dumps(config))  # JSON is YAML
    try:
        with prometheus(config_file) as server_of_numbers:
            wait_for = server_of_numbers.wait_for
            [(labels, generation)] = wait_for("elastic_agent_rendezvous_generation == 7")
            assert (labels["run_id"], labels["node"]) == ("run-1", "node-a")
            assert labels["instance"] == target
            [(_, up)] = wait_for("up == 1")
            assert (generation, up) == (7, 1)

            metrics.rendezvous_generation.set(8)
            wait_for("elastic_agent_rendezvous_generation == 8")

            server.close()
            wait_for("up == 0")
    finally:
        server.close()
