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

from ..records import World
from ..statements.inquiry import Doing, Finding, InGroup, RankState, Recorded, Testimony, Verdict
from ..text import counted, shortened

NEVER = (Doing.GONE, Doing.STOPPED)
"""The rank can never go on by itself."""

RECORDED_STILL_S = 10.0
"""A rank whose flight record has shown the same for so long has entered and ended nothing meanwhile."""

_ORDER = {doing: place for place, doing in enumerate(Doing)}

_WORDS = {
    Doing.GONE: "has ended",
    Doing.STOPPED: "is stopped",
    Doing.UNINTERRUPTIBLE: "is in uninterruptible sleep",
    Doing.IN_SAVE: "is saving",
    Doing.IN_COLLECTIVE: "is in a collective",
    Doing.WAITS: "waits by itself",
    Doing.WORKS: "is at work",
    Doing.OTHER: "does something else",
}


def verdict(testimonies: Sequence[Testimony], world: World) -> Verdict:
    """The verdict from these answers to one inquiry in `world`. Ranks that no answer mentions are ignored."""
    states = sorted(
        {
            one.rank: one for testimony in testimonies for one in testimony.ranks if one.rank < world.size
        }.values(),
        key=lambda one: one.rank,
    )
    if not states:
        return Verdict(Finding.UNCLEAR, "no node has said what its workers do")
    waiting = [one for one in states if one.doing is Doing.IN_COLLECTIVE]
    rest = [one for one in states if one.doing is not Doing.IN_COLLECTIVE]
    if dead := [one for one in rest if one.doing in NEVER]:
        return _named(Finding.CERTAIN, _first(dead), waiting, world)
    if moving := [
        one for one in rest if one.doing is Doing.WORKS and not waits_recorded(one, RECORDED_STILL_S)
    ]:
        if len(rest) == 1:
            return _named(Finding.HEALTHY, moving[0], waiting, world)
        ranks = _ranks(moving)
        return Verdict(
            Finding.HEALTHY, f"{ranks} {_is_or_are(moving)} at work, first {_place(moving[0], world)}"
        )
    if (recorded := _by_records(states, world)) is not None:
        return recorded
    states = [_as_recorded(one) for one in states]
    waiting = [one for one in states if one.doing is Doing.IN_COLLECTIVE]
    rest = [one for one in states if one.doing is not Doing.IN_COLLECTIVE]
    known = [one for one in rest if one.doing is not Doing.OTHER]
    if known and waiting:
        return _named(Finding.LIKELY, _first(known), waiting, world)
    if known and world.size == 1:  # no other rank shows by its wait that this one should have come
        return _named(Finding.DOUBTFUL, _first(known), waiting, world)
    if len(rest) == 1 and len(waiting) == world.size - 1 and waiting and rest[0].recorded is None:
        return _named(Finding.LIKELY, rest[0], waiting, world)
    if rest:
        return Verdict(Finding.UNCLEAR, f"too few ranks wait for others: {_tally(states)}")
    return _all_wait(waiting, world)


def _all_wait(waiting: Sequence[RankState], world: World) -> Verdict:
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
            return _by_step(waiting, world) or Verdict(Finding.UNCLEAR, split)
        rest = [one for one in waiting if one not in others]
        # While the network stands still, some ranks may be in the next collective already. Two, as in a send and its
        # recv, may be exchanging bytes so slowly that nothing of them shows it.
        finding = Finding.LIKELY if len(others) == 1 else Finding.DOUBTFUL
        return _named(finding, _hindmost(others), rest, world)
    return Verdict(
        Finding.UNCLEAR,
        f"all wait in the same collective: {_tally(waiting)}; the network or an unseen rank may be at fault",
    )


def _by_step(waiting: Sequence[RankState], world: World) -> Verdict | None:
    """The rank whose step is the lowest is behind."""
    if None in {one.step for one in waiting}:
        return None
    last = _hindmost(waiting)
    others = [one for one in waiting if one.step != last.step]
    return _named(Finding.LIKELY, last, others, world) if len(others) == len(waiting) - 1 else None


# --- By torch's flight recorder


def waits_recorded(one: RankState, for_s: float) -> bool:
    """It has waited so long in a collective, by its flight record."""
    recorded = one.recorded
    return recorded is not None and recorded.still_s >= for_s and _waits(recorded)


def _waits(recorded: Recorded) -> bool:
    return any(group.waits_in is not None for group in recorded.groups)


def _as_recorded(one: RankState) -> RankState:
    """A thread that waits for its GPU may use a processor for it. Which collective it is has another name there than on
    a stack, so it is left open."""
    waits = one.doing in (Doing.OTHER, Doing.WORKS) and waits_recorded(one, RECORDED_STILL_S)
    return replace(one, doing=Doing.IN_COLLECTIVE, collective="") if waits else one


def _by_records(states: Sequence[RankState], world: World) -> Verdict | None:
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
        if any((world.size if one.size is None else one.size) != len(members) for one in members.values()):
            continue  # one that has said nothing may be the one that the others wait for; or of sends and recvs
        all_in = all_in or _all_in_one(members, world)
        for rank, words in _suspects(members, free, held_up, world).items():
            if still[rank].fresh:  # or it may have entered since
                why.setdefault(rank, words)
    if not why:
        return Verdict(Finding.UNCLEAR, all_in) if all_in else None
    one = _first(one for one in states if one.rank in why)
    finding = Finding.LIKELY if len(why) == 1 else Finding.DOUBTFUL
    place = _place(one, world)
    return Verdict(
        finding,
        f"{place} {_WORDS[one.doing]} and {why[one.rank]}, by torch's flight recorder",
        _node(one.rank, world),
        one.rank,
    )


def _all_in_one(members: Mapping[int, InGroup], world: World) -> str:
    """All ranks wait in the same collective: so it is no rank's place that is at fault, whatever the stacks show."""
    [(_, told), *others] = members.items()
    alike = all((one.waits_in, one.collective) == (told.waits_in, told.collective) for _, one in others)
    if told.waits_in is None or not alike or not 1 < len(members) == world.size:
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
    members: Mapping[int, InGroup], free: Container[int], held_up: Container[int], world: World
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
        alone = len(behind) == 1 and votes == world.size - 1 > 1 and behind[0] in held_up
        found |= {rank: f"has not entered {there}" for rank in behind if alone or rank in free}
    if votes > len(astray):
        found |= {rank: f"has entered {members[rank].collective} in place of {there}" for rank in astray}
    return found


def _step(one: RankState) -> int:
    return -1 if one.step is None else one.step


def _collective(one: RankState) -> Hashable:
    return one.collective


def _exact_place(one: RankState) -> Hashable:
    return one.where


def _first(found: Iterable[RankState]) -> RankState:
    """The rank whose state is the clearest sign of a fault; of several, the one at the lowest step."""
    return min(found, key=lambda one: (_ORDER[one.doing], _step(one), one.rank))


def _hindmost(found: Iterable[RankState]) -> RankState:
    return min(found, key=lambda one: (_step(one), one.rank))


def _named(finding: Finding, one: RankState, waiting: Sequence[RankState], world: World) -> Verdict:
    where = f" ({one.where})" if one.where else ""
    others = ""
    if waiting:
        usual = Counter(map(_what, waiting)).most_common(1)[0][0]
        others = f", while {counted(len(waiting), 'rank')} {'waits' if len(waiting) == 1 else 'wait'} {usual}"
    node = _node(one.rank, world)
    words = _what(one, own=True)
    return Verdict(finding, f"rank {one.rank} on node {node} {words}{where}{others}", node, one.rank)


def _what(one: RankState, *, own: bool = False) -> str:
    """
    >>> _what(RankState(0, Doing.IN_COLLECTIVE, collective="barrier"))
    'in barrier'
    """
    if one.doing is Doing.IN_COLLECTIVE and one.collective:
        return f"waits in {one.collective}" if own else f"in {one.collective}"
    return _WORDS[one.doing] if own else "in a collective"


def _node(rank: int, world: World) -> str:
    return next(one.node for one in world.members if one.first_rank <= rank < one.first_rank + one.slots)


def _place(one: RankState, world: World) -> str:
    return f"rank {one.rank} on node {_node(one.rank, world)}" + (f" ({one.where})" if one.where else "")


def _ranks(states: Sequence[RankState]) -> str:
    word = "rank" if len(states) == 1 else "ranks"
    return f"{word} {shortened(str(one.rank) for one in states)}"


def _is_or_are(states: Sequence[RankState]) -> str:
    return "is" if len(states) == 1 else "are"


def _tally(states: Sequence[RankState]) -> str:
    """How many ranks do what."""
    counts: dict[str, list[RankState]] = {}
    for one in states:
        counts.setdefault(_what(one, own=True), []).append(one)
    return shortened((f"{_ranks(ones)}: {words}" for words, ones in counts.items()), "; ")
