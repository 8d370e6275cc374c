"""Recoveries as OpenTelemetry spans (extra `otel`), from the events of the journal.

There is one span for the whole recovery on this node, and in it one for each phase. The nodes of a job recover at the
same time. Without asking each other they compute the same trace id, from the run and the generation in which training
resumes: the spans of all nodes for one recovery are one trace.

One thread makes the spans and waits for the collector, by OTLP/HTTP. It can neither delay nor end the agent: recoveries
that find no room are dropped, the library logs what a collector refuses, and the end of the agent waits at most CLOSE_S
for the last ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import queue
import random
from collections.abc import Mapping
from typing import Any

from ...threads import Thread
from ..output.journal import JobEvent, Journal, Kind

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long the end of the agent waits for the last spans."""
MOST_WAITING = 64
"""Recoveries that wait for the thread."""
COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"
_VARIABLES = (COLLECTOR, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def sends_spans(environ: Mapping[str, str]) -> bool:
    """OpenTelemetry's variables name a collector, and its packages are installed."""
    if not any(map(environ.get, _VARIABLES)):
        return False
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None:
            return True
    log.info("%s is set, but no spans are sent: pip install 'elastic-agent[otel]'", COLLECTOR)
    return False


def trace_id(run: str, generation: int) -> int:
    """128 bits, never 0."""
    digest = hashlib.sha256(f"{run}\0{generation}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1


class SpanSender:
    """Sends a span for each recovery of which the journal tells. `heard` is for any thread, and never waits."""

    def __init__(self, resource: Mapping[str, str], journal: Journal) -> None:
        """`resource`: the attributes of this node; OpenTelemetry's variables override them, and name the collector."""
        self._resource = resource
        self._journal = journal
        self._because = ""
        self._waiting: queue.Queue[tuple[JobEvent, Mapping[str, str | int]] | None] = queue.Queue(
            MOST_WAITING
        )
        self._thread = Thread(self._work, "spans")
        self._sends = False
        journal.listen(self.heard)

    def start(self) -> None:
        self._thread.start()

    def heard(self, event: JobEvent) -> None:
        if event.kind is Kind.WORLD:
            self._because = event.text
        if event.kind is not Kind.RECOVERY:
            return
        attributes: dict[str, str | int] = {
            "elastic_agent.run": self._journal.run,
            "elastic_agent.generation": event.generation,
            "elastic_agent.cause": event.cause,
            "elastic_agent.because": self._because,
        }
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((event, attributes))
            self._sends = True

    def close(self) -> None:
        """Waits up to CLOSE_S for the last spans."""
        with contextlib.suppress(queue.Full):  # else the thread is too far behind to reach the last spans
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_S)
            if self._sends and self._thread.is_alive():
                log.warning(
                    "the last spans are not sent: no answer within %g s; check %s", CLOSE_S, COLLECTOR
                )

    def _work(self) -> None:
        """In the thread."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource

            exporter = OTLPSpanExporter()
            resource = Resource.create(self._resource).merge(OTELResourceDetector().detect())
            for event, attributes in iter(self._waiting.get, None):
                try:
                    exporter.export(_spans(event, attributes, resource))
                except Exception as error:  # older versions raise one where no collector is
                    log.warning("the spans of this recovery are not sent: %r. The job goes on", error)
        except Exception as error:  # of a library that the job does not need
            log.warning("no spans are sent: %r. The job goes on", error)


def _spans(event: JobEvent, attributes: Mapping[str, str | int], resource: Any) -> list[Any]:
    """The whole recovery, which ended with the event, and its phases one after another; what took no time has none."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, TraceFlags

    def span(name: str, began: float, ended: float, **more: Any) -> ReadableSpan:
        trace = trace_id(str(attributes["elastic_agent.run"]), event.generation)
        context = SpanContext(trace, random.getrandbits(64) or 1, is_remote=False, trace_flags=TraceFlags(1))
        start, end = round(began * 1e9), round(ended * 1e9)
        return ReadableSpan(name, context, resource=resource, start_time=start, end_time=end, **more)

    at = event.at - sum(event.seconds.values())
    whole = span("recovery", at, event.at, attributes=attributes)
    spans = [whole]
    for phase, seconds in event.seconds.items():
        if seconds:
            name = "first step" if phase == "step" else phase
            spans.append(span(name, at, at + seconds, parent=whole.context))
            at += seconds
    return spans
