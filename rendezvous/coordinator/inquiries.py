"""What the coordinator does about workers that seem to hang: ask all members, wait for their answers, and judge them.

    suspicion ──> inquiry n ──> hang reports of all members, or ANSWER_S ──> verdict ──> the guilty node's failure
                     ^                                                         └──> the inquiry is closed
                     └────────────── a pause, twice as long each time ─────────────────┘

The workers run on during an inquiry. Whether its verdict ends the generation depends on how sure the verdict is, and on
how long the workers have been still (`ENDS_FROM`). One rank at work for which all others wait is left alone until the
last limit: from outside, an evaluation, an index that is built or a compilation looks as a loop without end does. A
node that gets no verdict ends its workers by its own limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...health.diagnosis import RISING, ends, judge
from ...health.hang_report import (
    ANSWER_S,
    HANG,
    HangFinding,
    HangProbe,
    HangReport,
    HangSuspicion,
    Urgency,
)
from ..records import MAX_TEXT, Cause, CauseKind, Failure, NodeRecord, Phase, World
from .next_world import named
from .view import Publish, View, Wait

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pauses between two inquiries of one generation. An inquiry that is more urgent than all before it does not wait."""


def inquire(world: World, view: View, present: Sequence[NodeRecord], now: float) -> Publish | Wait | None:
    """The next step of a generation that runs; None if the workers of no node seem to hang."""
    inquiry = world.inquiry
    suspects = [node for node in present if _suspects(node, world)]
    if inquiry is not None and inquiry.finding is None:
        return _close(world, inquiry, suspects, view, present, now)
    if not suspects:
        return None
    urgency = max((said.urgency for said in _said(suspects)), key=RISING.index)
    until = asks_at(inquiry, view.inquiry_since, urgency)
    reason = f"the workers of {named(suspects)} seem to hang: {_why(suspects, urgency)}"
    if now < until:
        return Wait(reason, until)
    number = inquiry.number + 1 if inquiry is not None else 1
    return Publish(replace(world, inquiry=HangProbe(number, urgency)), reason)


def hinders(asking: Publish | Wait, world: World) -> bool:
    """No newcomer may be invited: workers that hang reach no common last step; workers found at work do."""
    healthy = world.inquiry is not None and world.inquiry.finding is HangFinding.HEALTHY
    return isinstance(asking, Publish) or not healthy


def sooner(decision: Wait, asking: Wait | Publish | None) -> Wait:
    """`decision`, but no later than the next inquiry."""
    if not isinstance(asking, Wait) or asking.until is None:
        return decision
    return replace(
        decision, until=asking.until if decision.until is None else min(decision.until, asking.until)
    )


def asks_at(inquiry: HangProbe | None, closed_at: float, urgency: Urgency) -> float:
    """When the next inquiry may begin, after `inquiry`, which this node has seen closed at `closed_at`."""
    if inquiry is None or RISING.index(urgency) > RISING.index(inquiry.urgency):
        return closed_at
    return closed_at + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(inquiry.number - 1, 30))


def _close(
    world: World,
    inquiry: HangProbe,
    suspects: Sequence[NodeRecord],
    view: View,
    present: Sequence[NodeRecord],
    now: float,
) -> Publish | Wait:
    answers = {node.node: said for node in present if (said := _answer(node, world, inquiry)) is not None}
    until = view.inquiry_since + ANSWER_S
    if now < until and (silent := [node for node in present if node.node not in answers]):
        return Wait(f"inquiry {inquiry.number}: what do the workers of {named(silent)} do?", until)
    all_answered = all(node.node in answers for node in present)
    still = inquiry.urgency if suspects else Urgency.EARLY  # they may have gone on meanwhile
    found = judge(answers, world.node_of_ranks, still, all_answered=all_answered)
    closed = replace(inquiry, finding=found.finding, why=found.why[:512], node=found.node, rank=found.rank)
    if ends(still, found, all_answered=all_answered):
        signs = next((said.why for said in _said(suspects) if said.urgency is inquiry.urgency), "")
        why = f"hang: {found.why}{signs and f'; {signs}'}"[:MAX_TEXT]
        failure = Failure(world.generation, HANG, why, cause=HANG, node=found.node, rank=found.rank)
        cause = Cause(CauseKind.FAILURE, found.node, why, failure)
        return Publish(replace(world, phase=Phase.STOPPING, cause=cause, inquiry=closed), why)
    return Publish(replace(world, inquiry=closed), found.why)


def _suspects(node: NodeRecord, world: World) -> bool:
    return node.suspicion is not None and node.suspicion.generation == world.generation


def _said(suspects: Sequence[NodeRecord]) -> list[HangSuspicion]:
    return [node.suspicion for node in suspects if node.suspicion is not None]


def _why(suspects: Sequence[NodeRecord], urgency: Urgency) -> str:
    return next(said.why for said in _said(suspects) if said.urgency is urgency)


def _answer(node: NodeRecord, world: World, inquiry: HangProbe) -> HangReport | None:
    said = node.hang_report
    asked = world.generation, inquiry.number
    return said if said is not None and (said.generation, said.inquiry) == asked else None
