"""Recoveries as OpenTelemetry spans (extra `otel`), from the events of the journal.

There is one span for the whole recovery on this node, and in it one for each phase. The nodes of a job recover at the
same time. Without asking each other they compute the same trace id, from the run and the generation in which training
resumes: the spans of all nodes for one recovery are one trace.

One thread makes the spans and waits for the collector, by OTLP/HTTP. It can neither delay nor end the agent: recoveries
that find no room are dropped, errors are logged once, and the end of the agent waits at most CLOSE_S for the last ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
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
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OURS = "http/protobuf"
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_OF_LIBRARIES = ("opentelemetry", "requests", "urllib3")


def sends_spans(environ: Mapping[str, str]) -> bool:
    """OpenTelemetry's variables name a collector, one for OTLP/HTTP, and its packages are installed."""
    named = [name for name in _VARIABLES if environ.get(name)]
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    protocol = next(filter(None, (environ.get(name, "").strip().lower() for name in _PROTOCOLS)), _OURS)
    if named and protocol != _OURS:
        log.info("no spans are sent: %s names %s, and they go by %s alone", _PROTOCOLS[1], protocol, _OURS)
        return False
    installed = bool(named) and all(map(_is_installed, _PACKAGES))
    if named and not installed:
        log.info("%s is set, but no spans are sent: pip install 'elastic-agent[otel]'", named[0])
    return installed


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
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
        self._sends = self._failing = self._given_up = False
        self._exporter: Any = None
        journal.listen(self.heard)

    def start(self) -> None:
        self._thread.start()

    def heard(self, event: JobEvent) -> None:
        if event.kind is Kind.WORLD:
            self._because = event.text
        if event.kind is not Kind.RECOVERY or not any(event.seconds.values()):
            return
        self._sends = True
        attributes: dict[str, str | int] = {
            "elastic_agent.run": self._journal.run,
            "elastic_agent.generation": event.generation,
            "elastic_agent.cause": event.cause,
            "elastic_agent.because": self._because,
        }
        try:
            self._waiting.put_nowait((event, attributes))
        except queue.Full:
            log.warning("the spans of a recovery are not sent: those of %d wait already", MOST_WAITING)

    def close(self) -> None:
        """Waits up to CLOSE_S for the last spans."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            pass  # the thread is too far behind to reach the last spans
        else:
            self._thread.join(CLOSE_S)
        if self._sends and self._thread.is_alive():
            log.warning("the last spans are not sent: no answer within %g s; check %s", CLOSE_S, COLLECTOR)
            self._given_up = True
            if self._exporter is not None:
                self._exporter.shutdown()  # else it tries again for minutes

    # Everything below runs in the thread.

    def _work(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource

            heard = _LastWords()
            for name in _OF_LIBRARIES:  # they log each attempt, and this module once
                logging.getLogger(name).addHandler(heard)
            exporter: Any = OTLPSpanExporter()
            self._exporter = exporter
            resource = Resource.create(self._resource).merge(OTELResourceDetector().detect())
            while not self._given_up and (recovery := self._waiting.get()) is not None:
                self._export(exporter, _spans(*recovery, resource), heard)
            if not self._given_up:
                exporter.shutdown()
        except Exception as error:  # of a library that the job does not need
            log.warning("no spans are sent: %r. The job goes on", error)

    def _export(self, exporter: Any, spans: list[Any], heard: _LastWords) -> None:
        """Log when it begins to fail, and when it works again."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return
        try:
            why = (
                ""
                if exporter.export(spans) is SpanExportResult.SUCCESS
                else heard.text or "no reason is known"
            )
        except Exception as error:
            why = repr(error)
        if why and not self._failing:
            log.warning("spans are not sent: %.300s. The job goes on; check %s", why, COLLECTOR)
        elif self._failing and not why:
            log.info("spans are sent again")
        self._failing = bool(why)


def _spans(event: JobEvent, attributes: Mapping[str, str | int], resource: Any) -> list[Any]:
    """The whole recovery, which ended with the event, and its phases one after another; what took no time has none."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, TraceFlags

    def context() -> SpanContext:
        trace = trace_id(str(attributes["elastic_agent.run"]), event.generation)
        return SpanContext(trace, random.getrandbits(64) or 1, is_remote=False, trace_flags=TraceFlags(1))

    def span(name: str, began: float, ended: float, **more: Any) -> ReadableSpan:
        return ReadableSpan(name, resource=resource, start_time=_ns(began), end_time=_ns(ended), **more)

    whole, at = context(), event.at - sum(event.seconds.values())
    spans = [span("recovery", at, event.at, context=whole, attributes=attributes)]
    for phase, seconds in event.seconds.items():
        if seconds:
            name = "first step" if phase == "step" else phase
            spans.append(span(name, at, at + seconds, context=context(), parent=whole))
            at += seconds
    return spans


def _ns(at: float) -> int:
    return round(at * 1e9)


class _LastWords(logging.Handler):
    """Keeps a library's last log line, which says why it failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
