"""Spans at a collector, by OpenTelemetry's own packages; and a collector that is away, refuses or hangs."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'elastic-agent[otel]'")

from elastic_agent import threads
from elastic_agent.agent.observability import otel
from elastic_agent.agent.observability.otel import (
    CLOSE_S,
    COLLECTOR,
    MOST_WAITING,
    SpanSender,
    sends_spans,
    trace_id,
)
from elastic_agent.agent.output.journal import Journal, Kind
from tests.collector import Collector

PATIENCE_S = 30.0
SECRET = "c4n4ry-Value9"
RESOURCE = {"service.name": "elastic-agent", "elastic_agent.node": "a"}


@pytest.fixture(autouse=True)
def failed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Threads that have failed, each of which would have ended an agent."""
    monkeypatch.setenv(COLLECTOR, "")
    names: list[str] = []
    threads.listen(lambda name, error: names.append(name))
    yield names
    threads.listen()
    assert names == []


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


class Sender(SpanSender):
    """With a journal of its own, whose clock stands still."""

    def __init__(self, endpoint: str, resource: dict[str, str]) -> None:
        os.environ[COLLECTOR] = endpoint  # until `failed` puts it back
        self.journal = Journal("a", lambda: 1002.0, secrets=[SECRET])
        super().__init__(resource, self.journal)

    def recovery(self) -> None:
        self.journal.run = "run"
        why = f"rank 1 failed: --api-key abc123 {SECRET}"
        self.journal.note(Kind.WORLD, why, generation=2, cause="exit_code")
        seconds = {"detect": 0.5, "stop": 1.25, "backoff": 0.0, "step": 0.25}
        self.journal.note(Kind.RECOVERY, "training resumed after 2 s", cause="process", seconds=seconds)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_spans_of_a_recovery_are_one_trace(collector: Collector) -> None:
    sender = Sender(collector.url, RESOURCE)
    sender.start()
    sender.recovery()
    wait_for(lambda: len(collector.spans) == 4)
    sender.close()
    spans = {span.name: span for span in collector.spans}
    assert {span.trace for span in spans.values()} == {f"{trace_id('run', 2):032x}"}
    whole = spans["recovery"]
    assert whole.parent == ""
    assert {spans[name].parent for name in ("detect", "stop", "first step")} == {whole.id}
    assert (whole.began_at, whole.ended_at) == (1000 * 10**9, 1002 * 10**9)
    assert (spans["detect"].began_at, spans["detect"].ended_at) == (1000 * 10**9, 1000 * 10**9 + 5 * 10**8)
    assert (spans["stop"].began_at, spans["first step"].ended_at) == (1000 * 10**9 + 5 * 10**8, 1002 * 10**9)
    because = whole.attributes.pop("elastic_agent.because")
    assert whole.attributes == {
        "elastic_agent.run": "run",
        "elastic_agent.generation": 2,
        "elastic_agent.cause": "process",
    }
    assert str(because).startswith("rank 1 failed: --api-key ")
    assert "abc123" not in str(because)
    assert SECRET not in str(because), "what a worker printed leaves the node without secrets"
    assert whole.resource.items() >= RESOURCE.items()
    assert {path for path, _ in collector.requests} == {"/v1/traces"}


@pytest.mark.parametrize(
    ("environ", "sends"),
    [
        ({}, False),
        ({COLLECTOR: ""}, False),
        ({COLLECTOR: "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
    ],
)
def test_spans_are_sent_where_a_collector_is_named(environ: dict[str, str], sends: bool) -> None:
    assert sends_spans(environ) is sends


def test_without_the_packages_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(otel.importlib.util, "find_spec", lambda name: None)
    assert not sends_spans({COLLECTOR: "http://collector:4318"})
    assert "pip install 'elastic-agent[otel]'" in caplog.text


def test_what_waits_at_the_end_is_sent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", PATIENCE_S)
    sender = Sender(collector.url, RESOURCE)
    sender.start()
    sender.recovery()
    sender.close()
    assert len(collector.spans) == 4


def test_the_variables_of_opentelemetry_are_respected(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "rack=7")
    sender = Sender(collector.url, RESOURCE)
    sender.start()
    sender.recovery()
    wait_for(lambda: len(collector.spans) == 4)
    sender.close()
    [(path, headers)] = collector.requests
    assert (path, headers["x-token"], headers["content-encoding"]) == ("/v1/traces", "abc", "gzip")
    resource = collector.spans[0].resource
    assert (resource["service.name"], resource["rack"], resource["elastic_agent.node"]) == ("ours", "7", "a")


@pytest.mark.parametrize("collector_is", ["away", "hanging", "failing"])
def test_no_collector_holds_up_the_agent(collector_is: str) -> None:
    if collector_is == "away":
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url, stub = f"http://127.0.0.1:{bound.getsockname()[1]}", None
    else:
        stub = Collector(503, answers=collector_is != "hanging")
        url = stub.url
    sender = Sender(url, RESOURCE)
    sender.start()
    began = time.monotonic()
    for _ in range(3 * MOST_WAITING):
        sender.recovery()
    sent = time.monotonic()
    assert sent - began < 5.0, "it does not wait for the collector's 10 s"
    if stub is not None:
        wait_for(lambda: len(stub.requests) > 0)
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < CLOSE_S + 3.0
    if stub is not None:
        stub.close()


def test_a_thread_that_stands_still_holds_up_no_other() -> None:
    sender = Sender("http://127.0.0.1:9", RESOURCE)  # and is never started

    def send_and_close() -> None:
        for _ in range(2 * MOST_WAITING):
            sender.recovery()
        sender.close()

    caller = threading.Thread(target=send_and_close, daemon=True)
    caller.start()
    caller.join(PATIENCE_S)
    assert not caller.is_alive()


def test_what_the_library_raises_costs_the_spans_of_one_recovery(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failed: list[str],
) -> None:
    def raises(*_: object) -> None:
        raise ConnectionError("of a library")

    sender = Sender(collector.url, RESOURCE)
    with monkeypatch.context() as patch:
        patch.setattr(otel, "_spans", raises)
        sender.start()
        sender.recovery()
        wait_for(lambda: "the spans of this recovery are not sent" in caplog.text)
    sender.recovery()
    wait_for(lambda: len(collector.spans) == 4)
    sender.close()
    assert failed == []


def test_an_agent_that_sends_spans_can_use_etcd() -> None:
    """Whichever is loaded first."""
    script = """
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from elastic_agent.rendezvous.etcd.rpc import load
first, second = (lambda: OTLPSpanExporter("http://127.0.0.1:1"), load)[::int(__import__("sys").argv[1])]
first()
second()
"""
    for order in ("1", "-1"):
        subprocess.run([sys.executable, "-c", script, order], check=True, timeout=60)
