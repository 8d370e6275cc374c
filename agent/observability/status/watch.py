"""Reads the state of a job again and again."""

from __future__ import annotations

from collections.abc import Callable

from .report import JobReport, report
from .sources import AT_ONCE, Source, Unreachable, ask_nodes


class Watch:
    """Asks a source for the job and its nodes for their states, and remembers since when a node has not answered."""

    def __init__(
        self, source: Source, timeout_s: float, clock: Callable[[], float], at_once: int = AT_ONCE
    ) -> None:
        """`at_once`: how many threads ask nodes."""
        self._source = source
        self._timeout_s = timeout_s
        self._clock = clock
        self._at_once = at_once
        self.silent: tuple[str, ...] = ()
        """Which agents gave the source no answer at the last look, in words."""
        self._silent_since: dict[str, float] = {}

    def look(self) -> list[JobReport]:
        """Raises CannotShow."""
        jobs = [
            (found, ask_nodes(found.job, self._timeout_s, self._at_once)) for found in self._source.jobs()
        ]
        self.silent = self._source.silent
        now = self._clock()
        silent = {
            incarnation
            for _, answers in jobs
            for incarnation, answer in answers.items()
            if isinstance(answer, Unreachable)
        }
        self._silent_since = {one: self._silent_since.get(one, now) for one in silent}
        silent_for = {one: now - since for one, since in self._silent_since.items() if since < now}
        return [report(found, answers, silent_for) for found, answers in jobs]
