"""What the coordinator does about workers that seem to hang: ask all members, wait for their answers, and judge them.

    suspicion ──> inquiry n ──> testimonies of all members, or ANSWER_S ──> verdict ──> the guilty node's failure
                     ^                                                         └──> the inquiry is closed
                     └────────────── a pause, twice as long each time ─────────────────┘

The workers run on during an inquiry. Whether its verdict ends the generation depends on how sure the verdict is, and on
how long the workers have been still (`ENDS_FROM`). One rank at work for which all others wait is left alone until the
last limit: from outside, an evaluation, an index that is built or a compilation looks as a loop without end does. A
node that gets no verdict ends its workers by its own limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..records import MAX_TEXT, Cause, CauseKind, Failure, NodeRecord, Phase, World
from ..statements.inquiry import (
    ANSWER_S,
    HANG,
    Doing,
    Finding,
    Inquiry,
    RankState,
    Suspicion,
    Testimony,
    Urgency,
    Verdict,
)
from .candidates import named
from .verdict import NEVER, verdict, waits_recorded
from .view import Publish, View, Wait

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pauses between two inquiries of one generation. An inquiry that is more urgent than all before it does not wait."""

ENDS_FROM = {
    Finding.CERTAIN: Urgency.EARLY,
    Finding.LIKELY: Urgency.OVERDUE,
    Finding.DOUBTFUL: Urgency.LAST,
    Finding.UNCLEAR: Urgency.LAST,
}
"""The findings that end a generation, and the urgency from which they do."""

LONG_WAIT_S = 300.0
"""When all others have waited so long for one that is at work, it may be taken for a hang, at the last limit."""
MAY_BE_SLOW = (Doing.UNINTERRUPTIBLE, Doing.IN_SAVE)
MAY_GET_SOME = (Doing.WAITS, Doing.OTHER)
"""What they wait for, while anything of them moves: bytes that come, a child or a thread that is at work."""

STILL_S = 20.0
"""A worker that has used nothing for so long gets nothing, and computes nothing."""

_RISING = tuple(Urgency)


def inquire(world: World, view: View, present: Sequence[NodeRecord], now: float) -> Publish | Wait | None:
    """The next step of a generation that runs; None if the workers of no node seem to hang."""
    inquiry = world.inquiry
    suspects = [node for node in present if _suspects(node, world)]
    if inquiry is not None and inquiry.finding is None:
        return _close(world, inquiry, suspects, view, present, now)
    if not suspects:
        return None
    urgency = max((said.urgency for said in _said(suspects)), key=_RISING.index)
    until = asks_at(inquiry, view.inquiry_since, urgency)
    reason = f"the workers of {named(suspects)} seem to hang: {_why(suspects, urgency)}"
    if now < until:
        return Wait(reason, until)
    number = inquiry.number + 1 if inquiry is not None else 1
    return Publish(replace(world, inquiry=Inquiry(number, urgency)), reason)


def hinders(asking: Publish | Wait, world: World) -> bool:
    """No newcomer may be invited: workers that hang reach no common last step; workers found at work do."""
    healthy = world.inquiry is not None and world.inquiry.finding is Finding.HEALTHY
    return isinstance(asking, Publish) or not healthy


def sooner(decision: Wait, asking: Wait | Publish | None) -> Wait:
    """`decision`, but no later than the next inquiry."""
    if not isinstance(asking, Wait) or asking.until is None:
        return decision
    return replace(
        decision, until=asking.until if decision.until is None else min(decision.until, asking.until)
    )


def asks_at(inquiry: Inquiry | None, closed_at: float, urgency: Urgency) -> float:
    """When the next inquiry may begin, after `inquiry`, which this node has seen closed at `closed_at`."""
    if inquiry is None or _RISING.index(urgency) > _RISING.index(inquiry.urgency):
        return closed_at
    return closed_at + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(inquiry.number - 1, 30))


def _close(
    world: World,
    inquiry: Inquiry,
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
    found = weighed(verdict(tuple(answers.values()), world), answers, all_answered=all_answered)
    still = inquiry.urgency if suspects else Urgency.EARLY  # they may have gone on meanwhile
    if still is not Urgency.EARLY and all_answered and all_go_on(found, answers):
        found = replace(
            found,
            finding=Finding.HEALTHY,
            why=f"all ranks have been active within {STILL_S:g} s; {found.why}",
        )
    closed = replace(inquiry, finding=found.finding, why=found.why[:512], node=found.node, rank=found.rank)
    if ends(still, found, all_answered=all_answered):
        signs = next((said.why for said in _said(suspects) if said.urgency is inquiry.urgency), "")
        why = f"hang: {found.why}{signs and f'; {signs}'}"[:MAX_TEXT]
        failure = Failure(world.generation, HANG, why, cause=HANG, node=found.node, rank=found.rank)
        cause = Cause(CauseKind.FAILURE, found.node, why, failure)
        return Publish(replace(world, phase=Phase.STOPPING, cause=cause, inquiry=closed), why)
    return Publish(replace(world, inquiry=closed), found.why)


def weighed(found: Verdict, answers: Mapping[str, Testimony], *, all_answered: bool) -> Verdict:
    """What of it is sure enough to act on. While some have not answered, one of their ranks may be the one that the
    others wait for. One that is at work comes by itself, as far as can be known for long; a disk may be slow."""
    said = [one for testimony in answers.values() for one in testimony.ranks]
    named = next((one for one in said if one.rank == found.rank), None)
    if named is None or named.doing in NEVER:
        return found
    if named.doing is Doing.WORKS:
        others = [one for one in said if one is not named]
        waited = all(one.doing is Doing.IN_COLLECTIVE and _still(one, LONG_WAIT_S) for one in others)
        for_long = all_answered and others and waited
        return replace(found, finding=Finding.DOUBTFUL if for_long else Finding.HEALTHY)
    if not all_answered:
        return replace(found, finding=Finding.UNCLEAR)
    stands = _still(named, STILL_S) or waits_recorded(named, STILL_S)
    slow = named.doing in MAY_BE_SLOW or (named.doing in MAY_GET_SOME and not stands)
    if found.finding is Finding.LIKELY and slow:
        return replace(found, finding=Finding.DOUBTFUL)
    return found


def all_go_on(found: Verdict, answers: Mapping[str, Testimony]) -> bool:
    """Every rank has done something lately: the script is in a phase in which it reports no steps, such as a test, and
    where each rank stands is chance. At the first limit ranks that hang may have been active so lately, too."""
    said = [one for testimony in answers.values() for one in testimony.ranks]
    if any(one.doing in NEVER for one in said):
        return False
    # A thread that waits for its GPU may use a processor for that.
    wait_s = LONG_WAIT_S if found.rank is None else STILL_S
    said = [one for one in said if not waits_recorded(one, wait_s)]
    return bool(said) and all(one.still_s is not None and one.still_s < STILL_S for one in said)


def _still(one: RankState, for_s: float) -> bool:
    return one.still_s is not None and one.still_s >= for_s


def ends(urgency: Urgency, found: Verdict, *, all_answered: bool) -> bool:
    """The generation cannot go on."""
    if found.finding is Finding.UNCLEAR and not all_answered:
        return False
    needed = ENDS_FROM.get(found.finding)
    return needed is not None and _RISING.index(urgency) >= _RISING.index(needed)


def _suspects(node: NodeRecord, world: World) -> bool:
    return node.suspicion is not None and node.suspicion.generation == world.generation


def _said(suspects: Sequence[NodeRecord]) -> list[Suspicion]:
    return [node.suspicion for node in suspects if node.suspicion is not None]


def _why(suspects: Sequence[NodeRecord], urgency: Urgency) -> str:
    return next(said.why for said in _said(suspects) if said.urgency is urgency)


def _answer(node: NodeRecord, world: World, inquiry: Inquiry) -> Testimony | None:
    said = node.testimony
    asked = world.generation, inquiry.number
    return said if said is not None and (said.generation, said.inquiry) == asked else None
