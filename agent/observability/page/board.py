"""What a page is sent while somebody looks at it: the journal's events as they come, and the state of the job.

The state is looked at as `elastic-agent status` does it, by a thread of its own, while there is a stream: where nobody
watches, it costs nothing. The thread rests nine times as long as a look takes. All streams send the same text of it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ....health.http_messages import JSON, TEXT, Page, Request
from ....threads import Thread
from ..journal.events import EVENT, SCHEMA
from ..journal.journal import Journal
from ..status.report import JobReport
from ..status.sources import CannotShow

log = logging.getLogger(__name__)

STREAM_PATH = "/events/stream"

MOST_EVENTS = 500
"""In one answer, and when a stream begins."""
MOST_ROUTINE = 50
"""Of the latter."""
RESTS_S = 2.0
HURRIES_S = 0.3
"""A look that an event asks for is at least so long after the one before."""
RESTS = 9.0
"""Times the last look, at least: so the thread takes a tenth of a processor at most."""


_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the state comes from."""

    look: Callable[[], list[JobReport]]
    """Raises CannotShow."""
    describe: Callable[[JobReport | None, str], dict[str, Any]]
    """The document, of a report or of why there is none."""


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
        """The newest, as text."""
        self.looks = 0
        """How often it was made."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is another state."""
        journal.listen(self._noted)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The thread ends when it has looked."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def events(self, request: Request) -> Page:
        """`/events?since=N`: those with a higher number than N, at most `MOST_EVENTS` of them."""
        since = request.query.get("since", "0")
        if not _NUMBER.fullmatch(since):
            text = f"since is {since[:80]!r}, expected a whole number: that of the last event that you have\n"
            return Page(HTTPStatus.BAD_REQUEST, TEXT, text.encode(errors="replace"))
        found = self.journal.since(int(since), MOST_EVENTS)
        head = json.dumps({"schema": SCHEMA, **self.about, "newest": self.journal.newest})
        body = ",".join(EVENT.encode(event) for event in found)
        return Page(HTTPStatus.OK, JSON, f'{head[:-1]}, "events": [{body}]}}'.encode())

    def begin(self, request: Request) -> EventStream:
        """`/events/stream`: from the last event that the client has, or the newest few hundred."""
        with self._changed:
            if not self._watchers:
                self.state, self._hurry = "", True  # what was looked at for others before is old
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

    def _noted(self) -> None:
        if self._watchers:
            with self._changed:
                self._hurry = True
                self._changed.notify_all()
        self.wake()

    # In the thread.

    def _serve(self) -> None:
        """Looks while somebody watches."""
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
        """What fails here is shown, and ends no agent."""
        try:
            return self._source.describe(self._source.look()[0], "")
        except CannotShow as nothing:
            return self._source.describe(None, str(nothing))
        except Exception as error:
            log.exception("the state of the job cannot be shown")
            return self._source.describe(None, f"the agent could not look: {error!r}")


class EventStream:
    """As `health.http.Stream`."""

    def __init__(self, board: Board, number: int | None) -> None:
        """`number`: of the last event that the client has; None: it has none."""
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
    """JSON has no line breaks of its own."""
    return f"{f'id: {number}' + chr(10) if number else ''}event: {kind}\ndata: {data}\n\n"
