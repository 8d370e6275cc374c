"""Whose fault a hang is: tables of what ranks are seen to do, and who is named."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from elastic_agent.rendezvous.coordinator.verdict import NEVER, WAITING, verdict
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World
from elastic_agent.rendezvous.statements.inquiry import Doing, Finding, RankState
from elastic_agent.rendezvous.statements.inquiry import Testimony as Answer

MEMBERS = tuple(Member(f"n{place}", f"i{place}", 2, 2 * place) for place in range(3))
WORLD = World("job", 3, Phase.RUNNING, MEMBERS, Endpoint("127.0.0.1", 1), Cause(CauseKind.START))
REDUCE = RankState(0, Doing.IN_COLLECTIVE, 7, collective="all_reduce", where="train.py:9 in step")


def said(*states: RankState) -> list[Answer]:
    """By the nodes of the first so many ranks."""
    by_node = [tuple(one for one in states if one.rank // 2 == place) for place in range(3)]
    return [Answer(3, 1, ranks) for ranks in by_node if ranks]


def waiting(*but: int) -> list[RankState]:
    return [replace(REDUCE, rank=rank) for rank in range(6) if rank not in but]


ALONE = [doing for doing in Doing if doing not in (*WAITING, Doing.MOVES, Doing.DEBUGGED)]


@pytest.mark.parametrize("doing", ALONE)
@pytest.mark.parametrize("rank", range(6))
def test_the_one_that_does_something_else_is_named_with_its_node(doing: Doing, rank: int) -> None:
    found = verdict(said(*waiting(rank), RankState(rank, doing, where="here")), WORLD)
    assert (found.rank, found.node) == (rank, f"n{rank // 2}")
    assert found.finding is (Finding.CERTAIN if doing in NEVER else Finding.LIKELY)
    assert f"rank {rank} on node n{rank // 2}" in found.why
    assert "5 ranks wait in all_reduce" in found.why


def test_who_is_at_work_may_come_by_itself() -> None:
    moves = RankState(2, Doing.MOVES)
    found = verdict(said(*waiting(2), moves), WORLD)
    assert (found.finding, found.rank, found.node) == (Finding.HEALTHY, 2, "n1")
    assert "rank 2 on node n1 is at work, while 5 ranks wait in all_reduce" in found.why
    found = verdict(said(*waiting(2, 4), moves, replace(moves, rank=4)), WORLD)
    assert (found.finding, found.rank) == (Finding.HEALTHY, None)


@pytest.mark.parametrize("doing", [doing for doing in Doing if doing is not Doing.DEBUGGED])
def test_while_a_debugger_holds_one_nothing_is_a_hang(doing: Doing) -> None:
    found = verdict(said(*waiting(2, 4), RankState(2, doing), RankState(4, Doing.DEBUGGED)), WORLD)
    assert (found.finding, found.rank) == (Finding.HEALTHY, None)
    assert "rank 4 on node n2 is under a debugger" in found.why


def test_beside_one_at_work_one_that_never_goes_on_is_named() -> None:
    states = [*waiting(2, 4), RankState(2, Doing.MOVES), RankState(4, Doing.STOPPED)]
    assert verdict(said(*states), WORLD).rank == 4


def test_the_most_certain_is_named_and_of_equals_who_is_behind() -> None:
    asleep, reading = RankState(1, Doing.ASLEEP, 7), RankState(2, Doing.READING, 7)
    assert verdict(said(*waiting(1, 2), asleep, reading), WORLD).rank == 2
    assert verdict(said(*waiting(1, 2), asleep, replace(asleep, rank=2, step=6)), WORLD).rank == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(REDUCE, collective="broadcast"),
        RankState(0, Doing.AT_STORE),
    ],
)
def test_the_one_in_another_collective_does_not_come(other: RankState) -> None:
    found = verdict(said(*waiting(3), replace(other, rank=3)), WORLD)
    assert (found.finding, found.rank) == (Finding.LIKELY, 3)


@pytest.mark.parametrize("pair", [("send", "recv"), ("scatter", "scatter")])
def test_two_that_may_still_exchange_bytes_are_named_but_in_doubt(pair: tuple[str, str]) -> None:
    """Over a slow network; the others are in a barrier already."""
    two = [replace(REDUCE, rank=rank, collective=name) for rank, name in enumerate(pair)]
    found = verdict(said(*two, *waiting(0, 1)), WORLD)
    assert (found.finding, found.rank) == (Finding.DOUBTFUL, 0)


def test_the_same_collective_called_from_another_line_is_a_hint() -> None:
    found = verdict(said(*waiting(3), replace(REDUCE, rank=3, where="train.py:30 in end")), WORLD)
    assert (found.finding, found.rank) == (Finding.LIKELY, 3)


def test_the_one_that_is_steps_behind_is_a_hint() -> None:
    found = verdict(said(*waiting(3), replace(REDUCE, rank=3, step=6)), WORLD)
    assert (found.finding, found.rank) == (Finding.LIKELY, 3)


def test_an_even_split_names_nobody_but_by_steps() -> None:
    world = replace(WORLD, members=MEMBERS[:1])
    one, other = replace(REDUCE, collective="broadcast"), replace(REDUCE, rank=1)
    assert verdict(said(one, other), world).finding is Finding.UNCLEAR
    assert verdict(said(replace(one, step=6), other), world).rank == 0


UNTOLD = replace(REDUCE, collective="", where="thread 9 (python) is in state S")
"""As of a worker without stacks."""


def test_among_ranks_that_most_likely_wait_one_that_sleeps_is_named_and_none_for_where_it_waits() -> None:
    untold = [replace(UNTOLD, rank=rank, where=f"thread {rank}") for rank in range(6)]
    found = verdict(said(*untold[1:], RankState(0, Doing.ASLEEP)), WORLD)
    assert (found.finding, found.rank) == (Finding.LIKELY, 0)
    assert "5 ranks wait in a collective" in found.why
    assert verdict(said(*untold), WORLD).finding is Finding.UNCLEAR
    assert verdict(said(*untold[:3], *waiting(0, 1, 2)), WORLD).finding is Finding.UNCLEAR
    other = replace(REDUCE, rank=5, collective="broadcast")
    found = verdict(said(*untold[:1], *waiting(0, 5), other), WORLD)
    assert (found.finding, found.rank) == (Finding.LIKELY, 5), "the one that is not known may be there, too"


def test_all_in_the_same_names_nobody() -> None:
    found = verdict(said(*waiting()), WORLD)
    assert (found.finding, found.rank) == (Finding.UNCLEAR, None)
    assert "all_reduce" in found.why


def test_where_nobody_waits_for_others_nobody_is_named() -> None:
    found = verdict(said(*(RankState(rank, Doing.ASLEEP) for rank in range(6))), WORLD)
    assert (found.finding, found.rank) == (Finding.UNCLEAR, None)


def test_a_job_of_one_rank_is_judged_by_itself() -> None:
    world = replace(WORLD, members=(Member("n0", "i0", 1, 0),))
    found = verdict(said(RankState(0, Doing.LOCKED)), world)
    assert (found.rank, found.finding) == (0, Finding.DOUBTFUL), "nobody is seen to wait for it"


def test_a_node_that_does_not_answer_counts_for_nothing() -> None:
    states = [one for one in waiting() if one.rank < 4]
    assert verdict(said(*states), WORLD).finding is Finding.UNCLEAR
    assert verdict([], WORLD).finding is Finding.UNCLEAR


def test_ranks_that_are_not_in_the_world_are_no_ones() -> None:
    world = replace(WORLD, members=MEMBERS[:1])
    found = verdict([Answer(3, 1, (RankState(5, Doing.GONE), *waiting(2, 3, 4, 5)))], world)
    assert found.rank is None


def test_the_order_of_answers_does_not_matter() -> None:
    states = [*waiting(1, 4), RankState(1, Doing.ASLEEP), RankState(4, Doing.ASLEEP)]
    answers = said(*states)
    assert len({verdict(order, WORLD) for order in permutations(answers)}) == 1
