"""Checks an excluded node after its cool-down; if all checks pass, the coordinator readmits it.

The checks are those before each join, whatever --check says, and two more: devices compute, and peers answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ...health.checks.finding import Finding
from ...health.checks.needs import MOST_PEERS
from ...health.checks.node.background import BackgroundChecks
from ...health.checks.node.runner import CheckRun
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import Member, NodeRecord
from ..common.events import Event

log = logging.getLogger(__name__)

HANGS = "a check's process from an earlier run still hangs in the kernel"


class Recheck:
    """For the main thread."""

    def __init__(self, new_run: Callable[[Sequence[str]], CheckRun], post: Callable[[Event], object]) -> None:
        """`new_run` gets the addresses of other nodes' agents, HOST:PORT."""
        self._new_run = new_run
        self._peers: Sequence[str] = ()
        self._checks = BackgroundChecks(
            lambda: self._new_run(self._peers),
            lambda findings: post(lambda: self._ended(findings)),
            errors=True,
        )
        self._found: Sequence[Finding] | None = None
        """By the run that has ended, as long as `take` has not been called."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes of the checks, which are children of this agent."""
        return self._checks.pids

    def turn(self, participant: Participant, now: float) -> None:
        """Begin the check if it is due."""
        if not participant.recheck_due(now):
            return
        participant.recheck_begins()
        self._peers = peers_of(participant)
        if not self._checks.begin():
            participant.rechecked(now, passed=False, summary=HANGS)

    def _ended(self, findings: Sequence[Finding]) -> None:
        self._found = findings

    def take(self, participant: Participant, now: float) -> Sequence[Finding] | None:
        """What a run has found that has ended since the last turn; the result is in this node's record."""
        findings, self._found = self._found, None
        if findings is None:
            return None
        failed = self._checks.ended(findings)
        summary = "; ".join(f"{finding.check}: {finding.summary}" for finding in failed)
        participant.rechecked(now, passed=not failed, summary=summary)
        if failed:
            log.warning("this node stays excluded: %d of its checks failed", len(failed))
        else:
            log.info("this node has passed its checks after its cool-down, and asks to be readmitted")
        return findings

    def close(self) -> None:
        self._checks.close()


def peers_of(participant: Participant) -> tuple[str, ...]:
    """Where agents should answer: the first members of a world that trains, as many as are asked.

    Of a world that has ended, members may be dead, and the job may lack just this node. Then those are asked whose
    leases are known to live: the coordinator, and on the coordinator all.
    """
    world = participant.world
    nodes: Sequence[Member | NodeRecord] = (
        world.members if world is not None and world.trains else participant.known_nodes
    )
    others = [one for one in nodes if one.node != participant.identity.node]
    return tuple(str(one.http) for one in others if one.http is not None)[:MOST_PEERS]
