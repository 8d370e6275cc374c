"""The checks of this node before it joins (--check): run beside the agent's start, and again before it joins anew.

With `fail` the participant is held back until no check fails; with `warn` nothing waits.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

from ...health.checks.finding import Finding
from ...health.checks.node.background import BackgroundChecks
from ...health.checks.node.runner import CheckRun
from ...rendezvous.node.participant import Participant
from ...rendezvous.store.requests import RetryPolicy
from ..common.events import Event
from ..configuration.config import CHECK
from ..configuration.values import CheckMode

log = logging.getLogger(__name__)

AGAIN = RetryPolicy(first_wait_s=4.0, max_wait_s=60.0)
"""What an operator mends takes minutes. Not limited here: --join-timeout ends it."""

CHECKING = f"the checks of this node (--{CHECK.name} fail)"


class JoinChecks:
    """For the main thread."""

    def __init__(
        self,
        mode: CheckMode,
        new_run: Callable[[], CheckRun],
        post: Callable[[Event], object],
        rng: random.Random,
    ) -> None:
        self._mode, self._rng = mode, rng
        self._checks = BackgroundChecks(
            new_run, lambda findings: post(lambda: self._ended(findings)), errors=mode == "fail"
        )
        self._found: Sequence[Finding] | None = None
        """By the run that has ended, as long as `take` has not been called."""
        self._checked = ""
        """The life of this node that the newest run is for."""
        self._again_at: float | None = None
        self._failures = 0

    @property
    def held_back(self) -> str:
        """Why a node may not join before it is checked; empty: it may."""
        return CHECKING if self._mode == "fail" else ""

    @property
    def pids(self) -> Sequence[int]:
        """Of this agent's children that are the checks'."""
        return self._checks.pids

    def begin(self, incarnation: str) -> bool:
        """For a life of the node, which need not have begun. Whether findings follow."""
        self._checked, self._again_at = incarnation, None
        return self._mode != "off" and self._checks.begin()

    def turn(self, participant: Participant, now: float) -> float | None:
        """Begins what is due; the instant at which there is more to do."""
        new = participant.incarnation != self._checked
        if new:
            self._failures = 0
        due = new or (self._again_at is not None and now >= self._again_at)
        if due and not self.begin(participant.incarnation) and self._mode != "off":
            self._again_at = now + self._pause_s()  # what hung still does
        return self._again_at

    def _ended(self, findings: Sequence[Finding]) -> None:
        self._found = findings

    def take(self, participant: Participant, now: float) -> Sequence[Finding] | None:
        """What a run has found that has ended since the last turn; it decides whether the node joins."""
        findings, self._found = self._found, None
        if findings is not None:
            self._judge(self._checks.ended(findings), participant, now)
        return findings

    def _judge(self, failed: Sequence[Finding], participant: Participant, now: float) -> None:
        if self._mode != "fail" or not failed:
            if self._failures:
                log.info("no check of this node fails any more: it joins")
            self._failures = 0
            participant.hold_back("")
            return
        wait_s = self._pause_s()
        self._again_at = now + wait_s
        what = "; ".join(f"{finding.check}: {finding.summary}" for finding in failed)
        participant.hold_back(f"this node does not join before its checks pass (--{CHECK.name} fail): {what}")
        log.info(
            "this node does not join: %d of its checks failed; checking again in %.0f s", len(failed), wait_s
        )

    def _pause_s(self) -> float:
        self._failures += 1
        return AGAIN.wait_s(self._failures - 1, self._rng)

    def close(self) -> None:
        self._checks.close()
