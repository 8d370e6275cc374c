"""The checks of this node, before it joins and after it was excluded: one run at a time.

Those of --check run beside the agent's start, and again before it joins anew. With `fail` the participant is held back
until no check fails; with `warn` nothing waits.

An excluded node is checked after its cool-down; if all checks pass, the coordinator readmits it. The checks are those
before each join, whatever --check says, and one more: devices compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ...health.checks.finding import Finding
from ...health.checks.runner import BackgroundChecks, CheckRun, failed
from ...rendezvous.node.participant import Participant
from ..common.events import Event
from ..configuration.config import CHECK, CheckMode

log = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Until a node that fails is checked again. Not limited here: --join-timeout ends it."""

CHECKING = f"the checks of this node (--{CHECK.name} fail)"
HANGS = "a check's process from an earlier run still hangs in the kernel"


class NodeChecks:
    """For the main thread."""

    def __init__(
        self, mode: CheckMode, new_run: Callable[[bool], CheckRun], post: Callable[[Event], object]
    ) -> None:
        """`new_run` is told whether the run is that of an excluded node."""
        self._mode = mode
        self._of_excluded = False
        self._runs = False
        self.runs = BackgroundChecks(lambda: new_run(self._of_excluded), post)
        self._checked = ""
        """The life of this node that the newest run before a join is for."""
        self._again_at: float | None = None
        self._failed = False
        """Before a join, in this life."""

    @property
    def held_back(self) -> str:
        """Why a node may not join before it is checked; empty: it may."""
        return CHECKING if self._mode == "fail" else ""

    def begin(self, incarnation: str) -> bool:
        """For a life of the node, which need not have begun. Whether findings follow."""
        self._checked, self._again_at = incarnation, None
        return self._mode != "off" and self._begin(of_excluded=False)

    def _begin(self, *, of_excluded: bool) -> bool:
        self._of_excluded = of_excluded
        self._runs = self.runs.begin()
        return self._runs

    def turn(self, participant: Participant, now: float) -> float | None:
        """Begins what is due; the instant at which there is more to do."""
        if self._runs:
            return None
        new = participant.incarnation != self._checked
        self._failed = self._failed and not new
        due = new or (self._again_at is not None and now >= self._again_at)
        if due and not self.begin(participant.incarnation) and self._mode != "off":
            self._again_at = now + AGAIN_S  # what hung still does
        if not self._runs and participant.recheck_due(now):
            participant.recheck_begins()
            if not self._begin(of_excluded=True):
                participant.rechecked(now, passed=False, summary=HANGS)
        return self._again_at

    def take(self, participant: Participant, now: float) -> Sequence[Finding] | None:
        """What a run has found that has ended since the last turn. It decides whether the node joins, or is in its
        record."""
        findings = self.runs.take()
        if findings is None:
            return None
        self._runs, failures = False, failed(findings)
        what = "; ".join(f"{finding.check}: {finding.summary}" for finding in failures)
        if self._of_excluded:
            participant.rechecked(now, passed=not failures, summary=what)
            outcome = f"it stays excluded: {what}" if failures else "it asks to be readmitted"
            log.info("this node was checked after its cool-down, and %s", outcome)
        elif self._mode == "fail" and failures:
            self._failed, self._again_at = True, now + AGAIN_S
            participant.hold_back(
                f"this node does not join before its checks pass (--{CHECK.name} fail): {what}"
            )
            log.info("this node does not join, checking again in %g s", AGAIN_S)
        else:
            if self._failed:
                log.info("no check of this node fails any more: it joins")
            self._failed = False
            participant.hold_back("")
        return findings
