"""A collector of OpenTelemetry on this machine: it decodes what it is sent, answers as a test says, or not at all."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Sent:
    """One span, as it came. Instants are nanoseconds since the epoch."""

    trace: str
    id: str
    parent: str
    name: str
    began_at: int
    ended_at: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """Listens from its beginning to `close`."""

    def __init__(self, status: int = 200, *, answers: bool = True) -> None:
        """`answers`: False keeps every request waiting until `close`."""
        self.status = status
        self.spans: list[Sent] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Path and headers of each."""
        self._closed = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                if not answers:
                    collector._closed.wait()
                    return
                if collector.status == 200:
                    collector.spans += decoded(body)
                self.send_response(collector.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def decoded(body: bytes) -> list[Sent]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Sent(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _plain(span.attributes),
            _plain(group.resource.attributes),
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
