"""Runs of this node's checks, one at a time: a thread of its own waits for each, and logs what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ...health.checks.finding import Finding, Outcome, worst_first
from ...health.checks.node.runner import CheckRun
from ...threads import Thread
from ..common.events import NodeChecked
from ..configuration.types.values import CheckMode

log = logging.getLogger(__name__)


class NodeChecks:
    """For the main thread. `post` takes a `NodeChecked` from any thread."""

    def __init__(
        self, mode: CheckMode, new_run: Callable[[], CheckRun], post: Callable[[NodeChecked], object]
    ) -> None:
        """`new_run` is called in the main thread, its result is used in another one. With `off` nothing ever runs."""
        self.mode = mode
        self._new_run, self._post = new_run, post
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
        """Whether a `NodeChecked` follows, of this run or of the one that goes on already: not while a probe of an
        earlier run hangs."""
        hangs = any(run.hangs and run.pid is not None for run in self._runs)
        if self.mode != "off" and not self._running and not hangs:
            self._running = True
            run = self._new_run()
            self._runs = [*(run for run in self._runs if run.pid is not None), run]
            Thread(lambda: self._wait_for(run), "node-checks").start()
        return self._running

    def ended(self, event: NodeChecked) -> tuple[Finding, ...]:
        """Those that failed, worst first. To be called with each event."""
        self._running = False
        return tuple(finding for finding in worst_first(event.findings) if finding.outcome is Outcome.FAIL)

    def close(self) -> None:
        self._closed = True
        for run in self._runs:
            run.close()

    def _wait_for(self, run: CheckRun) -> None:
        """In a thread of its own."""
        run.start()
        findings = run.findings()
        if not run.hangs:
            run.close()
        if self._closed:
            return  # it was cut short
        self._log(findings)
        self._post(NodeChecked(findings))

    def _log(self, findings: Sequence[Finding]) -> None:
        """What is as bad as it was at the last run is logged already."""
        bad = [
            finding for finding in worst_first(findings) if finding.outcome in (Outcome.FAIL, Outcome.WARN)
        ]
        for finding in bad:
            if (finding.check, finding.outcome) not in self._logged:
                failed = finding.outcome is Outcome.FAIL
                log.log(
                    logging.ERROR if failed and self.mode == "fail" else logging.WARNING,
                    "check %s %s: %s. To do: %s",
                    finding.check,
                    "failed" if failed else "warns",
                    finding.summary,
                    finding.advice,
                )
        self._logged = frozenset((finding.check, finding.outcome) for finding in bad)
