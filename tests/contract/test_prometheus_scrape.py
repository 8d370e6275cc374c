"""A real Prometheus scrapes a real health server and answers queries about it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.health.http import HealthServer, Probe
from elastic_agent.health.metrics import Metrics

PATIENCE_S = 60.0


@contextmanager
def prometheus(binary: str, target: str, directory: Path) -> Iterator[str]:
    """Run `binary`, scraping `target` five times a second; yields the address of its query API."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        # It cannot be handed a bound socket. Should somebody take the port meanwhile, it exits and its log says so.
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [{"job_name": "elastic-agent", "static_configs": [{"targets": [target]}]}],
    }
    config_file = directory / "prometheus.yml"
    config_file.write_text(json.dumps(config))  # JSON is YAML
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={config_file}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def query(address: str, expression: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of every series that `expression` gives now; none while Prometheus is still starting."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            answer = json.load(reply)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return []
    return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]


def wait_for_series(address: str, expression: str, log: Path) -> list[tuple[dict[str, str], float]]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if series := query(address, expression):
            return series
        time.sleep(0.05)
    pytest.fail(f"no series for {expression}; the end of Prometheus' log:\n{log.read_text()[-2000:]}")


def test_prometheus_scrapes_the_agent_and_answers_queries(tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian package: prometheus)")
    metrics = Metrics(
        "run-1",
        "node-a",
        "0.1.0",
        slots=2,
        min_nodes=1,
        max_nodes=2,
        started_at_s=time.time(),
        clock=time.monotonic,
    )
    metrics.enter_world(generation=7, world_size=4, group_world_size=2, duration_s=0.3)
    ok = Probe(True, "ok")
    server = HealthServer(socket.create_server(("127.0.0.1", 0)), metrics.render, lambda: ok, lambda: ok, {})
    server.start()
    target = "{}:{}".format(*server.address)
    log = tmp_path / "prometheus.log"
    try:
        with prometheus(binary, target, tmp_path) as address:
            [(labels, generation)] = wait_for_series(address, "elastic_agent_rendezvous_generation == 7", log)
            assert (labels["run_id"], labels["node"]) == ("run-1", "node-a")
            assert labels["instance"] == target
            [(_, up)] = wait_for_series(address, "up == 1", log)
            assert (generation, up) == (7, 1)

            metrics.enter_world(generation=8, world_size=2, group_world_size=1, duration_s=0.1)
            wait_for_series(address, "elastic_agent_rendezvous_generation == 8", log)
            wait_for_series(address, 'elastic_agent_rendezvous_total{result="ok"} == 2', log)

            server.close()
            wait_for_series(address, "up == 0", log)
    finally:
        server.close()
