"""The phases of a recovery at a collector (OTEL_EXPORTER_OTLP_ENDPOINT): what two nodes did for it is one trace."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'elastic-agent[otel]'")

from elastic_agent.agent.observability.otel import CLOSE_S, COLLECTOR
from tests.collector import Collector, Sent

from .harness import RECORDER, Job

FLOAT_NS = 1000
"""Finer than this a float of seconds since the epoch is not."""
EVENT_NS = 10**6
"""An event has its instant in milliseconds."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_the_phases_of_one_recovery_are_one_trace_of_all_nodes(job: Job, collector: Collector) -> None:
    options = ("--nnodes=2",)
    script = (RECORDER, f"--checkpoint={job.folder / 'steps'}")
    for name in ("a", "b"):
        job.join(name, *options, script=script, environment={COLLECTOR: collector.url})
    old = job.wait_for_training(world=2)
    before, killed = time.time(), old.pid(1)
    os.kill(killed, signal.SIGKILL)
    job.wait_for_training(world=2, after=old.number)
    job.wait_for(lambda: len(wholes(collector)) == 2, "the spans of both nodes")
    after = time.time()
    assert {span.resource["elastic_agent.node"] for span in wholes(collector)} == {"a", "b"}
    assert len({span.trace for span in collector.spans}) == 1
    for whole in wholes(collector):
        assert whole.resource["elastic_agent.job"] == "default"
        assert whole.attributes["elastic_agent.cause"] == "process"
        assert whole.attributes["elastic_agent.generation"] == old.number + 1
        parts = sorted((s for s in collector.spans if s.parent == whole.id), key=lambda s: s.began_at)
        names = [part.name for part in parts]
        assert names[-3:] == ["rendezvous", "start", "init"]
        assert set(names[:-3]) <= {"detect", "stop"}, "either may take no time that a clock shows"
        assert before * 1e9 - EVENT_NS <= whole.began_at < whole.ended_at <= after * 1e9 + EVENT_NS
        ends = parts[0].began_at, parts[-1].ended_at
        assert ends == pytest.approx((whole.began_at, whole.ended_at), abs=FLOAT_NS)
        for part, following in itertools.pairwise(parts):
            assert part.ended_at == pytest.approx(following.began_at, abs=FLOAT_NS), "no gap and no overlap"


def wholes(collector: Collector) -> list[Sent]:
    return [span for span in collector.spans if span.name == "recovery"]


def test_a_collector_that_hangs_does_not_hold_up_the_end(job: Job) -> None:
    collector = Collector(answers=False)
    agent = job.start(
        "a",
        script=(RECORDER, "--report"),
        environment={COLLECTOR: collector.url},
    )
    old = job.wait_for_training(world=1)
    killed = old.pid(0)
    os.kill(killed, signal.SIGKILL)
    job.wait_for_training(world=1, after=old.number)
    job.wait_for(lambda: collector.requests, "the agent to wait for the collector")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code(within_s=CLOSE_S + 30.0) == 143
    collector.close()
    assert agent.says("the last spans are not sent: no answer within 2 s; check OTEL_EXPORTER_OTLP_ENDPOINT")
