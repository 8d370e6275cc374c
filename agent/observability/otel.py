"""The spans of a recovery: one for the whole recovery on this node, and in it one for each phase.

The nodes of a job recover at the same time. Without asking each other they compute the same trace id, from the run and
the generation in which training goes on. So the spans of all nodes for one recovery are one trace.

Sends the spans of recoveries to a collector, over OTLP/HTTP, by OpenTelemetry's SDK (extra `otel`).

One thread imports, sets up and calls the SDK, whose own thread sends. Neither can delay or end the agent: spans that
find no room are dropped, errors are logged once, and the end of the agent waits at most CLOSE_S for the last spans.
"""

from __future__ import annotations

import hashlib
import logging
import queue
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...threads import Thread
from ..output.masking import masked
from .goodput import Activity
from .training_account import Recovered

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_NAMES = {Activity.FIRST_STEP: "first step"}
"""The phases whose spans have another name than in the metrics."""


@dataclass(frozen=True, slots=True)
class RecoverySpans:
    """The spans of one recovery. Instants are seconds since the epoch."""

    trace_id: int
    spans: tuple[Span, ...]
    """The first is the whole recovery; the others are parts of it."""
    attributes: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    began_at: float
    ended_at: float


def trace_id(run: str, generation: int) -> int:
    """128 bits, never 0."""
    digest = hashlib.sha256(f"{run}\0{generation}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1


def spans_of(recovered: Recovered, epoch: float, secrets: Collection[str]) -> RecoverySpans | None:
    """`epoch`: the wall clock's time when the monotonic clock was 0. `secrets` are masked in texts that a worker may
    have printed: they must not leave this node. None: the recovery took no time."""
    recovery = recovered.recovery
    if not recovery.stages:
        return None
    ended_at = recovery.stages[-1].ended_at
    whole = Span("recovery", epoch + ended_at - recovery.duration_s, epoch + ended_at)
    phases = (
        Span(_NAMES.get(stage.phase, stage.phase.value), epoch + stage.began_at, epoch + stage.ended_at)
        for stage in recovery.stages
    )
    attributes: dict[str, str | int] = {
        "elastic_agent.run": recovered.run,
        "elastic_agent.generation": recovered.generation,
        "elastic_agent.cause": recovered.cause,
    }
    if recovered.because:
        attributes["elastic_agent.because"] = masked(recovered.because, secrets)
    return RecoverySpans(trace_id(recovered.run, recovered.generation), (whole, *phases), attributes)


log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long the end of the agent waits for the last spans."""
MOST_WAITING = 64
"""Recoveries that wait for the thread."""

_OF_LIBRARIES = ("opentelemetry", "requests", "urllib3")


class SpanSender:
    """`send` is for any thread, and never waits."""

    def __init__(self, endpoint: str | None, resource: Mapping[str, str]) -> None:
        """`endpoint`: the collector's URL without /v1/traces; None: from OpenTelemetry's variables. `resource`: the
        attributes of this node; OpenTelemetry's variables override them."""
        self._endpoint = endpoint
        self._resource = resource
        self._waiting: queue.Queue[RecoverySpans | None] = queue.Queue(MOST_WAITING)
        self._thread = Thread(self._work, "spans")
        self._sends = False

    def start(self) -> None:
        self._thread.start()

    def send(self, spans: RecoverySpans) -> None:
        self._sends = True
        try:
            self._waiting.put_nowait(spans)
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
            log.warning("the last spans are not sent: no answer within %g s; check --otlp-endpoint", CLOSE_S)

    # Everything below runs in the thread.

    def _work(self) -> None:
        try:
            tracing = _Tracing(self._endpoint, self._resource)
            while (spans := self._waiting.get()) is not None:
                tracing.record(spans)
            tracing.end()
        except Exception as error:  # of a library that the job does not need
            log.warning("no spans are sent: %r. The job goes on", error)


class _Tracing:
    """The SDK, set up for one collector."""

    def __init__(self, endpoint: str | None, resource: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            trace_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

        heard = _LastWords()
        for name in _OF_LIBRARIES:  # they log each attempt, and ours once
            logging.getLogger(name).addHandler(heard)
        self._ids = Ids()
        exporter = OTLPSpanExporter(None if endpoint is None else f"{endpoint}/v1/traces")
        self._provider = TracerProvider(
            resource=Resource.create(resource).merge(OTELResourceDetector().detect()),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_told_once(exporter, heard)))
        self._tracer = self._provider.get_tracer("elastic_agent")

    def record(self, spans: RecoverySpans) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        self._ids.trace_id = spans.trace_id
        first, *parts = spans.spans
        whole = self._tracer.start_span(
            first.name, Context(), start_time=_ns(first.began_at), attributes=spans.attributes
        )
        inside = set_span_in_context(whole, Context())
        for part in parts:
            self._tracer.start_span(part.name, inside, start_time=_ns(part.began_at)).end(_ns(part.ended_at))
        whole.end(_ns(first.ended_at))

    def end(self) -> None:
        """Sends the spans that wait, for as long as the SDK tries."""
        self._provider.shutdown()


def _ns(at: float) -> int:
    return round(at * 1e9)


class _LastWords(logging.Handler):
    """Keeps a library's last log line, which says why it failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _told_once(exporter: SpanExporter, heard: _LastWords) -> SpanExporter:
    """The exporter with one log line when it begins to fail, and one when it works again. It raises nothing: an error
    in any thread ends the agent."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class ToldOnce(SpanExporter):
        failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:
                return self._failed(repr(error))
            if result is not SpanExportResult.SUCCESS:
                return self._failed(heard.text)
            if self.failing:
                self.failing = False
                log.info("spans are sent again")
            return result

        def _failed(self, why: str) -> SpanExportResult:
            if not self.failing:
                self.failing = True
                log.warning("spans are not sent: %.300s. The job goes on; check --otlp-endpoint", why)
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            exporter.shutdown()

    return ToldOnce()
