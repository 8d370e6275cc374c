"""The checks of this node before it joins (--check): run beside the agent's start, and again before it joins anew.

A thread of its own waits for each run and logs what is wrong; the main loop gets the findings as an event. With `fail`
it holds the participant back until no check fails; with `warn` nothing waits.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

from ...health.checks.finding import Finding, Outcome, worst_first
from ...health.checks.node.runner import CheckRun
from ...rendezvous.node.participant import Participant
from ...rendezvous.store.requests import RetryPolicy
from ...threads import Thread
from ..common.events import NodeChecked
from ..configuration.config import CHECK
from ..configuration.types.values import CheckMode

log = logging.getLogger(__name__)

AGAIN = RetryPolicy(first_wait_s=4.0, max_wait_s=60.0)
"""What an operator mends takes minutes. Not limited here: --join-timeout ends it."""

CHECKING = f"the checks of this node (--{CHECK.name} fail)"


class JoinChecks:
    """For the main thread. `post` takes a `NodeChecked` from any thread."""

    def __init__(
        self,
        mode: CheckMode,
        new_run: Callable[[], CheckRun],
        post: Callable[[NodeChecked], object],
        rng: random.Random,
    ) -> None:
        """`new_run` is called in another thread."""
        self._mode, self._new_run, self._post, self._rng = mode, new_run, post, rng
        self._runs: list[CheckRun] = []
        """Those whose process may still be there: a probe that hangs in the kernel stays its child."""
        self._running = False
        self._checked = ""
        """The life of this node that the newest run is for."""
        self._again_at: float | None = None
        self._failures = 0
        self._closed = False
        self._logged: frozenset[tuple[str, Outcome]] = frozenset()

    @property
    def held_back(self) -> str:
        """Why a node may not join before it is checked; empty: it may."""
        return CHECKING if self._mode == "fail" else ""

    @property
    def pids(self) -> Sequence[int]:
        """Of this agent's children that are the checks'."""
        return [pid for run in self._runs if (pid := run.pid) is not None]

    def begin(self, incarnation: str) -> None:
        """For a life of the node, which need not have begun; not while a probe of an earlier run hangs."""
        self._checked, self._again_at = incarnation, None
        if (
            self._mode == "off"
            or self._running
            or any(run.hangs and run.pid is not None for run in self._runs)
        ):
            return
        self._running = True
        run = self._new_run()
        self._runs = [*(run for run in self._runs if run.pid is not None), run]
        Thread(lambda: self._wait_for(run), "node-checks").start()

    def turn(self, participant: Participant, now: float) -> float | None:
        """Begins what is due; the instant at which there is more to do."""
        new = participant.incarnation != self._checked
        if new:
            self._failures = 0
        if new or (self._again_at is not None and now >= self._again_at):
            self.begin(participant.incarnation)
            if self._mode != "off" and not self._running:  # what hung still does
                self._again_at = now + self._pause_s()
        return self._again_at

    def handle(self, event: NodeChecked, participant: Participant, now: float) -> None:
        self._running = False
        failed = [finding for finding in worst_first(event.findings) if finding.outcome is Outcome.FAIL]
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
                    logging.ERROR if failed and self._mode == "fail" else logging.WARNING,
                    "check %s %s: %s. To do: %s",
                    finding.check,
                    "failed" if failed else "warns",
                    finding.summary,
                    finding.advice,
                )
        self._logged = frozenset((finding.check, finding.outcome) for finding in bad)
