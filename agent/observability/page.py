"""The page itself: one HTML file that loads nothing else.

Its content security policy allows only the file's own script and style, by their digests, and connections to the agent
that served it. Texts of other nodes are inserted as text, never as markup: the script does so, and the policy enforces
it (trusted types). Even injected markup could neither run nor send anything.

Feeds the pages that are open: the journal's events as they come, and the state of the job.

While a page is open, a thread reads the state as `elastic-agent status` does, at most every 2 s, after an event every
0.3 s; it rests nine times (after an event three times) as long as a look takes. While no page is open, it costs
nothing. All pages get the same text.

The state of a job for the page: the report of `elastic-agent status`, small enough to be sent often.

A pure function. A node is a row of values, so that a thousand nodes take a tenth of a megabyte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ...health.http import JSON, TEXT, Page, Request
from ...rendezvous.coordinator.exclusions import in_words, left_out
from ...rendezvous.records import Failure
from ...threads import Thread
from ..output.events import EVENT, SCHEMA, JobEvent
from ..output.journal import Journal
from ..output.masking import masked
from .job_report import JobReport, NodeReport, as_json
from .sources import CannotShow
from .status import Checkpoint, NodeStatus, worker_of
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
        f"Content-Security-Policy: {policy(html)}",
        "X-Content-Type-Options: nosniff",
        "Referrer-Policy: no-referrer",
        "Cache-Control: no-store",
    )
    return Page(HTTPStatus.OK, "text/html; charset=utf-8", html.encode(), headers)


log = logging.getLogger(__name__)

STREAM_PATH = "/events/stream"

MOST_EVENTS = 500
"""The most events in one answer, and at the begin of a stream."""
MOST_ROUTINE = 50
"""The most events of `ROUTINE` kinds at the begin of a stream."""
RESTS_S = 2.0
"""The least pause between two looks without a new event."""
HURRIES_S = 0.3
"""The least pause before a look for a new event."""
RESTS = 9.0
"""The least pause, in durations of the last look; before a look for a new event a third of that: the thread takes at
most a tenth of a processor, a quarter while events come."""


_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Source:
    """How the state is read and written."""

    look: Callable[[], list[JobReport]]
    """Raises CannotShow."""
    describe: Callable[[JobReport | None, str], dict[str, Any]]
    """The JSON document of a report, or of the reason why there is none."""


class Board:
    def __init__(
        self, journal: Journal, about: dict[str, str], source: Source, clock: Callable[[], float]
    ) -> None:
        """`about`: job, node, incarnation and version of this agent."""
        self.journal = journal
        self.about = about
        self._source = source
        self._clock = clock
        self._changed = threading.Condition()
        self._watchers = 0
        self._closing = False
        self._thread = Thread(self._serve, "page")
        self._hurry = False
        self.state = ""
        """The newest state, as JSON."""
        self.looks = 0
        """How often the state was read."""
        self.wake: Callable[[], None] = lambda: None
        """Called after each new state or event."""
        journal.listen(self._noted)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The thread ends after its present look."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def events(self, request: Request) -> Page:
        """`/events?since=N`: the events with a number above N, at most `MOST_EVENTS`."""
        since = request.query.get("since", "0")
        if not _NUMBER.fullmatch(since):
            text = f"since is {since[:80]!r}, expected a whole number: that of the last event that you have\n"
            return Page(HTTPStatus.BAD_REQUEST, TEXT, text.encode(errors="replace"))
        found = self.journal.since(int(since), MOST_EVENTS)
        head = json.dumps({"schema": SCHEMA, **self.about, "newest": self.journal.newest})
        body = ",".join(EVENT.encode(event) for event in found)
        return Page(HTTPStatus.OK, JSON, f'{head[:-1]}, "events": [{body}]}}'.encode())

    def begin(self, request: Request) -> EventStream:
        """`/events/stream`: the events after the client's last one; for a new client the newest few hundred."""
        with self._changed:
            if not self._watchers:
                self.state, self._hurry = "", True  # the last state may be old
            self._watchers += 1
            self._changed.notify_all()
        life, _, number = request.last_event.rpartition(":")
        known = life == self.about["incarnation"] and _NUMBER.fullmatch(number)
        return EventStream(self, int(number) if known else None)

    def leave(self) -> None:
        """A stream has ended."""
        with self._changed:
            self._watchers -= 1
            self._changed.notify_all()

    def _noted(self, _: JobEvent) -> None:
        if self._watchers:
            with self._changed:
                self._hurry = True
                self._changed.notify_all()
        self.wake()

    # In the thread.

    def _serve(self) -> None:
        """Read the state again and again while a page is open."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watchers or self._closing)
                if self._closing:
                    return
                self._hurry = False
            began_at = self._clock()
            self.state = json.dumps(self._look(), separators=(",", ":"))
            self.looks += 1
            self.wake()
            took_s = self._clock() - began_at
            hurries_s, rests_s = max(HURRIES_S, RESTS / 3 * took_s), max(RESTS_S, RESTS * took_s)
            with self._changed:
                self._changed.wait_for(self._unwatched, hurries_s)
                self._changed.wait_for(lambda: self._hurry or self._unwatched(), rests_s - hurries_s)

    def _unwatched(self) -> bool:
        return self._closing or not self._watchers

    def _look(self) -> dict[str, Any]:
        """The state as a document. An error is shown on the page, and does not end the agent."""
        try:
            return self._source.describe(self._source.look()[0], "")
        except CannotShow as nothing:
            return self._source.describe(None, str(nothing))
        except Exception as error:
            log.exception("the state of the job cannot be shown")
            return self._source.describe(None, f"the agent could not look: {error!r}")


class EventStream:
    """One page's events and states; a `health.http.Stream`."""

    def __init__(self, board: Board, number: int | None) -> None:
        """`number`: of the last event that the client has; None: a new client."""
        self._board = board
        self._number = number
        self._looks = -1
        self._greeting = _event("hello", json.dumps({"schema": SCHEMA, **board.about}))

    def next(self) -> bytes:
        board = self._board
        parts, self._greeting = [self._greeting], ""
        life = board.about["incarnation"]
        if self._number is None:
            events = board.journal.newest_of(MOST_EVENTS, MOST_ROUTINE)
            self._number = 0
        else:
            events = board.journal.since(self._number, MOST_EVENTS)
        for event in events:
            self._number = event.number
            parts.append(_event("job", EVENT.encode(event), f"{life}:{event.number}"))
        if board.looks != self._looks and board.state:
            self._looks = board.looks
            parts.append(_event("state", board.state))
        return "".join(parts).encode(errors="replace")

    def close(self) -> None:
        self._board.leave()


def _event(kind: str, data: str, number: str = "") -> str:
    """One server-sent event. `data` is JSON, which has no line breaks."""
    return f"{f'id: {number}' + chr(10) if number else ''}event: {kind}\ndata: {data}\n\n"


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
        _rounded(status.step_s if status is not None else None),
        saved.step if saved is not None else None,
        _rounded(saved.age_s if saved is not None else None),
        _rounded(status.lease_s if status is not None else None),
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
    worker = worker_of(failure)
    known: dict[str, Any] = {
        "generation": failure.generation,
        "summary": masked(failure.summary, secrets),
        "cause": failure.cause,
        "action": failure.action.value,
    }
    if failure.rank is not None:
        known |= {"rank": failure.rank, "node": failure.node}
    if worker is not None:
        known |= {
            "summary": masked(worker.summary, secrets),
            "traceback": masked(worker.traceback or "", secrets),
            "log_tail": masked("\n".join(worker.log_tail), secrets),
            "log_file": worker.log_file,
        }
    return known
