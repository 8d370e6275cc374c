"""What an agent shows of itself, for tests: its metrics, its state, and the server for both."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elastic_agent.agent.observability.status import NodeState
from elastic_agent.health.http import Answers, HealthServer, Page, PageRequest, Probe
from elastic_agent.health.metrics import Build, Metrics
from elastic_agent.rendezvous.records import Endpoint


def a_metrics(job: str = "digits", node: str = "a", **changes: Any) -> Metrics:
    about: dict[str, Any] = {"workers": 1, "min_nodes": 1, "started_at_s": 0.0}
    return Metrics(job, node, Build(version="1"), **{**about, **changes})


def a_node(metrics: Metrics | None = None, job: str = "digits", node: str = "a", **changes: Any) -> NodeState:
    """Its clocks stand still, unless it is given others."""
    about: dict[str, Any] = {"lease_ttl_s": 5.0, "clock": float, "wall_clock": float}
    return NodeState(job, node, f"{node}-1", metrics or a_metrics(job, node), **{**about, **changes})


@contextmanager
def answering(
    pages: Mapping[str, Callable[[PageRequest], Page]], metrics: Callable[[], bytes] = bytes
) -> Iterator[Endpoint]:
    """Where an agent that is well serves these pages."""
    ok = Probe(True, "")
    server = HealthServer(
        socket.create_server(("127.0.0.1", 0)), Answers(metrics, lambda: ok, lambda: ok, dict(pages))
    )
    server.start()
    yield Endpoint(*server.address)
    server.close()
