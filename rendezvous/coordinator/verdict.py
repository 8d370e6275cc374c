"""Whose fault a hang is: a pure function of what all workers are seen to do.

In a synchronous job, when one rank stands still, all others soon wait for it in the next collective. The guilty rank is
the one that is not where the others wait: it has stopped or ended, is outside any collective, or is in another
collective than most. The majority is assumed to be right, since all ranks run one script; where the ranks are split
evenly, no rank is named.

All may wait for a rank that is at work and will come by itself: then the finding is HEALTHY, and the rank is named if
all others wait. While a debugger holds a rank, the finding is HEALTHY, too. A rank that can never go on by itself makes
the finding CERTAIN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from ..records import World
from ..statements.inquiry import Doing, Finding, RankState, Testimony, Verdict
from ..text import counted, shortened

WAITING = (Doing.IN_COLLECTIVE, Doing.AT_STORE)
"""The rank waits for other ranks."""

NEVER = (Doing.GONE, Doing.STOPPED)
"""The rank can never go on by itself."""

_ORDER = {doing: place for place, doing in enumerate(Doing)}

_WORDS = {
    Doing.GONE: "has ended",
    Doing.STOPPED: "is stopped",
    Doing.UNINTERRUPTIBLE: "is in uninterruptible sleep",
    Doing.IN_SAVE: "is saving",
    Doing.IN_DATA_LOADER: "waits for its data",
    Doing.LOCKED: "waits for a lock or another thread",
    Doing.READING: "waits for bytes, or the end of a child",
    Doing.ASLEEP: "sleeps",
    Doing.HOLDS_GIL: "does not let go of Python's lock",
    Doing.BUSY: "computes in one place",
    Doing.MOVES: "is at work",
    Doing.DEBUGGED: "is under a debugger",
    Doing.OTHER: "does something else",
    Doing.IN_COLLECTIVE: "is in a collective",
    Doing.AT_STORE: "waits at the store",
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
    waiting = [one for one in states if one.doing in WAITING]
    rest = [one for one in states if one.doing not in WAITING]
    if debugged := [one for one in rest if one.doing is Doing.DEBUGGED]:
        return Verdict(Finding.HEALTHY, f"{_place(debugged[0], world)} is under a debugger")
    if dead := [one for one in rest if one.doing in NEVER]:
        return _named(Finding.CERTAIN, _first(dead), waiting, world)
    if moving := [one for one in rest if one.doing is Doing.MOVES]:
        if len(rest) == 1:
            return _named(Finding.HEALTHY, moving[0], waiting, world)
        ranks = _ranks(moving)
        return Verdict(
            Finding.HEALTHY, f"{ranks} {_is_or_are(moving)} at work, first {_place(moving[0], world)}"
        )
    known = [one for one in rest if one.doing is not Doing.OTHER]
    if known and waiting:
        return _named(Finding.LIKELY, _first(known), waiting, world)
    if known and world.size == 1:  # no other rank shows by its wait that this one should have come
        return _named(Finding.DOUBTFUL, _first(known), waiting, world)
    if len(rest) == 1 and len(waiting) == world.size - 1 and waiting:
        return _named(Finding.LIKELY, rest[0], waiting, world)
    if rest:
        return Verdict(Finding.UNCLEAR, f"too few ranks wait for others: {_tally(states)}")
    return _all_wait(waiting, world)


def _all_wait(waiting: Sequence[RankState], world: World) -> Verdict:
    """All ranks wait for each other: the guilty one waits in another collective than most."""
    told = [one for one in waiting if one.doing is Doing.AT_STORE or one.collective]
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


def _step(one: RankState) -> int:
    return -1 if one.step is None else one.step


def _collective(one: RankState) -> Hashable:
    return one.doing, one.collective


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
    >>> _what(RankState(0, Doing.AT_STORE))
    'at the store'
    """
    if one.doing is Doing.IN_COLLECTIVE and one.collective:
        return f"waits in {one.collective}" if own else f"in {one.collective}"
    if own:
        return _WORDS[one.doing]
    return "at the store" if one.doing is Doing.AT_STORE else "in a collective"


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
