"""The page itself: one HTML file that loads nothing else.

Its content security policy allows only the file's own script and style, by their digests, and connections to the agent
that served it. Texts of other nodes are inserted as text, never as markup: the script does so, and the policy enforces
it (trusted types). Even injected markup could neither run nor send anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from http import HTTPStatus
from pathlib import Path

from ....health.http_messages import Page

PAGE_PATH = "/"
FILE = Path(__file__).with_name("page.html")
_PART = {name: re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("script", "style")}


def policy(html: str) -> str:
    """The content security policy of this page."""

    def digests(name: str) -> str:
        parts = (hashlib.sha256(part.encode()).digest() for part in _PART[name].findall(html))
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in parts)

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {digests('script')}",
            f"style-src {digests('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def read_page() -> Page:
    html = FILE.read_text(encoding="utf-8")
    headers = (
        f"Content-Security-Policy: {policy(html)}",
        "X-Content-Type-Options: nosniff",
        "Referrer-Policy: no-referrer",
        "Cache-Control: no-store",
    )
    return Page(HTTPStatus.OK, "text/html; charset=utf-8", html.encode(), headers)
