"""The thread that polls the source of notices, and posts an event for each one that is new, moved or withdrawn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from ....threads import Thread
from ...common.events import Event
from .notice import RETRY_S, BadResponse, Hint, Notice, Source, SourceUnreachable

log = logging.getLogger(__name__)

MIN_LEFT_S = 2.0
"""An instant that has passed, or is about to, is the source's mistake or its clock's: this machine still lives."""

MAX_DIFFERENCE_S = 1.0
"""Two notices whose instants differ by no more are one."""


class NoticeWatch:
    """Polls from `start` to `close`. `clock` is monotonic, `wall_clock` counts as the source's instants do."""

    def __init__(
        self,
        source: Source,
        noticed: Callable[[str | None, float | None], object],
        post: Callable[[Event], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        expected: bool,
    ) -> None:
        """`noticed` is called in the main loop: with the text, which says who says so, and the deadline, which is None
        where no instant is known; with None and None when the notice is withdrawn.

        `expected`: the user has named the source, and reads in the log that it gives no answer.
        """
        self._source = source
        self._noticed = noticed
        self._post = post
        self._clock = clock
        self._wall_clock = wall_clock
        self._expected = expected
        self._known: Notice | None = None
        self._trouble = self._hint = ""
        """What the log has already of each."""
        self._closed = threading.Event()
        self._thread = Thread(self._work, "notices")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self.turn()):
            pass

    def turn(self) -> float:
        """Poll once. Returns the seconds until the next poll. No defect of the source ends the training."""
        try:
            news = self._source.poll()
        except SourceUnreachable as error:
            self._warn(error, logging.WARNING if self._expected else logging.DEBUG)
            return error.again_s
        except BadResponse as error:
            self._warn(error, logging.WARNING)
            return self._source.interval_s
        except Exception as error:
            self._warn(error, logging.WARNING, defect=True)
            return RETRY_S
        self._trouble = ""
        hint = news.text if isinstance(news, Hint) else ""
        if hint != self._hint:
            log.warning("%s", hint or f"no longer: {self._hint}")
        self._hint = hint
        self._see(news if isinstance(news, Notice) else None)
        return self._source.interval_s

    def _see(self, notice: Notice | None) -> None:
        known, self._known = self._known, notice
        if notice is None:
            if known is not None:
                self._post(partial(self._noticed, None, None))
        elif known is None or not _same(known, notice):
            left_s = notice.ends_at - self._wall_clock() if notice.ends_at is not None else notice.within_s
            deadline = self._clock() + max(MIN_LEFT_S, left_s) if left_s is not None else None
            self._post(partial(self._noticed, notice.text, deadline))

    def _warn(self, error: Exception, level: int, *, defect: bool = False) -> None:
        """Once for all troubles of a kind in a row."""
        kind = type(error).__name__
        if kind != self._trouble:
            self._trouble = kind
            why = repr(error) if defect else error
            log.log(level, "a notice that this machine goes away would not be seen: %s", why, exc_info=defect)


def _same(one: Notice, other: Notice) -> bool:
    if one.ends_at is None or other.ends_at is None:
        return one == other
    return abs(one.ends_at - other.ends_at) <= MAX_DIFFERENCE_S
