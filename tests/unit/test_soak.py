"""What the soak draws, and its books on histories written by hand: a checker that finds nothing is worse than none."""

from __future__ import annotations

import pytest

from tests.chaos.soak import Fault, Kind, mistakes, most_lost, unplanned
from tests.chaos.soak_job import SAVE_EVERY


def event(what: str, generation: int, rank: int, step: int) -> dict[str, object]:
    return {"what": what, "generation": generation, "rank": rank, "step": step}


def generation(number: int, begin: int, end: int, *, saved: bool = True) -> list[dict[str, object]]:
    """Two ranks from one step to another, saving every two."""
    events = [event("load", number, rank, begin) for rank in (0, 1)]
    for step in range(begin + 1, end + 1):
        events += [event("step", number, rank, step) for rank in (0, 1)]
        events += [event("saved", number, 0, step)] if saved and step % 2 == 0 else []
    return events


GOOD = [*generation(1, 0, 5), *generation(2, 4, 9), *generation(3, 8, 10)]


def test_a_history_that_loses_no_more_than_an_interval_is_in_order() -> None:
    assert mistakes(GOOD, lambda _: 2) == []


def test_steps_whose_save_was_refused_may_be_lost_too() -> None:
    refused = [*generation(1, 0, 3), event("not saved", 1, 0, 4), *generation(2, 2, 4)]
    assert mistakes(refused, lambda _: 0) == []
    assert mistakes([*refused, *generation(3, 3, 4)], lambda _: 0)


def test_a_step_that_one_rank_alone_has_finished_may_be_done_again() -> None:
    torn = [*generation(1, 0, 4), event("step", 1, 1, 5), *generation(2, 4, 6)]
    assert mistakes(torn, lambda _: 0) == []


def test_what_may_be_lost_depends_on_what_ended_the_generation() -> None:
    assert mistakes(GOOD, {0: 0, 1: 1, 2: 1}.__getitem__) == []
    assert mistakes(GOOD, {0: 0, 1: 1, 2: 0}.__getitem__) == ["generation 2 lost 1 steps: 9 to 9"]
    lost = {kind: most_lost(Fault(kind, "a", 6)) for kind in Kind}
    nothing = (Kind.WORKER, Kind.SIGTERM, Kind.FULL)
    assert lost == {kind: 0 if kind in nothing else SAVE_EVERY for kind in Kind}
    assert most_lost(None) == SAVE_EVERY


@pytest.mark.parametrize(
    ("history", "allowed", "said"),
    [
        (GOOD, 0, "generation 1 lost 1 steps: 5 to 5"),
        ([*GOOD, *generation(4, 8, 12)], 5, "generation 4 began at 8, though 10 was saved"),
        ([*generation(1, 0, 3), *generation(2, 1, 3)], 5, "generation 2 began at 1, though 2 was saved"),
        ([*generation(1, 2, 3, saved=False), *generation(2, 1, 2)], 5, "an earlier one at 2"),
        ([*GOOD, event("load", 4, 0, 10), event("load", 4, 1, 8)], 5, "rank 1 began at 8, another at 10"),
        ([*GOOD, event("step", 3, 0, 12)], 5, "generation 3: rank 0 did 12 after 10"),
        ([*GOOD, event("step", 3, 1, 10)], 5, "generation 3: rank 1 did 10 after 10"),
        ([*GOOD, event("step", 4, 1, 11)], 5, "generation 4: rank 1 did 11 after None"),
        ([*GOOD, event("saved", 3, 0, 8)], 5, "generation 3: saved 8 after 10"),
    ],
    ids=[
        "lost",
        "older",
        "not saved",
        "backwards",
        "not together",
        "left out",
        "twice",
        "without load",
        "again",
    ],
)
def test_what_is_wrong_is_found(history: list[dict[str, object]], allowed: int, said: str) -> None:
    found = mistakes(history, lambda _: allowed)
    assert any(said in mistake for mistake in found), found


def drained(number: int, *steps: int) -> list[dict[str, object]]:
    return [event("drained", number, rank, step) for rank, step in enumerate(steps)]


LEFT = [*generation(1, 0, 5), *drained(1, 5, 5), *generation(2, 5, 7)]


def test_a_planned_change_ends_all_ranks_where_the_next_generation_begins() -> None:
    assert unplanned(LEFT, [1]) == mistakes(LEFT, lambda _: 0) == []
    assert unplanned(GOOD, []) == []


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (GOOD, "generation 1: of the ranks [0, 1] only [] ended as told"),
        ([*generation(1, 0, 5), *drained(1, 5), *generation(2, 5, 7)], "only [0] ended as told"),
        (
            [*generation(1, 0, 5), *drained(1, 5, 4), *generation(2, 5, 7)],
            "generation 1 ended at [4, 5], and the next began at [5]",
        ),
        ([*generation(1, 0, 5), *drained(1, 5, 5), *generation(2, 4, 7)], "the next began at [4]"),
        ([*generation(1, 0, 5), *drained(1, 5, 5), *generation(3, 5, 7)], "the next began at []"),
    ],
    ids=["signalled", "one alone", "not together", "lost", "not the next"],
)
def test_a_planned_change_that_was_none_is_found(history: list[dict[str, object]], said: str) -> None:
    found = unplanned(history, [1])
    assert any(said in mistake for mistake in found), found
