"""Whose fault a hang is: a pure function of what all workers are seen to do.

In a synchronous job, when one rank stands still, all others soon wait for it in the next collective. The guilty rank is
the one that is not where the others wait: it has stopped or ended, is outside any collective, or is in another
collective than most. The majority is assumed to be right, since all ranks run one script; where the ranks are split
evenly, no rank is named.

All may wait for a rank that is at work and will come by itself: then the finding is HEALTHY, and the rank is named if
all others wait. A rank that can never go on by itself makes the finding CERTAIN.

Where ranks compute on GPUs, a wait for other ranks looks from outside as work does. There torch's flight recorder says
who waits: the guilty rank is one that has not entered the collective in which others wait, or has entered another one
in its place. A record counts only if nothing of it has changed between two inquiries, and never for more than LIKELY.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..rendezvous.text import counted, shortened
from .hang_report import (
    Diagnosis,
    HangFinding,
    HangReport,
    InGroup,
    RankActivity,
    RankReport,
    Recorded,
    Urgency,
)

NEVER = (RankActivity.GONE, RankActivity.STOPPED)
"""The rank can never go on by itself."""

ENDS_FROM = {
    HangFinding.CERTAIN: Urgency.EARLY,
    HangFinding.LIKELY: Urgency.OVERDUE,
    HangFinding.DOUBTFUL: Urgency.LAST,
    HangFinding.UNCLEAR: Urgency.LAST,
}
"""The findings that end a generation, and the urgency from which they do."""

LONG_WAIT_S = 300.0
"""When all others have waited so long for one that is at work, it may be taken for a hang, at the last limit."""
MAY_BE_SLOW = (RankActivity.UNINTERRUPTIBLE, RankActivity.IN_SAVE)
MAY_GET_SOME = (RankActivity.WAITS, RankActivity.OTHER)
"""What they wait for, while anything of them moves: bytes that come, a child or a thread that is at work."""

STILL_S = 20.0
"""A worker that has used nothing for so long gets nothing, and computes nothing."""

RISING = tuple(Urgency)

RECORDED_STILL_S = 10.0
"""A rank whose flight record has shown the same for so long has entered and ended nothing meanwhile."""

_ORDER = {doing: place for place, doing in enumerate(RankActivity)}

_WORDS = {
    RankActivity.GONE: "has ended",
    RankActivity.STOPPED: "is stopped",
    RankActivity.UNINTERRUPTIBLE: "is in uninterruptible sleep",
    RankActivity.IN_SAVE: "is saving",
    RankActivity.IN_COLLECTIVE: "is in a collective",
    RankActivity.WAITS: "waits by itself",
    RankActivity.WORKS: "is at work",
    RankActivity.OTHER: "does something else",
}


def diagnose(reports: Sequence[HangReport], nodes: Sequence[str]) -> Diagnosis:
    """The verdict from these answers to one inquiry; `nodes` has the node of each rank of the world. Ranks that no
    answer mentions are ignored."""
    states = sorted(
        {one.rank: one for report in reports for one in report.ranks if one.rank < len(nodes)}.values(),
        key=lambda one: one.rank,
    )
    if not states:
        return Diagnosis(HangFinding.UNCLEAR, "no node has said what its workers do")
    waiting = [one for one in states if one.doing is RankActivity.IN_COLLECTIVE]
    rest = [one for one in states if one.doing is not RankActivity.IN_COLLECTIVE]
    if dead := [one for one in rest if one.doing in NEVER]:
        return _named(HangFinding.CERTAIN, _first(dead), waiting, nodes)
    if moving := [
        one for one in rest if one.doing is RankActivity.WORKS and not waits_recorded(one, RECORDED_STILL_S)
    ]:
        if len(rest) == 1:
            return _named(HangFinding.HEALTHY, moving[0], waiting, nodes)
        ranks = _ranks(moving)
        return Diagnosis(
            HangFinding.HEALTHY, f"{ranks} {_is_or_are(moving)} at work, first {_place(moving[0], nodes)}"
        )
    if (recorded := _by_records(states, nodes)) is not None:
        return recorded
    states = [_as_recorded(one) for one in states]
    waiting = [one for one in states if one.doing is RankActivity.IN_COLLECTIVE]
    rest = [one for one in states if one.doing is not RankActivity.IN_COLLECTIVE]
    known = [one for one in rest if one.doing is not RankActivity.OTHER]
    if known and waiting:
        return _named(HangFinding.LIKELY, _first(known), waiting, nodes)
    if known and len(nodes) == 1:  # no other rank shows by its wait that this one should have come
        return _named(HangFinding.DOUBTFUL, _first(known), waiting, nodes)
    if len(rest) == 1 and len(waiting) == len(nodes) - 1 and waiting and rest[0].recorded is None:
        return _named(HangFinding.LIKELY, rest[0], waiting, nodes)
    if rest:
        return Diagnosis(HangFinding.UNCLEAR, f"too few ranks wait for others: {_tally(states)}")
    return _all_wait(waiting, nodes)


def judge(
    answers: Mapping[str, HangReport], nodes: Sequence[str], urgency: Urgency, *, all_answered: bool
) -> Diagnosis:
    """The conclusion from the answers, by node, to one probe. `nodes` has the node of each rank of the world, `urgency`
    for how long the workers have been still."""
    found = weighed(diagnose(tuple(answers.values()), nodes), answers, all_answered=all_answered)
    if urgency is Urgency.EARLY or not all_answered or not all_go_on(found, answers):
        return found
    why = f"all ranks have been active within {STILL_S:g} s; {found.why}"
    return replace(found, finding=HangFinding.HEALTHY, why=why)


def weighed(found: Diagnosis, answers: Mapping[str, HangReport], *, all_answered: bool) -> Diagnosis:
    """What of it is sure enough to act on. While some have not answered, one of their ranks may be the one that the
    others wait for. One that is at work comes by itself, as far as can be known for long; a disk may be slow."""
    said = [one for report in answers.values() for one in report.ranks]
    named = next((one for one in said if one.rank == found.rank), None)
    if named is None or named.doing in NEVER:
        return found
    if named.doing is RankActivity.WORKS:
        others = [one for one in said if one is not named]
        waited = all(one.doing is RankActivity.IN_COLLECTIVE and _still(one, LONG_WAIT_S) for one in others)
        for_long = all_answered and others and waited
        return replace(found, finding=HangFinding.DOUBTFUL if for_long else HangFinding.HEALTHY)
    if not all_answered:
        return replace(found, finding=HangFinding.UNCLEAR)
    stands = _still(named, STILL_S) or waits_recorded(named, STILL_S)
    slow = named.doing in MAY_BE_SLOW or (named.doing in MAY_GET_SOME and not stands)
    if found.finding is HangFinding.LIKELY and slow:
        return replace(found, finding=HangFinding.DOUBTFUL)
    return found


def all_go_on(found: Diagnosis, answers: Mapping[str, HangReport]) -> bool:
    """Every rank has done something lately: the script is in a phase in which it reports no steps, such as a test, and
    where each rank stands is chance. At the first limit ranks that hang may have been active so lately, too."""
    said = [one for report in answers.values() for one in report.ranks]
    if any(one.doing in NEVER for one in said):
        return False
    # A thread that waits for its GPU may use a processor for that.
    wait_s = LONG_WAIT_S if found.rank is None else STILL_S
    said = [one for one in said if not waits_recorded(one, wait_s)]
    return bool(said) and all(one.still_s is not None and one.still_s < STILL_S for one in said)


def _still(one: RankReport, for_s: float) -> bool:
    return one.still_s is not None and one.still_s >= for_s


def ends(urgency: Urgency, found: Diagnosis, *, all_answered: bool) -> bool:
    """The generation cannot go on."""
    if found.finding is HangFinding.UNCLEAR and not all_answered:
        return False
    needed = ENDS_FROM.get(found.finding)
    return needed is not None and RISING.index(urgency) >= RISING.index(needed)


def _all_wait(waiting: Sequence[RankReport], nodes: Sequence[str]) -> Diagnosis:
    """All ranks wait for each other: the guilty one waits in another collective than most."""
    told = [one for one in waiting if one.collective]
    for alike, of in ((_collective, told), (_exact_place, told), (_step, waiting)):
        most = Counter(map(alike, of)).most_common()
        if len(most) <= 1:
            continue
        usual, number = most[0]
        others = [one for one in of if alike(one) != usual]
        if number <= len(others):
            split = f"the ranks wait in different collectives: {_tally(waiting)}"
            return _by_step(waiting, nodes) or Diagnosis(HangFinding.UNCLEAR, split)
        rest = [one for one in waiting if one not in others]
        # While the network stands still, some ranks may be in the next collective already. Two, as in a send and its
        # recv, may be exchanging bytes so slowly that nothing of them shows it.
        finding = HangFinding.LIKELY if len(others) == 1 else HangFinding.DOUBTFUL
        return _named(finding, _hindmost(others), rest, nodes)
    return Diagnosis(
        HangFinding.UNCLEAR,
        f"all wait in the same collective: {_tally(waiting)}; the network or an unseen rank may be at fault",
    )


def _by_step(waiting: Sequence[RankReport], nodes: Sequence[str]) -> Diagnosis | None:
    """The rank whose step is the lowest is behind."""
    if None in {one.step for one in waiting}:
        return None
    last = _hindmost(waiting)
    others = [one for one in waiting if one.step != last.step]
    return _named(HangFinding.LIKELY, last, others, nodes) if len(others) == len(waiting) - 1 else None


# --- By torch's flight recorder


def waits_recorded(one: RankReport, for_s: float) -> bool:
    """It has waited so long in a collective, by its flight record."""
    recorded = one.recorded
    return recorded is not None and recorded.still_s >= for_s and _waits(recorded)


def _waits(recorded: Recorded) -> bool:
    return any(group.waits_in is not None for group in recorded.groups)


def _as_recorded(one: RankReport) -> RankReport:
    """A thread that waits for its GPU may use a processor for it. Which collective it is has another name there than on
    a stack, so it is left open."""
    waits = one.doing in (RankActivity.OTHER, RankActivity.WORKS) and waits_recorded(one, RECORDED_STILL_S)
    return replace(one, doing=RankActivity.IN_COLLECTIVE, collective="") if waits else one


def _by_records(states: Sequence[RankReport], nodes: Sequence[str]) -> Diagnosis | None:
    """None: the flight records do not show whose fault it is."""
    still = {
        one.rank: one.recorded
        for one in states
        if one.recorded is not None and one.recorded.still_s >= RECORDED_STILL_S
    }
    groups: dict[str, dict[int, InGroup]] = {}
    for rank, recorded in still.items():
        for group in recorded.groups:
            groups.setdefault(group.group, {})[rank] = group
    free = {rank for rank, recorded in still.items() if not _waits(recorded)}
    held_up = {rank for members in groups.values() for rank in _held_up(members)}
    why: dict[int, str] = {}
    all_in = ""
    for members in groups.values():
        if any((len(nodes) if one.size is None else one.size) != len(members) for one in members.values()):
            continue  # one that has said nothing may be the one that the others wait for; or of sends and recvs
        all_in = all_in or _all_in_one(members, nodes)
        for rank, words in _suspects(members, free, held_up, nodes).items():
            if still[rank].fresh:  # or it may have entered since
                why.setdefault(rank, words)
    if not why:
        return Diagnosis(HangFinding.UNCLEAR, all_in) if all_in else None
    one = _first(one for one in states if one.rank in why)
    finding = HangFinding.LIKELY if len(why) == 1 else HangFinding.DOUBTFUL
    place = _place(one, nodes)
    return Diagnosis(
        finding,
        f"{place} {_WORDS[one.doing]} and {why[one.rank]}, by torch's flight recorder",
        nodes[one.rank],
        one.rank,
    )


def _all_in_one(members: Mapping[int, InGroup], nodes: Sequence[str]) -> str:
    """All ranks wait in the same collective: so it is no rank's place that is at fault, whatever the stacks show."""
    [(_, told), *others] = members.items()
    alike = all((one.waits_in, one.collective) == (told.waits_in, told.collective) for _, one in others)
    if told.waits_in is None or not alike or not 1 < len(members) == len(nodes):
        return ""
    return (
        f"all {counted(len(members), 'rank')} have entered {told.collective} {told.waits_in} of {told.group} and wait, "
        "by torch's flight recorder; the network or a GPU may be at fault"
    )


def _held_up(members: Mapping[int, InGroup]) -> list[int]:
    """Of one group: who waits for one that has not entered. What all have entered may wait for a rank's own GPU."""
    least = min(one.entered for one in members.values())
    return [rank for rank, one in members.items() if one.size != 0 and (one.waits_in or 0) > least]


def _suspects(
    members: Mapping[int, InGroup], free: Container[int], held_up: Container[int], nodes: Sequence[str]
) -> dict[int, str]:
    """Of one group, whose ranks are all known: why each of them may be guilty."""
    waits = Counter((one.waits_in, one.collective) for one in members.values() if one.waits_in is not None)
    if not waits:
        return {}
    ((number, collective), votes) = waits.most_common(1)[0]
    behind = [rank for rank, one in members.items() if one.entered < number]
    astray = [
        rank for rank, one in members.items() if one.waits_in == number and one.collective != collective
    ]
    group = next(iter(members.values())).group
    there = f"{collective} {number} of {group}, in which {counted(votes, 'rank')} {'waits' if votes == 1 else 'wait'}"
    found: dict[int, str] = {}
    if votes >= len(behind):
        # One that waits elsewhere may itself wait for the guilty rank; unless that one waits here with all others.
        alone = len(behind) == 1 and votes == len(nodes) - 1 > 1 and behind[0] in held_up
        found |= {rank: f"has not entered {there}" for rank in behind if alone or rank in free}
    if votes > len(astray):
        found |= {rank: f"has entered {members[rank].collective} in place of {there}" for rank in astray}
    return found


def _step(one: RankReport) -> int:
    return -1 if one.step is None else one.step


def _collective(one: RankReport) -> Hashable:
    return one.collective


def _exact_place(one: RankReport) -> Hashable:
    return one.where


def _first(found: Iterable[RankReport]) -> RankReport:
    """The rank whose state is the clearest sign of a fault; of several, the one at the lowest step."""
    return min(found, key=lambda one: (_ORDER[one.doing], _step(one), one.rank))


def _hindmost(found: Iterable[RankReport]) -> RankReport:
    return min(found, key=lambda one: (_step(one), one.rank))


def _named(
    finding: HangFinding, one: RankReport, waiting: Sequence[RankReport], nodes: Sequence[str]
) -> Diagnosis:
    where = f" ({one.where})" if one.where else ""
    others = ""
    if waiting:
        usual = Counter(map(_what, waiting)).most_common(1)[0][0]
        others = f", while {counted(len(waiting), 'rank')} {'waits' if len(waiting) == 1 else 'wait'} {usual}"
    node = nodes[one.rank]
    words = _what(one, own=True)
    return Diagnosis(finding, f"rank {one.rank} on node {node} {words}{where}{others}", node, one.rank)


def _what(one: RankReport, *, own: bool = False) -> str:
    """
    >>> _what(RankReport(0, RankActivity.IN_COLLECTIVE, collective="barrier"))
    'in barrier'
    """
    if one.doing is RankActivity.IN_COLLECTIVE and one.collective:
        return f"waits in {one.collective}" if own else f"in {one.collective}"
    return _WORDS[one.doing] if own else "in a collective"


def _place(one: RankReport, nodes: Sequence[str]) -> str:
    return f"rank {one.rank} on node {nodes[one.rank]}" + (f" ({one.where})" if one.where else "")


def _ranks(states: Sequence[RankReport]) -> str:
    word = "rank" if len(states) == 1 else "ranks"
    return f"{word} {shortened(str(one.rank) for one in states)}"


def _is_or_are(states: Sequence[RankReport]) -> str:
    return "is" if len(states) == 1 else "are"


def _tally(states: Sequence[RankReport]) -> str:
    """How many ranks do what."""
    counts: dict[str, list[RankReport]] = {}
    for one in states:
        counts.setdefault(_what(one, own=True), []).append(one)
    return shortened((f"{_ranks(ones)}: {words}" for words, ones in counts.items()), "; ")
