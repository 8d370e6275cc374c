"""Runs this node's checks beside other work, one run at a time: a thread waits for each, and logs what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ....threads import Thread
from ..finding import Finding, Outcome, worst_first
from .runner import CheckRun

log = logging.getLogger(__name__)


class BackgroundChecks:
    """For the main thread. `post` takes the findings of each run, in any thread."""

    def __init__(
        self,
        new_run: Callable[[], CheckRun],
        post: Callable[[tuple[Finding, ...]], object],
        *,
        errors: bool,
    ) -> None:
        """`new_run` is called in the main thread, its result is used in another one. `errors`: what fails is logged as
        an error, not as a warning."""
        self._new_run, self._post, self._errors = new_run, post, errors
        self._runs: list[CheckRun] = []
        """Those whose process may still be there: a probe that hangs in the kernel stays its child."""
        self._running = False
        self._closed = False
        self._logged: frozenset[tuple[str, Outcome]] = frozenset()

    @property
    def pids(self) -> Sequence[int]:
        """Of this agent's children that are the checks'."""
        return [pid for run in self._runs if (pid := run.pid) is not None]

    def begin(self) -> bool:
        """Whether findings follow, of this run or of the one that goes on already: not while a probe of an earlier run
        hangs."""
        hangs = any(run.hangs and run.pid is not None for run in self._runs)
        if not self._running and not hangs:
            self._running = True
            run = self._new_run()
            self._runs = [*(run for run in self._runs if run.pid is not None), run]
            Thread(lambda: self._wait_for(run), "node-checks", lambda: self._post(run.findings())).start()
        return self._running

    def ended(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """To be called with the findings of each run; returns those that failed."""
        self._running = False
        return tuple(finding for finding in findings if finding.outcome is Outcome.FAIL)

    def close(self) -> None:
        self._closed = True
        for run in self._runs:
            run.close()

    def _wait_for(self, run: CheckRun) -> None:
        """In a thread of its own."""
        run.start()
        findings = run.findings()
        if not run.hangs:
            run.end()
        if self._closed:
            return  # it was cut short
        self._log(findings)
        self._post(findings)

    def _log(self, findings: Sequence[Finding]) -> None:
        """What is as bad as it was at the last run is logged already."""
        bad = [
            finding for finding in worst_first(findings) if finding.outcome in (Outcome.FAIL, Outcome.WARN)
        ]
        for finding in bad:
            if (finding.check, finding.outcome) not in self._logged:
                failed = finding.outcome is Outcome.FAIL
                log.log(
                    logging.ERROR if failed and self._errors else logging.WARNING,
                    "check %s %s: %s. To do: %s",
                    finding.check,
                    "failed" if failed else "warns",
                    finding.summary,
                    finding.advice,
                )
        self._logged = frozenset((finding.check, finding.outcome) for finding in bad)
