"""The page itself: one HTML file that loads nothing else.

Its content security policy allows only the file's own script and style, by their digests, and connections to the agent
that served it. Texts of other nodes are inserted as text, never as markup: the script does so, and the policy enforces
it (trusted types). Even injected markup could neither run nor send anything.

It asks every few seconds for the journal's events and for the state of the job: the report of `elastic-agent status`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ...health.http import JSON, TEXT, Page, PageRequest
from ..common.exits import CannotDo
from ..output.journal import EVENT, SCHEMA, Journal
from ..output.masking import masked
from .job_report import JobReport, as_json, look
from .sources import JobSource
from .status import NodeState

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
        ("Content-Security-Policy", policy(html)),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-store"),
    )
    return Page(HTTPStatus.OK, "text/html; charset=utf-8", html.encode(), headers)


log = logging.getLogger(__name__)

OVERVIEW_PATH = "/overview"
OVERVIEW_SCHEMA = 3
LOOKS_WITHIN_S = 2.0
"""How long other nodes may take to answer for the page."""
ASKS_AT_ONCE = 16
MOST_EVENTS = 500
"""The most events in one answer."""

_NUMBER = re.compile(r"[0-9]{1,18}")


class Board:
    """What the page asks for: the journal's events, and the state of the job, read as `elastic-agent status` does.

    It is read when it is asked for: while no page is open, it costs nothing. For any thread.
    """

    def __init__(self, journal: Journal, about: dict[str, str], node: NodeState, source: JobSource) -> None:
        """`about`: job, node, incarnation and version of this agent."""
        self._journal = journal
        self._about = about
        self._node = node
        self._source = source

    def events(self, request: PageRequest) -> Page:
        """`/events?since=N`: the events with a number above N, at most `MOST_EVENTS`."""
        since = request.query.get("since", "0")
        if not _NUMBER.fullmatch(since):
            text = f"since is {since[:80]!r}, expected a whole number: that of the last event that you have\n"
            return Page(HTTPStatus.BAD_REQUEST, TEXT, text.encode(errors="replace"))
        found = self._journal.since(int(since), MOST_EVENTS)
        head = json.dumps({"schema": SCHEMA, **self._about, "newest": self._journal.newest})
        body = ",".join(EVENT.encode(event) for event in found)
        return Page(HTTPStatus.OK, JSON, f'{head[:-1]}, "events": [{body}]}}'.encode())

    def overview(self, _: PageRequest) -> Page:
        """`/overview`: the state of the job, and what this node has of it alone. It may take as long as other nodes
        do."""
        job, problem = self.look()
        document = {
            "schema": OVERVIEW_SCHEMA,
            "at": round(self._node.wall_clock(), 3),
            "problem": problem,
            "rates": self._node.rate.read(self._node.clock()),
            "failure": self._failure(),
            "job": as_json(job),
        }
        return Page(HTTPStatus.OK, JSON, json.dumps(document, separators=(",", ":")).encode())

    def look(self) -> tuple[JobReport | None, str]:
        """The job, or why it cannot be seen, which is shown on the page."""
        try:
            return look(self._source, LOOKS_WITHIN_S, ASKS_AT_ONCE)[0], ""
        except CannotDo as nothing:
            return None, str(nothing)
        except Exception as error:
            log.exception("the state of the job cannot be shown")
            return None, f"the agent could not look: {error!r}"

    def _failure(self) -> dict[str, Any] | None:
        failure, secrets = self._node.failure, self._node.secrets
        if failure is None:
            return None
        return {
            "generation": failure.generation,
            "summary": masked(failure.summary, secrets),
            "cause": failure.cause,
            "rank": failure.rank,
            "node": failure.node,
            "traceback": masked(failure.traceback or "", secrets),
            "log_tail": masked("\n".join(failure.log_tail), secrets),
            "log_file": failure.log_file,
        }
