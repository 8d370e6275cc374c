"""A metadata server for agents in a network namespace: `metadata_server.py ADDRESS FILE`. Not a test.

FILE is a JSON object: for each path the text that is answered. All other paths are not there. PUT gets a token.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    pages: Path

    def do_GET(self) -> None:
        text = json.loads(self.pages.read_text()).get(self.path)
        self._send(404 if text is None else 200, text or "")

    def do_PUT(self) -> None:
        self._send(200, "token")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    Handler.pages = Path(sys.argv[2])
    ThreadingHTTPServer((sys.argv[1], 80), Handler).serve_forever()
