"""The page itself: one HTML file that loads nothing else.

Its content security policy allows only the file's own script and style, by their digests, and connections to the agent
that served it. Texts of other nodes are inserted as text, never as markup: the script does so, and the policy enforces
it (trusted types). Even injected markup could neither run nor send anything.

It asks every few seconds for the journal's events and for the state of the job: the report of `elastic-agent status`,
small enough to be sent often. A node is a row of values, so that a thousand nodes take a tenth of a megabyte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ...health.http import JSON, TEXT, Page, Request
from ...rendezvous.coordinator.exclusions import in_words, left_out
from ...rendezvous.records import Failure
from ..output.journal import EVENT, SCHEMA, Journal
from ..output.masking import masked
from .job_report import JobReport, NodeReport, as_json
from .sources import CannotShow
from .status import Checkpoint, NodeStatus
from .steps import Rates

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
"""The state of the job, as `overview` has it, with its `schema` and who answers."""
MOST_EVENTS = 500
"""The most events in one answer."""
RESTS_S = 1.0
"""The least pause between two looks."""
RESTS = 3.0
"""The least pause, in durations of the last look: looks take at most a quarter of a processor."""

_NUMBER = re.compile(r"[0-9]{1,18}")


class Board:
    """What the page asks for: the journal's events, and the state of the job, read as `elastic-agent status` does.

    It is read when it is asked for, and all pages get the same text until the next look is due. While no page is open,
    it costs nothing. For any thread.
    """

    def __init__(
        self,
        journal: Journal,
        about: dict[str, str],
        look: Callable[[], list[JobReport]],
        describe: Callable[[JobReport | None, str], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        """`about`: job, node, incarnation and version of this agent. `look` raises CannotShow. `describe`: the JSON
        document of a report, or of the reason why there is none."""
        self._journal = journal
        self._about = about
        self._read = look
        self._describe = describe
        self._clock = clock
        self._lock = threading.Lock()
        self._state = b""
        self._due_at = -math.inf

    def events(self, request: Request) -> Page:
        """`/events?since=N`: the events with a number above N, at most `MOST_EVENTS`."""
        since = request.query.get("since", "0")
        if not _NUMBER.fullmatch(since):
            text = f"since is {since[:80]!r}, expected a whole number: that of the last event that you have\n"
            return Page(HTTPStatus.BAD_REQUEST, TEXT, text.encode(errors="replace"))
        found = self._journal.since(int(since), MOST_EVENTS)
        head = json.dumps({"schema": SCHEMA, **self._about, "newest": self._journal.newest})
        body = ",".join(EVENT.encode(event) for event in found)
        return Page(HTTPStatus.OK, JSON, f'{head[:-1]}, "events": [{body}]}}'.encode())

    def state(self, _: Request) -> Page:
        """`/overview`. It may take as long as other nodes do: requests that come meanwhile get the one before."""
        if not self._lock.acquire(blocking=not self._state):
            return Page(HTTPStatus.OK, JSON, self._state)
        try:
            began_at = self._clock()
            if began_at >= self._due_at:
                self._state = json.dumps(self._look(), separators=(",", ":")).encode()
                now = self._clock()
                self._due_at = now + max(RESTS_S, RESTS * (now - began_at))
            return Page(HTTPStatus.OK, JSON, self._state)
        finally:
            self._lock.release()

    def _look(self) -> dict[str, Any]:
        """An error is shown on the page."""
        try:
            return self._describe(self._read()[0], "")
        except CannotShow as nothing:
            return self._describe(None, str(nothing))
        except Exception as error:
            log.exception("the state of the job cannot be shown")
            return self._describe(None, f"the agent could not look: {error!r}")


OVERVIEW_SCHEMA = 1

COLUMNS = (
    *("node", "first_rank", "slots", "state", "coordinates", "leaving", "workers", "step", "step_age_s"),
    *("checkpoint", "checkpoint_age_s", "lease_age_s", "lease_ttl_s", "address", "notice"),
)
"""The names of the values in a row of `nodes`."""

_JOB_KEYS = (
    *("job", "state", "generation", "phase_age_s", "world_size", "group_world_size", "result", "cause"),
    *("restarts", "step", "coordinator", "waiting_for", "complete", "notes"),
)


def overview(
    job: JobReport | None,
    problem: str,
    failure: Failure | None,
    rates: Rates,
    at: float,
    secrets: Collection[str] = (),
) -> dict[str, Any]:
    """`job` is None while the job cannot be read, which `problem` explains. `at`: the wall clock. `secrets` are masked
    in the texts of failures."""
    document: dict[str, Any] = {
        "schema": OVERVIEW_SCHEMA,
        "at": round(at, 3),
        "problem": problem,
        "rates": as_json(rates),
        "failure": _failure(failure, secrets),
        "excluded": [],
        "job": None,
    }
    if job is not None:
        document["job"] = {key: as_json(getattr(job, key)) for key in _JOB_KEYS}
        document["columns"] = COLUMNS
        document["nodes"] = [_row(node) for node in job.nodes]
        document["checkpoints"] = list(_checkpoints(job.nodes))
        document["excluded"] = list(_excluded(job, secrets))
    return document


def _row(node: NodeReport) -> list[Any]:
    status = node.status
    saved = status.checkpoint if status is not None else None
    return [
        node.node,
        node.first_rank,
        node.slots,
        node.state,
        node.coordinates,
        node.leaving,
        status.workers if status is not None else 0,
        status.step if status is not None else 0,
        _rounded(status.step_age_s if status is not None else None),
        saved.step if saved is not None else None,
        _rounded(saved.age_s if saved is not None else None),
        _rounded(status.lease_age_s if status is not None else None),
        status.lease_ttl_s if status is not None else None,
        str(node.address) if node.address is not None else "",
        status.notice if status is not None else "",
    ]


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 1) if seconds is not None else None


def _checkpoints(nodes: Iterable[NodeReport]) -> Iterable[dict[str, Any]]:
    """The newest checkpoint of each tier, its age, and how many nodes have it."""
    statuses = [node.status for node in nodes if node.status is not None]

    def of(status: NodeStatus) -> dict[str, Checkpoint | None]:
        return {"memory": status.memory, "replica": status.replica, "disk": status.checkpoint}

    for tier in ("memory", "replica", "disk"):
        known = [found for status in statuses if (found := of(status)[tier]) is not None]
        if known:
            step = max(found.step for found in known)
            newest = [found for found in known if found.step == step]
            ages = [found.age_s for found in newest if found.age_s is not None]
            yield {
                "tier": tier,
                "step": step,
                "age_s": _rounded(min(ages, default=None)),
                "nodes": len(newest),
            }


def _excluded(job: JobReport, secrets: Collection[str]) -> Iterable[dict[str, str]]:
    """The nodes that are excluded now, the newest first."""
    if job.result is None:
        for one in reversed(list(left_out(job.exclusions).values())):
            yield {"node": one.node, "text": masked(f"node {one.node} is {in_words(one)}", secrets)}


def _failure(failure: Failure | None, secrets: Collection[str]) -> dict[str, Any] | None:
    if failure is None:
        return None
    known: dict[str, Any] = {
        "generation": failure.generation,
        "summary": masked(failure.summary, secrets),
        "cause": failure.cause,
        "action": failure.action.value,
    }
    if failure.rank is not None:
        known |= {"rank": failure.rank, "node": failure.node}
    if failure.local_rank is not None:
        known |= {
            "traceback": masked(failure.traceback or "", secrets),
            "log_tail": masked("\n".join(failure.log_tail), secrets),
            "log_file": failure.log_file,
        }
    return known
