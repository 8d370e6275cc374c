"""Answers as a cloud's metadata server does. Not a test.

As a program, for the agents of a network namespace: `metadata_server.py ADDRESS FILE` serves port 80. FILE is a JSON
object, which is read for each request: for each path the text that is answered. All other paths are not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from elastic_agent.agent.machine.notices import TOKEN_PATH

GOOGLES = "Metadata-Flavor"


class FakeMetadataServer(ThreadingHTTPServer):
    """Refuses requests without the cloud's header; without one to ask for it is the server of every cloud."""

    def __init__(
        self,
        address: tuple[str, int],
        pages: Callable[[], Mapping[str, str]],
        *,
        header: tuple[str, str] | None = None,
        token: str = "",
    ) -> None:
        """`token` is what PUT answers, for EC2's second version; without one PUT is refused."""
        super().__init__(address, Handler)
        self.pages = pages
        self.header = header
        self.token = token
        self.refused = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeMetadataServer

    def do_PUT(self) -> None:
        token = self.server.token
        fits = token and self.path == TOKEN_PATH and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._send(200 if fits else 403, token if fits else "")

    def do_GET(self) -> None:
        name, value = self.server.header or ("", None)
        if self.headers[name] != value or "X-Forwarded-For" in self.headers:
            self.server.refused += 1
            self._send(401 if self.server.token else 403, "")
        else:
            text = self.server.pages().get(self.path)
            self._send(404 if text is None else 200, "<html>" if text is None else text)

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        if self.server.header is None or self.server.header[0] == GOOGLES:
            self.send_header(GOOGLES, "Google")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    host, file = sys.argv[1], Path(sys.argv[2])
    FakeMetadataServer((host, 80), lambda: json.loads(file.read_text()), token="token").serve_forever()
