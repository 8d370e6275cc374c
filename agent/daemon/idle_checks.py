"""The checks of a daemon's node (--check): as it starts, again every few minutes while it has no job, and after a job
that could not run here.

With `fail` a node is given no job before its first checks have ended, nor while one of them fails: it stays in the
pool and says why. With `warn` the log and /metrics say what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...health.checks.finding import Finding
from ...health.checks.node.background import BackgroundChecks
from ...health.checks.node.runner import CheckRun
from ..common.events import NodeChecked
from ..configuration.values import CheckMode

EVERY_S = 300.0
AGAIN_S = 30.0
"""While one fails that keeps jobs away."""

NOT_YET = "its checks have not ended yet"


class IdleChecks:
    """For the main thread."""

    def __init__(
        self,
        mode: CheckMode,
        new_run: Callable[[], CheckRun],
        post: Callable[[NodeChecked], object],
        on_findings: Callable[[Sequence[Finding]], None] = lambda findings: None,
    ) -> None:
        """`post` takes events from any thread, `on_findings` gets the findings of each run."""
        self._mode = mode
        self._checks = BackgroundChecks(
            new_run, lambda findings: post(NodeChecked(findings)), errors=mode == "fail"
        )
        self._on_findings = on_findings
        self._due_at = float("-inf") if mode != "off" else float("inf")
        self.problem = NOT_YET if mode == "fail" else ""
        """Why this node must not be given a job; empty when it may."""

    def turn(self, now: float) -> float | None:
        """Of a node without a job. Begins what is due; the instant of the next run."""
        if now >= self._due_at:
            self._due_at = now + EVERY_S
            self._checks.begin()
        return self._due_at if self._due_at < float("inf") else None

    def suspect(self, now: float) -> None:
        """A job could not run here: the next run is due."""
        self._due_at = min(self._due_at, now) if self._mode != "off" else self._due_at

    def handle(self, event: NodeChecked, now: float) -> None:
        failed = self._checks.ended(event.findings)
        self._on_findings(event.findings)
        if self._mode == "fail":
            self.problem = "; ".join(f"check {finding.check} failed: {finding.summary}" for finding in failed)
            if failed:
                self._due_at = min(self._due_at, now + AGAIN_S)

    def close(self) -> None:
        self._checks.close()
