"""Whose fault a hang is: tables of what ranks are seen to do, and who is named."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from elastic_agent.health.diagnosis import NEVER, RECORDED_STILL_S, diagnose
from elastic_agent.health.hang_report import HangFinding, InGroup, RankActivity, RankReport, Recorded
from elastic_agent.health.hang_report import HangReport as Answer
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World

MEMBERS = tuple(Member(f"n{place}", f"i{place}", 2, 2 * place) for place in range(3))
WORLD = World("job", 3, Phase.RUNNING, MEMBERS, Endpoint("127.0.0.1", 1), Cause(CauseKind.START))
REDUCE = RankReport(0, RankActivity.IN_COLLECTIVE, 7, collective="all_reduce", where="train.py:9 in step")


def said(*states: RankReport) -> list[Answer]:
    """By the nodes of the first so many ranks."""
    by_node = [tuple(one for one in states if one.rank // 2 == place) for place in range(3)]
    return [Answer(3, 1, ranks) for ranks in by_node if ranks]


def waiting(*but: int) -> list[RankReport]:
    return [replace(REDUCE, rank=rank) for rank in range(6) if rank not in but]


ALONE = [doing for doing in RankActivity if doing not in (RankActivity.IN_COLLECTIVE, RankActivity.WORKS)]


@pytest.mark.parametrize("doing", ALONE)
@pytest.mark.parametrize("rank", range(6))
def test_the_one_that_does_something_else_is_named_with_its_node(doing: RankActivity, rank: int) -> None:
    found = diagnose(said(*waiting(rank), RankReport(rank, doing, where="here")), WORLD.node_of_ranks)
    assert (found.rank, found.node) == (rank, f"n{rank // 2}")
    assert found.finding is (HangFinding.CERTAIN if doing in NEVER else HangFinding.LIKELY)
    assert f"rank {rank} on node n{rank // 2}" in found.why
    assert "5 ranks wait in all_reduce" in found.why


def test_who_is_at_work_may_come_by_itself() -> None:
    moves = RankReport(2, RankActivity.WORKS)
    found = diagnose(said(*waiting(2), moves), WORLD.node_of_ranks)
    assert (found.finding, found.rank, found.node) == (HangFinding.HEALTHY, 2, "n1")
    assert "rank 2 on node n1 is at work, while 5 ranks wait in all_reduce" in found.why
    found = diagnose(said(*waiting(2, 4), moves, replace(moves, rank=4)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.HEALTHY, None)


def test_beside_one_at_work_one_that_never_goes_on_is_named() -> None:
    states = [*waiting(2, 4), RankReport(2, RankActivity.WORKS), RankReport(4, RankActivity.STOPPED)]
    assert diagnose(said(*states), WORLD.node_of_ranks).rank == 4


def test_the_most_certain_is_named_and_of_equals_who_is_behind() -> None:
    asleep, saving = RankReport(1, RankActivity.WAITS, 7), RankReport(2, RankActivity.IN_SAVE, 7)
    assert diagnose(said(*waiting(1, 2), asleep, saving), WORLD.node_of_ranks).rank == 2
    assert (
        diagnose(said(*waiting(1, 2), asleep, replace(asleep, rank=2, step=6)), WORLD.node_of_ranks).rank == 2
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(REDUCE, collective="broadcast"),
        replace(REDUCE, collective="init_process_group"),
        replace(REDUCE, where="train.py:30 in end"),
        replace(REDUCE, step=6),
    ],
    ids=["another collective", "another phase", "the same, from another line", "a step behind"],
)
def test_the_one_that_stands_elsewhere_than_all_others_is_named(other: RankReport) -> None:
    found = diagnose(said(*waiting(3), replace(other, rank=3)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 3)


@pytest.mark.parametrize("pair", [("send", "recv"), ("scatter", "scatter")])
def test_two_that_may_still_exchange_bytes_are_named_but_in_doubt(pair: tuple[str, str]) -> None:
    """Over a slow network; the others are in a barrier already."""
    two = [replace(REDUCE, rank=rank, collective=name) for rank, name in enumerate(pair)]
    found = diagnose(said(*two, *waiting(0, 1)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.DOUBTFUL, 0)


def test_an_even_split_names_nobody_but_by_steps() -> None:
    world = replace(WORLD, members=MEMBERS[:1])
    one, other = replace(REDUCE, collective="broadcast"), replace(REDUCE, rank=1)
    assert diagnose(said(one, other), world.node_of_ranks).finding is HangFinding.UNCLEAR
    assert diagnose(said(replace(one, step=6), other), world.node_of_ranks).rank == 0


UNTOLD = replace(REDUCE, collective="", where="thread 9 (python) is in state S")
"""As of a worker without stacks."""


def test_among_ranks_that_most_likely_wait_one_that_sleeps_is_named_and_none_for_where_it_waits() -> None:
    untold = [replace(UNTOLD, rank=rank, where=f"thread {rank}") for rank in range(6)]
    found = diagnose(said(*untold[1:], RankReport(0, RankActivity.WAITS)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 0)
    assert "5 ranks wait in a collective" in found.why
    assert diagnose(said(*untold), WORLD.node_of_ranks).finding is HangFinding.UNCLEAR
    assert diagnose(said(*untold[:3], *waiting(0, 1, 2)), WORLD.node_of_ranks).finding is HangFinding.UNCLEAR
    other = replace(REDUCE, rank=5, collective="broadcast")
    found = diagnose(said(*untold[:1], *waiting(0, 5), other), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 5), (
        "the one that is not known may be there, too"
    )


def test_all_in_the_same_names_nobody() -> None:
    found = diagnose(said(*waiting()), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.UNCLEAR, None)
    assert "all_reduce" in found.why


def test_where_nobody_waits_for_others_nobody_is_named() -> None:
    found = diagnose(said(*(RankReport(rank, RankActivity.WAITS) for rank in range(6))), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.UNCLEAR, None)


def test_a_job_of_one_rank_is_judged_by_itself() -> None:
    world = replace(WORLD, members=(Member("n0", "i0", 1, 0),))
    found = diagnose(said(RankReport(0, RankActivity.WAITS)), world.node_of_ranks)
    assert (found.rank, found.finding) == (0, HangFinding.DOUBTFUL), "nobody is seen to wait for it"


def test_a_node_that_does_not_answer_counts_for_nothing() -> None:
    states = [one for one in waiting() if one.rank < 4]
    assert diagnose(said(*states), WORLD.node_of_ranks).finding is HangFinding.UNCLEAR
    assert diagnose([], WORLD.node_of_ranks).finding is HangFinding.UNCLEAR


def test_the_order_of_answers_does_not_matter() -> None:
    states = [*waiting(1, 4), RankReport(1, RankActivity.WAITS), RankReport(4, RankActivity.WAITS)]
    answers = said(*states)
    assert len({diagnose(order, WORLD.node_of_ranks) for order in permutations(answers)}) == 1


# --- By torch's flight recorder


def shown(
    rank: int,
    *groups: InGroup,
    doing: RankActivity = RankActivity.OTHER,
    still_s: float = 20.0,
    fresh: bool = True,
) -> RankReport:
    """From outside a rank with a GPU may always look like this."""
    return RankReport(rank, doing, where="train.py:9 in step", recorded=Recorded(still_s, fresh, groups))


def at(entered: int, waits_in: int | None, collective: str = "all_reduce") -> InGroup:
    return InGroup("default_pg", None, entered, waits_in, collective)


def there(*but: int) -> list[RankReport]:
    """These ranks wait in the seventh collective; some have called more already."""
    return [shown(rank, at(7 + rank % 2, 7)) for rank in range(6) if rank not in but]


def pair(*ranks: int, entered: int, waits_in: int | None) -> InGroup:
    return InGroup(f"pair {ranks}", len(ranks), entered, waits_in, "all_gather")


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("doing", [RankActivity.OTHER, RankActivity.WAITS, RankActivity.IN_SAVE])
def test_the_rank_that_has_not_entered_the_collective_of_the_others_is_named(
    doing: RankActivity, rank: int
) -> None:
    found = diagnose(said(*there(rank), shown(rank, at(6, None), doing=doing)), WORLD.node_of_ranks)
    assert (found.finding, found.rank, found.node) == (HangFinding.LIKELY, rank, f"n{rank // 2}")
    assert f"rank {rank} on node n{rank // 2} (train.py:9 in step)" in found.why
    assert "has not entered all_reduce 7 of default_pg, in which 5 ranks wait" in found.why


def test_the_rank_that_has_entered_another_collective_in_its_place_is_named() -> None:
    found = diagnose(said(*there(3), shown(3, at(7, 7, "broadcast"))), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 3)
    assert "has entered broadcast in place of all_reduce 7 of default_pg, in which 5 ranks wait" in found.why


def test_the_record_is_a_better_witness_than_the_place() -> None:
    """Rank 1 sleeps in its script, while its GPU waits as the others' do; rank 4 stands at another line than most."""
    asleep = shown(1, at(7, 7), doing=RankActivity.WAITS)
    elsewhere = replace(
        shown(4, at(7, 7), doing=RankActivity.IN_COLLECTIVE), collective="barrier", where="train.py:99 in x"
    )
    found = diagnose(said(*there(1, 2, 4), asleep, elsewhere, shown(2, at(6, None))), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 2)
    found = diagnose(said(*there(1, 4), asleep, elsewhere), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.UNCLEAR, None)
    assert "all 6 ranks have entered all_reduce 7 of default_pg and wait" in found.why


def test_those_that_wait_for_a_rank_go_on_to_wait_while_it_is_missing() -> None:
    stale = [replace(one, recorded=replace(one.recorded, fresh=False)) for one in there(3)]
    assert diagnose(said(*stale, shown(3, at(6, None))), WORLD.node_of_ranks).rank == 3


def test_that_all_are_in_one_collective_acquits_nobody_of_another_group() -> None:
    """On the GPU the one may come behind the other."""
    trio = [pair(2, 3, 4, entered=4, waits_in=4)] * 2
    trio.insert(1, replace(trio[0], collective="broadcast"))
    states = [shown(rank, at(7, 7), trio[rank - 2]) for rank in (2, 3, 4)]
    assert diagnose(said(*there(2, 3, 4), *states), WORLD.node_of_ranks).rank == 3
    alone = replace(WORLD, members=(Member("n0", "i0", 1, 0),))
    assert (
        "all 1 rank"
        not in diagnose(said(shown(0, at(7, 7), doing=RankActivity.WAITS)), alone.node_of_ranks).why
    )


def test_of_several_that_have_not_entered_one_is_named_but_in_doubt() -> None:
    two = shown(2, at(6, None)), shown(3, at(5, None), doing=RankActivity.WAITS)
    found = diagnose(said(*there(2, 3), *two), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.DOUBTFUL, 3)


@pytest.mark.parametrize(
    "states",
    [
        # it may have entered by now, and in a job that runs no two dumps agree
        [*there(3), shown(3, at(6, None), still_s=RECORDED_STILL_S - 1)],
        [
            *[replace(one, recorded=replace(one.recorded, still_s=0.0)) for one in there(3)],
            shown(3, at(6, None)),
        ],
        [*there(3), shown(3, at(6, None), fresh=False)],
        # one whose record is not known may be the one
        [
            *there(1, 2, 3),
            shown(3, at(6, None)),
            RankReport(2, RankActivity.OTHER),
            RankReport(1, RankActivity.OTHER),
        ],
        # nobody waits
        [*[shown(rank, at(7, None)) for rank in range(5)], shown(5, at(6, None))],
        # fewer wait than are missing
        [*[shown(rank, at(6, None)) for rank in range(4)], *there(0, 1, 2, 3)],
        # an even split
        [*there(3, 4, 5), *[shown(rank, at(7, 7, "broadcast")) for rank in (3, 4, 5)]],
        # it has ended what the others wait in, as the root of a broadcast does
        [*there(3), shown(3, at(7, None))],
    ],
)
def test_what_the_records_do_not_show_for_certain_names_nobody(states: list[RankReport]) -> None:
    found = diagnose(said(*states), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.UNCLEAR, None)


def test_a_rank_at_work_is_no_hang_unless_its_record_shows_that_it_only_waits() -> None:
    works = shown(3, at(6, None), doing=RankActivity.WORKS)
    assert diagnose(said(*there(3), works), WORLD.node_of_ranks).finding is HangFinding.HEALTHY
    spins = [replace(one, doing=RankActivity.WORKS) for one in there(3)]
    found = diagnose(said(*spins, replace(works, doing=RankActivity.WAITS)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 3)


def test_one_that_waits_elsewhere_is_no_suspect_but_the_one_it_waits_for_is() -> None:
    """Ranks 0 and 3 are a group of their own, and 0 waits there for 3."""
    victim = shown(0, at(6, None), pair(0, 3, entered=4, waits_in=4))
    guilty = shown(3, at(6, None), pair(0, 3, entered=3, waits_in=None))
    found = diagnose(said(victim, guilty, *there(0, 3)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 3)
    sends = InGroup("0 (send, recv)", 0, 4, 4, "send 0->3")
    found = diagnose(said(shown(0, at(6, None), sends), guilty, *there(0, 3)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 3)


def test_the_only_one_that_waits_in_another_group_is_named_if_all_others_wait_for_it() -> None:
    states = there(2, 3)
    states += [
        shown(2, at(6, None), pair(2, 3, entered=4, waits_in=4)),
        shown(3, at(7, 7), pair(2, 3, entered=3, waits_in=None)),
    ]
    found = diagnose(said(*states), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 2)


def test_one_whose_wait_all_its_partners_share_may_compute_on_its_gpu() -> None:
    """Its script has called a collective behind an evaluation of a minute, in which the GPU is still: all others have
    called that one already, and wait for this rank in the next."""
    states = there(2, 3)
    states += [
        shown(2, at(6, None), pair(2, 3, entered=4, waits_in=4)),
        shown(3, at(7, 7), pair(2, 3, entered=4, waits_in=4)),
    ]
    assert diagnose(said(*states), WORLD.node_of_ranks).rank is None
    recv, send = InGroup("0 (send, recv)", 0, 9, 9, "recv"), InGroup("0 (send, recv)", 0, 3, None, "send")
    states = [*there(2, 3), shown(2, at(6, None), recv), shown(3, at(7, 7), send)]
    assert diagnose(said(*states), WORLD.node_of_ranks).rank is None, (
        "of sends and recvs each rank has its own numbers"
    )


def test_a_rank_that_spins_in_a_collective_waits_for_a_rank_without_record() -> None:
    """Such as one that holds Python's lock: torch needs it for the dump."""
    found = diagnose(said(*there(3), RankReport(3, RankActivity.WAITS)), WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.LIKELY, 3)
    early = [replace(one, recorded=replace(one.recorded, still_s=1.0)) for one in there(3)]
    assert (
        diagnose(said(*early, RankReport(3, RankActivity.WAITS)), WORLD.node_of_ranks).finding
        is HangFinding.UNCLEAR
    )
