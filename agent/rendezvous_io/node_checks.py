"""The checks of this node: before it joins (`JoinChecks`), and after it was excluded (`Recheck`).

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
from ..configuration.config import CHECK
from ..configuration.values import CheckMode

log = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Until a node that fails is checked again. Not limited here: --join-timeout ends it."""

CHECKING = f"the checks of this node (--{CHECK.name} fail)"


class JoinChecks:
    """For the main thread."""

    def __init__(
        self,
        mode: CheckMode,
        new_run: Callable[[], CheckRun],
        post: Callable[[Event], object],
    ) -> None:
        self._mode = mode
        self.runs = BackgroundChecks(new_run, post)
        self._checked = ""
        """The life of this node that the newest run is for."""
        self._again_at: float | None = None
        self._failed = False
        """In the newest run of this life."""

    @property
    def held_back(self) -> str:
        """Why a node may not join before it is checked; empty: it may."""
        return CHECKING if self._mode == "fail" else ""

    def begin(self, incarnation: str) -> bool:
        """For a life of the node, which need not have begun. Whether findings follow."""
        self._checked, self._again_at = incarnation, None
        return self._mode != "off" and self.runs.begin()

    def turn(self, participant: Participant, now: float) -> float | None:
        """Begins what is due; the instant at which there is more to do."""
        new = participant.incarnation != self._checked
        self._failed = self._failed and not new
        due = new or (self._again_at is not None and now >= self._again_at)
        if due and not self.begin(participant.incarnation) and self._mode != "off":
            self._again_at = now + AGAIN_S  # what hung still does
        return self._again_at

    def take(self, participant: Participant, now: float) -> Sequence[Finding] | None:
        """What a run has found that has ended since the last turn; it decides whether the node joins."""
        findings = self.runs.take()
        if findings is not None:
            self._judge(failed(findings), participant, now)
        return findings

    def _judge(self, failures: Sequence[Finding], participant: Participant, now: float) -> None:
        if self._mode != "fail" or not failures:
            if self._failed:
                log.info("no check of this node fails any more: it joins")
            self._failed = False
            participant.hold_back("")
            return
        self._failed, self._again_at = True, now + AGAIN_S
        what = in_words(failures)
        participant.hold_back(f"this node does not join before its checks pass (--{CHECK.name} fail): {what}")
        log.info("this node does not join, checking again in %g s", AGAIN_S)


HANGS = "a check's process from an earlier run still hangs in the kernel"


class Recheck:
    """For the main thread."""

    def __init__(self, new_run: Callable[[], CheckRun], post: Callable[[Event], object]) -> None:
        self.runs = BackgroundChecks(new_run, post)

    def turn(self, participant: Participant, now: float) -> None:
        """Begin the check if it is due."""
        if not participant.recheck_due(now):
            return
        participant.recheck_begins()
        if not self.runs.begin():
            participant.rechecked(now, passed=False, summary=HANGS)

    def take(self, participant: Participant, now: float) -> Sequence[Finding] | None:
        """What a run has found that has ended since the last turn; the result is in this node's record."""
        findings = self.runs.take()
        if findings is None:
            return None
        failures = failed(findings)
        participant.rechecked(now, passed=not failures, summary=in_words(failures))
        outcome = f"it stays excluded: {in_words(failures)}" if failures else "it asks to be readmitted"
        log.info("this node was checked after its cool-down, and %s", outcome)
        return findings


def in_words(failures: Sequence[Finding]) -> str:
    return "; ".join(f"{finding.check}: {finding.summary}" for finding in failures)
